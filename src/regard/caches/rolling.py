"""What `Ring` and `Streaming` are: slots that follow from positions, overwritten when nobody can see them any more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from regard.caches.base import (
    Cache,
    Contents,
    Parts,
    check_crop,
    check_fits,
    check_update,
    memory_of,
    named,
)  # fmt: skip
from regard.caches.buffers import Overwritten, put, put_at, spread
from regard.caches.rows import Rows
from regard.caches.slots import Seen, Slots
from regard.errors import ArgumentError
from regard.process import is_compiling
from regard.span import Positions, Span, as_tensor, count, follow


class Rolling(Cache):
    """A number of first positions for ever, and the last ones in a ring.

    As long as all rows hold one run of positions it is known by three numbers (`Seen`), and nothing is read from a tensor;
    else every slot has its position (`Rows`).
    """

    def __init__(self, sinks: int, window: int, rewind: int) -> None:
        self.window, self.rewind = window, rewind
        self._slots = Slots(sinks, window + rewind)
        self._memory: Parts | None = None
        self._seen: Seen | Rows = Seen(0, 0)
        self._overwritten: Overwritten | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the slots, whether or not they are written."""
        return sum(x.numel() * x.element_size() for x in self._memory or ())

    def update(self, memory: Parts, positions: Positions) -> tuple[Parts, Positions]:
        """Store memory, each [B,n,T,d]; return it and all old memory that a query at its positions may see."""
        check_update(memory, positions)
        if self._memory is not None:
            check_fits(self._memory, memory)
        seen = self._before(positions, memory[0].device)
        held = self._memory if self._memory is not None else self._allocate(memory)
        if isinstance(seen, Seen):
            return self._go_on(held, memory, seen, count(positions))
        if self._memory is None:
            if count(positions):
                self._chunk(held, memory, seen, as_tensor(positions, memory[0].device).long())
            return memory, positions
        return self._by_rows(held, memory, seen, as_tensor(positions, memory[0].device).long())

    def crop(self, length: int) -> None:
        """Forget every token at position `length` or later."""
        check_crop(length)
        seen = self._seen
        least = seen.least(length, self._slots, self.window)
        if least > length:
            raise ArgumentError(
                f"crop to {length}, but the tokens that a window of {self.window} needs in front of it are overwritten; "
                f"crop to {least} or more, or to {self._slots.sinks} or less, or give the cache a larger rewind than {self.rewind}"
            )
        self._seen = seen.crop(length, self._slots)

    def contents(self) -> Contents:
        """All slots, and which positions they hold."""
        if self._memory is None:
            return {}
        return {**named(self._memory), **self._seen.contents()}

    def fill(self, contents: Mapping[str, Tensor | Span | int]) -> None:
        """Hold these slots."""
        self._memory = memory_of(contents) if contents else None
        self._overwritten = None
        positions, lost = contents.get("positions"), contents.get("lost")
        self._seen = Seen(0, 0)
        if isinstance(positions, Tensor) and isinstance(lost, Tensor):
            self._seen = Rows(positions, lost)
        elif isinstance(positions, Span) and isinstance(lost, int):
            self._seen = Seen(positions.start, positions.stop, lost)

    def mark(self) -> Any:
        """What is held, and what was overwritten last: an update that writes in place says so anew."""
        return self._memory, self._seen, self._overwritten

    def restore(self, mark: Any) -> None:
        """Take back the update that came after `mark`: what it overwrote is put back."""
        self._memory, self._seen, overwritten = mark
        if self._overwritten is not overwritten and self._overwritten is not None:
            self._overwritten.put_back(self._memory or ())
        self._overwritten = overwritten

    def __len__(self) -> int:
        return self._seen.count(self._slots)

    def _allocate(self, memory: Parts) -> Parts:
        # zeros: garbage in an unwritten slot would cost every kernel a clean-up
        size = self._slots.size
        return tuple(m.new_zeros((*m.shape[:2], size, m.shape[3])) for m in memory)

    def _before(self, positions: Positions, device: torch.device) -> Seen | Rows:
        """What was seen, in the form that the new positions allow; refuse positions that do not lie behind."""
        seen, compiling = self._seen, is_compiling()
        if isinstance(seen, Seen):
            # a graph would be tied to numbers that change with every step: there, slots have positions
            if isinstance(positions, Span) and positions.start >= 0 and not compiling:
                if seen.first == seen.stop and seen.lost < 0:
                    return Seen(positions.start, positions.start)
                if seen.stop == positions.start:
                    return seen
            seen = Rows.of(seen, self._slots, device)
        if not compiling:
            seen.check_behind(as_tensor(positions, device))
        return seen

    def _go_on(self, held: Parts, new: Parts, seen: Seen, T: int) -> tuple[Parts, Positions]:
        """One run of positions goes on."""
        slots, start, device = self._slots, seen.stop, new[0].device
        after = seen.go_on(start + T, slots)
        if after.stop <= slots.size and after.lost < 0:  # position p is in slot p
            self._memory, self._seen = put(held, new, start), after
            shown = Span(after.first, after.stop - after.first)
            return tuple(x[:, :, shown.start : shown.stop] for x in self._memory), shown
        p = torch.arange(start, start + T, device=device)[None]
        if (
            after.stop - start <= self.rewind + 1
        ):  # nothing that a query of the step sees is overwritten
            self._write(held, new, p, after)
            return self._visible(), slots.held(after, device)
        answer, where = self._in_order(held, new, seen)
        self._chunk(held, new, Rows.of(seen, slots, device), p)
        self._seen = after
        return answer, where

    def _in_order(self, held: Parts, new: Parts, seen: Seen) -> tuple[Parts, Positions]:
        """Sinks, the last window - 1 tokens, and the new ones: in order, so that a contiguous answer stays a `Span`."""
        slots, start = self._slots, seen.stop
        sinks = Span(seen.first, max(0, min(slots.sinks, start) - seen.first))
        oldest = max(seen.lost + 1, start - self.window + 1, slots.sinks, seen.first)
        recent = Span(oldest, max(0, start - oldest))
        spans = [x for x in (sinks, recent) if x.length]
        runs = [run for x in spans for run in slots.runs(x.start, x.stop)]
        if not runs:
            return new, Span(start, new[0].shape[2])
        where: Positions = spans[0]
        for more in (*spans[1:], Span(start, new[0].shape[2])):
            where = follow(where, more)
        parts = zip(held, new, strict=True)
        answer = tuple(torch.cat([*(old[:, :, a:b] for a, b in runs), x], 2) for old, x in parts)
        return answer, where if isinstance(where, Span) else where.to(new[0].device)

    def _by_rows(self, held: Parts, new: Parts, seen: Rows, p: Tensor) -> tuple[Parts, Positions]:
        """Rows at positions of their own go on."""
        if p.shape[1] <= 1:
            after = seen.step(p, self._slots)
            self._write(held, new, p, after)
            return self._visible(), after.positions
        parts = zip(held, new, strict=True)
        answer = tuple(torch.cat([old, x], 2) for old, x in parts), follow(seen.positions, p)
        self._chunk(held, new, seen, p)
        return answer

    def _write(self, held: Parts, new: Parts, p: Tensor, after: Seen | Rows) -> None:
        """A step into its slots, in place if nobody can notice."""
        self._memory, self._overwritten = put_at(held, new, self._slots.slot(p), p >= 0)
        self._seen = after

    def _chunk(self, held: Parts, new: Parts, seen: Rows, p: Tensor) -> None:
        """The last tokens of a chunk into a copy of the ring: the answer has the old ones."""
        self._seen, source = seen.chunk(p, self._slots)
        self._memory = spread(held, new, source)

    def _visible(self) -> Parts:
        return self._memory or ()
