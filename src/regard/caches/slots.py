"""Where a ring keeps a token: its slot follows from its position, and so does what is lost."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from regard.span import EMPTY, Span


class Slots(NamedTuple):
    """`sinks` slots for the first positions, and a ring for all later ones.

    slot(p) = p if p < sinks, else sinks + (p - sinks) % ring

    Attributes:
        sinks: the first positions, which are never overwritten.
        ring: the size of the ring.

    >>> layout = Slots(sinks=2, ring=3)
    >>> layout.slot(torch.tensor([0, 1, 2, 3, 4, 5])).tolist()
    [0, 1, 2, 3, 4, 2]
    >>> layout.held(Seen(first=0, stop=6, lost=2)).tolist()
    [[0, 1, 5, 3, 4]]
    """

    sinks: int
    ring: int

    @property
    def size(self) -> int:
        """How many slots there are."""
        return self.sinks + self.ring

    def slot(self, p: Int[Tensor, "*p"]) -> Int[Tensor, "*p"]:
        """The slots of positions; of a negative position any slot."""
        if self.sinks == 0:
            return p % self.ring
        return torch.where(
            p < self.sinks, p.clamp(min=0), self.sinks + (p - self.sinks) % self.ring
        )

    def runs(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The slots of positions start to stop - 1, in this order, as ranges; at most `ring` of them are behind the sinks.

        >>> Slots(2, 3).runs(3, 6)
        [(3, 5), (2, 3)]
        """
        found = [(start, min(stop, self.sinks))]
        start = max(start, self.sinks)
        if start < stop:
            first = self.sinks + (start - self.sinks) % self.ring
            direct = min(stop - start, self.size - first)
            found += [(first, first + direct), (self.sinks, self.sinks + stop - start - direct)]
        return [(a, b) for a, b in found if a < b]

    def held(self, seen: Seen, device: torch.device | str | None = None) -> Int[Tensor, "1 size"]:
        """The positions in all slots [1, size] after a run of positions, EMPTY where a slot holds none of them."""
        last, j = seen.stop - 1, torch.arange(self.size, device=device)
        p = last - (last - j) % self.ring
        held = p >= max(seen.lost + 1, self.sinks)
        if self.sinks:
            p, held = torch.where(j < self.sinks, j, p), held | (j < self.sinks)
        return torch.where(held & (p >= seen.first) & (p <= last), p, EMPTY)[None]


class Seen(NamedTuple):
    """A run of positions first to stop - 1, the same for all rows, of which those up to `lost` were overwritten.

    Attributes:
        first, stop: the run.
        lost: the highest position behind the sinks that is no longer held; -1 if none.

    >>> seen = Seen(first=0, stop=6, lost=1)
    >>> seen.go_on(8, Slots(sinks=0, ring=4))
    Seen(first=0, stop=8, lost=3)
    """

    first: int
    stop: int
    lost: int = -1

    def go_on(self, stop: int, slots: Slots) -> Seen:
        """The run after it went on to `stop`."""
        gone = stop - 1 - slots.ring
        lost = gone if gone >= max(self.first, slots.sinks) else -1
        return Seen(self.first, stop, max(lost, self.lost))

    def least(self, length: int, slots: Slots, window: int) -> int:
        """The least length from `length` on that a crop can serve: a window in front of it is held."""
        nothing_lost = self.lost < 0 or length <= slots.sinks
        return length if nothing_lost else max(length, self.lost + window)

    def crop(self, length: int, slots: Slots) -> Seen:
        """The run without the positions from `length` on."""
        stop = max(self.first, min(self.stop, length))
        return Seen(self.first, stop, -1 if length <= slots.sinks else self.lost)

    def contents(self) -> dict[str, Tensor | Span | int]:
        """As contents of a cache: the positions seen, and what was lost."""
        return {"positions": Span(self.first, self.stop - self.first), "lost": self.lost}

    def count(self, slots: Slots) -> int:
        """How many slots hold a token."""
        in_sinks = max(0, min(self.stop, slots.sinks) - self.first)
        start = max(self.first, slots.sinks, self.lost + 1)
        return in_sinks + max(0, self.stop - start)
