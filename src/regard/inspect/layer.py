"""One layer of attention on random tokens, and everything that it computes: what `regard layer`
prints and draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.inspect.parts import plain
from regard.inspect.stages import Stage, stages, timed
from regard.masks import Mask
from regard.nn import Attention
from regard.nn.blocks import PostNorm
from regard.nn.variants.registry import find
from regard.process import seeded
from regard.span import Span

DROPOUT = 0.1
"""Of the residual path, as in the notes' run; in evaluation mode, which is what is shown, it does
nothing.
"""


@dataclass(frozen=True)
class Layer:
    """One layer of a mechanism and what it computed.

    Attributes:
        name: the mechanism's, of the catalogue.
        x: the input [B, T, M].
        mask: the mask, or None: every key.
        stages: q, k, v, scores, masked, weights, z, out, and block, which is LayerNorm(x + out).
    """

    name: str
    x: Tensor
    mask: Mask | None
    stages: tuple[Stage, ...]

    def stage(self, name: str) -> Stage:
        """The stage of a name.

        Raises:
            KeyError: there is none.
        """
        return {stage.name: stage for stage in self.stages}[name]

    @property
    def blocked(self) -> NDArray[np.int64]:
        """The mask as the notes print it, [T, T]: 1 where a query may not see a key."""
        T = self.x.shape[1]
        if self.mask is None:
            return np.zeros((T, T), np.int64)
        return (~self.mask.block(Span(0, T), Span(0, T))[0, 0]).long().numpy()

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: every tensor with its numbers, minus infinity as None."""
        return {
            "name": self.name,
            "mask": str(self.mask),
            "input": list(self.x.shape),
            "blocked": self.blocked.tolist(),
            "stages": [
                plain(stage.told()) | {"values": plain(stage.values.numpy())}
                for stage in self.stages
            ],
        }


def options_of(name: str, dim: int, heads: int) -> dict[str, Any]:
    """The options of a mechanism at a size: those that `regard compare` gives it, or else those of
    its small example.

    >>> options_of("mla", 512, 8)
    {'kv_rank': 128, 'nope_dim': 64, 'rope_dim': 32, 'value_dim': 64}
    """
    entry = find(name)
    if name == "mla":
        D = dim // heads
        return {"kv_rank": 2 * D, "nope_dim": D, "rope_dim": max(2, D // 4 * 2), "value_dim": D}
    return dict(entry.sizes)


def layers(
    names: Sequence[str],
    *,
    dim: int = 512,
    heads: int = 8,
    batch: int = 2,
    tokens: int = 4,
    mask: Mask | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> list[Layer]:
    """Run one layer of each mechanism on the same random tokens, in evaluation mode.

    Args:
        names: of the catalogue: softmax attention over its own input.
        dim, heads, batch, tokens: M, H, B and T.
        mask: what every mechanism sees by; None is every key.
        seed: of the tokens and of the weights; the weights of each mechanism are drawn anew from
            it.
        options: of the mechanisms; None is `options_of` each.

    Raises:
        ArgumentError: a name is not in the catalogue, or is no softmax attention over its own
            input, or a size does not fit.

    >>> from regard.masks import Causal
    >>> (one,) = layers(["mha"], mask=Causal())
    >>> one.stage("weights").values.shape, one.blocked.tolist()[0]
    (torch.Size([2, 8, 4, 4]), [0, 1, 1, 1])
    """
    x = torch.randn(batch, tokens, dim, generator=torch.Generator().manual_seed(seed))
    return [layer(name, x, heads, mask, seed, options) for name in names]


def layer(
    name: str,
    x: Tensor,
    heads: int,
    mask: Mask | None,
    seed: int,
    options: Mapping[str, Any] | None = None,
) -> Layer:
    """Run one layer of a mechanism on tokens x [B, T, M]: as `layers`, which says what it raises.

    >>> layer("gqa", torch.zeros(1, 3, 8), 4, None, 0, {"groups": 2}).stage("k").values.shape
    torch.Size([1, 2, 3, 2])
    """
    entry, dim = find(name), x.shape[2]
    own = options_of(name, dim, heads) if options is None else dict(options)
    with seeded(seed):
        module = entry.build(dim, heads, **own)
    if type(module) is not Attention:
        raise ArgumentError(
            f"{name} is a {type(module).__name__}, which has no pattern of one softmax over its "
            "own input to show; "
            "give one that has, such as mha, gpt, gqa or mla, or look at it with regard explain "
            f"TEXT --attention {name}"
        )
    module.mask = mask
    return Layer(name, x, mask, with_block(module, x))


def with_block(module: Attention, x: Tensor) -> tuple[Stage, ...]:
    """The stages of a layer, and behind them what a block of the first Transformers makes of its
    output.

    >>> from regard.nn.variants import mha
    >>> with_block(mha(8, 2), torch.zeros(1, 3, 8))[-1].name
    'block'
    """
    found = stages(module, x)
    path = PostNorm(nn.LayerNorm(x.shape[2]), dropout=DROPOUT).eval().to(x.dtype)
    with torch.no_grad():
        block, seconds = timed(lambda: path(x, lambda _: found[-1].values))
    return (*found, Stage("block", "LayerNorm(x + out)", block, seconds))
