"""The cache that keeps everything and grows."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.span import Positions, Span, count, follow


class Growing:
    """Keep all memory; every update appends behind the last slot, by concatenation.

    Raises:
        ArgumentError: an update does not fit what is held (parts, batch, heads, dims, dtype); the cache is left as it was.

    >>> import torch
    >>> from regard.span import Span
    >>> cache = Growing()
    >>> _ = cache.update((torch.zeros(1, 2, 3, 4),), Span(0, 3))
    >>> (memory,), positions = cache.update((torch.ones(1, 2, 1, 4),), Span(3, 1))
    >>> memory.shape, positions, cache.bytes
    (torch.Size([1, 2, 4, 4]), Span(start=0, length=4), 128)
    """

    def __init__(self) -> None:
        self._memory: tuple[Tensor, ...] | None = None
        self._positions: Positions | None = None

    def update(
        self, memory: tuple[Tensor, ...], positions: Positions
    ) -> tuple[tuple[Tensor, ...], Positions]:
        """Append memory, each [B,n,T,d], at positions; return all of it, and all positions."""
        self._check(memory, positions)
        if self._memory is not None and self._positions is not None:
            joined = zip(self._memory, memory, strict=True)
            memory = tuple(torch.cat([old, new], dim=2) for old, new in joined)
            positions = follow(self._positions, positions)
        self._memory, self._positions = memory, positions
        return memory, positions

    def __len__(self) -> int:
        return 0 if self._positions is None else count(self._positions)

    @property
    def bytes(self) -> int:
        """Bytes of the stored memory, positions not counted."""
        return sum(m.numel() * m.element_size() for m in self._memory or ())

    def _check(self, memory: tuple[Tensor, ...], positions: Positions) -> None:
        length, batches = count(positions), {m.shape[0]: None for m in memory}
        for i, new in enumerate(memory):
            if new.ndim != 4 or new.shape[2] != length:
                raise ArgumentError(
                    f"memory {i} is {tuple(new.shape)} at {length} positions; "
                    "it must be [batch, heads, length, dim] with one position per slot"
                )
        if len(batches) > 1:
            sizes = " and ".join(str(b) for b in batches)
            raise ArgumentError(f"memory has parts of batch {sizes}; all must have one batch")
        for B in batches:
            if not isinstance(positions, Span) and positions.shape[0] not in (1, B):
                raise ArgumentError(
                    f"positions are {tuple(positions.shape)} for memory of batch {B}; "
                    f"they must be ({B}, {length}) or (1, {length})"
                )
        if self._memory is None:
            return
        kept, given = ([_fixed(m) for m in ms] for ms in (self._memory, memory))
        if kept != given:
            raise ArgumentError(
                f"memory {given} does not fit what is held, {kept}; "
                "start a new cache for another batch or model"
            )


def _fixed(memory: Tensor) -> tuple[tuple[int, int, int], torch.dtype]:
    """What no update may change: (batch, heads, dim) and dtype."""
    return (memory.shape[0], memory.shape[1], memory.shape[3]), memory.dtype
