"""Parts of Granite 3 and 4, with and without experts: factors on the embedding, the scores, what
each sublayer adds, and the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from regard.configs.llama_relatives import GraniteConfig
from regard.configs.state_space_hybrids import GraniteHybridConfig
from regard.models.assembly import llama_like
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.checkpoint.family import NameTable, TensorRule
from regard.models.decoder import Decoder
from regard.nn import Attention, Block, ScaledPreNorm
from regard.nn.mixer import Mixer
from regard.positions import Rotary

GraniteLike: TypeAlias = GraniteConfig | GraniteHybridConfig
"""A config with the factors of Granite."""


def decoder(config: GraniteLike, layer: Callable[[Rotary | None, int | None], Block]) -> Decoder:
    """Build the decoder of a config, with initial weights.

    Args:
        config: the config.
        layer: a function (rotary module or None, window or None) -> the block of one layer.
    """
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


def of_all_experts(*parts: str) -> TensorRule:
    """Return the rule for a tensor [n, rows, columns] with the matrices of all n experts; several
    parts are one above the other in the rows.
    """

    def unpack(stored: Tensor, _: Sequence[torch.Size]) -> list[Tensor]:
        return [matrix for part in stored.chunk(len(parts), 1) for matrix in part]

    def pack(parameters: Sequence[Tensor]) -> Tensor:
        return torch.cat(torch.stack(list(parameters)).chunk(len(parts)), 1)

    return TensorRule(tuple(f"{_EXPERTS}.*.{part}.weight" for part in parts), unpack, pack)


_EXPERTS = MODEL_LAYER + "feed_forward.experts"
_STORED = STORED_LAYER + "block_sparse_moe."
EXPERTS: NameTable = {
    _STORED + "router.layer.weight": MODEL_LAYER + "feed_forward.router.linear.weight",
    _STORED + "input_linear.weight": of_all_experts("gate", "up"),
    _STORED + "output_linear.weight": of_all_experts("down"),
}
"""The router of a mixture, and the matrices of all its experts."""
