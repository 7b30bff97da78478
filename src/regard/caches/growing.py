"""The cache that keeps everything and grows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from regard.caches.base import (
    Cache,
    Contents,
    Parts,
    check_crop,
    check_fits,
    check_update,
    kept_until,
    memory_of,
    named,
)
from regard.span import Positions, Span, count, follow, part


class Growing(Cache):
    """Keep all memory; every update appends behind the last slot, by concatenation.

    What was given out never changes. A crop cuts slots off the end where no row keeps one, and
    empties others.

    Raises:
        ArgumentError: an update does not fit what is held (parts, batch, heads, dims, dtype); the
            cache is left as it was.

    >>> import torch
    >>> from regard.span import Span
    >>> cache = Growing()
    >>> _ = cache.update((torch.zeros(1, 2, 3, 4),), Span(0, 3))
    >>> (memory,), positions = cache.update((torch.ones(1, 2, 1, 4),), Span(3, 1))
    >>> memory.shape, positions, cache.bytes
    (torch.Size([1, 2, 4, 4]), Span(start=0, length=4), 128)
    >>> cache.crop(2)
    >>> len(cache), cache.next(1)
    (2, Span(start=2, length=1))
    """

    def __init__(self) -> None:
        self._memory: Parts | None = None
        self._positions: Positions | None = None

    def update(self, memory: Parts, positions: Positions) -> tuple[Parts, Positions]:
        """Append memory, each [B,n,T,d], at positions; return all of it, and all positions."""
        check_update(memory, positions)
        if self._memory is not None and self._positions is not None:
            check_fits(self._memory, memory)
            joined = zip(self._memory, memory, strict=True)
            memory = tuple(torch.cat([old, new], dim=2) for old, new in joined)
            positions = follow(self._positions, positions)
        self._memory, self._positions = memory, positions
        return memory, positions

    def crop(self, length: int) -> None:
        """Forget every token at position `length` or later."""
        check_crop(length)
        if self._memory is None or self._positions is None:
            return
        positions = kept_until(self._positions, length)
        n = written(positions)
        self._memory = tuple(m[:, :, :n] for m in self._memory)
        self._positions = part(positions, slice(0, n))

    def contents(self) -> Contents:
        """The parts and their positions."""
        if self._memory is None or self._positions is None:
            return {}
        return {**named(self._memory), "positions": self._positions}

    def fill(self, contents: Mapping[str, Tensor | Span | int]) -> None:
        """Hold these parts and positions."""
        positions = contents.get("positions")
        self._memory = memory_of(contents) if contents else None
        self._positions = None if isinstance(positions, int) else positions

    def __len__(self) -> int:
        return 0 if self._positions is None else count(self._positions)


def written(positions: Positions) -> int:
    """How many slots there are up to the last one that holds a token in any row."""
    if isinstance(positions, Span):
        return positions.length
    used = (positions >= 0).any(0).nonzero()
    return int(used[-1]) + 1 if len(used) else 0
