"""A cache in one file: every update is kept as it came, and joined when it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from regard.caches import Cache, Contents, Parts
from regard.caches.base import (
    check_crop,
    check_same_layout,
    check_update,
    named_parts,
    parts_of,
    positions_before,
)
from regard.span import Positions, Span, concat_positions, slot_count


class Listed(Cache):
    """Keep a list of updates."""

    kind: ClassVar[str | None] = "listed"

    def __init__(self) -> None:
        self._updates: list[Parts] = []
        self._positions: Positions | None = None

    def update(self, memory: Parts, positions: Positions) -> tuple[Parts, Positions]:
        """Keep one more update; return all of them, joined."""
        check_update(memory, positions)
        if self._positions is not None:
            check_same_layout(self._updates[0], memory)
            positions = concat_positions(self._positions, positions)
        self._updates, self._positions = [*self._updates, tuple(memory)], positions
        return self._joined(), positions

    def crop(self, length: int) -> None:
        """Forget every token at position `length` or later."""
        check_crop(length)
        if self._positions is None:
            return
        positions = positions_before(self._positions, length)
        self._updates = [tuple(x[:, :, : slot_count(positions)] for x in self._joined())]
        self._positions = positions

    def contents(self) -> Contents:
        """The joined memory and its positions."""
        if self._positions is None:
            return {}
        return {**named_parts(self._joined()), "positions": self._positions}

    def fill(self, contents: Mapping[str, Tensor | Span | int]) -> None:
        """Hold these."""
        positions = contents.get("positions")
        self._updates = [parts_of(contents)] if contents else []
        self._positions = None if isinstance(positions, int) else positions

    def __len__(self) -> int:
        return 0 if self._positions is None else slot_count(self._positions)

    def _joined(self) -> Parts:
        return tuple(torch.cat(parts, 2) for parts in zip(*self._updates, strict=True))
