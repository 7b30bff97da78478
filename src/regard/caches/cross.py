"""The cache of cross-attention: the encoder's memory, written once and then only read."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from regard.caches.base import (
    Cache,
    Contents,
    Parts,
    check_crop,
    check_update,
    named_parts,
    parts_of,
)
from regard.errors import ArgumentError
from regard.span import Positions, Span, slot_count


class Cross(Cache):
    """Keep what a decoder remembers of its source: `store` it once, `read` it at every step.

    The positions are those of the source, -1 where it is padded. Beams: `select` repeats rows,
    `reorder` permutes them.

        if cache.written:
            memory, positions = cache.read()
        else:
            memory, positions = cache.store(remember(source, source_positions), source_positions)

    `update` is `store`: a module that would append to it every step is refused at the second.
    `crop` is refused unless it forgets everything or nothing, since the target's length says
    nothing about the source; `reset` frees it for another.

    Raises:
        ArgumentError: it is written twice, or read before it is written; parts and positions do not
            fit one another; a crop would cut the source. The cache is left as it was.

    >>> import torch
    >>> cache = Cross()
    >>> k = v = torch.zeros(1, 2, 5, 4)
    >>> _ = cache.store((k, v), Span(0, 5))
    >>> (keys, values), positions = cache.read()
    >>> keys is k, positions
    (True, Span(start=0, length=5))
    """

    def __init__(self) -> None:
        self._memory: Parts | None = None
        self._positions: Positions | None = None

    @property
    def written(self) -> bool:
        """Whether a source is held."""
        return self._memory is not None

    def store(self, memory: Parts, positions: Positions) -> tuple[Parts, Positions]:
        """Hold the memory of a source, each part [B,n,S,d], at its positions; return both."""
        check_update(memory, positions)
        if self._positions is not None:
            raise ArgumentError(
                f"a Cross cache is written once, and holds {len(self)} slots of a source already; "
                "read() them, or reset() it for "
                "another source"
            )
        self._memory, self._positions = tuple(memory), positions
        return self._memory, positions

    def read(self) -> tuple[Parts, Positions]:
        """The memory of the source and its positions, as they were stored."""
        if self._memory is None or self._positions is None:
            raise ArgumentError("a Cross cache was read before store() gave it a source")
        return self._memory, self._positions

    def update(self, memory: Parts, positions: Positions) -> tuple[Parts, Positions]:
        """As `store`."""
        return self.store(memory, positions)

    def crop(self, length: int) -> None:
        """Forget the source at length 0, and nothing where no token stands at `length` or later."""
        check_crop(length)
        if self._positions is None or length == 0:
            return self.reset()
        where = self._positions
        if isinstance(where, Span):
            stop = where.stop if where.length else 0
        else:
            stop = int(where.max()) + 1 if where.numel() else 0
        if length < stop:
            raise ArgumentError(
                f"crop to {length}, but a Cross cache holds a source of {stop} positions, of "
                "which a decoder forgets nothing; "
                "crop the caches of the target, or reset() this one"
            )
        return None

    def contents(self) -> Contents:
        """The parts and their positions."""
        if self._memory is None or self._positions is None:
            return {}
        return {**named_parts(self._memory), "positions": self._positions}

    def fill(self, contents: Mapping[str, Tensor | Span | int]) -> None:
        """Hold this source, in place of another."""
        positions = contents.get("positions")
        self._memory = parts_of(contents) if contents else None
        self._positions = None if isinstance(positions, int) else positions

    def __len__(self) -> int:
        return 0 if self._positions is None else slot_count(self._positions)
