"""Ring caches: `Ring` keeps the last tokens, and `Streaming` the first ones too."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import pad

from regard.caches.base import (
    Cache,
    Contents,
    OpenSlot,
    Parts,
    StaticSize,
    bytes_of,
    check_crop,
    check_same_layout,
    check_update,
    named_parts,
    parts_of,
)
from regard.caches.buffer_writes import (
    OverwrittenSlots,
    can_write_in_place,
    fill_slots,
    new_buffers,
    scatter_slots,
    write_slots,
)
from regard.caches.contiguous import Growing
from regard.caches.ring_layout import ContiguousRun, RingLayout
from regard.caches.static import StaticSlots
from regard.errors import ArgumentError
from regard.masks import Mask, Reach, Sinks, Window
from regard.process_state import is_compiling
from regard.span import (
    EMPTY,
    Positions,
    Span,
    as_tensor,
    concat_positions,
    follow_by_construction,
    slot_count,
)

STREAMING_SINKS = 4
"""The number of first tokens that "streaming" never evicts, as in arXiv 2309.17453, section 3.2."""


class SlotPositions(NamedTuple):
    """The position in each slot `[B or 1, size]`, and the highest one that was overwritten."""

    positions: Tensor
    lost: Tensor

    @staticmethod
    def of(run: ContiguousRun, slots: RingLayout, device: torch.device) -> SlotPositions:
        """Return the position of each slot after a contiguous run."""
        positions = slots.positions(run, device)
        return SlotPositions(positions, positions.new_full((1, 1), run.lost))

    def for_rows(self, rows: int) -> SlotPositions:
        """Return the positions expanded to a number of rows, if all rows share them."""
        rows = rows if self.positions.shape[0] == 1 else self.positions.shape[0]
        return SlotPositions(self.positions.expand(rows, -1), self.lost.expand(rows, -1))

    def check_follows(self, p: Int[Tensor, "b T"]) -> None:
        """Raise unless new positions `[B or 1, T]` follow those of the cache, without repeats."""
        last = self.positions.amax(1, keepdim=True)
        early = (p >= 0) & (p <= last)
        if bool(early.any()):
            row, column = early.nonzero()[0].tolist()
            stored = int(last[min(row, last.shape[0] - 1)])
            raise ArgumentError(
                f"row {row} has the new position {int(p[row, column])}, but the cache has position "
                f"{stored} already: a ring is filled in the order of positions; crop it first, or "
                "use a Growing cache"
            )
        if p.shape[1] > 1:
            order = p.sort(1).values
            twice = (order[:, 1:] == order[:, :-1]) & (order[:, 1:] >= 0)
            if bool(twice.any()):
                row, column = twice.nonzero()[0].tolist()
                raise ArgumentError(
                    f"row {row} has position {int(order[row, column])} twice; give each token a "
                    "position of its own"
                )

    def step(self, p: Int[Tensor, "b T"], slots: RingLayout) -> SlotPositions:
        """Return the positions after at most one new token per row, `[B or 1, 0 or 1]`."""
        now = self.for_rows(p.shape[0])
        p = p.expand(now.positions.shape[0], -1)
        where = slots.slot(p)
        was = now.positions.gather(1, where)
        gone = torch.where(p >= 0, was, EMPTY)
        return SlotPositions(
            now.positions.scatter(1, where, torch.where(p >= 0, p, was)),
            torch.cat([now.lost, gone], 1).amax(1, keepdim=True),
        )

    def chunk(self, p: Int[Tensor, "b T"], slots: RingLayout) -> tuple[SlotPositions, Tensor]:
        """Return the positions after new tokens, and the new token of each slot (-1: none)."""
        now = self.for_rows(p.shape[0])
        p = p.expand(now.positions.shape[0], -1)
        last = torch.cat([now.positions, p], 1).amax(1, keepdim=True)
        is_kept = (p >= 0) & ((p > last - slots.ring) | (p < slots.sinks))
        # tokens that are not kept go to an extra slot, which is dropped
        where = torch.where(is_kept, slots.slot(p), slots.size)
        new, index = (
            torch.full_like(last, EMPTY).expand(-1, slots.size + 1),
            torch.arange(p.shape[1], device="cpu"),
        )
        source = new.scatter(1, where, index.to(p.device).expand_as(p))[:, :-1]
        after = new.scatter(1, where, p)[:, :-1]
        gone = [torch.where(after >= 0, now.positions, EMPTY), torch.where(is_kept, EMPTY, p)]
        return SlotPositions(
            torch.where(after >= 0, after, now.positions),
            torch.cat([now.lost, *gone], 1).amax(1, keepdim=True),
        ), source

    def min_crop_length(self, length: int, slots: RingLayout, window: int) -> int:
        """Return the smallest length from `length` on at which every row has a full window."""
        if length <= slots.sinks or not self.lost.numel():
            return length
        needed = torch.where(self.lost >= 0, self.lost + window, 0)
        return max(length, int(needed.max()))

    def crop(self, length: int, slots: RingLayout) -> SlotPositions:
        """Return the positions without those from `length` on."""
        positions = self.positions.masked_fill(self.positions >= length, EMPTY)
        lost = torch.full_like(self.lost, EMPTY) if length <= slots.sinks else self.lost
        return SlotPositions(positions, lost)

    def contents(self) -> dict[str, Tensor | Span | int]:
        """Return the positions and the last overwritten one, as `Cache.contents` names them."""
        return {"positions": self.positions, "lost": self.lost}

    def count(self, slots: RingLayout) -> int:
        """Return the number of slots that hold a token in any row."""
        return int((self.positions >= 0).any(0).sum())


def _is_short(contents: Mapping[str, Tensor | Span | int], size: int) -> bool:
    """Return whether saved positions are in the slots of their own numbers, and none is lost."""
    positions, lost = contents.get("positions"), contents.get("lost")
    if isinstance(positions, Span):
        return positions.stop <= size and isinstance(lost, int) and lost == EMPTY
    if not isinstance(positions, Tensor) or not isinstance(lost, Tensor):
        return False
    own = torch.arange(size, device=positions.device)
    is_own = ((positions == own) | (positions == EMPTY)).all()
    return bool(is_own) and bool((lost == EMPTY).all())


@lru_cache(maxsize=16)
def _positions_after(slots: RingLayout, run: ContiguousRun) -> Tensor:
    """Return `slots.positions(run)`, the same tensor for all layers of a model; never written."""
    return slots.positions(run)


class RingBase(Cache):
    """Base of `Ring` and `Streaming`: the first positions are kept, the last ones in a ring.

    A `ContiguousRun` of three integers describes rows with the same positions, so that no tensor is
    read; otherwise it is `SlotPositions`. A ring that has fewer slots than its size, because the
    text is short, has lost nothing: position p is in slot p.
    """

    crop_is_exact: ClassVar[bool] = False
    static_step_refusal: ClassVar[str | None] = None
    min_slots: ClassVar[int] = 256
    """The slots behind the sinks that a ring begins with; they double until it has its size."""

    def __init__(self, sinks: int, window: int, rewind: int) -> None:
        self.window, self.rewind = window, rewind
        self._full = RingLayout(sinks, window + rewind)
        self._slots = RingLayout(sinks, min(window + rewind, self.min_slots))
        self._memory: Parts | None = None
        self._stored: ContiguousRun | SlotPositions = ContiguousRun(0, 0)
        self._overwritten: OverwrittenSlots | None = None
        self._opened: OverwrittenSlots | None = None  # what the slot of `open_slot` held

    def _to_static(self, size: StaticSize) -> Cache:
        assert self._memory is not None, "the caller checks it"
        stored = self._stored
        if isinstance(stored, ContiguousRun):
            stored = SlotPositions.of(stored, self._slots, size.device)
        # without room for more tokens than the window, none is ever overwritten
        evicts = self._full.size < size.slots
        layout = self._full if evicts else RingLayout(0, size.slots)
        static = StaticSlots(layout, size, evicts=evicts)
        static.fill({**named_parts(self._memory), "positions": stored.positions})
        return static

    @property
    def bytes(self) -> int:
        """Bytes of all slots, written or not."""
        return bytes_of(self._memory or ())

    def update(self, memory: Parts, positions: Positions) -> tuple[Parts, Positions]:
        """Store memory, each part `[B, n, T, d]`; return it with all that its queries may see."""
        check_update(memory, positions)
        if self._memory is not None:
            check_same_layout(self._memory, memory)
        self._grow(self._stop_of(positions))
        buffers = self._memory if self._memory is not None else self._allocate(memory)
        stored = self._stored_for(positions, memory[0].device)
        if isinstance(stored, ContiguousRun):
            return self._extend_run(buffers, memory, stored, slot_count(positions))
        if self._memory is None:
            if slot_count(positions):
                self._write_chunk(
                    buffers, memory, stored, as_tensor(positions, memory[0].device).long()
                )
            return memory, positions
        return self._update_rows(
            buffers, memory, stored, as_tensor(positions, memory[0].device).long()
        )

    def open_slot(self, positions: Positions) -> OpenSlot | None:
        """Return the buffers and the slot of the next position, or None."""
        run = self._stored
        if self._memory is None or not isinstance(run, ContiguousRun) or run.first != 0:
            return None
        if not isinstance(positions, Span) or positions != Span(run.stop, 1):
            return None
        if not can_write_in_place(self._memory, ()):
            return None
        self._opened = None
        self._grow(run.stop + 1)
        if run.stop < self._slots.size and run.lost < 0:  # position p is in slot p
            return OpenSlot(self._memory, run.stop, Span(0, run.stop))
        ((slot, _),) = self._slots.runs(run.stop, run.stop + 1)
        old = tuple(x[:, :, slot : slot + 1].clone() for x in self._memory)
        self._opened = OverwrittenSlots(torch.tensor([[slot]], device=old[0].device), old)
        after = _positions_after(self._slots, run.extended(run.stop + 1, self._slots))
        return OpenSlot(self._memory, slot, Span(0, 0), after)

    def close_slot(self, opened: OpenSlot, positions: Positions) -> None:
        """Count the slot as written."""
        run = self._stored
        assert isinstance(run, ContiguousRun)
        self._stored = run.extended(run.stop + 1, self._slots)
        if opened.after is not None:
            self._overwritten = self._opened
        self._opened = None

    def crop(self, length: int) -> None:
        """Remove every token at position `length` or later."""
        check_crop(length)
        stored = self._stored
        least = stored.min_crop_length(length, self._slots, self.window)
        if least > length:
            raise ArgumentError(
                f"crop to {length}, but the tokens that a window of {self.window} needs before "
                f"this position are overwritten; crop to {least} or more, or to "
                f"{self._slots.sinks} or less, or give the cache a larger rewind than {self.rewind}"
            )
        self._stored = stored.crop(length, self._slots)

    def contents(self) -> Contents:
        """Return all slots and their positions."""
        if self._memory is None:
            return {}
        return {**named_parts(self._memory), **self._stored.contents()}

    def fill(self, contents: Mapping[str, Tensor | Span | int]) -> None:
        """Replace all slots by saved contents."""
        memory, size = parts_of(contents) if contents else None, self._slots.size
        for i, x in enumerate(memory or ()):
            size = x.shape[2]
            whole = size == self._full.size
            if not (
                whole or (self._full.sinks < size < self._full.size and _is_short(contents, size))
            ):
                raise ArgumentError(
                    f"memory.{i} has {size} slots, and the settings {self.settings} make "
                    f"{self._full.size}"
                )
        self._memory, self._slots = memory, RingLayout(self._full.sinks, size - self._full.sinks)
        self._overwritten = None
        positions, lost = contents.get("positions"), contents.get("lost")
        self._stored = ContiguousRun(0, 0)
        if isinstance(positions, Tensor) and isinstance(lost, Tensor):
            self._stored = SlotPositions(
                positions.long(), lost.long()
            )  # the dtype that later steps write
        elif isinstance(positions, Span) and isinstance(lost, int):
            self._stored = ContiguousRun(positions.start, positions.stop, lost)

    def mark(self) -> object:
        """Return the contents, and the values that were overwritten last."""
        return self._memory, self._stored, self._overwritten, self._slots

    def restore(self, mark: Any) -> None:
        """Undo the update that came after the snapshot: the overwritten slots are written back."""
        self._memory, self._stored, overwritten, slots = mark
        written = self._overwritten if self._overwritten is not overwritten else None
        if written is not None and slots == self._slots:  # a ring that grew is another tensor
            written.put_back(self._memory or ())
        self._overwritten, self._slots = overwritten, slots

    def __len__(self) -> int:
        return self._stored.count(self._slots)

    def _allocate(self, memory: Parts) -> Parts:
        # zeros, so that kernels need not clean up unwritten slots
        size = self._slots.size
        shapes = [(*m.shape[:2], size, m.shape[3]) for m in memory]
        return new_buffers(memory, shapes, size, zeros=True)

    def _stop_of(self, positions: Positions) -> int:
        """Return a position behind all of these; where reading them costs, the size of the ring."""
        if isinstance(positions, Span):
            return self._full.size if is_compiling() else positions.stop
        if is_compiling() or positions.device.type != "cpu" or not positions.numel():
            return self._full.size
        return int(positions.max()) + 1

    def _grow(self, stop: int) -> None:
        """Give positions below `stop` a slot, as far as the ring has that many."""
        old, full = self._slots.size, self._full.size
        if old >= min(stop, full):
            return
        size = min(max(stop, 2 * old), full)
        self._slots = RingLayout(self._full.sinks, size - self._full.sinks)
        if self._memory is not None:
            self._memory = tuple(pad(x, (0, 0, 0, size - old)) for x in self._memory)
        if isinstance(self._stored, SlotPositions):
            positions = pad(self._stored.positions, (0, size - old), value=EMPTY)
            self._stored = self._stored._replace(positions=positions)

    def _stored_for(
        self, positions: Positions, device: torch.device
    ) -> ContiguousRun | SlotPositions:
        """Return the stored positions in the form of the new ones; raise if these do not follow."""
        stored, compiling = self._stored, is_compiling()
        if isinstance(stored, ContiguousRun):
            # A compiled graph would specialize on numbers that change in every step; there, each
            # slot has its own position.
            if isinstance(positions, Span) and positions.start >= 0 and not compiling:
                if stored.first == stored.stop and stored.lost < 0:
                    return ContiguousRun(positions.start, positions.start)
                if stored.stop == positions.start:
                    return stored
            stored = SlotPositions.of(stored, self._slots, device)
        if not compiling and (device.type == "cpu" or not follow_by_construction(positions)):
            stored.check_follows(as_tensor(positions, device))
        return stored

    def _extend_run(
        self, buffers: Parts, new: Parts, run: ContiguousRun, T: int
    ) -> tuple[Parts, Positions]:
        """Store memory that extends one contiguous run of positions."""
        slots, start, device = self._slots, run.stop, new[0].device
        after = run.extended(start + T, slots)
        if after.stop <= slots.size and after.lost < 0:  # position p is in slot p
            self._memory, self._stored = write_slots(buffers, new, start), after
            visible = Span(after.first, after.stop - after.first)
            return tuple(x[:, :, visible.start : visible.stop] for x in self._memory), visible
        p = torch.arange(start, start + T, device=device)[None]
        if (
            after.stop - start <= self.rewind + 1
        ):  # no key that a query of the step sees is overwritten
            self._write_step(buffers, new, p, after)
            return self._visible(), slots.positions(after, device)
        visible_memory, where = self._join_in_order(buffers, new, run)
        self._write_chunk(buffers, new, SlotPositions.of(run, slots, device), p)
        self._stored = after
        return visible_memory, where

    def _join_in_order(
        self, buffers: Parts, new: Parts, run: ContiguousRun
    ) -> tuple[Parts, Positions]:
        """Return sinks, the last window - 1 tokens and the new ones, so that a `Span` stays one."""
        slots, start = self._slots, run.stop
        sinks = Span(run.first, max(0, min(slots.sinks, start) - run.first))
        oldest = max(run.lost + 1, start - self.window + 1, slots.sinks, run.first)
        recent = Span(oldest, max(0, start - oldest))
        spans = [x for x in (sinks, recent) if x.length]
        runs = [piece for x in spans for piece in slots.runs(x.start, x.stop)]
        if not runs:
            return new, Span(start, new[0].shape[2])
        where: Positions = spans[0]
        for more in (*spans[1:], Span(start, new[0].shape[2])):
            where = concat_positions(where, more)
        parts = zip(buffers, new, strict=True)
        answer = tuple(torch.cat([*(old[:, :, a:b] for a, b in runs), x], 2) for old, x in parts)
        return answer, where if isinstance(where, Span) else where.to(new[0].device)

    def _update_rows(
        self, buffers: Parts, new: Parts, stored: SlotPositions, p: Tensor
    ) -> tuple[Parts, Positions]:
        """Store memory of rows that have different positions."""
        if p.shape[1] <= 1:
            after = stored.step(p, self._slots)
            self._write_step(buffers, new, p, after)
            return self._visible(), after.positions
        parts = zip(buffers, new, strict=True)
        answer = (
            tuple(torch.cat([old, x], 2) for old, x in parts),
            concat_positions(stored.positions, p),
        )
        self._write_chunk(buffers, new, stored, p)
        return answer

    def _write_step(
        self, buffers: Parts, new: Parts, p: Tensor, after: ContiguousRun | SlotPositions
    ) -> None:
        """Write one step into its slots, in place where that is safe."""
        self._memory, self._overwritten = scatter_slots(buffers, new, self._slots.slot(p), p >= 0)
        self._stored = after

    def _write_chunk(self, buffers: Parts, new: Parts, stored: SlotPositions, p: Tensor) -> None:
        """Write the last tokens of a chunk into a copy, since the result refers to the old ring."""
        self._stored, source = stored.chunk(p, self._slots)
        self._memory = fill_slots(buffers, new, source)

    def _visible(self) -> Parts:
        return self._memory or ()


class Ring(RingBase):
    """A cache that holds the last `window + rewind` positions of each row.

    slot = position % (window + rewind)

    It is exact for masks under which a query sees only the last `window` positions up to its own.
    During an update, everything that a query of the chunk may see is visible, however long it is.
    Rows may have any padding. A step of at most rewind + 1 tokens is written into the ring, which
    is returned without a copy and is valid until the next update.

    Args:
        window: how many keys a query may see.
        rewind: how many more tokens are kept, so that rewind + 1 tokens can be cropped.

    Raises:
        ArgumentError: a size is out of range; an update does not fit or follow; a crop needs tokens
            that were overwritten.

    >>> cache = Ring(4)
    >>> (memory,), positions = cache.update((torch.zeros(1, 2, 9, 8),), Span(0, 9))
    >>> memory.shape, positions  # a chunk is visible as a whole
    (torch.Size([1, 2, 9, 8]), Span(start=0, length=9))

    Source: the rolling buffer cache of Jiang et al. 2023 (arXiv 2310.06825), section 2.
    """

    kind: ClassVar[str | None] = "ring"
    evicts: ClassVar[bool] = True

    def __init__(self, window: int, *, rewind: int = 0) -> None:
        if window < 1 or rewind < 0:
            raise ArgumentError(
                f"Ring(window={window}, rewind={rewind}): window must be at least 1 and rewind at "
                "least 0"
            )
        super().__init__(0, window, rewind)

    @classmethod
    def narrowing_mask(cls, max_context: int) -> Mask:
        """Return a window of the last `max_context` tokens."""
        return Window(max_context)


class Streaming(RingBase):
    """A cache that holds the first `sinks` positions of each row, and the last `recent + rewind`
    ones.

    It is exact for `masks.Causal() & (masks.Window(recent) | masks.Sinks(sinks))`. Positions do not
    change. Chunks, padding and steps work as in `Ring`.

    Args:
        sinks: how many first positions are never evicted.
        recent: how many of the last keys a query may see, its own included.
        rewind: how many more tokens are kept, as in `Ring`.

    Raises:
        ArgumentError: a size is out of range, or for a reason that `Ring` lists.

    >>> cache = Streaming(sinks=2, recent=3)
    >>> _ = cache.update((torch.zeros(1, 2, 9, 8),), Span(0, 9))
    >>> (memory,), positions = cache.update((torch.ones(1, 2, 1, 8),), Span(9, 1))
    >>> positions.tolist()
    [[0, 1, 8, 9, 7]]

    Source: Xiao et al. 2024 (arXiv 2309.17453), section 3.2.
    """

    kind: ClassVar[str | None] = "streaming"
    evicts: ClassVar[bool] = True
    min_context: ClassVar[int] = STREAMING_SINKS + 1

    def __init__(self, sinks: int, recent: int, *, rewind: int = 0) -> None:
        if sinks < 0 or recent < 1 or rewind < 0:
            raise ArgumentError(
                f"Streaming(sinks={sinks}, recent={recent}, rewind={rewind}): sinks and rewind "
                "must be at least 0 and recent at least 1"
            )
        super().__init__(sinks, recent, rewind)

    @classmethod
    def narrowing_mask(cls, max_context: int) -> Mask:
        """Return a mask of the first 4 tokens and the last ones, `max_context` in all."""
        return Window(max_context - STREAMING_SINKS) | Sinks(STREAMING_SINKS)

    @property
    def settings(self) -> Mapping[str, object]:
        """Sinks, recent and rewind, as constructor arguments."""
        return {"sinks": self._slots.sinks, "recent": self.window, "rewind": self.rewind}


def for_reach(reach: Reach) -> Cache:
    """Create an empty cache of the old tokens within the reach of a mask.

    Args:
        reach: the reach of the mask, `mask.reach()`.

    Returns:
        A `Growing` without a bound, a `Streaming` cache if there are sinks, else a `Ring`.

    >>> from regard.masks import Causal
    >>> cache = for_reach((Causal() & (Window(8) | Sinks(4))).reach())
    >>> type(cache).__name__, cache.settings
    ('Streaming', {'sinks': 4, 'recent': 8, 'rewind': 0})
    """
    if reach.window is None:
        return Growing()
    # If queries see sinks only, a ring of one slot still records the last position.
    window = max(1, reach.window)
    return Streaming(reach.sinks, window) if reach.sinks else Ring(window)
