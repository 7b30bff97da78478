"""Llama 1 to 3: RMS norm, rotary positions with the layout "half", grouped queries, SwiGLU.

Source: Touvron et al. 2023 (arXiv 2307.09288); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.llama import LlamaConfig
from regard.models.assembly import llama_like
from regard.models.checkpoint.family import Family
from regard.models.decoder import Decoder
from regard.nn import Block
from regard.positions import Rotary

Config = LlamaConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""

    def block(rotary: Rotary, window: int | None) -> Block:
        bias = config.attention_bias
        mixer = llama_like.attention(config, rotary, window, bias=bias, output_bias=bias)
        return llama_like.block(config, mixer, bias=config.mlp_bias)

    return llama_like.decoder(config, block)


FAMILY = Family(
    Config,
    build,
    llama_like.NAMES,
    check=llama_like.check,
    prefixes=llama_like.PREFIXES,
    head=llama_like.HEAD,
    buffers=llama_like.BUFFERS,
)
