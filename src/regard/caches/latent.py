"""The cache of multi-head latent attention: one latent per token, never expanded keys and
values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from regard.caches.base import Cache, Contents, Parts, parts_of
from regard.caches.contiguous import Fixed, Growing
from regard.errors import ArgumentError
from regard.span import Positions, Span


class Latent(Cache):
    """Keep rank + rotary numbers per token: a latent and the rotary key that all heads share, as
    one part [B,1,T,rank+rotary].

    It stores as `Growing` does, or as `Fixed` with a capacity, and refuses everything else: a
    projection that hands over expanded keys and values, which are many times larger, is caught at
    its first update.

    Args:
        rank: the size of the latent.
        rotary: the size of the shared rotary key behind it; 0 is none.
        capacity: None, or the most slots, allocated at the first update.

    Raises:
        ArgumentError: rank or capacity is less than 1, or rotary less than 0; an update is not one
            part [B,1,T,rank+rotary], does not fit what is held, or finds no room. The cache is left
            as it was.

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
        """Numbers per token: rank + rotary."""
        return self.rank + self.rotary

    @property
    def settings(self) -> dict[str, Any]:
        """The sizes, and the capacity."""
        return {"rank": self.rank, "rotary": self.rotary, "capacity": self.capacity}

    @property
    def bytes(self) -> int:
        """Bytes of the memory held."""
        return self._store.bytes

    def update(self, memory: Parts, positions: Positions) -> tuple[Parts, Positions]:
        """Append one part [B,1,T,rank+rotary] at positions; return all of it, and all positions."""
        if not self._store.contents():  # later ones must fit it
            self._check(memory)
        return self._store.update(memory, positions)

    def crop(self, length: int) -> None:
        """Forget every token at position `length` or later."""
        self._store.crop(length)

    def contents(self) -> Contents:
        """The part and its positions."""
        return self._store.contents()

    def fill(self, contents: Mapping[str, Tensor | Span | int]) -> None:
        """Hold this part and its positions.

        Raises:
            ArgumentError: it is not one part [B,1,S,rank+rotary].
        """
        if contents:
            self._check(parts_of(contents))
        self._store.fill(contents)

    def mark(self) -> Any:
        """A point to come back to."""
        return self._store.mark()

    def restore(self, mark: Any) -> None:
        """Take back the update that came after `mark`."""
        self._store.restore(mark)

    def __len__(self) -> int:
        return len(self._store)

    def _check(self, memory: Parts) -> None:
        shapes = [tuple(m.shape) for m in memory]
        if len(memory) != 1 or memory[0].ndim != 4 or shapes[0][1::2] != (1, self.elements):
            raise ArgumentError(
                f"memory has parts {shapes}; a Latent cache takes one part [batch, 1, length, "
                f"{self.elements}], "
                f"{self.rank} latent and {self.rotary} rotary numbers: remember the latent, and "
                "expand it on recall"
            )
