"""Qwen 2 and 2.5: Llama with a bias on queries, keys and values; the upper layers may have a
sliding window.

Source: Yang et al. 2024 (arXiv 2407.10671); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.llama import Qwen2Config
from regard.models.assembly import llama_like
from regard.models.decoder import Decoder

Config = Qwen2Config


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    return llama_like.pre_norm_decoder(config, bias=True)


FAMILY = llama_like.family(Config, build)
