"""Parts of Granite 3 with and without experts: factors on the embedding, the scores, what each
sublayer adds, and the logits.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from regard.configs.llama_relatives import GraniteConfig
from regard.models.assembly import llama_like
from regard.models.decoder import Decoder
from regard.nn import Block, ScaledPreNorm
from regard.positions import Rotary


def decoder(config: GraniteConfig, feed_forward: Callable[[], nn.Module]) -> Decoder:
    """Build the decoder of a config, with initial weights.

    Args:
        config: the config.
        feed_forward: builds the feed-forward layer of a block.
    """

    def block(rotary: Rotary | None, window: int | None) -> Block:
        bias = config.attention_bias
        mixer = llama_like.attention(
            config,
            rotary,
            window,
            bias=bias,
            output_bias=bias,
            scale=config.attention_multiplier,
        )
        factor = config.residual_multiplier
        residuals = (ScaledPreNorm(llama_like.norm(config), factor) for _ in range(2))
        return Block(mixer, feed_forward(), *residuals)

    return llama_like.decoder(
        config,
        block,
        embedding_scale=config.embedding_multiplier,
        logit_scale=1 / config.logits_scaling,
    )
