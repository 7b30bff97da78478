"""EXAONE 4: norms after the attention and the feed-forward layer and on each head of queries and
keys; in models with a window, layers without one have no positions.

Source: LG AI Research 2025 (arXiv 2507.11407); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.llama_relatives import Exaone4Config
from regard.models.assembly import llama_like
from regard.models.decoder import Decoder
from regard.nn import Block, OutputNorm, SwiGLU
from regard.positions import Rotary

Config = Exaone4Config


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""

    def block(rotary: Rotary | None, window: int | None) -> Block:
        mixer = llama_like.head_norm_attention(config, rotary, window)
        feed_forward = SwiGLU(config.hidden_size, config.intermediate_size)
        residuals = (OutputNorm(llama_like.norm(config)) for _ in range(2))
        return Block(mixer, feed_forward, *residuals)

    return llama_like.decoder(config, block)


FAMILY = llama_like.family(
    Config,
    build,
    llama_like.EMBEDDING_AND_HEAD
    | llama_like.ATTENTION
    | llama_like.HEAD_NORMS
    | llama_like.FEED_FORWARD
    | llama_like.OUTPUT_NORMS,
)
