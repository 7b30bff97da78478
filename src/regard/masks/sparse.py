"""Masks that keep a few far keys: sinks, global tokens, strides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.masks.base import Mask, whole, wholes
from regard.masks.tiling import FAR, Intervals


@dataclass(frozen=True, eq=False)
class Sinks(Mask):
    """Everybody sees the first n positions: k < n, as StreamingLLM keeps them (arXiv 2309.17453).

    Not causal by itself: `causal & (window(8) | sinks(4))`. Not to be confused with `sink=`, a
    logit without a key.

    Raises:
        ArgumentError, ArgumentTypeError: n below 0 or not an int.

    >>> from regard.masks import Causal, Window
    >>> from regard.span import Span
    >>> (Causal() & (Window(8) | Sinks(4))).count(Span(0, 64), Span(0, 64))
    702
    """

    n: int

    def __post_init__(self) -> None:
        whole("Sinks n", self.n, 0)

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """K < n."""
        return k < self.n

    def _intervals(self, q: Tensor) -> Intervals:
        return Intervals(torch.zeros_like(q), torch.full_like(q, self.n))


@dataclass(frozen=True, eq=False)
class Global(Mask):
    """Some positions see everything and are seen by everybody: q or k is among them (Longformer,
    arXiv 2004.05150).

    Raises:
        ArgumentError, ArgumentTypeError: a position below 0 or not an int.

    >>> from regard.masks import Window
    >>> from regard.span import Span
    >>> (Window(9, ahead=8) | Global((0, 1))).count(Span(0, 64), Span(0, 64))
    1234
    """

    positions: Sequence[int]

    def __post_init__(self) -> None:
        found = wholes("Global positions", self.positions, 0)
        object.__setattr__(self, "positions", tuple(sorted(set(found))))

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """Q or k is global."""
        return self.has(q) | self.has(k)

    def has(self, x: Tensor) -> Tensor:
        """Which positions are global: bool, as x."""
        found = torch.tensor(self.positions, dtype=x.dtype, device=x.device)
        return (x[..., None] == found).any(-1)  # isin knows no vmap

    def _intervals(self, q: Tensor) -> Intervals:
        runs: list[list[int]] = []
        for p in self.positions:
            if runs and runs[-1][1] == p:
                runs[-1][1] = p + 1
            else:
                runs.append([p, p + 1])
        ends = torch.tensor(runs or [[0, 0]], device=q.device)  # [n, 2]
        all_of_them = torch.zeros_like(ends)
        all_of_them[0, 1] = FAR
        mine = torch.where(self.has(q)[..., None], all_of_them, ends)  # [B,1,t,n,2]
        return Intervals(mine[..., 0], mine[..., 1])


@dataclass(frozen=True, eq=False)
class Strided(Mask):
    """The two patterns of the Sparse Transformer (arXiv 1904.10509); under `causal`, two hops reach
    every earlier key.

    strided: q - k < stride or (q - k) % stride == 0. fixed=c: q // stride == k // stride, or k %
        stride >= stride - c: the last c columns of every block.

    Raises:
        ArgumentError, ArgumentTypeError: stride below 1, fixed outside 1 to stride, or not ints.

    >>> from regard.masks import Causal
    >>> from regard.span import Span
    >>> keys = Span(0, 64)
    >>> (Causal() & Strided(8)).count(keys, keys), (Causal() & Strided(8, fixed=1)).count(keys, keys)
    (708, 512)
    """

    stride: int
    fixed: int | None = None

    def __post_init__(self) -> None:
        whole("Strided stride", self.stride, 1)
        if self.fixed is not None and whole("Strided fixed", self.fixed, 1) > self.stride:
            whole(
                "Strided stride",
                self.stride,
                self.fixed,
                f"fixed={self.fixed} columns fit in a block",
            )

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """The strided pattern, or the fixed one."""
        if self.fixed is None:
            return (q - k < self.stride) | ((q - k) % self.stride == 0)
        same = q // self.stride == k // self.stride
        return same | (k % self.stride >= self.stride - self.fixed)
