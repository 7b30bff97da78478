"""Caches that store all tokens in contiguous memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from regard.caches.base import (
    Cache,
    Contents,
    ForwardingCache,
    LayerSize,
    OpenSlot,
    Parts,
    StaticSize,
    bytes_of,
    check_crop,
    check_same_layout,
    check_update,
    named_parts,
    parts_of,
    positions_before,
)
from regard.caches.buffer_writes import can_write_in_place, new_buffers, write_slots
from regard.caches.ring_layout import RingLayout
from regard.caches.static import StaticSlots
from regard.errors import ArgumentError
from regard.huge_pages import empty_like
from regard.span import Positions, Span, as_tensor, concat_positions, slice_positions, slot_count
from regard.units import plural


class StoredParts:
    """The memory of a cache that stores its parts and their positions as they are given."""

    def __init__(self) -> None:
        self._memory: Parts | None = None
        self._positions: Positions | None = None

    def contents(self) -> Contents:
        """Return the parts and their positions."""
        if self._memory is None or self._positions is None:
            return {}
        return {**named_parts(self._memory), "positions": self._positions}

    def fill(self, contents: Mapping[str, Tensor | Span | int]) -> None:
        """Replace the parts and their positions."""
        positions = contents.get("positions")
        self._memory = parts_of(contents) if contents else None
        self._positions = None if isinstance(positions, int) else positions

    def __len__(self) -> int:
        return 0 if self._positions is None else slot_count(self._positions)


MIN_ROOM, ROOM_SHARE = 64, 8
"""For how many more slots `Growing` allocates: at least MIN_ROOM, and slots / ROOM_SHARE."""


class Growing(StoredParts, Cache):
    """A cache that keeps all tokens; every update appends to it by concatenation.

    Tensors that `update` returned never change.

    Raises:
        ArgumentError: an update does not fit the contents; the cache stays unchanged.

    >>> cache = Growing()
    >>> _ = cache.update((torch.zeros(1, 2, 3, 4),), Span(0, 3))
    >>> (memory,), positions = cache.update((torch.ones(1, 2, 1, 4),), Span(3, 1))
    >>> memory.shape, positions, cache.bytes
    (torch.Size([1, 2, 4, 4]), Span(start=0, length=4), 128)
    >>> cache.crop(2)
    >>> len(cache), cache.next(1)
    (2, Span(start=2, length=1))
    """

    kind: ClassVar[str | None] = "growing"
    static_step_refusal: ClassVar[str | None] = None

    def __init__(self) -> None:
        super().__init__()
        # Only `open_slot` allocates buffers, with room for more slots than there are. Slots behind
        # the present ones are in no tensor that was returned, so they may be written. Whatever
        # else changes the contents drops the buffers.
        self._buffers: Parts | None = None
        self._shown = 0  # the slots of the buffers that may be in a tensor that was returned

    def contents(self) -> Contents:
        """Return the parts and their positions."""
        self._read_buffers()
        return super().contents()

    def fill(self, contents: Mapping[str, Tensor | Span | int]) -> None:
        """Replace the parts and their positions."""
        self._buffers = None
        super().fill(contents)

    def _to_static(self, size: StaticSize) -> Cache:
        return _static_slots(self.contents(), size)

    @property
    def bytes(self) -> int:
        """Bytes of the memory that is held, with the room for later tokens."""
        return bytes_of(self._buffers or self._memory or ())

    def open_slot(self, positions: Positions) -> OpenSlot | None:
        """Return buffers with room for the new tokens; None while the cache is empty."""
        n, T = len(self), slot_count(positions)
        if self._memory is None or self._positions is None:
            return None
        if self._buffers is None or n + T > self._buffers[0].shape[2]:
            self._read_buffers()
            if any(x.requires_grad for x in self._memory):
                return None
            capacity = n + max(MIN_ROOM, T, n // ROOM_SHARE)
            buffers = tuple(
                empty_like(x, (*x.shape[:2], capacity, x.shape[3])) for x in self._memory
            )
            self._buffers, self._shown = write_slots(buffers, self._memory, 0), 0
        return OpenSlot(self._buffers, n, self._positions)

    def close_slot(self, opened: OpenSlot, positions: Positions) -> None:
        """Count the slots as written."""
        self._buffers, self._positions = opened.buffers, positions

    def _read_buffers(self) -> None:
        """Make the memory views of the buffers, if there are any."""
        if self._buffers is not None:
            self._shown = n = len(self)
            self._memory = tuple(x[:, :, :n] for x in self._buffers)

    def update(self, memory: Parts, positions: Positions) -> tuple[Parts, Positions]:
        """Append memory, each part `[B, n, T, d]`, and return all memory and all positions."""
        check_update(memory, positions)
        self._read_buffers()
        if self._memory is not None and self._positions is not None:
            check_same_layout(self._memory, memory)
            joined = zip(self._memory, memory, strict=True)
            memory = tuple(torch.cat([old, new], dim=2) for old, new in joined)
            positions = concat_positions(self._positions, positions)
        self._memory, self._positions, self._buffers = memory, positions, None
        return memory, positions

    def crop(self, length: int) -> None:
        """Remove every token at position `length` or later."""
        check_crop(length)
        if self._memory is None or self._positions is None:
            return
        positions = positions_before(self._positions, length)
        n = written_length(positions)
        if self._buffers is None or n < self._shown:
            self._read_buffers()
            self._buffers = None
            self._memory = tuple(m[:, :, :n] for m in self._memory)
        self._positions = slice_positions(positions, slice(0, n))


def _static_slots(contents: Contents, size: StaticSize) -> Cache:
    """Return the static form of a cache that keeps every token: token p is in slot p % slots."""
    positions = contents["positions"]
    assert not isinstance(positions, int)
    static = StaticSlots(RingLayout(0, size.slots), size, evicts=False)
    static.fill({**contents, "positions": as_tensor(positions, size.device)})
    return static


def written_length(positions: Positions) -> int:
    """Return the number of slots up to the last one that holds a token in any row."""
    if isinstance(positions, Span):
        return positions.length
    used = (positions >= 0).any(0).nonzero()
    return int(used[-1]) + 1 if len(used) else 0


class Fixed(Cache):
    """A cache that keeps all tokens, up to `capacity` slots, in buffers `[B, n, capacity, d]`.

    An update writes its T slots in place and returns views of all written slots, valid until a crop
    lets later tokens overwrite them. If gradients are recorded, it writes into a copy: use
    `Growing` for training.

    Args:
        capacity: the largest number of slots, those at position -1 included.

    Raises:
        ArgumentError: capacity is less than 1, or an update does not fit or exceeds it.

    >>> cache = Fixed(8)
    >>> _ = cache.update((torch.zeros(1, 2, 3, 4),), Span(0, 3))
    >>> (memory,), positions = cache.update((torch.ones(1, 2, 1, 4),), Span(3, 1))
    >>> memory.shape, positions, len(cache), cache.bytes
    (torch.Size([1, 2, 4, 4]), Span(start=0, length=4), 4, 256)
    """

    kind: ClassVar[str | None] = "fixed"
    static_step_refusal: ClassVar[str | None] = None
    needs_slots: ClassVar[bool] = True
    # the next update writes only behind these
    fields: ClassVar[tuple[str, ...]] = ("_buffers", "_table", "_positions")

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ArgumentError(f"Fixed capacity is {capacity}; it must be at least 1")
        self.capacity = capacity
        self._buffers: Parts | None = None
        self._positions: Positions = Span(0, 0)  # if a tensor, a view of the table
        self._table: Tensor | None = None  # [B or 1, capacity], if positions are not a Span

    @classmethod
    def for_layer(cls, size: LayerSize) -> Fixed:
        """Create a cache with `size.slots` slots."""
        assert size.slots is not None, "needs_slots is True"
        return cls(size.slots)

    @property
    def bytes(self) -> int:
        """Bytes of the buffers, written or not."""
        return bytes_of(self._buffers or ())

    def update(self, memory: Parts, positions: Positions) -> tuple[Parts, Positions]:
        """Write memory, each part `[B, n, T, d]`; return views of all slots and all positions."""
        check_update(memory, positions)
        if self._buffers is not None:
            check_same_layout(self._buffers, memory)
        length, added = len(self), slot_count(positions)
        if length + added > self.capacity:
            raise ArgumentError(
                f"Fixed holds {length} of {self.capacity} slots and {added} more do not fit; crop "
                "it, or start with a larger capacity, a Growing cache, or a Ring for a windowed "
                "mask"
            )
        if self._buffers is None:
            self._buffers = self._allocate(memory)
        self._buffers = write_slots(self._buffers, memory, length)
        self._extend(positions)
        return self._visible(), self._positions

    def crop(self, length: int) -> None:
        """Remove every token at position `length` or later."""
        check_crop(length)
        positions = positions_before(self._positions, length)
        n = written_length(positions)
        if not isinstance(positions, Span) and self._table is not None:
            # a copy, because earlier results are views of the old table
            self._table = self._table.clone()
            self._table[:, : positions.shape[1]] = positions
            positions = self._table
        self._positions = slice_positions(positions, slice(0, n))

    def open_slot(self, positions: Positions) -> OpenSlot | None:
        """Return the buffers and the next slot; None without buffers or free slots."""
        n = len(self)
        if self._buffers is None or n + slot_count(positions) > self.capacity:
            return None
        if not can_write_in_place(self._buffers, ()):
            return None
        return OpenSlot(self._buffers, n, self._positions)

    def close_slot(self, opened: OpenSlot, positions: Positions) -> None:
        """Count the slots as written."""
        self._positions = positions
        self._table = None  # `_extend` makes another one if it needs one

    def contents(self) -> Contents:
        """Return views of the written slots, and their positions."""
        if self._buffers is None:
            return {}
        return {**named_parts(self._visible()), "positions": self._positions}

    def fill(self, contents: Mapping[str, Tensor | Span | int]) -> None:
        """Copy these parts and positions into new buffers."""
        self._buffers, self._table, self._positions = None, None, Span(0, 0)
        positions = contents.get("positions")
        if positions is None or isinstance(positions, int):
            return
        memory = parts_of(contents)
        self._buffers = write_slots(self._allocate(memory), memory, 0)
        self._extend(positions)

    def _to_static(self, size: StaticSize) -> Cache:
        return _static_slots(self.contents(), size)

    def __len__(self) -> int:
        return slot_count(self._positions)

    def _allocate(self, memory: Parts) -> Parts:
        shapes = [(*m.shape[:2], self.capacity, m.shape[3]) for m in memory]
        return new_buffers(memory, shapes, self.capacity)

    def _visible(self) -> Parts:
        n = len(self)
        return tuple(x[:, :, :n] for x in self._buffers or ())

    def _extend(self, new: Positions) -> None:
        """Append positions, which stay a `Span` while they are contiguous."""
        stored, T = self._positions, slot_count(new)
        n = slot_count(stored)
        if (
            isinstance(new, Span)
            and isinstance(stored, Span)
            and (not n or stored.stop == new.start)
        ):
            self._positions = Span(stored.start, n + T) if n else new
            return
        device = next((p.device for p in (stored, new) if isinstance(p, Tensor)), None)
        old, added = as_tensor(stored, device), as_tensor(new, device)
        rows = added.shape[0] if old.shape[0] == 1 else old.shape[0]
        if self._table is None or self._table.shape[0] != rows:
            self._table = torch.full((rows, self.capacity), -1, dtype=torch.int64, device=device)
            self._table[:, :n] = old
        self._table[:, n : n + T] = added
        self._positions = self._table[:, : n + T]


class Latent(ForwardingCache):
    """A cache of rank + rotary values per token: a latent and the rotary key that all heads share.

    Both are stored as one part `[B, 1, T, rank + rotary]`. Any other memory is refused, so that a
    projection which passes expanded keys and values fails.

    Args:
        rank: the size of the latent.
        rotary: the size of the shared rotary key that follows it; 0 means none.
        capacity: the largest number of slots, allocated at the first update; None means no bound.

    Raises:
        ArgumentError: a size is out of range; an update does not fit or exceeds the capacity.

    >>> cache = Latent(512, 64)
    >>> _ = cache.update((torch.zeros(1, 1, 3, 576, dtype=torch.bfloat16),), Span(0, 3))
    >>> cache.elements, cache.bytes
    (576, 3456)

    Source: DeepSeek-AI 2024 (arXiv 2405.04434), section 2.1.2 and table 1.
    """

    static_step_refusal: ClassVar[str | None] = None

    def __init__(self, rank: int, rotary: int, *, capacity: int | None = None) -> None:
        if rank < 1 or rotary < 0:
            raise ArgumentError(
                f"Latent(rank={rank}, rotary={rotary}): rank must be at least 1 and rotary at "
                "least 0"
            )
        self.rank, self.rotary, self.capacity = rank, rotary, capacity
        self._store = Growing() if capacity is None else Fixed(capacity)

    @property
    def elements(self) -> int:
        """The number of values per token: rank + rotary."""
        return self.rank + self.rotary

    @property
    def bytes(self) -> int:
        """Bytes of the memory that is held."""
        return self._store.bytes

    def update(self, memory: Parts, positions: Positions) -> tuple[Parts, Positions]:
        """Append one part `[B, 1, T, rank + rotary]`, and return all memory and all positions."""
        if not self._store.contents():  # later updates are compared with the first one
            self._check(memory)
        return super().update(memory, positions)

    def fill(self, contents: Mapping[str, Tensor | Span | int]) -> None:
        """Replace the part and its positions."""
        if contents:
            self._check(parts_of(contents))
        super().fill(contents)

    def _to_static(self, size: StaticSize) -> Cache:
        return _static_slots(self.contents(), size)

    def _check(self, memory: Parts) -> None:
        shapes = [tuple(m.shape) for m in memory]
        if len(memory) != 1 or memory[0].ndim != 4 or shapes[0][1::2] != (1, self.elements):
            raise ArgumentError(
                f"memory has parts {shapes}; a Latent cache takes one part [batch, 1, length, "
                f"{self.elements}], {self.rank} latent and {self.rotary} rotary values: store "
                "the latent, and expand it to keys and values after reading"
            )


class Cross(StoredParts, Cache):
    """A cache for cross-attention: the memory of the source is stored once and then read.

    The positions are those of the source, -1 at padding. For beam search, `select` repeats rows and
    `reorder` permutes them.

        if cache.written:
            memory, positions = cache.read()
        else:
            memory, positions = cache.store(project(source, source_positions), source_positions)

    `update` does the same as `store`, so that appending fails at the second step. `crop` raises
    unless it removes everything or nothing; `reset` empties the cache.

    Raises:
        ArgumentError: the cache is written twice, read before, or cropped; parts do not fit.

    >>> cache = Cross()
    >>> k = v = torch.zeros(1, 2, 5, 4)
    >>> _ = cache.store((k, v), Span(0, 5))
    >>> (keys, values), positions = cache.read()
    >>> keys is k, positions
    (True, Span(start=0, length=5))
    """

    @property
    def written(self) -> bool:
        """Whether the cache holds a source."""
        return self._memory is not None

    def store(self, memory: Parts, positions: Positions) -> tuple[Parts, Positions]:
        """Store the memory of a source.

        Args:
            memory: parts, each `[B, n, S, d]`.
            positions: the positions of the source tokens.

        Returns:
            The memory and the positions.
        """
        check_update(memory, positions)
        if self._positions is not None:
            raise ArgumentError(
                f"a Cross cache is written once, and holds {len(self)} slots of a source already; "
                "read() them, or reset() it for another source"
            )
        self._memory, self._positions = tuple(memory), positions
        return self._memory, positions

    def read(self) -> tuple[Parts, Positions]:
        """Return the memory of the source as it was stored.

        Returns:
            The parts, each `[B, n, S, d]`, and their positions.
        """
        if self._memory is None or self._positions is None:
            raise ArgumentError(
                "a Cross cache holds no source yet; call store(memory, positions) before read()"
            )
        return self._memory, self._positions

    def update(self, memory: Parts, positions: Positions) -> tuple[Parts, Positions]:
        """Store the memory of a source, like `store`."""
        return self.store(memory, positions)

    def crop(self, length: int) -> None:
        """Remove the source at length 0; otherwise check that no token is at `length` or later."""
        check_crop(length)
        if self._positions is None or length == 0:
            return self.reset()
        positions = self._positions
        if isinstance(positions, Span):
            stop = positions.stop if positions.length else 0
        else:
            stop = int(positions.max()) + 1 if positions.numel() else 0
        if length < stop:
            raise ArgumentError(
                f"crop to {length}, but a Cross cache holds a source of "
                f"{plural(stop, 'position')}, which cannot be shortened; crop the caches of the "
                "target, or reset() this one"
            )
        return None
