"""Gemma: Llama with norms of weight 1 + w, an embedding times sqrt(M), GeGLU, and heads of dim
256 in every size.

Source: Gemma Team 2024 (arXiv 2403.08295); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.gemma import GemmaConfig
from regard.models.assembly import building_blocks, gemma, llama_like
from regard.models.decoder import Decoder
from regard.nn import Block, PreNorm

Config = GemmaConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    rotary = building_blocks.rotary_module(config.rope)

    def block() -> Block:
        residuals = [PreNorm(gemma.norm(config)) for _ in range(2)]
        return Block(gemma.attention(config, rotary), gemma.feed_forward(config), *residuals)

    return gemma.decoder(config, [block() for _ in range(config.num_hidden_layers)])


FAMILY = llama_like.family(Config, build)
