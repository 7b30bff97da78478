"""The static forms of caches, whose steps can be captured as a CUDA graph. They write into memory
that stays where it is, at places that the device computes, and return all slots, with -1 as the
position of empty ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from regard.caches.base import (
    Cache,
    Contents,
    Parts,
    StaticSize,
    check_crop,
    check_same_layout,
    check_update,
    named_parts,
    parts_of,
)
from regard.caches.buffer_writes import fill_slots
from regard.caches.joined import Joined
from regard.caches.ring_layout import RingLayout
from regard.errors import ArgumentError
from regard.span import (
    EMPTY,
    Positions,
    Span,
    follow_by_construction,
    next_positions,
    slot_count,
)
from regard.units import plural


class StaticForm(Cache):
    """What both static forms share: after a step that raised, only `fill` makes it usable."""

    savable: ClassVar[bool] = False

    def __init__(self) -> None:
        self._steps = 0  # of Python; a captured step that runs again is not counted
        self._is_broken = False

    def mark(self) -> object:
        """Return the number of steps so far."""
        return self._steps

    def restore(self, mark: object) -> None:
        """Refuse further steps, if there was one after the mark: it has overwritten memory."""
        self._is_broken = self._is_broken or mark != self._steps

    def crop(self, length: int) -> None:
        """Remove everything, or raise, because it is not known which slots were overwritten."""
        check_crop(length)
        if length:
            raise ArgumentError(
                f"crop to {length}, but a {type(self).__name__} cache cannot go back; crop the "
                "cache of which it is the static form, and fill this one with the result"
            )
        self.reset()

    def _check_step(self, positions: Positions) -> Tensor:
        """Return the positions of a step, checked without a look at their numbers."""
        if self._is_broken:
            raise ArgumentError(
                f"an earlier step of this {type(self).__name__} cache raised an error after it had "
                "written; fill it with the contents of another one"
            )
        if not isinstance(positions, Tensor) or not follow_by_construction(positions):
            raise ArgumentError(
                f"a {type(self).__name__} cache got positions that its next(1) did not return; it "
                "takes single tokens that follow: read a prompt with the ordinary cache, and then "
                "make its static form"
            )
        self._steps += 1
        return positions


class SlotTable:
    """The positions of slots `[B, size]` and rows `[B, 1]`, which several layers share."""

    def __init__(self, layout: RingLayout, rows: int, device: torch.device) -> None:
        self.layout = layout
        self.positions = torch.full((rows, layout.size), EMPTY, dtype=torch.int64, device=device)
        self.last = torch.full((rows, 1), EMPTY, dtype=torch.int64, device=device)
        self._step: Tensor | None = None
        self._slots = self.last

    def advance(self, positions: Int[Tensor, "b 1"]) -> Int[Tensor, "B 1"]:
        """Write the positions of one new token per row, once for all layers of a step."""
        if positions is not self._step:
            p = positions.expand_as(self.last)
            self._step, self._slots = positions, self.layout.slot(p)
            self.positions.scatter_(1, self._slots, p)
            self.last.copy_(p)
        return self._slots

    def fill(self, positions: Int[Tensor, "B size"]) -> None:
        """Replace the position in each slot."""
        self._step = None
        self.positions.copy_(positions)
        self.last.copy_(positions.amax(1, keepdim=True))


class StaticSlots(StaticForm):
    """The static form of a cache of tokens: one token per row and step.

    slot(p) = p if p < sinks, else sinks + (p - sinks) % ring

    `update` returns all slots; `fill` replaces the contents in the same memory. Unless it `evicts`,
    a step that would overwrite a token raises.
    """

    static_step_refusal: ClassVar[str | None] = None

    def __init__(self, layout: RingLayout, size: StaticSize, *, evicts: bool) -> None:
        super().__init__()
        self.table = SlotTable(layout, size.rows, size.device)
        self.layout, self.size, self.evicts = layout, size, evicts  # type: ignore[misc]
        self._memory: Parts | None = None
        self._room: int | None = None

    def next(self, length: int) -> Positions:
        """Return the positions after the last token of each row, computed on the device."""
        return next_positions(self.table.last, length)

    def update(self, memory: Parts, positions: Positions) -> tuple[Parts, Positions]:
        """Write one token per row, each part `[B, n, 1, d]`; return all slots with positions."""
        check_update(memory, positions)
        if self._memory is None:
            raise ArgumentError(
                "a StaticSlots cache holds nothing yet; fill it with the contents of a cache that "
                "has read a prompt"
            )
        check_same_layout(self._memory, memory)
        if slot_count(positions) != 1:
            raise ArgumentError(
                f"{plural(slot_count(positions), 'token')} for each row of a StaticSlots cache; "
                "give one at each step"
            )
        if self._room == 0:
            raise ArgumentError(
                f"all {self.layout.size} slots of a StaticSlots cache hold tokens; give "
                "to_static more slots"
            )
        slots = self.table.advance(self._check_step(positions))
        for old, new in zip(self._memory, memory, strict=True):
            old.scatter_(2, slots[:, None, :, None].expand(new.shape), new)
        self._room = None if self._room is None else self._room - 1
        return self._memory, self.table.positions

    def contents(self) -> Contents:
        """Return all slots, and the position in each."""
        if self._memory is None:
            return {}
        return {**named_parts(self._memory), "positions": self.table.positions}

    def fill(self, contents: Mapping[str, Tensor | Span | int]) -> None:
        """Replace the contents, in the same memory."""
        positions = contents.get("positions")
        if not isinstance(positions, Tensor):
            positions = self.table.positions.new_full((1, 1), EMPTY)
            memory = tuple(x[:, :, :1] for x in self._memory or ())
        else:
            memory = parts_of(contents)
        if self._memory is not None:
            check_same_layout(self._memory, memory)
        layout, rows = self.layout, self.size.rows
        if any(x.shape[0] != rows for x in memory):
            raise ArgumentError(
                f"contents have {plural(memory[0].shape[0], 'row')}, and this StaticSlots cache "
                f"has {rows}; make the static form of a cache with as many rows"
            )
        # The numbers are read here, once per prompt, never in a step.
        table, source = _arranged(positions.long().expand(rows, -1), layout)
        empty = tuple(x.new_zeros((*x.shape[:2], layout.size, x.shape[3])) for x in memory)
        arranged = fill_slots(empty, memory, source)
        if self._memory is None:
            self._memory = arranged or None
        else:
            for old, new in zip(self._memory, arranged, strict=True):
                old.copy_(new)
        self.table.fill(table)
        used = (table >= 0).any(0).sum()
        self._room = None if self.evicts else layout.size - int(used)
        self._is_broken = False

    def __len__(self) -> int:
        return int((self.table.positions >= 0).any(0).sum())


def _arranged(positions: Tensor, layout: RingLayout) -> tuple[Tensor, Tensor]:
    """Return for positions `[B, S]` that in each slot and its column, -1: none, `[B, size]`."""
    is_token = positions >= 0
    # what holds no token goes to an extra slot, which is dropped
    where = torch.where(is_token, layout.slot(positions), layout.size)
    empty = positions.new_full((positions.shape[0], layout.size + 1), EMPTY)
    columns = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
    table = empty.scatter(1, where, positions)[:, :-1]
    missing = int(is_token.sum()) - int((table >= 0).sum())
    if missing:
        raise ArgumentError(
            f"{plural(missing, 'token')} would share a slot with another one: {layout.size} slots "
            "hold positions that follow one another; give to_static more slots"
        )
    return table, empty.scatter(1, where, columns)[:, :-1]


def share_tables(caches: Iterable[Cache]) -> None:
    """Let the static caches of a model share equal tables, which a step computes once."""
    tables: list[SlotTable] = []
    for cache in _flat(caches):
        if not isinstance(cache, StaticSlots):
            continue
        own = cache.table
        for other in tables:
            if own.layout == other.layout and torch.equal(own.positions, other.positions):
                cache.table = other
                break
        else:
            tables.append(own)


def to_static(caches: Sequence[Cache], size: StaticSize) -> list[Cache]:
    """Return the static forms of the caches of a model, whose step can be captured."""
    static = [cache.to_static(size) for cache in caches]
    share_tables(static)
    return static


def _flat(caches: Iterable[Cache]) -> Iterable[Cache]:
    """Yield the caches, and the parts of those that are joined."""
    for cache in caches:
        if isinstance(cache, Joined):
            yield from _flat(cache.parts)
        else:
            yield cache
