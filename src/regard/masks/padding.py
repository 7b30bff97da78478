"""Padding: which keys of each batch row are real."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks.base import Mask
from regard.masks.intervals import FAR, Intervals
from regard.masks.values import Lengths, check_rows, locate, some, table, whole, wholes


@dataclass(frozen=True, eq=False)
class Padding(Mask):
    """Only real keys are seen: per batch row, the runs of positions (start, stop) that hold tokens.

    runs: one tuple of (start, stop) per batch row, rising and disjoint. Keys outside the runs are padding, also later
    ones; give padded slots position -1 instead where a sequence goes on growing.

    Raises:
        ArgumentError, ArgumentTypeError: runs that fall or overlap; at a call, another number of batch rows.

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
                f"Padding runs is {type(given).__name__} {given!r}; it must be one tuple of (start, stop) pairs "
                "per batch row"
            ) from None
        for i, runs in enumerate(some(rows, "Padding")):
            ends = wholes(f"Padding runs[{i}]", [end for run in runs for end in run], 0)
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
        return cls(tuple(((0, n),) for n in wholes("Padding lengths", lengths, 0)))

    @classmethod
    def left(cls, lengths: Lengths, total: int) -> Padding:
        """Rows of these lengths, padded on the left to `total`: positions total - length to total - 1 are real.

        >>> Padding.left([2, 3], total=3)
        Padding(runs=(((1, 3),), ((0, 3),)))
        """
        whole("Padding total", total, 0)
        sizes = wholes("Padding lengths", lengths, 0)
        if sizes and max(sizes) > total:
            raise ArgumentError(
                f"Padding lengths has {max(sizes)}; none may exceed total {total}: give the padded length"
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
                f"keep is {str(keep.dtype).removeprefix('torch.')}; it must be bool, True = a real key: use keep.bool()"
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
        return locate(self._ends(k), k) % 2 == 1

    def _ends(self, like: Tensor) -> Tensor:
        return table(tuple(sum(runs, ()) for runs in self.runs), FAR, like)

    def _intervals(self, q: Tensor) -> Intervals:
        ends = self._ends(q)
        if ends.shape[1] == 0:
            return Intervals(torch.zeros_like(q), torch.zeros_like(q))
        shape = (max(len(ends), q.shape[0]), 1, q.shape[2], -1)
        starts, stops = (ends[:, None, None, i::2].expand(shape) for i in (0, 1))
        return Intervals(starts, stops)

    def require(self, B: int, H: int, T: int, S: int) -> None:
        """Runs for each batch row."""
        check_rows("Padding", len(self.runs), B)
