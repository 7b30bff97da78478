"""Mistral: Llama, in the first version with a sliding window in every layer.

Source: Jiang et al. 2023 (arXiv 2310.06825); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.llama import MistralConfig
from regard.models.assembly import llama_like
from regard.models.decoder import Decoder

Config = MistralConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    return llama_like.pre_norm_decoder(config)


FAMILY = llama_like.family(Config, build)
