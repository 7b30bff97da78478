"""Masks that may differ between the rows of a batch: prefix, documents, padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.errors import ArgumentError
from regard.masks.base import Mask
from regard.masks.intervals import Intervals
from regard.masks.values import Lengths, check_rows, locate, row, some, table, whole, wholes


@dataclass(frozen=True, eq=False)
class Prefix(Mask):
    """Everybody sees the first `length` positions: k < length. `causal | prefix(n)` is a prefix language model.

    length: an int, or one per batch row.

    Raises:
        ArgumentError, ArgumentTypeError: a length below 0 or not an int; at a call, another number of batch rows.

    >>> from regard.masks import Causal
    >>> from regard.span import Span
    >>> (Causal() | Prefix(2)).visible(Span(0, 4), Span(0, 4)).tolist()
    [[[2, 2, 3, 4]]]
    """

    length: int | Lengths

    def __post_init__(self) -> None:
        if isinstance(self.length, int):
            whole("Prefix length", self.length, 0)
        else:
            object.__setattr__(
                self, "length", some(wholes("Prefix length", self.length, 0), "Prefix")
            )

    @property
    def _lengths(self) -> tuple[int, ...]:
        length: Any = self.length
        return (length,) if isinstance(length, int) else length

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """K < length."""
        return k < (self.length if isinstance(self.length, int) else row(self._lengths, k))

    def _intervals(self, q: Tensor) -> Intervals:
        stops = row(self._lengths, q)
        return Intervals(torch.zeros_like(q), stops)

    def require(self, B: int, H: int, T: int, S: int) -> None:
        """One length, or one per batch row."""
        check_rows("Prefix", len(self._lengths), B)


@dataclass(frozen=True, eq=False)
class Document(Mask):
    """A query sees the keys of its own document; documents are packed one behind the other.

    bounds: where each document starts, and the end of the last: document i is bounds[i] <= position < bounds[i + 1].
        One tuple, or one per batch row. Outside the bounds nothing sees and nothing is seen.

    Raises:
        ArgumentError, ArgumentTypeError: fewer than two bounds, or bounds that fall; at a call, another number of rows.

    >>> from regard.masks import Causal
    >>> from regard.span import Span
    >>> (Causal() & Document((0, 3, 5))).visible(Span(0, 5), Span(0, 5)).tolist()
    [[[1, 2, 3, 1, 2]]]
    """

    bounds: Lengths | Sequence[Lengths]

    def __post_init__(self) -> None:
        bounds: Any = self.bounds
        bounds = bounds.tolist() if isinstance(bounds, Tensor) else bounds
        many = (
            isinstance(bounds, (tuple, list)) and len(bounds) > 0 and not isinstance(bounds[0], int)
        )
        rows = tuple(_rising(x) for x in (bounds if many else (bounds,)))
        object.__setattr__(self, "bounds", rows if many else rows[0])

    @classmethod
    def from_lengths(cls, lengths: Lengths | Sequence[Lengths]) -> Document:
        """Documents of these lengths, the first at position 0; or one list of lengths per batch row.

        >>> Document.from_lengths([3, 2])
        Document(bounds=(0, 3, 5))
        """
        found: Any = lengths.tolist() if isinstance(lengths, Tensor) else lengths
        many = len(found) > 0 and not isinstance(found[0], int)
        rows = []
        for x in found if many else (found,):
            ends = [0]
            for n in wholes("Document lengths", x, 0):
                ends.append(ends[-1] + n)
            rows.append(tuple(ends))
        return cls(tuple(rows) if many else rows[0])

    @property
    def _rows(self) -> tuple[tuple[int, ...], ...]:
        bounds: Any = self.bounds
        return bounds if isinstance(bounds[0], tuple) else (bounds,)

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """Q and k lie in the same document."""
        bounds = table(self._rows, None, q)
        doc, inside = self._find(bounds, q)
        other, _ = self._find(bounds, k)
        return (doc == other) & inside

    def _find(self, bounds: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The document of each position, counted from 1, and whether there is one."""
        found = locate(bounds, x)
        return found, (found > 0) & (found < bounds.shape[1])

    def _intervals(self, q: Tensor) -> Intervals:
        bounds = table(self._rows, None, q)
        doc, inside = self._find(bounds, q)
        doc = doc.clamp(1, bounds.shape[1] - 1)
        B, t = doc.shape[0], doc.shape[2]
        flat, bounds = doc.reshape(B, t), bounds.expand(B, -1)
        starts, stops = (bounds.gather(1, flat - i).reshape(doc.shape) for i in (1, 0))
        return Intervals(starts, torch.where(inside, stops, starts))

    def require(self, B: int, H: int, T: int, S: int) -> None:
        """Bounds for all rows, or for each batch row."""
        check_rows("Document", len(self._rows), B)


def _rising(bounds: object) -> tuple[int, ...]:
    found = wholes("Document bounds", bounds, 0)
    if len(found) < 2 or list(found) != sorted(found):
        raise ArgumentError(
            f"Document bounds is {found}; it must be the rising starts of the documents and the end: "
            "(0, 3, 5) is documents of 3 and 2; Document.from_lengths([3, 2]) makes it"
        )
    return found
