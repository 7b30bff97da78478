"""Qwen 3: Qwen 2 with a norm on each head of queries and keys, before they are rotated, in place of
the bias.

Source: Yang et al. 2025 (arXiv 2505.09388); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.llama import Qwen3Config
from regard.models.assembly import llama_like
from regard.models.decoder import Decoder
from regard.nn import Block
from regard.positions import Rotary

Config = Qwen3Config


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""

    def block(rotary: Rotary | None, window: int | None) -> Block:
        mixer = llama_like.head_norm_attention(config, rotary, window)
        return llama_like.block(config, mixer)

    return llama_like.decoder(config, block)


FAMILY = llama_like.family(Config, build, llama_like.NAMES | llama_like.HEAD_NORMS)
