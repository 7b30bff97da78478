"""Nemotron 3, 4 and Minitron: LayerNorms with weight 1 + w, a squared ReLU, and rotary positions on
a part of each head.

Source: Parmar et al. 2024 (arXiv 2402.16819); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.layer_norm_decoders import NemotronConfig
from regard.models.assembly import layer_norm_decoder, llama_like
from regard.models.decoder import Decoder
from regard.nn import Block, FeedForward, PreNorm
from regard.nn.feed_forward import ReLUSquared
from regard.nn.norms import OffsetLayerNorm
from regard.positions import Rotary

Config = NemotronConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    bias = config.attention_bias

    def norm() -> OffsetLayerNorm:
        return OffsetLayerNorm(config.hidden_size, eps=config.eps)

    def block(rotary: Rotary | None, window: int | None) -> Block:
        mixer = llama_like.attention(config, rotary, window, bias=bias, output_bias=bias)
        feed_forward = FeedForward(
            config.hidden_size, config.intermediate_size, ReLUSquared(), bias=config.mlp_bias
        )
        return Block(mixer, feed_forward, PreNorm(norm()), PreNorm(norm()))

    return llama_like.decoder(config, block, final_norm=norm())


FAMILY = llama_like.family(
    Config,
    build,
    llama_like.EMBEDDING_AND_HEAD
    | llama_like.ATTENTION
    | llama_like.FEED_FORWARD
    | layer_norm_decoder.PRE_NORMS,
)
