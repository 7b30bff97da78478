"""Arcee's AFM: Llama with a squared ReLU in place of the gated feed-forward layer.

Source: Arcee AI 2025, "Announcing Arcee Foundation Models"; key names as in Hugging Face
checkpoints.
"""

from __future__ import annotations

from regard.configs.llama_relatives import ArceeConfig
from regard.models.assembly import llama_like
from regard.models.decoder import Decoder
from regard.nn import Block, FeedForward, PreNorm
from regard.nn.feed_forward import ReLUSquared
from regard.positions import Rotary

Config = ArceeConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""

    def block(rotary: Rotary | None, window: int | None) -> Block:
        bias = config.attention_bias
        mixer = llama_like.attention(config, rotary, window, bias=bias, output_bias=bias)
        feed_forward = FeedForward(
            config.hidden_size, config.intermediate_size, ReLUSquared(), bias=config.mlp_bias
        )
        return Block(mixer, feed_forward, *(PreNorm(llama_like.norm(config)) for _ in range(2)))

    return llama_like.decoder(config, block)


FAMILY = llama_like.family(Config, build)
