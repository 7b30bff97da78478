"""The keys and values of a place while it is recorded: each is kept once, however many calls read
it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.inspect.kept import Pool

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Store:
    """Keys of one form, in memory that doubles when it is full. A column's newest key is known,
    older ones stay.

    Args:
        like: a pair (k [B,g,s,D], v [B,g,s,E] or None) of the form that is kept.
        groups: which key/value heads these are.
        G: of so many.
        held: what the keys are, in words.
    """

    def __init__(
        self, like: tuple[Tensor, Tensor | None], groups: tuple[int, ...], G: int, held: str
    ) -> None:
        self.groups, self.G, self.held = groups, G, held
        self._parts = [None if x is None else x[:, :, :0] for x in like]
        self._columns = torch.zeros(0, dtype=torch.int64)
        self._newest = torch.zeros(0, dtype=torch.int64)  # column -> number of its newest key
        self.length = 0

    def numbers(
        self, columns: Tensor, given: tuple[Tensor, Tensor | None], there: Tensor | None = None
    ) -> Tensor:
        """The numbers [s] of keys at these columns; one that is not bit for bit the newest of its
        column is kept anew.

        there: [B,s], which rows of the batch hold the key at all; None: all.
        """
        missing = int(columns.max()) + 1 - len(self._newest) if len(columns) else 0
        if missing > 0:
            self._newest = torch.cat([self._newest, torch.full((missing,), -1)])
        found = self._newest[columns]
        known = (found >= 0).nonzero()[:, 0]
        if len(known):
            same = self._same(found, known, given, there)
            found[known[~same]] = -1
        new = (found < 0).nonzero()[:, 0]
        if len(new):
            found[new] = self._append(columns[new], given, new)
        return found

    def pool(self) -> Pool:
        """What is kept, on the CPU."""
        k, v = (None if x is None else x[:, :, : self.length].cpu() for x in self._parts)
        assert k is not None, "keys are always kept"
        return Pool(k, v, self._columns[: self.length].clone(), self.groups, self.G, self.held)

    def _same(
        self,
        found: Tensor,
        known: Tensor,
        given: tuple[Tensor, Tensor | None],
        there: Tensor | None,
    ) -> Tensor:
        """Which of the known keys are the newest of their columns, bit for bit, in every row that
        holds them.
        """
        same = torch.ones(len(known), dtype=torch.bool)
        old, new = _run(found[known]), _run(known)
        for held, x in zip(self._parts, given, strict=True):
            if held is None or x is None:
                continue
            a, b = _bits(held[:, :, : self.length])[:, :, old], _bits(x)[:, :, new]
            equal = (a == b).all(3).all(1).cpu()  # [B,n]
            equal = equal if there is None else equal | ~there[:, known]
            same &= equal.all(0)
        return same

    def _append(
        self, columns: Tensor, given: tuple[Tensor, Tensor | None], which: Tensor
    ) -> Tensor:
        n, start = len(columns), self.length
        if start + n > len(self._columns):
            size = max(2 * len(self._columns), start + n)
            self._parts = [None if x is None else _grown(x, start, size) for x in self._parts]
            self._columns = torch.cat(
                [self._columns, torch.zeros(size - len(self._columns), dtype=torch.int64)]
            )
        for held, x in zip(self._parts, given, strict=True):
            if held is not None and x is not None:
                held[:, :, start : start + n] = x[:, :, _run(which)]
        numbers = torch.arange(start, start + n)
        self._columns[start : start + n] = columns
        self._newest[columns] = numbers
        self.length += n
        return numbers


def _run(which: Tensor) -> slice | Tensor:
    """Numbers as a slice if they are a run: indexing by it copies nothing."""
    n, start = len(which), int(which[0])
    return slice(start, start + n) if torch.equal(which, torch.arange(start, start + n)) else which


def _bits(x: Tensor) -> Tensor:
    """The bits of numbers as integers: NaN equals itself, and 0 is not -0."""
    return x.view(_BITS[x.element_size()])


def _grown(x: Tensor, used: int, size: int) -> Tensor:
    """A copy with room for `size` keys."""
    made = x.new_zeros((*x.shape[:2], size, x.shape[3]))
    made[:, :, :used] = x[:, :, :used]
    return made
