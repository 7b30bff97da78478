"""Parts and checkpoint names of OLMo 2 and 3: norms over all heads of queries and of keys, and
norms after each sublayer.
"""

from __future__ import annotations

from regard.configs.llama import Olmo2Config
from regard.models.assembly import llama_like
from regard.models.decoder import Decoder
from regard.nn import Block, OutputNorm, SwiGLU
from regard.positions import Rotary

NAMES = (
    llama_like.EMBEDDING_AND_HEAD
    | llama_like.ATTENTION
    | llama_like.FLAT_NORMS
    | llama_like.FEED_FORWARD
    | llama_like.OUTPUT_NORMS
)
"""Stored name -> parameter name; {} is the layer."""


def output_norm_decoder(config: Olmo2Config) -> Decoder:
    """Build a decoder with a norm after each sublayer, with initial weights."""

    def block(rotary: Rotary | None, window: int | None) -> Block:
        mixer = llama_like.flat_norm_attention(config, rotary, window)
        feed_forward = SwiGLU(config.hidden_size, config.intermediate_size)
        residuals = (OutputNorm(llama_like.norm(config)) for _ in range(2))
        return Block(mixer, feed_forward, *residuals)

    return llama_like.decoder(config, block)
