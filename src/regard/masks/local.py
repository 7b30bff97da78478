"""Masks of near and far: full, causal, window, chunk, dilated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.masks.base import LARGEST, Mask, Part, whole
from regard.masks.tiling import EMPTY, FAR, Intervals


@dataclass(frozen=True, eq=False)
class Full(Mask):
    """Every query sees every key.

    >>> from regard.span import Span
    >>> Full().count(Span(0, 4), Span(0, 4))
    16
    """

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """True."""
        return torch.ones((1,) * max(q.ndim, k.ndim), dtype=torch.bool, device=q.device)

    def _intervals(self, q: Tensor) -> Intervals:
        return Intervals(torch.zeros_like(q), torch.full_like(q, FAR))


@dataclass(frozen=True, eq=False)
class Causal(Mask):
    """A query sees itself and what came before: k <= q.

    Positions are absolute, so it is the bottom-right triangle wherever queries are the last ones:
    prefill, chunks, decode.

    >>> from regard.span import Span
    >>> Causal().visible(Span(2, 2), Span(0, 4)).tolist()
    [[[3, 4]]]
    """

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """k <= q."""
        return k <= q

    def _intervals(self, q: Tensor) -> Intervals:
        return Intervals(torch.zeros_like(q), q + 1)


@dataclass(frozen=True, eq=False)
class Window(Mask):
    """A query sees `size` keys looking back, its own included: q - k < size. What lies ahead is not
    its business.

    `causal & window(4)` is the sliding window of Mistral. With `ahead`, at most that many keys
    after the query are
    visible: k - q <= ahead. `Window(9, ahead=8)` is Longformer's window of 16 (arXiv 2004.05150).

    Raises:
        ArgumentError, ArgumentTypeError: size below 1, ahead below 0, or not ints.

    >>> from regard.span import Span
    >>> (Causal() & Window(8)).count(Span(0, 64), Span(0, 64))
    484
    """

    size: int
    ahead: int | None = None

    def __post_init__(self) -> None:
        whole(
            "Window size",
            self.size,
            1,
            "a query always sees itself; leave the window out to see all",
        )
        if self.ahead is not None:
            whole("Window ahead", self.ahead, 0, "0 is causal, None is no limit")

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """Q - k < size, and k - q <= ahead."""
        near = q - k < self.size
        return near if self.ahead is None else near & (k - q <= self.ahead)

    def _intervals(self, q: Tensor) -> Intervals:
        stops = torch.full_like(q, FAR) if self.ahead is None else q + (self.ahead + 1)
        return Intervals(q - (self.size - 1), stops)


@dataclass(frozen=True, eq=False)
class Chunk(Mask):
    """A query sees the keys of its own chunk of `size` positions: q // size == k // size (Llama 4).

    Raises:
        ArgumentError, ArgumentTypeError: size below 1 or not an int.

    >>> from regard.span import Span
    >>> (Causal() & Chunk(3)).visible(Span(0, 5), Span(0, 5)).tolist()
    [[[1, 2, 3, 1, 2]]]
    """

    size: int

    def __post_init__(self) -> None:
        whole("Chunk size", self.size, 1)

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """Q // size == k // size."""
        return q // self.size == k // self.size

    def _intervals(self, q: Tensor) -> Intervals:
        start = q // self.size * self.size
        return Intervals(start, start + self.size)


@dataclass(frozen=True, eq=False)
class Dilated(Mask):
    """A window with gaps: looking back, every `step`-th key, `size` of them, the query's own
    included.

    q - k < size * step and (q - k) % step == 0: the dilated sliding window of Longformer (arXiv
    2004.05150).

    Raises:
        ArgumentError, ArgumentTypeError: size or step below 1 or not ints.

    >>> from regard.span import Span
    >>> (Causal() & Dilated(2, 3)).block(Span(6, 1), Span(0, 8)).int().tolist()
    [[[[0, 0, 0, 1, 0, 0, 1, 0]]]]
    """

    size: int
    step: int

    def __post_init__(self) -> None:
        whole("Dilated size", self.size, 1)
        whole("Dilated step", self.step, 1, "1 is a plain window")

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """Q - k < size * step, and (q - k) % step == 0."""
        back = q - k
        # a quotient, not size * step, which may be beyond 64 bits
        return (back // self.step < self.size) & (back % self.step == 0)

    def _undecided(self, where: Part, bk: int) -> Tensor:
        hull = Window(min(self.size * self.step, LARGEST))._states(where, bk)
        return torch.where(hull == EMPTY, hull, super()._undecided(where, bk))
