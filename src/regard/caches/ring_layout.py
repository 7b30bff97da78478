"""The slot of each position in a ring, and a run of positions that all rows hold."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from regard.span import EMPTY, Span


class RingLayout(NamedTuple):
    """The slot of each position: `sinks` slots for the first ones, and a ring for the others.

    slot(p) = p if p < sinks, else sinks + (p - sinks) % ring
    """

    sinks: int
    ring: int

    @property
    def size(self) -> int:
        """The total number of slots."""
        return self.sinks + self.ring

    def slot(self, p: Int[Tensor, "*p"]) -> Int[Tensor, "*p"]:
        """Return the slots of positions; for a negative position the result has no meaning."""
        if self.sinks == 0:
            return p % self.ring
        return torch.where(
            p < self.sinks, p.clamp(min=0), self.sinks + (p - self.sinks) % self.ring
        )

    def runs(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the slots of positions start to stop - 1, at most `ring` after the sinks."""
        ranges = [(start, min(stop, self.sinks))]
        start = max(start, self.sinks)
        if start < stop:
            first = self.sinks + (start - self.sinks) % self.ring
            direct = min(stop - start, self.size - first)
            ranges += [(first, first + direct), (self.sinks, self.sinks + stop - start - direct)]
        return [(a, b) for a, b in ranges if a < b]

    def positions(
        self, run: ContiguousRun, device: torch.device | str | None = None
    ) -> Int[Tensor, "1 size"]:
        """Return the position in each slot `[1, size]` after a run, EMPTY where there is none."""
        last, j = run.stop - 1, torch.arange(self.size, device=device or "cpu")
        p = last - (last - j) % self.ring
        is_held = p >= max(run.lost + 1, self.sinks)
        if self.sinks:
            p, is_held = torch.where(j < self.sinks, j, p), is_held | (j < self.sinks)
        return torch.where(is_held & (p >= run.first) & (p <= last), p, EMPTY)[None]


class ContiguousRun(NamedTuple):
    """The positions first to stop - 1 of all rows; those up to `lost`, not sinks, are gone."""

    first: int
    stop: int
    lost: int = -1

    def extended(self, stop: int, slots: RingLayout) -> ContiguousRun:
        """Return the run after it was extended to `stop`."""
        gone = stop - 1 - slots.ring
        lost = gone if gone >= max(self.first, slots.sinks) else -1
        return ContiguousRun(self.first, stop, max(lost, self.lost))

    def min_crop_length(self, length: int, slots: RingLayout, window: int) -> int:
        """Return the smallest length from `length` on that still has a full window before it."""
        nothing_lost = self.lost < 0 or length <= slots.sinks
        return length if nothing_lost else max(length, self.lost + window)

    def crop(self, length: int, slots: RingLayout) -> ContiguousRun:
        """Return the run without the positions from `length` on."""
        stop = max(self.first, min(self.stop, length))
        return ContiguousRun(self.first, stop, -1 if length <= slots.sinks else self.lost)

    def contents(self) -> dict[str, Tensor | Span | int]:
        """Return the positions and the last overwritten one, as `Cache.contents` names them."""
        return {"positions": Span(self.first, self.stop - self.first), "lost": self.lost}

    def count(self, slots: RingLayout) -> int:
        """Return the number of slots that hold a token."""
        in_sinks = max(0, min(self.stop, slots.sinks) - self.first)
        start = max(self.first, slots.sinks, self.lost + 1)
        return in_sinks + max(0, self.stop - start)
