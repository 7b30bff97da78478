"""Pages of memory with counts of who refers to them: what paged caches share."""

from __future__ import annotations

from collections.abc import Iterable
from threading import RLock

import torch
from torch import Tensor

from regard.caches.base import Parts
from regard.caches.buffers import in_place
from regard.errors import ArgumentError


class Pool:
    """`pages` pages of `page_size` tokens: the tensors, which pages are free, and how often each is referred to.

    Caches of several threads may have their pages in one pool: `lock` is held while it changes.

    The tensors [pages + 1, page_size, n, d], one per part, are made when the first memory shows what they hold. The last
    page is never given out and holds 0: empty slots point to it.

    Raises:
        ArgumentError: page_size or pages is less than 1; more pages are taken than are free; memory does not fit.

    >>> pool = Pool(16, 8)
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
        self.counts = [0] * pages
        self._free = list(range(pages - 1, -1, -1))  # the last is given out first
        # the thread that holds it may collect a cache, which then gives its pages back
        self.lock = RLock()

    @property
    def free(self) -> int:
        """How many pages nobody refers to."""
        return len(self._free)

    @property
    def used(self) -> int:
        """How many pages somebody refers to."""
        return self.pages - self.free

    @property
    def bytes(self) -> int:
        """Bytes of the pages in use, each counted once."""
        return self.used * self.page_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all parts."""
        return sum(x[0].numel() * x.element_size() for x in self.parts)

    def fit(self, memory: Parts) -> None:
        """Make the tensors for such memory, or see that they are for such memory."""
        wanted = [((self.pages + 1, self.page_size, m.shape[1], m.shape[3]), m.dtype, m.device) for m in memory]  # fmt: skip
        if wanted == [(tuple(x.shape), x.dtype, x.device) for x in self.parts]:
            return
        if self.used:
            held = [(tuple(x.shape[2:]), x.dtype) for x in self.parts]
            given = [((m.shape[1], m.shape[3]), m.dtype) for m in memory]
            raise ArgumentError(
                f"memory {given} does not fit the pool's pages, {held}, of which {self.used} are in use; "
                "start a new cache for another model"
            )
        self.parts = tuple(
            m.new_zeros(shape) for m, (shape, *_) in zip(memory, wanted, strict=True)
        )

    def need(self, pages: int) -> None:
        """See that so many pages are free."""
        if pages > self.free:
            raise ArgumentError(
                f"{pages} pages of {self.page_size} tokens are needed, and {self.free} of the pool's {self.pages} are free; "
                "crop or reset a cache of this pool, or start with more pages"
            )

    def take(self, pages: int) -> list[int]:
        """Pages that nobody else refers to."""
        with self.lock:
            self.need(pages)
            taken = [self._free.pop() for _ in range(pages)]
            for page in taken:
                self.counts[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Refer to pages once more."""
        with self.lock:
            for page in pages:
                self.counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Refer to pages once less; those that nobody refers to are free again."""
        with self.lock:
            for page in pages:
                self.counts[page] -= 1
                if not self.counts[page]:
                    self._free.append(page)

    def copy(self, page: int) -> int:
        """A page of one's own with the contents of a shared one, which is referred to once less."""
        (own,) = self.take(1)
        source = torch.tensor([page])
        self._write(torch.tensor([own]), tuple(x[source.to(x.device)] for x in self.parts))
        self.release([page])
        return own

    def write(self, slots: Tensor, new: Parts) -> None:
        """Tokens [N,n,d] of each part at slots [N]: slot page * page_size + offset."""
        self._write((slots // self.page_size, slots % self.page_size), new)

    def read(self, slots: Tensor) -> Parts:
        """The tokens at slots [B,S], each part [B,n,S,d]."""
        flat = (x.flatten(0, 1).index_select(0, slots.flatten()) for x in self.parts)
        return tuple(x.unflatten(0, tuple(slots.shape)).transpose(1, 2) for x in flat)

    def _write(self, at: Tensor | tuple[Tensor, ...], new: Parts) -> None:
        where = at if isinstance(at, tuple) else (at,)
        safe = in_place(self.parts, new)
        self.parts = tuple(
            (x.index_put_ if safe else x.index_put)(tuple(i.to(x.device) for i in where), y)
            for x, y in zip(self.parts, new, strict=True)
        )
