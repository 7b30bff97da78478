"""The paged cache: memory in fixed-size pages, which rows and forks share by reference counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from threading import RLock
from typing import Any, ClassVar, NamedTuple
from weakref import ReferenceType, ref

import torch
from jaxtyping import Int
from torch import Tensor

from regard.caches.base import (
    Cache,
    Contents,
    LayerSize,
    OpenSlot,
    Parts,
    check_crop,
    check_same_layout,
    check_update,
    named_parts,
    parts_of,
    positions_before,
)
from regard.caches.buffer_writes import can_write_in_place, new_buffers
from regard.caches.lazy_tensor import LazyTensor
from regard.errors import ArgumentError
from regard.process_state import is_compiling
from regard.span import (
    Positions,
    Span,
    as_tensor,
    concat_positions,
    follow_by_construction,
    next_positions,
    slice_positions,
    slot_count,
)
from regard.units import plural

PAGE_SIZE = 16
"""Tokens per page of a paged cache that generation creates."""


class PagesOfRows(NamedTuple):
    """The slots of some rows as pages: `table` `[B, columns]` ends in the page of zeros."""

    pages: Tensor
    table: Tensor


class LazyPagedTensor(LazyTensor):
    """A tensor `[B, n, S, d]` that stays in the pages of a pool until a value is needed.

    The first torch operation gathers the slots, once, and `paged` is None from then on. The pool
    gathers before a slot that it needs is given away, so that its values never change.
    """

    _paged: PagesOfRows
    _positions: Positions

    @classmethod
    def of(cls, paged: PagesOfRows, positions: Positions) -> LazyPagedTensor:
        """Create the tensor from pages, and the position of each slot."""
        _, _, n, d = paged.pages.shape
        shape = paged.table.shape[0], n, slot_count(positions), d
        tensor = Tensor._make_wrapper_subclass(
            cls, shape, dtype=paged.pages.dtype, device=paged.pages.device
        )
        tensor._paged, tensor._positions = paged, positions
        return tensor

    @property
    def paged(self) -> PagesOfRows | None:
        """The pages; None if the values were gathered."""
        return self._paged if self.is_stored else None

    def compute_numbers(self) -> Tensor:
        """Gather the slots of all rows from the pages."""
        return _read(self._paged.pages, _pool_slots(self._paged, self._positions))

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        state = "stored in pages" if self.is_stored else "gathered"
        return f"LazyPagedTensor({tuple(self.shape)}, {self.dtype}, {state})"


def _pool_slots(paged: PagesOfRows, positions: Positions) -> Tensor:
    """Return the pool's slot numbers of the rows `[B, S]`; empty slots are in the page of zeros."""
    device, S, size = paged.table.device, slot_count(positions), paged.pages.shape[1]
    row_slots = torch.arange(S, device=device).expand(paged.table.shape[0], -1)
    slots = _slots_of(paged.table, size, row_slots)
    if isinstance(positions, Tensor):
        slots = slots.masked_fill(positions.to(device) < 0, (paged.pages.shape[0] - 1) * size)
    return slots


def _read(pages: Tensor, slots: Tensor) -> Tensor:
    """Return the tokens of slots `[B, S]` of a pool, `[B, n, S, d]`."""
    tokens = pages.flatten(0, 1).index_select(0, slots.flatten())
    return torch.unflatten(tokens, 0, tuple(slots.shape)).transpose(1, 2)


def _slots_of(table: Tensor, size: int, row_slots: Tensor) -> Tensor:
    """Return the pool's slot numbers for slots `[B, N]` of a table; zeros after a row's end."""
    page = table.long().gather(1, (row_slots // size).clamp(max=table.shape[1] - 1))
    return page * size + row_slots % size


class PagePool:
    """A pool of `pages` pages of `page_size` tokens, with a reference count per page.

    Several threads may share a pool. The tensors `[pages + 1, page_size, n, d]`, one per part, are
    allocated when the first memory is stored; the last page contains zeros.

    Args:
        page_size: tokens per page.
        pages: the number of pages.

    Raises:
        ArgumentError: a size is less than 1, too few pages are free, or memory does not fit.

    >>> pool = PagePool(16, 8)
    >>> pages = pool.take(3)
    >>> pool.free, pool.used
    (5, 3)
    >>> pool.release(pages)
    >>> pool.free
    8
    """

    def __init__(self, page_size: int, pages: int) -> None:
        if min(page_size, pages) < 1:
            raise ArgumentError(
                f"page_size is {page_size} and pages is {pages}; both must be at least 1"
            )
        self.page_size, self.pages = page_size, pages
        self.parts: Parts = ()
        self.counts: list[int] = []  # of the pages that were ever taken, the first of the pool
        self._released: list[int] = []  # those of them that are free; taken from the end
        # reentrant, since garbage collection in the locking thread may release pages
        self.lock = RLock()
        self._lazy: list[ReferenceType[LazyPagedTensor]] = []

    @property
    def free(self) -> int:
        """The number of pages without references."""
        return self.pages - len(self.counts) + len(self._released)

    @property
    def used(self) -> int:
        """The number of pages with references."""
        return self.pages - self.free

    @property
    def bytes(self) -> int:
        """Bytes of the pages in use, each counted once."""
        return self.used * self.page_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, over all parts."""
        return sum(x[0].numel() * x.element_size() for x in self.parts)

    def fit(self, memory: Parts) -> None:
        """Allocate the tensors for this memory, or check that the existing ones fit it.

        Args:
            memory: parts, each `[B, n, T, d]`.
        """
        wanted = [
            ((self.pages + 1, self.page_size, m.shape[1], m.shape[3]), m.dtype, m.device)
            for m in memory
        ]
        if wanted == [(tuple(x.shape), x.dtype, x.device) for x in self.parts]:
            return
        if self.used:
            expected = [(tuple(x.shape[2:]), x.dtype) for x in self.parts]
            actual = [((m.shape[1], m.shape[3]), m.dtype) for m in memory]
            raise ArgumentError(
                f"memory {actual} does not fit the pool's pages, {expected}, of which {self.used} "
                "are in use; start a new cache for another model"
            )
        shapes, slots = [shape for shape, *_ in wanted], self.pages * self.page_size
        self.parts = new_buffers(memory, shapes, slots, zeros=True)

    def need(self, pages: int) -> None:
        """Raise unless enough pages are free.

        Args:
            pages: the number of pages that are needed.
        """
        if pages > self.free:
            raise ArgumentError(
                f"the cache needs {plural(pages, 'page')} of {plural(self.page_size, 'token')}, "
                f"but {self.free} of the pool's {self.pages} are free; crop or reset a cache of "
                "this pool, or start with more pages"
            )

    def take(self, pages: int) -> list[int]:
        """Allocate free pages, each with one reference.

        Args:
            pages: the number of pages.

        Returns:
            The numbers of the pages.
        """
        with self.lock:
            self.need(pages)
            again = min(pages, len(self._released))
            taken = [self._released.pop() for _ in range(again)]
            for page in taken:
                self.counts[page] = 1
            first = len(self.counts)
            self.counts += [1] * (pages - again)
        return [*taken, *range(first, len(self.counts))]

    def share(self, pages: Iterable[int]) -> None:
        """Add one reference to each page.

        Args:
            pages: numbers of pages.
        """
        with self.lock:
            for page in pages:
                self.counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove one reference from each page; pages without references become free.

        Args:
            pages: numbers of pages.
        """
        with self.lock:
            for page in pages:
                self.counts[page] -= 1
                if not self.counts[page]:
                    self._released.append(page)

    def copy(self, page: int) -> int:
        """Copy a shared page to a new one, and remove one reference from the shared page.

        Args:
            page: the number of the shared page.

        Returns:
            The number of the new page.
        """
        (own,) = self.take(1)
        self._write(
            torch.tensor([own], device="cpu"), tuple(x[page : page + 1].clone() for x in self.parts)
        )
        self.release([page])
        return own

    def write(self, slots: Tensor, new: Parts) -> None:
        """Write tokens into slots of the pool.

        Args:
            slots: slot numbers `[N]`, page * page_size + offset.
            new: the tokens, each part `[N, n, d]`.
        """
        self._write((slots // self.page_size, slots % self.page_size), new)

    def read(self, slots: Tensor) -> Parts:
        """Read the tokens of slots of the pool.

        Args:
            slots: slot numbers `[B, S]`.

        Returns:
            The tokens, each part `[B, n, S, d]`.
        """
        return tuple(_read(x, slots) for x in self.parts)

    def lend(self, tensors: Iterable[LazyPagedTensor]) -> None:
        """Remember tensors that read pages of the pool later.

        Args:
            tensors: the tensors; only weak references are kept.
        """
        with self.lock:
            alive = [x for x in self._lazy if x() is not None]
            self._lazy = [*alive, *map(ref, tensors)]

    def gather_lent(self) -> None:
        """Gather the slots of every lent tensor before some of them are overwritten."""
        with self.lock:
            lent, self._lazy = self._lazy, []
            for x in lent:
                if (tensor := x()) is not None:
                    tensor.numbers()

    def _write(self, index: Tensor | tuple[Tensor, ...], new: Parts) -> None:
        indices = index if isinstance(index, tuple) else (index,)
        safe = can_write_in_place(self.parts, new)
        self.parts = tuple(
            (x.index_put_ if safe else x.index_put)(
                tuple(i.to(x.device, non_blocking=True) for i in indices), y
            )
            for x, y in zip(self.parts, new, strict=True)
        )


class PageTable:
    """The pages of each batch row, in order, and the number of filled slots of each row."""

    def __init__(self, pool: PagePool, rows: list[list[int]], lengths: list[int]) -> None:
        self.pool, self.rows = pool, [list(row) for row in rows]
        self.lengths = list(lengths)
        # `rows` as tensors, until they change
        self._numbers: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        pool.share(page for row in rows for page in row)

    def rows_at(self, rows: list[int]) -> PageTable:
        """Return a table of some rows, which adds a reference to each of their pages."""
        return type(self)(self.pool, [self.rows[r] for r in rows], [self.lengths[r] for r in rows])

    def grow(self, new: list[int]) -> None:
        """Allocate pages for more slots in each row, and count the slots as filled."""
        self.reserve(new)
        self.lengths = [n + more for n, more in zip(self.lengths, new, strict=True)]

    def reserve(self, new: list[int]) -> None:
        """Allocate pages for more slots in each row, and copy a shared page that is half full."""
        size, counts = self.pool.page_size, self.pool.counts
        last, new_pages = [], []
        for row, n, more in zip(self.rows, self.lengths, new, strict=True):
            new_pages.append(max(0, -(-(n + more) // size) - len(row)))
            last.append(row[n // size] if more and n // size < len(row) else None)
        # If n rows write to one page, n - 1 copies are enough, unless other tables share the page.
        writers = Counter(page for page in last if page is not None)
        copies = sum(min(n, counts[page] - 1) for page, n in writers.items())
        self.pool.need(sum(new_pages) + copies)
        for i, row in enumerate(self.rows):
            page = last[i]
            if page is not None and counts[page] > 1:
                row[self.lengths[i] // size] = self.pool.copy(page)
                self._numbers = {}
            if new_pages[i]:
                row += self.pool.take(new_pages[i])
                self._numbers = {}

    def shorten(self, lengths: list[int]) -> None:
        """Release the pages after the given number of slots of each row."""
        if any(n < old for n, old in zip(lengths, self.lengths, strict=True)):
            self.pool.gather_lent()
        for row, n in zip(self.rows, lengths, strict=True):
            full = -(-n // self.pool.page_size)
            self.pool.release(row[full:])
            del row[full:]
        self.lengths, self._numbers = list(lengths), {}

    def release(self) -> None:
        """Release all pages of the table."""
        self.shorten([0] * len(self.rows))

    @property
    def numbers(self) -> Tensor:
        """The pages of each row, int64 on the CPU `[B, n]`, followed by the page of zeros."""
        return self.numbers_on(torch.device("cpu"))

    def numbers_on(self, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return `numbers` on a device, made again only when a row gets or loses a page."""
        key = device, dtype
        if key not in self._numbers:
            most = max((len(row) for row in self.rows), default=0) + 1
            rows = [[*row, *[self.pool.pages] * (most - len(row))] for row in self.rows]
            pages = torch.tensor(rows, dtype=dtype, device="cpu").reshape(-1, most)
            self._numbers[key] = pages.to(device, non_blocking=True)
        return self._numbers[key]

    def slots(self, row_slots: Tensor) -> Tensor:
        """Return the pool's slot numbers for slots `[B, N]` of the rows."""
        return _slots_of(self.numbers_on(row_slots.device), self.pool.page_size, row_slots)

    def end_slots(self, length: int, device: torch.device) -> Tensor:
        """Return the `length` slots of each row that follow its filled ones, `[B, length]`."""
        steps, lengths = torch.arange(length, device=device), self.lengths
        if len(set(lengths)) == 1:  # known without a tensor
            return (steps + lengths[0]).expand(len(lengths), -1)
        stops = torch.tensor(lengths, dtype=torch.int64, device="cpu")[:, None]
        return stops.to(device, non_blocking=True) + steps

    def pages(self, device: torch.device) -> tuple[PagesOfRows, ...]:
        """Return the pages of the rows, for each part of the memory."""
        table = self.numbers_on(device, torch.int32)
        return tuple(PagesOfRows(x, table) for x in self.pool.parts)


class Paged(Cache):
    """A cache in pages of a pool, so that each row takes only as many pages as it needs.

    Padding is not stored. Forks and repeated rows share pages, which are copied when written and
    become free without references. `update` returns gathered slots, with position -1 and zeros
    after the end of a shorter row.

    Args:
        page_size: tokens per page.
        pages: the number of pages of the pool, for all rows and forks together.

    Raises:
        ArgumentError: a size is less than 1, an update does not fit, or too few pages are free.

    >>> cache = Paged(page_size=4, pages=8)
    >>> _ = cache.update((torch.zeros(2, 1, 6, 3),), Span(0, 6))
    >>> cache.table, cache.pool.free
    ([[0, 1], [2, 3]], 4)
    >>> fork = cache.fork()
    >>> _ = fork.update((torch.ones(2, 1, 1, 3),), Span(6, 1))
    >>> fork.table, cache.pool.free
    ([[0, 4], [2, 5]], 2)

    Source: Kwon et al. 2023 (arXiv 2309.06180), sections 4.1 to 4.3.
    """

    _table: PageTable
    _positions: Positions | None  # per slot in the order of arrival: [B,S], or shared by all rows

    kind: ClassVar[str | None] = "paged"
    needs_slots: ClassVar[bool] = True
    static_step_refusal: ClassVar[str | None] = (
        "Python holds its page table, and copies it to the device where a page is added"
    )

    def __init__(self, page_size: int, pages: int) -> None:
        self._set(PageTable(PagePool(page_size, pages), [], []), None)
        # the pool's tensors as `open_slot` gave them last, and what it made of them
        self._opened: tuple[Parts, Parts] = (), ()

    @classmethod
    def for_layer(cls, size: LayerSize) -> Paged:
        """Create a cache with pages of 16 tokens, enough for all rows."""
        assert size.slots is not None, "needs_slots is True"
        return cls(PAGE_SIZE, size.rows * -(-size.slots // PAGE_SIZE))

    def repeated(self, rows: int, slots: int | None = None) -> Cache:
        """Return a new cache with a pool of its own, in which the repeated rows share pages."""
        assert slots is not None, "needs_slots is True"
        size = self.pool.page_size
        other = type(self)(size, rows * -(-slots // size))
        other.fill(self.contents())
        if rows > 1:
            other.select(torch.zeros(rows, dtype=torch.int64, device="cpu"))
        return other

    @property
    def pool(self) -> PagePool:
        """The pool that contains the pages."""
        return self._table.pool

    @property
    def table(self) -> list[list[int]]:
        """The page numbers of each row, in order."""
        return [list(row) for row in self._table.rows]

    @property
    def settings(self) -> Mapping[str, int]:
        """The page size and the number of pages, as constructor arguments."""
        return {"page_size": self.pool.page_size, "pages": self.pool.pages}

    @property
    def bytes(self) -> int:
        """Bytes of the pages that this cache refers to, each counted once."""
        return len({page for row in self._table.rows for page in row}) * self.pool.page_bytes

    @property
    def batch(self) -> int | None:
        """The number of batch rows; None while the cache is empty."""
        return None if self._positions is None else len(self._table.rows)

    def next(self, length: int) -> Positions:
        """Return the default positions of the next tokens, after the last of each row."""
        return (
            Span(0, length) if self._positions is None else next_positions(self._positions, length)
        )

    def update(self, memory: Parts, positions: Positions) -> tuple[Parts, Positions]:
        """Store memory, each part `[B, n, T, d]`; return all memory and its positions."""
        check_update(memory, positions)
        if self._positions is not None:
            check_same_layout(self._like(), memory)
        real = None
        all_tokens = isinstance(positions, Span) and positions.start >= 0
        if not (all_tokens or follow_by_construction(positions)):
            real = (as_tensor(positions) >= 0).expand(memory[0].shape[0], -1)
        self._place(memory, positions, real)
        return self._read() if self.pool.parts[0].is_cpu else self.lazy_memory()

    def lazy_memory(self) -> tuple[Parts, Positions]:
        """Return all memory without gathering it.

        Kernels may read its pages; any other operation gathers them. On other devices than the CPU
        `update` returns the same.

        Returns:
            The parts, each `[B, n, S, d]`, and their positions, as `update` returns them.

        Raises:
            ArgumentError: the cache is empty.
        """
        if self._positions is None:
            raise ArgumentError("the paged cache is empty; call update() before lazy_memory()")
        if is_compiling() or any(x.requires_grad for x in self.pool.parts):
            return self._read()
        parts = self._table.pages(self.pool.parts[0].device)
        lazy = tuple(LazyPagedTensor.of(x, self._positions) for x in parts)
        self.pool.lend(lazy)
        return lazy, self._positions

    def open_slot(self, positions: Positions) -> OpenSlot | None:
        """Return the pages of the pool, with room for one more token per row; None if there is
        none.
        """
        table, stored, pool = self._table, self._positions, self.pool
        if stored is None or slot_count(positions) != 1 or not table.rows:
            return None
        if isinstance(positions, Tensor) and bool((positions < 0).any()):
            return None
        B, lengths = len(table.rows), table.lengths
        with pool.lock:
            if not can_write_in_place(pool.parts, ()):
                return None
            try:
                table.reserve([1] * B)
            except ArgumentError:
                return None
            parts, buffers = self._opened
            if parts is not pool.parts or buffers[0].shape[0] != B:
                buffers = tuple(
                    x.flatten(0, 1).transpose(0, 1).expand(B, -1, -1, -1) for x in pool.parts
                )
                self._opened = pool.parts, buffers
        opened = OpenSlot(buffers, len(self), stored, pages=table.numbers, state=pool.parts)
        opened = opened._replace(page_size=pool.page_size)
        if lengths == [len(self)] * B:
            return opened
        slots = torch.tensor(lengths, device="cpu")
        real = torch.ones(B, 1, dtype=torch.bool, device="cpu")
        after = self._joined(positions, real, slots[:, None], max(lengths) + 1)
        return opened._replace(slots=slots, after=as_tensor(after))

    def close_slot(self, opened: OpenSlot, positions: Positions) -> None:
        """Count the slot of each row as written."""
        table = self._table
        with self.pool.lock:
            if self.pool.parts is not opened.state:  # another thread has replaced the tensors
                slots = table.slots(torch.tensor(table.lengths, device="cpu")[:, None])[:, 0]
                memory = tuple(x.flatten(0, 1)[slots] for x in opened.state)
                self.pool.write(slots, memory)
        table.lengths = [n + 1 for n in table.lengths]
        if isinstance(positions, Tensor):
            positions = positions.expand(len(table.rows), -1)
        self._positions = positions

    def crop(self, length: int) -> None:
        """Remove every token at position `length` or later."""
        check_crop(length)
        if self._positions is None:
            return
        positions = positions_before(self._positions, length)
        if isinstance(positions, Span):
            self._table.shorten([positions.length] * len(self._table.rows))
        else:
            slots = torch.arange(1, positions.shape[1] + 1, device=positions.device)
            last = torch.nn.functional.pad(slots * (positions >= 0), (1, 0)).amax(1)
            self._table.shorten(last.tolist())
        self._positions = slice_positions(positions, slice(0, max(self._table.lengths, default=0)))

    def contents(self) -> Contents:
        """Return the parts and their positions, gathered from the pages."""
        if self._positions is None:
            return {}
        memory, positions = self._read()
        return {**named_parts(memory), "positions": positions}

    def fill(self, contents: Mapping[str, Tensor | Span | int]) -> None:
        """Store these parts and positions in new pages."""
        self._table.release()
        self._set(PageTable(self.pool, [], []), None)
        positions = contents.get("positions")
        if positions is None or isinstance(positions, int):
            return
        memory = parts_of(contents)
        # slots keep their indices; only those after the last token of a row are dropped
        used = (as_tensor(positions) >= 0).long().expand(memory[0].shape[0], -1)
        self._place(memory, positions, used.flip(1).cummax(1).values.flip(1) > 0)

    def fork(self) -> Paged:
        """Return another cache with the same contents, which refers to the same pages."""
        other = type(self)(**self.settings)
        other._set(self._table.rows_at(list(range(len(self._table.rows)))), self._positions)
        return other

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Keep these batch rows, in this order; no memory is copied."""
        self._check_rows(rows)
        if self._positions is None:
            return
        old, positions = self._table, self._positions
        table = old.rows_at(rows.tolist())
        if isinstance(positions, Tensor):
            positions = positions.index_select(0, rows.to(positions.device))
            positions = positions[:, : max(table.lengths, default=0)]
        self._set(table, positions)
        old.release()

    def mark(self) -> object:
        """Return the positions and the length of each row; an update writes only after it."""
        return self._positions, list(self._table.lengths)

    def restore(self, mark: Any) -> None:
        """Undo the update that came after the snapshot."""
        positions, lengths = mark
        self._table.shorten(lengths or [0] * len(self._table.rows))
        self._set(self._table if lengths else PageTable(self.pool, [], []), positions)

    def __len__(self) -> int:
        return 0 if self._positions is None else slot_count(self._positions)

    def __deepcopy__(self, memo: dict[int, object]) -> Paged:
        """Return a copy with a pool of its own; pages of other forks are not copied."""
        other = type(self)(**self.settings)
        other.fill(self.contents())
        return other

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the contents, without the pages of other forks; the copy has a pool of its own."""
        return _refilled, (type(self), self.settings, self.contents())

    def __del__(self) -> None:
        if hasattr(self, "_table"):  # false if the constructor raised
            self._table.release()

    def _set(self, table: PageTable, positions: Positions | None) -> None:
        self._table, self._positions = table, positions

    def _place(self, memory: Parts, positions: Positions, real: Tensor | None) -> None:
        """Store new tokens after the last slot of each row; nothing changes if there is no room."""
        (B, _, T, _), device = memory[0].shape, memory[0].device
        table = self._table if self._table.rows else PageTable(self.pool, [[]] * B, [0] * B)
        row_slots = table.end_slots(T, device)  # the row slot of each token
        counts = [T] * B
        if real is not None:
            counts, real = real.sum(1).tolist(), real.to(device)
            row_slots = (table.end_slots(1, device) + real.cumsum(1) - 1).clamp(min=0)
        with self.pool.lock:  # no other thread takes pages in between
            self.pool.fit(memory)
            table.grow(counts)
            new, slots = tuple(m.transpose(1, 2) for m in memory), table.slots(row_slots)
            if real is None:  # a bool index would wait for the device
                self.pool.write(slots.flatten(), tuple(x.flatten(0, 1) for x in new))
            else:
                self.pool.write(slots[real], tuple(x[real] for x in new))
        self._set(table, self._joined(positions, real, row_slots, max(table.lengths, default=0)))

    def _joined(
        self, positions: Positions, real: Tensor | None, row_slots: Tensor, slots: int
    ) -> Positions:
        """Return the old positions and the new ones."""
        stored, (B, _), device = self._positions, row_slots.shape, row_slots.device
        if isinstance(positions, Span) and positions.start >= 0 and not isinstance(stored, Tensor):
            both = positions if stored is None else concat_positions(stored, positions)
            return both if isinstance(both, Span) else both.expand(B, -1)
        slots = max(slots, len(self))  # a batch of size 0 may have slots
        joined = torch.full((B, slots), -1, device=device)
        if stored is not None:
            old = as_tensor(stored, device)
            joined[:, : old.shape[1]] = old
        new = as_tensor(positions, device).expand(B, -1).long()
        if real is None:
            return joined.scatter_(1, row_slots, new)
        row, _ = real.nonzero(as_tuple=True)
        joined[row, row_slots[real]] = new[real]
        return joined

    def _read(self) -> tuple[Parts, Positions]:
        """Return all slots, gathered from the pages, and their positions."""
        assert self._positions is not None
        parts = self._table.pages(self.pool.parts[0].device)
        return self.pool.read(_pool_slots(parts[0], self._positions)), self._positions

    def _like(self) -> Parts:
        """Return empty memory with the layout of the contents."""
        B = len(self._table.rows)
        return tuple(x.new_empty((B, x.shape[2], 0, x.shape[3])) for x in self.pool.parts)


def _refilled(kind: type[Paged], settings: dict[str, Any], contents: Contents) -> Paged:
    """Return a cache with these contents, for `pickle`."""
    cache = kind(**settings)
    cache.fill(contents)
    return cache
