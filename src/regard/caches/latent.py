"""The cache of multi-head latent attention, which stores one latent vector per token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from regard.caches.base import Cache, Contents, Parts, parts_of
from regard.caches.contiguous import Fixed, Growing
from regard.errors import ArgumentError
from regard.span import Positions, Span


class Latent(Cache):
    """A cache of rank + rotary values per token: a latent and the rotary key that all heads share.

    Both are stored as one part `[B, 1, T, rank + rotary]`, like `Growing`, or like `Fixed` if a
    capacity is given. Any other memory is refused, so that a projection which passes expanded keys
    and values, which are many times larger, fails at its first update.

    Args:
        rank: the size of the latent.
        rotary: the size of the shared rotary key that follows it; 0 means none.
        capacity: the largest number of slots, allocated at the first update; None means no bound.

    Raises:
        ArgumentError: rank or capacity is less than 1, or rotary less than 0; an update is not one
            part `[B, 1, T, rank + rotary]`, does not fit the contents, or exceeds the capacity. The
            cache stays unchanged.

    >>> import torch
    >>> cache = Latent(512, 64)
    >>> _ = cache.update((torch.zeros(1, 1, 3, 576, dtype=torch.bfloat16),), Span(0, 3))
    >>> cache.elements, cache.bytes
    (576, 3456)

    Source: DeepSeek-AI 2024 (arXiv 2405.04434), section 2.1.2 and table 1.
    """

    def __init__(self, rank: int, rotary: int, *, capacity: int | None = None) -> None:
        if rank < 1 or rotary < 0:
            raise ArgumentError(
                f"Latent(rank={rank}, rotary={rotary}): rank must be at least 1 and rotary at "
                "least 0"
            )
        self.rank, self.rotary, self.capacity = rank, rotary, capacity
        self._store: Cache = Growing() if capacity is None else Fixed(capacity)

    @property
    def elements(self) -> int:
        """The number of values per token: rank + rotary."""
        return self.rank + self.rotary

    @property
    def settings(self) -> dict[str, Any]:
        """The sizes and the capacity, as constructor arguments."""
        return {"rank": self.rank, "rotary": self.rotary, "capacity": self.capacity}

    @property
    def bytes(self) -> int:
        """Bytes of the memory that is held."""
        return self._store.bytes

    def update(self, memory: Parts, positions: Positions) -> tuple[Parts, Positions]:
        """Append one part `[B, 1, T, rank + rotary]`, and return all memory and all positions."""
        if not self._store.contents():  # later updates are compared with the first one
            self._check(memory)
        return self._store.update(memory, positions)

    def crop(self, length: int) -> None:
        """Remove every token at position `length` or later."""
        self._store.crop(length)

    def contents(self) -> Contents:
        """Return the part and its positions."""
        return self._store.contents()

    def fill(self, contents: Mapping[str, Tensor | Span | int]) -> None:
        """Replace the part and its positions.

        Raises:
            ArgumentError: the contents are not one part `[B, 1, S, rank + rotary]`.
        """
        if contents:
            self._check(parts_of(contents))
        self._store.fill(contents)

    def mark(self) -> Any:
        """Return a snapshot from which `restore` can undo the next update."""
        return self._store.mark()

    def restore(self, mark: Any) -> None:
        """Undo the update that came after the snapshot."""
        self._store.restore(mark)

    def __len__(self) -> int:
        return len(self._store)

    def _check(self, memory: Parts) -> None:
        shapes = [tuple(m.shape) for m in memory]
        if len(memory) != 1 or memory[0].ndim != 4 or shapes[0][1::2] != (1, self.elements):
            raise ArgumentError(
                f"memory has parts {shapes}; a Latent cache takes one part [batch, 1, length, "
                f"{self.elements}], {self.rank} latent and {self.rotary} rotary values: store "
                "the latent, and expand it to keys and values after reading"
            )
