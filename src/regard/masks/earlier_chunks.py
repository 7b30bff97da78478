"""`EarlierChunks`: the keys of chunks before that of the query."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.errors import ArgumentError
from regard.masks.base import Mask, Reach, Refusal, check_int
from regard.masks.tiling import Intervals


@dataclass(frozen=True, eq=False)
class EarlierChunks(Mask):
    """A query sees the keys of the chunks that are `first` to `last` chunks before its own.

    first <= q // size - k // size <= last

    Args:
        size: positions per chunk.
        first: the nearest chunk, from 1, the one before the query's own.
        last: the farthest chunk; None is every earlier one.

    Raises:
        ArgumentError, ArgumentTypeError: a number is below 1 or not an int, or last is below first.

    >>> from regard.span import Span
    >>> EarlierChunks(2, 1, 1).block(Span(0, 6), Span(0, 6))[0, 0, 4].int().tolist()
    [0, 0, 1, 1, 0, 0]

    Source: An et al. 2024 (arXiv 2402.17463), section 3: the parts of dual chunk attention.
    """

    size: int
    first: int = 1
    last: int | None = None

    def __post_init__(self) -> None:
        check_int("EarlierChunks size", self.size, 1)
        check_int("EarlierChunks first", self.first, 1, "the query's own chunk is Chunk(size)")
        if self.last is not None:
            check_int("EarlierChunks last", self.last, 1)
            if self.last < self.first:
                raise ArgumentError(
                    f"EarlierChunks first is {self.first} and last is {self.last}; last must be at "
                    "least first, or None for every earlier chunk"
                )

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """Return whether the chunk of k is one of these chunks before that of q."""
        before = q // self.size - k // self.size
        is_early = before >= self.first
        return is_early if self.last is None else is_early & (before <= self.last)

    def _intervals(self, q: Tensor) -> Intervals:
        chunk = q // self.size
        stop = (chunk - self.first + 1) * self.size
        if self.last is None:
            return Intervals(torch.zeros_like(q), stop)
        return Intervals((chunk - self.last) * self.size, stop)

    def causal_from(self) -> int:
        """Return 0: a later key is in no earlier chunk."""
        return 0

    def reach(self) -> Reach:
        """Return a reach of all tokens, or of the farthest chunk with the query's own."""
        return super().reach() if self.last is None else Reach((self.last + 1) * self.size)

    def refusal(self) -> Refusal:
        """Explain that the key is in another chunk."""
        return Refusal(f"not in these earlier chunks of {self.size}", "chunk", str(self))
