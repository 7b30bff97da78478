"""The cache of cross-attention: the encoder's keys and values, written once and then only read."""

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
from regard.units import plural


class Cross(Cache):
    """A cache for cross-attention: `store` the memory of the source once, and `read` it at every
    step.

    The positions are those of the source, -1 at padding. For beam search, `select` repeats rows and
    `reorder` permutes them.

        if cache.written:
            memory, positions = cache.read()
        else:
            memory, positions = cache.store(project(source, source_positions), source_positions)

    `update` does the same as `store`, so that a module which tries to append at every step fails at
    the second step. `crop` raises unless it removes everything or nothing, because the length of
    the target does not refer to the source; `reset` empties the cache for another source.

    Raises:
        ArgumentError: the cache is written twice, or read before it is written; parts and positions
            do not fit each other; a crop would shorten the source. The cache stays unchanged.

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
        """Whether the cache holds a source."""
        return self._memory is not None

    def store(self, memory: Parts, positions: Positions) -> tuple[Parts, Positions]:
        """Store the memory of a source.

        Args:
            memory: parts, each `[B, n, S, d]`.
            positions: the positions of the source tokens.

        Returns:
            The memory and the positions.
        """
        check_update(memory, positions)
        if self._positions is not None:
            raise ArgumentError(
                f"a Cross cache is written once, and holds {len(self)} slots of a source already; "
                "read() them, or reset() it for another source"
            )
        self._memory, self._positions = tuple(memory), positions
        return self._memory, positions

    def read(self) -> tuple[Parts, Positions]:
        """Return the memory of the source as it was stored.

        Returns:
            The parts, each `[B, n, S, d]`, and their positions.
        """
        if self._memory is None or self._positions is None:
            raise ArgumentError(
                "a Cross cache holds no source yet; call store(memory, positions) before read()"
            )
        return self._memory, self._positions

    def update(self, memory: Parts, positions: Positions) -> tuple[Parts, Positions]:
        """Store the memory of a source, like `store`."""
        return self.store(memory, positions)

    def crop(self, length: int) -> None:
        """Remove the source at length 0; otherwise check that no token is at position `length` or
        later.
        """
        check_crop(length)
        if self._positions is None or length == 0:
            return self.reset()
        positions = self._positions
        if isinstance(positions, Span):
            stop = positions.stop if positions.length else 0
        else:
            stop = int(positions.max()) + 1 if positions.numel() else 0
        if length < stop:
            raise ArgumentError(
                f"crop to {length}, but a Cross cache holds a source of "
                f"{plural(stop, 'position')}, which cannot be shortened; crop the caches of the "
                "target, or reset() this one"
            )
        return None

    def contents(self) -> Contents:
        """Return the parts and their positions."""
        if self._memory is None or self._positions is None:
            return {}
        return {**named_parts(self._memory), "positions": self._positions}

    def fill(self, contents: Mapping[str, Tensor | Span | int]) -> None:
        """Replace the stored source and its positions."""
        positions = contents.get("positions")
        self._memory = parts_of(contents) if contents else None
        self._positions = None if isinstance(positions, int) else positions

    def __len__(self) -> int:
        return 0 if self._positions is None else slot_count(self._positions)
