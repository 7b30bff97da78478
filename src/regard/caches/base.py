"""What a cache is."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from regard.span import Positions


@runtime_checkable
class Cache(Protocol):
    """Memory with positions in, memory with positions out. What a memory is, the projection knows, not the cache."""

    def update(
        self, memory: tuple[Tensor, ...], positions: Positions
    ) -> tuple[tuple[Tensor, ...], Positions]:
        """Store new memory, each [B,n,T,d], at positions; return all that is visible now, each [B,n,S,d], and where."""

    def __len__(self) -> int:
        """How many slots are held."""

    @property
    def bytes(self) -> int:
        """How much memory is held."""
