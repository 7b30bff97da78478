"""Which pages of a pool each row has: the bookkeeping of paged caches."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from regard.caches.pool import Pool


class Table:
    """The pages of each row, in order, and how many slots of them are filled.

    Args:
        pool: where the pages are.
        rows, lengths: pages and slots of each row; they are referred to once more.

    >>> table = Table(Pool(4, 8), [[], []], [0, 0])
    >>> table.grow([5, 2])
    >>> table.rows, table.lengths
    ([[0, 1], [2]], [5, 2])
    """

    def __init__(self, pool: Pool, rows: list[list[int]], lengths: list[int]) -> None:
        self.pool, self.rows = pool, [list(row) for row in rows]
        self.lengths = list(lengths)
        pool.share(page for row in rows for page in row)

    def rows_at(self, rows: list[int]) -> Table:
        """A table of some rows, which refers to their pages once more."""
        return type(self)(self.pool, [self.rows[r] for r in rows], [self.lengths[r] for r in rows])

    def grow(self, new: list[int]) -> None:
        """Give each row room for so many more slots; nothing changes if the pool has too few pages.

        A partly filled last page that others refer to is copied; of several rows that do, the last may keep it.

        Raises:
            ArgumentError: the pool has too few free pages.
        """
        size, counts = self.pool.page_size, self.pool.counts
        last, fresh = [], []
        for row, n, more in zip(self.rows, self.lengths, new, strict=True):
            fresh.append(-(-(n + more) // size) - len(row))
            last.append(row[-1] if more and n % size else None)
        writers = Counter(page for page in last if page is not None)
        copies = sum(min(n, counts[page] - 1) for page, n in writers.items())
        self.pool.need(sum(fresh) + copies)
        for i, row in enumerate(self.rows):
            page = last[i]
            if page is not None and counts[page] > 1:
                row[-1] = self.pool.copy(page)
            row += self.pool.take(fresh[i])
            self.lengths[i] += new[i]

    def shorten(self, lengths: list[int]) -> None:
        """Let go of the pages behind so many slots of each row."""
        for row, n in zip(self.rows, lengths, strict=True):
            full = -(-n // self.pool.page_size)
            self.pool.release(row[full:])
            del row[full:]
        self.lengths = list(lengths)

    def release(self) -> None:
        """Refer to no page any more."""
        self.shorten([0] * len(self.rows))

    def slots(self, at: Tensor) -> Tensor:
        """The pool's slots of the rows' slots at [B,N], page * page_size + offset; behind a row's end, the page of zeros."""
        size, most = self.pool.page_size, max((len(row) for row in self.rows), default=0) + 1
        rows = [[*row, *[self.pool.pages] * (most - len(row))] for row in self.rows]
        pages = torch.tensor(rows, dtype=torch.int64, device=at.device).reshape(-1, most)
        return pages.gather(1, (at // size).clamp(max=most - 1)) * size + at % size
