"""Parts of Granite 3 and 4, with and without experts: factors on the embedding, the scores, what
each sublayer adds, and the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import nn

from regard.configs.llama_relatives import GraniteConfig
from regard.configs.state_space_hybrids import GraniteHybridConfig
from regard.models.assembly import llama_like
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.checkpoint.family import NameTable
from regard.models.decoder import Decoder
from regard.nn import Attention, Block, ScaledPreNorm
from regard.nn.mixer import Mixer
from regard.positions import Rotary

GraniteLike: TypeAlias = GraniteConfig | GraniteHybridConfig
"""A config with the factors of Granite."""


def decoder(config: GraniteLike, layer: Callable[[Rotary | None, int | None], Block]) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    return llama_like.decoder(
        config,
        layer,
        embedding_scale=config.embedding_multiplier,
        logit_scale=1 / config.logits_scaling,
    )


def attention(config: GraniteLike, rotary: Rotary | None, window: int | None) -> Attention:
    """Build attention with the config's factor on the scores."""
    bias = config.attention_bias
    return llama_like.attention(
        config,
        rotary,
        window,
        bias=bias,
        output_bias=bias,
        scale=config.attention_multiplier,
    )


def block(config: GraniteLike, mixer: Mixer, feed_forward: nn.Module) -> Block:
    """Build a block with the config's factor on what each sublayer adds."""
    factor = config.residual_multiplier
    residuals = (ScaledPreNorm(llama_like.norm(config), factor) for _ in range(2))
    return Block(mixer, feed_forward, *residuals)


_STORED = STORED_LAYER + "block_sparse_moe."
EXPERTS: NameTable = {
    _STORED + "router.layer.weight": MODEL_LAYER + "feed_forward.router.linear.weight",
    _STORED + "input_linear.weight": llama_like.experts_in_one_tensor("gate", "up"),
    _STORED + "output_linear.weight": llama_like.experts_in_one_tensor("down"),
}
"""The router of a mixture, and the matrices of all its experts."""
