"""Masks that may differ between the rows of a batch: prefixes, documents and padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks.base import Lengths, Mask, Refusal, check_batch_rows, check_int, check_ints, to_4d
from regard.masks.tiling import UNBOUNDED, Intervals

Rows = TypeVar("Rows", bound=tuple[Any, ...])


def check_not_empty(rows: Rows, name: str) -> Rows:
    """Rows, at least one."""
    if not rows:
        raise ArgumentError(f"{name} of no batch rows; give at least one")
    return rows


def per_row_tensor(values: tuple[int, ...], like: Tensor) -> Tensor:
    """One number per batch row, [B,1,1,1]."""
    return torch.tensor(values, dtype=torch.int64, device=like.device)[:, None, None, None]


def padded_table(rows: tuple[tuple[int, ...], ...], fill: int | None, like: Tensor) -> Tensor:
    """Lists of different lengths as one tensor [B, n], filled up with `fill` (None: each one's last
    number).
    """
    n = max(map(len, rows))
    filled = [[*x, *[x[-1] if fill is None else fill] * (n - len(x))] for x in rows]
    return torch.tensor(filled, dtype=torch.int64, device=like.device).reshape(len(rows), n)


def count_bounds_up_to(bounds: Tensor, x: Tensor) -> Tensor:
    """How many of the sorted bounds [B, n] are <= x, for x of up to 4 dimensions with the batch
    first of 4.
    """
    if x.numel() == 1:  # also what a mask_mod sees, under vmap, which searchsorted does not like
        return (bounds[:, None, None, None] <= x[..., None]).sum(-1)
    if bounds.shape[0] == 1:
        return torch.searchsorted(bounds[0], x.contiguous(), right=True)
    x = to_4d(x)
    x = x.expand(bounds.shape[0], *x.shape[1:])
    found = torch.searchsorted(bounds, x.flatten(1).contiguous(), right=True)
    return found.reshape(x.shape)


@dataclass(frozen=True, eq=False)
class Prefix(Mask):
    """Everybody sees the first `length` positions: k < length. `causal | prefix(n)` is a prefix
    language model.

    length: an int, or one per batch row.

    Raises:
        ArgumentError, ArgumentTypeError: a length below 0 or not an int; at a call, another number
            of batch rows.

    >>> from regard.masks import Causal
    >>> from regard.span import Span
    >>> (Causal() | Prefix(2)).visible(Span(0, 4), Span(0, 4)).tolist()
    [[[2, 2, 3, 4]]]
    """

    length: int | Lengths

    def __post_init__(self) -> None:
        if isinstance(self.length, int):
            check_int("Prefix length", self.length, 0)
        else:
            object.__setattr__(
                self,
                "length",
                check_not_empty(check_ints("Prefix length", self.length, 0), "Prefix"),
            )

    @property
    def _lengths(self) -> tuple[int, ...]:
        length: Any = self.length
        return (length,) if isinstance(length, int) else length

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """K < length."""
        return k < (
            self.length if isinstance(self.length, int) else per_row_tensor(self._lengths, k)
        )

    def _intervals(self, q: Tensor) -> Intervals:
        stops = per_row_tensor(self._lengths, q)
        return Intervals(torch.zeros_like(q), stops)

    def require(self, B: int, H: int, T: int, S: int) -> None:
        """One length, or one per batch row."""
        check_batch_rows("Prefix", len(self._lengths), B)


@dataclass(frozen=True, eq=False)
class Document(Mask):
    """A query sees the keys of its own document; documents are packed one behind the other.

    bounds: where each document starts, and the end of the last: document i is bounds[i] <= position
        < bounds[i + 1]. One tuple, or one per batch row. Outside the bounds nothing sees and
        nothing is seen.

    Raises:
        ArgumentError, ArgumentTypeError: fewer than two bounds, or bounds that fall; at a call,
            another number of rows.

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
        rows = tuple(_check_bounds(x) for x in (bounds if many else (bounds,)))
        object.__setattr__(self, "bounds", rows if many else rows[0])

    @classmethod
    def from_lengths(cls, lengths: Lengths | Sequence[Lengths]) -> Document:
        """Documents of these lengths, the first at position 0; or one list of lengths per batch
        row.

        >>> Document.from_lengths([3, 2])
        Document(bounds=(0, 3, 5))
        """
        found: Any = lengths.tolist() if isinstance(lengths, Tensor) else lengths
        many = len(found) > 0 and not isinstance(found[0], int)
        rows = []
        for x in found if many else (found,):
            ends = [0]
            for n in check_ints("Document lengths", x, 0):
                ends.append(ends[-1] + n)
            rows.append(tuple(ends))
        return cls(tuple(rows) if many else rows[0])

    @property
    def _rows(self) -> tuple[tuple[int, ...], ...]:
        bounds: Any = self.bounds
        return bounds if isinstance(bounds[0], tuple) else (bounds,)

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """Q and k lie in the same document."""
        bounds = padded_table(self._rows, None, q)
        doc, inside = self._find(bounds, q)
        other, _ = self._find(bounds, k)
        return (doc == other) & inside

    def _find(self, bounds: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The document of each position, counted from 1, and whether there is one."""
        found = count_bounds_up_to(bounds, x)
        return found, (found > 0) & (found < bounds.shape[1])

    def _intervals(self, q: Tensor) -> Intervals:
        bounds = padded_table(self._rows, None, q)
        doc, inside = self._find(bounds, q)
        doc = doc.clamp(1, bounds.shape[1] - 1)
        B, t = doc.shape[0], doc.shape[2]
        flat, bounds = doc.reshape(B, t), bounds.expand(B, -1)
        starts, stops = (bounds.gather(1, flat - i).reshape(doc.shape) for i in (1, 0))
        return Intervals(starts, torch.where(inside, stops, starts))

    def refusal(self) -> Refusal:
        """The key is in another document."""
        return Refusal("other document", "document", str(self))

    def require(self, B: int, H: int, T: int, S: int) -> None:
        """Bounds for all rows, or for each batch row."""
        check_batch_rows("Document", len(self._rows), B)


def _check_bounds(bounds: object) -> tuple[int, ...]:
    found = check_ints("Document bounds", bounds, 0)
    if len(found) < 2 or list(found) != sorted(found):
        raise ArgumentError(
            f"Document bounds is {found}; it must be the rising starts of the documents and the "
            "end: "
            "(0, 3, 5) is documents of 3 and 2; Document.from_lengths([3, 2]) makes it"
        )
    return found


@dataclass(frozen=True, eq=False)
class Padding(Mask):
    """Only real keys are seen: per batch row, the runs of positions (start, stop) that hold tokens.

    runs: one tuple of (start, stop) per batch row, rising and disjoint. Keys outside the runs are
        padding, also later ones; give padded slots position -1 instead where a sequence goes on
        growing.

    Raises:
        ArgumentError, ArgumentTypeError: runs that fall or overlap; at a call, another number of
            batch rows.

    >>> from regard.span import Span
    >>> Padding.left([2, 3], total=3).block(Span(0, 1), Span(0, 3)).int().tolist()
    [[[[0, 1, 1]]], [[[1, 1, 1]]]]
    """

    runs: Sequence[Sequence[tuple[int, int]]]

    def __post_init__(self) -> None:
        given: object = self.runs
        try:
            rows = tuple(tuple(tuple(run) for run in runs) for runs in self.runs)
        except TypeError:
            raise ArgumentTypeError(
                f"Padding runs is {type(given).__name__} {given!r}; it must be one tuple of "
                "(start, stop) pairs "
                "per batch row"
            ) from None
        for i, runs in enumerate(check_not_empty(rows, "Padding")):
            ends = check_ints(f"Padding runs[{i}]", [end for run in runs for end in run], 0)
            if any(len(run) != 2 for run in runs) or list(ends) != sorted(ends):
                raise ArgumentError(
                    f"Padding runs[{i}] is {runs}; it must be rising, disjoint (start, stop) pairs"
                )
        object.__setattr__(self, "runs", rows)

    @classmethod
    def right(cls, lengths: Lengths) -> Padding:
        """Rows of these lengths, padded on the right: positions 0 to length - 1 are real.

        >>> Padding.right([2, 3])
        Padding(runs=(((0, 2),), ((0, 3),)))
        """
        return cls(tuple(((0, n),) for n in check_ints("Padding lengths", lengths, 0)))

    @classmethod
    def left(cls, lengths: Lengths, total: int) -> Padding:
        """Rows of these lengths, padded on the left to `total`: positions total - length to total -
        1 are real.

        >>> Padding.left([2, 3], total=3)
        Padding(runs=(((1, 3),), ((0, 3),)))
        """
        check_int("Padding total", total, 0)
        sizes = check_ints("Padding lengths", lengths, 0)
        if sizes and max(sizes) > total:
            raise ArgumentError(
                f"Padding lengths has {max(sizes)}; none may exceed total {total}: give the "
                "padded length"
            )
        return cls(tuple(((total - n, total),) for n in sizes))

    @classmethod
    def from_keep(cls, keep: Tensor) -> Padding:
        """From a bool tensor [B, S], True = a real key, at positions 0 to S - 1; holes are allowed.

        >>> Padding.from_keep(torch.tensor([[True, False, True]]))
        Padding(runs=(((0, 1), (2, 3)),))
        """
        if keep.dtype != torch.bool:
            raise ArgumentTypeError(
                f"keep is {str(keep.dtype).removeprefix('torch.')}; it must be bool, True = a "
                "real key: use keep.bool()"
            )
        if keep.ndim != 2:
            raise ArgumentError(f"keep is {tuple(keep.shape)}; it must be [batch, keys]")
        steps = torch.nn.functional.pad(keep.to(torch.int8), (1, 1)).diff(dim=1)
        return cls(
            tuple(
                tuple(
                    zip(
                        (x == 1).nonzero()[:, 0].tolist(),
                        (x == -1).nonzero()[:, 0].tolist(),
                        strict=True,
                    )
                )
                for x in steps
            )
        )

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """K lies in a run: an odd number of the runs' ends are behind it."""
        return count_bounds_up_to(self._ends(k), k) % 2 == 1

    def _ends(self, like: Tensor) -> Tensor:
        return padded_table(tuple(sum(runs, ()) for runs in self.runs), UNBOUNDED, like)

    def _intervals(self, q: Tensor) -> Intervals:
        ends = self._ends(q)
        if ends.shape[1] == 0:
            return Intervals(torch.zeros_like(q), torch.zeros_like(q))
        shape = (max(len(ends), q.shape[0]), 1, q.shape[2], -1)
        starts, stops = (ends[:, None, None, i::2].expand(shape) for i in (0, 1))
        return Intervals(starts, stops)

    def refusal(self) -> Refusal:
        """The key is padding."""
        return Refusal("padding", "padding", str(self))

    def require(self, B: int, H: int, T: int, S: int) -> None:
        """Runs for each batch row."""
        check_batch_rows("Padding", len(self.runs), B)
