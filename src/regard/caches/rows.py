"""What a ring holds when rows differ: a position for each slot of each row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from regard.caches.slots import Seen, Slots
from regard.errors import ArgumentError
from regard.span import EMPTY, Span


class Rows(NamedTuple):
    """The position in each slot of each row, EMPTY where there is none.

    Attributes:
        positions: int64 [B or 1, size].
        lost: int64 [B or 1, 1], the highest position behind the sinks that was overwritten; -1 if none.

    >>> slots = Slots(sinks=0, ring=3)
    >>> rows = Rows.of(Seen(first=0, stop=4, lost=0), slots, torch.device("cpu"))
    >>> rows.step(torch.tensor([[4], [-1]]), slots).positions.tolist()
    [[3, 4, 2], [3, 1, 2]]
    """

    positions: Tensor
    lost: Tensor

    @staticmethod
    def of(seen: Seen, slots: Slots, device: torch.device) -> Rows:
        """A run of positions, slot by slot."""
        positions = slots.held(seen, device)
        return Rows(positions, positions.new_full((1, 1), seen.lost))

    def for_rows(self, rows: int) -> Rows:
        """The same in so many rows, if it is the same for all."""
        rows = rows if self.positions.shape[0] == 1 else self.positions.shape[0]
        return Rows(self.positions.expand(rows, -1), self.lost.expand(rows, -1))

    def check_behind(self, p: Int[Tensor, "b T"]) -> None:
        """New positions [B or 1, T] lie behind those held, row by row, each once.

        Raises:
            ArgumentError: they do not.
        """
        last = self.positions.amax(1, keepdim=True)
        early = (p >= 0) & (p <= last)
        if bool(early.any()):
            row, column = early.nonzero()[0].tolist()
            held = int(last[min(row, last.shape[0] - 1)])
            raise ArgumentError(
                f"row {row} comes to position {int(p[row, column])} and the cache holds position {held}: a ring is filled in the "
                "order of positions; crop it first, or use a Growing cache"
            )
        if p.shape[1] > 1:
            order = p.sort(1).values
            twice = (order[:, 1:] == order[:, :-1]) & (order[:, 1:] >= 0)
            if bool(twice.any()):
                row, column = twice.nonzero()[0].tolist()
                raise ArgumentError(
                    f"row {row} has position {int(order[row, column])} twice; give each token a position of its own"
                )

    def step(self, p: Int[Tensor, "b T"], slots: Slots) -> Rows:
        """After one token for each row, p [B or 1, at most 1]."""
        now = self.for_rows(p.shape[0])
        p = p.expand(now.positions.shape[0], -1)
        where = slots.slot(p)
        was = now.positions.gather(1, where)
        gone = torch.where(p >= 0, was, EMPTY)
        return Rows(
            now.positions.scatter(1, where, torch.where(p >= 0, p, was)),
            torch.cat([now.lost, gone], 1).amax(1, keepdim=True),
        )

    def chunk(self, p: Int[Tensor, "b T"], slots: Slots) -> tuple[Rows, Tensor]:
        """After new tokens p [B or 1, T]; and which of them came into each slot, int64 [B or 1, size], -1 if none did."""
        now = self.for_rows(p.shape[0])
        p = p.expand(now.positions.shape[0], -1)
        last = torch.cat([now.positions, p], 1).amax(1, keepdim=True)
        kept = (p >= 0) & ((p > last - slots.ring) | (p < slots.sinks))
        # what is not kept goes to one slot more, which is cut off
        where = torch.where(kept, slots.slot(p), slots.size)
        new, index = (
            torch.full_like(last, EMPTY).expand(-1, slots.size + 1),
            torch.arange(p.shape[1]),
        )
        source = new.scatter(1, where, index.to(p.device).expand_as(p))[:, :-1]
        after = new.scatter(1, where, p)[:, :-1]
        gone = [torch.where(after >= 0, now.positions, EMPTY), torch.where(kept, EMPTY, p)]
        return Rows(
            torch.where(after >= 0, after, now.positions),
            torch.cat([now.lost, *gone], 1).amax(1, keepdim=True),
        ), source

    def least(self, length: int, slots: Slots, window: int) -> int:
        """As `Seen.least`, for every row."""
        if length <= slots.sinks or not self.lost.numel():
            return length
        needed = torch.where(self.lost >= 0, self.lost + window, 0)
        return max(length, int(needed.max()))

    def crop(self, length: int, slots: Slots) -> Rows:
        """Without the positions from `length` on."""
        positions = self.positions.masked_fill(self.positions >= length, EMPTY)
        lost = torch.full_like(self.lost, EMPTY) if length <= slots.sinks else self.lost
        return Rows(positions, lost)

    def contents(self) -> dict[str, Tensor | Span | int]:
        """As contents of a cache."""
        return {"positions": self.positions, "lost": self.lost}

    def count(self, slots: Slots) -> int:
        """How many slots hold a token in any row."""
        return int((self.positions >= 0).any(0).sum())
