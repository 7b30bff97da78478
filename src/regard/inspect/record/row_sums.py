"""The audit of a recording: do the recorded q, k, lse and rule belong together, and do they give
the kernel's output?

    sum_j exp(s_ij - lse_i) = 1        sum_j p_ij v_j = out_i
    of a row that sees nothing: lse = -inf, out = 0

s in fp64, from the recorded q, k and rule. The error rule of CONTRIBUTING.md judges: the kernel may
err twice as much as plain math in its dtype (several orders of the same sums), and two roundings;
and two more at the size of the terms that a score sums, since of a few rows plain math may be right
by luck. What is wrong is named where a known mistake explains every row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from regard.error_rule import two_roundings
from regard.inspect.record.kernel_faults import (
    AuditSample,
    audit_sample,
    explain_lse,
    explain_output,
)
from regard.inspect.record.recorded_place import Place

MAX_CHECKED_SCORES = 2**18
"""Scores that are looked at in a place; of a longer run, rows are sampled, evenly."""

MAX_ROW_RANGES = 64
"""Runs of rows that are looked at, at most."""


@dataclass(frozen=True)
class RowSums:
    """What the audit of one place found.

    rows, of: rows that were looked at (in every recorded head and batch row), and how many there
        are.
    residual, allowed: the largest |ln sum_j exp(s_ij - lse_i)|, which is |row sum - 1| where it is
        small; and its bound.
    output, output_allowed: the largest |sum_j p_ij v_j - out_i|, and its bound; None if v or out
        was not kept, or dropped.
    findings: what is wrong, in words; empty if nothing is.
    """

    place: str
    rows: int
    of: int
    residual: float
    allowed: float
    output: float | None
    output_allowed: float | None
    findings: tuple[str, ...]

    @property
    def sound(self) -> bool:
        """Nothing is wrong."""
        return not self.findings

    def __str__(self) -> str:
        out = (
            ""
            if self.output is None
            else f", outputs within {self.output:.2g} of {self.output_allowed:.2g}"
        )
        said = "; ".join(self.findings) or "sound"
        rows = f"{self.rows} of {self.of} rows"
        return (
            f"{self.place}: row sums within {self.residual:.2g} of {self.allowed:.2g} "
            f"allowed{out} ({rows}): {said}"
        )


class ErrorBound(NamedTuple):
    """Largest error and its bound."""

    error: float
    allowed: float

    @property
    def fits(self) -> bool:
        """NaN does not."""
        return self.error <= self.allowed


def row_sums(place: Place, *, cells: int = MAX_CHECKED_SCORES) -> RowSums:
    """Audit what was recorded at a place.

    Args:
        place: from a recording.
        cells: about so many scores are looked at; of more, evenly spread rows, the first and the
            last among them.

    >>> import regard
    >>> from regard.inspect import Recorder
    >>> q = torch.randn(1, 2, 8, 4)
    >>> with Recorder() as recorder:
    ...     _ = regard.attend(q, q, q, mask=regard.masks.Causal())
    >>> found = row_sums(recorder.recording()[0])
    >>> found.rows, found.of, found.sound
    (8, 8, True)
    """
    every = [audit_sample(place, number, own) for number, own in _sample(place, cells)]
    rows = sum(e.rows for e in every)
    found = [*_special_row_findings(every)]
    more = max((e.rounding for e in every), default=0.0)
    lse = _error_bound([(e.lse, e.plain_lse, e.true_lse) for e in every], more)
    wrong = None
    if not lse.fits:
        wrong, words = explain_lse(every, lse.allowed)
        found.append(
            f"{words}: row sums are off by up to a factor e^{lse.error:.2g}, e^{lse.allowed:.2g} "
            "allowed"
        )
    out = _output_error(every)
    if out is not None and not out.fits:
        same, words = explain_output(every, out.allowed, wrong)
        if not same:
            found.append(
                f"{words}: outputs are off by up to {out.error:.2g}, {out.allowed:.2g} allowed"
            )
    error, bound = (None, None) if out is None else out
    return RowSums(place.name, rows, place.T, lse.error, lse.allowed, error, bound, tuple(found))


def _sample(place: Place, cells: int) -> Iterator[tuple[int, slice]]:
    """Runs of rows of steps: all, or evenly spread ones."""
    each = max(1, place.B * len(place.heads) * place.N)
    wanted, length = max(1, cells // each), 1
    if wanted >= place.T and len(place.steps) <= MAX_ROW_RANGES:
        yield from ((n, slice(0, step.T)) for n, step in enumerate(place.steps) if step.T)
        return
    length = max(1, wanted // MAX_ROW_RANGES)
    runs = [
        (n, slice(i, min(i + length, step.T)))
        for n, step in enumerate(place.steps)
        for i in range(0, step.T, length)
    ]
    n = max(1, min(MAX_ROW_RANGES, wanted // length, len(runs)))
    chosen = {round(i * (len(runs) - 1) / max(1, n - 1)) for i in range(n)} | {len(runs) - 1}
    yield from (runs[i] for i in sorted(chosen))


def _error_bound(found: list[tuple[Tensor, list[Tensor], Tensor]], more: float) -> ErrorBound:
    """The error rule, and `more`, over all pieces together: (x, plains, ref64) of each, where ref64
    is finite.
    """
    error = plain = rounding = 0.0
    for x, plains, ref in found:
        seen = ref.isfinite()
        if not bool(seen.any()):
            continue
        error = max(error, _max_abs((x.double() - ref)[seen]))
        plain = max([plain, *(_max_abs((y.double() - ref)[seen]) for y in plains)])
        rounding = max(rounding, two_roundings(ref, x.dtype))
    return ErrorBound(error, 2 * plain + rounding + more)


def _max_abs(x: Tensor) -> float:
    """The largest |x|; NaN counts as infinite."""
    return float(torch.where(x.isnan(), torch.inf, x.abs()).max()) if x.numel() else 0.0


def _output_error(every: list[AuditSample]) -> ErrorBound | None:
    kept = [
        # a row that sees nothing is judged apart
        (e.out, e.plain_out, e.true_out.masked_fill(e.true_lse.isneginf()[..., None], torch.nan))
        for e in every
        if e.out is not None and e.true_out is not None
    ]
    return _error_bound(kept, max(e.rounding_of_output for e in every)) if kept else None


def _special_row_findings(every: list[AuditSample]) -> Iterator[str]:
    """Rows that see nothing, and NaN that nothing visible explains."""
    for e in every:
        blind = e.true_lse.isneginf()
        wrong = blind & ~e.lse.isneginf()
        if bool(wrong.any()):
            value = float(e.lse[wrong][0])
            yield (
                f"a row that sees nothing has the lse {value:g} (row {e.row(wrong)}); it must "
                "be -inf"
            )
            break
    for e in every:
        blind = e.true_lse.isneginf()
        if e.out is not None and bool((e.out != 0).any(-1)[blind].any()):
            yield "a row that sees nothing has an output other than 0"
            break
    for e in every:
        wrong = e.lse.isnan() & e.true_lse.isfinite()
        if bool(wrong.any()):
            yield f"the lse is NaN where nothing visible is (row {e.row(wrong)})"
            break
