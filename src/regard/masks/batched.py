"""Masks that may differ between the rows of a batch: `Prefix`, `Document` and `Padding`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.argument_checks import check_int
from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks.base import Lengths, Mask, check_ints
from regard.masks.tiling import UNBOUNDED, Intervals, check_batch_rows, to_4d
from regard.process_state import is_exporting_onnx
from regard.span import Positions, as_tensor

Rows = TypeVar("Rows", bound=tuple[Any, ...])


def check_not_empty(rows: Rows, name: str) -> Rows:
    """Return the rows, and raise if there are none."""
    if not rows:
        raise ArgumentError(f"{name} got no batch rows; give at least one")
    return rows


def per_row_tensor(values: tuple[int, ...], like: Tensor) -> Tensor:
    """Return one integer per batch row as a tensor `[B, 1, 1, 1]`."""
    return torch.tensor(values, dtype=torch.int64, device=like.device)[:, None, None, None]


def padded_table(rows: tuple[tuple[int, ...], ...], fill: int | None, like: Tensor) -> Tensor:
    """Return lists as one tensor `[B, n]`, padded with `fill` or with their last number."""
    n = max(map(len, rows))
    filled = [[*x, *[x[-1] if fill is None else fill] * (n - len(x))] for x in rows]
    return torch.tensor(filled, dtype=torch.int64, device=like.device).reshape(len(rows), n)


def count_bounds_up_to(bounds: Tensor, x: Tensor) -> Tensor:
    """Return how many of the sorted bounds `[B, n]` are <= x, elementwise."""
    # searchsorted supports neither vmap, in which mask_mod runs, nor ONNX
    if is_exporting_onnx() or x.numel() == 1:
        return (bounds[:, None, None, None] <= x[..., None]).sum(-1)
    if bounds.shape[0] == 1:
        return torch.searchsorted(bounds[0], x.contiguous(), right=True)
    x = to_4d(x)
    x = x.expand(bounds.shape[0], *x.shape[1:])
    counts = torch.searchsorted(bounds, x.flatten(1).contiguous(), right=True)
    return counts.reshape(x.shape)


@dataclass(frozen=True, eq=False)
class Prefix(Mask):
    """Every query sees the first `length` positions: k < length.

    `causal | prefix(n)` is the mask of a prefix language model.

    Args:
        length: the number of positions, an int, or one per batch row.

    Raises:
        ArgumentError, ArgumentTypeError: a length is no int of at least 0, or not one per row.

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
        """Return k < length for each pair."""
        return k < (
            self.length if isinstance(self.length, int) else per_row_tensor(self._lengths, k)
        )

    def _intervals(self, q: Tensor) -> Intervals:
        stops = per_row_tensor(self._lengths, q)
        return Intervals(torch.zeros_like(q), stops)

    def causal_from(self) -> int:
        """Return the length of the longest prefix, after which every row is causal."""
        return max(self._lengths)

    def require(self, B: int, H: int, T: int, S: int) -> None:
        """Check that there is one length for all batch rows, or one for each."""
        check_batch_rows("Prefix", len(self._lengths), B)


@dataclass(frozen=True, eq=False)
class Document(Mask):
    """A query sees the keys of its own document, where documents are packed one after another.

    Document i has the positions bounds[i] <= position < bounds[i + 1]; others see nothing.

    Args:
        bounds: the starts of documents, and the end of the last: one sequence, or one per row.

    Raises:
        ArgumentError, ArgumentTypeError: there are fewer than two bounds, or they decrease.

    >>> from regard.masks import Causal
    >>> from regard.span import Span
    >>> (Causal() & Document((0, 3, 5))).visible(Span(0, 5), Span(0, 5)).tolist()
    [[[1, 2, 3, 1, 2]]]
    """

    why_hidden = ("other document", "document")

    bounds: Lengths | Sequence[Lengths]

    def __post_init__(self) -> None:
        bounds: Any = self.bounds
        bounds = bounds.tolist() if isinstance(bounds, Tensor) else bounds
        per_row = (
            isinstance(bounds, (tuple, list)) and len(bounds) > 0 and not isinstance(bounds[0], int)
        )
        rows = tuple(_check_bounds(x) for x in (bounds if per_row else (bounds,)))
        object.__setattr__(self, "bounds", rows if per_row else rows[0])

    @classmethod
    def from_lengths(cls, lengths: Lengths | Sequence[Lengths]) -> Document:
        """Build the mask from the lengths of the documents, from position 0 on.

        Args:
            lengths: one length per document, or one such sequence per batch row.

        Returns:
            The mask.

        >>> Document.from_lengths([3, 2])
        Document(bounds=(0, 3, 5))
        """
        values: Any = lengths.tolist() if isinstance(lengths, Tensor) else lengths
        per_row = len(values) > 0 and not isinstance(values[0], int)
        rows = []
        for x in values if per_row else (values,):
            bounds = [0]
            for n in check_ints("Document lengths", x, 0):
                bounds.append(bounds[-1] + n)
            rows.append(tuple(bounds))
        return cls(tuple(rows) if per_row else rows[0])

    @property
    def _rows(self) -> tuple[tuple[int, ...], ...]:
        bounds: Any = self.bounds
        return bounds if isinstance(bounds[0], tuple) else (bounds,)

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """Return whether q and k lie in the same document."""
        bounds = padded_table(self._rows, None, q)
        doc, inside = self._find_document(bounds, q)
        other, _ = self._find_document(bounds, k)
        return (doc == other) & inside

    def _find_document(self, bounds: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the document number of each position, from 1, and whether it has one."""
        document = count_bounds_up_to(bounds, x)
        return document, (document > 0) & (document < bounds.shape[1])

    def _intervals(self, q: Tensor) -> Intervals:
        bounds = padded_table(self._rows, None, q)
        doc, inside = self._find_document(bounds, q)
        doc = doc.clamp(1, bounds.shape[1] - 1)
        B, t = doc.shape[0], doc.shape[2]
        flat, bounds = doc.reshape(B, t), bounds.expand(B, -1)
        starts, stops = (bounds.gather(1, flat - i).reshape(doc.shape) for i in (1, 0))
        return Intervals(starts, torch.where(inside, stops, starts))

    def begins(self, positions: Positions) -> Bool[Tensor, "#B T"]:
        """Return which tokens are the first of a document: those whose position is a bound.

        Args:
            positions: positions of T tokens.

        Returns:
            A bool tensor `[B or 1, T]`.
        """
        tensor = as_tensor(positions)
        bounds = padded_table(self._rows, None, tensor)
        return (tensor[:, :, None] == bounds[:, None]).any(-1)

    def require(self, B: int, H: int, T: int, S: int) -> None:
        """Check that there is one list of bounds for all batch rows, or one for each."""
        check_batch_rows("Document", len(self._rows), B)


def _check_bounds(bounds: object) -> tuple[int, ...]:
    values = check_ints("Document bounds", bounds, 0)
    if len(values) < 2 or list(values) != sorted(values):
        raise ArgumentError(
            f"Document bounds is {values}; it must be the increasing start positions of the "
            "documents, then the end of the last: (0, 3, 5) means documents of lengths 3 and 2, as "
            "Document.from_lengths([3, 2]) creates it"
        )
    return values


@dataclass(frozen=True, eq=False)
class Padding(Mask):
    """Only real tokens are visible: each batch row lists the ranges of positions that hold tokens.

    If a padded sequence will grow, give padded slots position -1 instead.

    Args:
        runs: for each batch row a tuple of half-open ranges (start, stop), increasing and disjoint.

    Raises:
        ArgumentError, ArgumentTypeError: ranges decrease or overlap, or rows differ in a call.

    >>> from regard.span import Span
    >>> Padding.left([2, 3], total=3).block(Span(0, 1), Span(0, 3)).int().tolist()
    [[[[0, 1, 1]]], [[[1, 1, 1]]]]
    """

    why_hidden = ("padding", "padding")

    runs: Sequence[Sequence[tuple[int, int]]]

    def __post_init__(self) -> None:
        value: object = self.runs
        try:
            rows = tuple(tuple(tuple(run) for run in runs) for runs in self.runs)
        except TypeError:
            raise ArgumentTypeError(
                f"Padding runs is {type(value).__name__} {value!r}; it must be one tuple of "
                "(start, stop) pairs per batch row"
            ) from None
        for i, runs in enumerate(check_not_empty(rows, "Padding")):
            bounds = check_ints(f"Padding runs[{i}]", [bound for run in runs for bound in run], 0)
            if any(len(run) != 2 for run in runs) or list(bounds) != sorted(bounds):
                raise ArgumentError(
                    f"Padding runs[{i}] is {runs}; it must be increasing, disjoint (start, stop) "
                    "pairs"
                )
        object.__setattr__(self, "runs", rows)

    @classmethod
    def right(cls, lengths: Lengths) -> Padding:
        """Build the mask of rows that are padded on the right: positions 0 to length - 1 are real.

        Args:
            lengths: the number of real tokens of each row.

        Returns:
            The mask.

        >>> Padding.right([2, 3])
        Padding(runs=(((0, 2),), ((0, 3),)))
        """
        return cls(tuple(((0, n),) for n in check_ints("Padding lengths", lengths, 0)))

    @classmethod
    def left(cls, lengths: Lengths, total: int) -> Padding:
        """Build the mask of rows whose positions total - length to total - 1 are real.

        Args:
            lengths: the number of real tokens of each row.
            total: the padded length.

        Returns:
            The mask.

        >>> Padding.left([2, 3], total=3)
        Padding(runs=(((1, 3),), ((0, 3),)))
        """
        check_int("Padding total", total, 0)
        sizes = check_ints("Padding lengths", lengths, 0)
        if sizes and max(sizes) > total:
            raise ArgumentError(
                f"Padding lengths has {max(sizes)}, which exceeds total {total}; total must be the "
                "padded length"
            )
        return cls(tuple(((total - n, total),) for n in sizes))

    @classmethod
    def from_keep(cls, keep: Tensor) -> Padding:
        """Build the mask from a bool tensor; real tokens need not be contiguous.

        Args:
            keep: bool `[B, S]`, True for a real key, for positions 0 to S - 1.

        Returns:
            The mask.

        >>> Padding.from_keep(torch.tensor([[True, False, True]]))
        Padding(runs=(((0, 1), (2, 3)),))
        """
        if keep.dtype != torch.bool:
            raise ArgumentTypeError(
                f"keep is {str(keep.dtype).removeprefix('torch.')}; it must be bool, True = a real "
                "key: use keep.bool()"
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
        """Return whether k lies in a range, that is, whether an odd number of bounds are <= k."""
        return count_bounds_up_to(self._bounds(k), k) % 2 == 1

    def _bounds(self, like: Tensor) -> Tensor:
        """Return starts and stops of the ranges in turn, `[B, 2n]`, padded with UNBOUNDED."""
        return padded_table(tuple(sum(runs, ()) for runs in self.runs), UNBOUNDED, like)

    def _intervals(self, q: Tensor) -> Intervals:
        bounds = self._bounds(q)
        if bounds.shape[1] == 0:
            return Intervals(torch.zeros_like(q), torch.zeros_like(q))
        shape = (max(len(bounds), q.shape[0]), 1, q.shape[2], -1)
        starts, stops = (bounds[:, None, None, i::2].expand(shape) for i in (0, 1))
        return Intervals(starts, stops)

    def require(self, B: int, H: int, T: int, S: int) -> None:
        """Check that there are ranges for each batch row of the call."""
        check_batch_rows("Padding", len(self.runs), B)
