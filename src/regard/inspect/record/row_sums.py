"""The audit of a recording: are the recorded q, k, lse, mask and bias consistent, and do they give
the output of the kernel?

    sum_j exp(s_ij - lse_i) = 1        sum_j p_ij v_j = out_i
    for a row that sees no key: lse = -inf, out = 0

The scores s are computed in fp64 from the recorded q, k, mask and bias. The bound on the error is
the error rule of CONTRIBUTING.md: twice the error of plain arithmetic in the dtype of the kernel
(over several orders of summation), plus two roundings, plus two roundings at the size of the terms
that a score sums, because plain arithmetic may be accurate by chance on a few rows. Where a known
fault of kernels explains all wrong rows, the finding names it.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from regard.inspect.record.kernel_faults import (
    AuditSample,
    audit_sample,
    explain_lse,
    explain_output,
)
from regard.inspect.record.recorded_place import Place
from regard.tolerance import two_roundings
from regard.units import plural

MAX_CHECKED_SCORES = 2**18
"""Number of scores of a place that are checked; for longer runs, evenly spaced rows are sampled."""

MAX_ROW_RANGES = 64
"""The largest number of row ranges that are sampled."""


@dataclass(frozen=True)
class RowSums:
    """Result of the audit of one place.

    Args:
        place: name of the place.
        rows: number of rows that were checked, in every recorded head and batch row.
        of: number of all rows of the place.
        residual: the largest |ln sum_j exp(s_ij - lse_i)|, which is about |row sum - 1| where it is
            small.
        allowed: the bound on `residual`.
        output: the largest |sum_j p_ij v_j - out_i|; None if v or out was not kept, or with
            dropout.
        output_allowed: the bound on `output`, or None.
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
        """Return whether the audit found nothing wrong."""
        return not self.findings

    def __str__(self) -> str:
        out = (
            ""
            if self.output is None
            else f", output error {self.output:.2g} (allowed {self.output_allowed:.2g})"
        )
        verdict = "; ".join(self.findings) or "sound"
        rows = f"{self.rows} of {plural(self.of, 'row')}"
        return (
            f"{self.place}: row-sum error {self.residual:.2g} (allowed {self.allowed:.2g}){out}, "
            f"{rows} checked: {verdict}"
        )


class ErrorBound(NamedTuple):
    """The largest error that was found, and the largest error that is allowed."""

    error: float
    allowed: float

    @property
    def fits(self) -> bool:
        """Return whether the error is within the bound; a NaN error is not."""
        return self.error <= self.allowed


def row_sums(place: Place, *, cells: int = MAX_CHECKED_SCORES) -> RowSums:
    """Audit what was recorded at a place.

    Args:
        place: a place of a recording.
        cells: approximate number of scores to check; for longer runs, evenly spaced rows are
            sampled, among them the first and the last.

    Returns:
        The largest errors, their bounds, and what is wrong.

    >>> import regard
    >>> from regard.inspect import Recorder
    >>> q = torch.randn(1, 2, 8, 4)
    >>> with Recorder() as recorder:
    ...     _ = regard.attend(q, q, q, mask=regard.masks.Causal())
    >>> audit = row_sums(recorder.recording()[0])
    >>> audit.rows, audit.of, audit.sound
    (8, 8, True)
    """
    samples = [audit_sample(place, number, own) for number, own in _sample(place, cells)]
    rows = sum(e.rows for e in samples)
    findings = [*_special_row_findings(samples)]
    extra_rounding = max((e.rounding for e in samples), default=0.0)
    lse = _error_bound([(e.lse, e.plain_lse, e.true_lse) for e in samples], extra_rounding)
    fault = None
    if not lse.fits:
        fault, description = explain_lse(samples, lse.allowed)
        findings.append(
            f"{description}: row sums are wrong by up to a factor e^{lse.error:.2g}; "
            f"e^{lse.allowed:.2g} is allowed"
        )
    out = _output_error(samples)
    if out is not None and not out.fits:
        is_same_fault, description = explain_output(samples, out.allowed, fault)
        if not is_same_fault:
            findings.append(
                f"{description}: outputs are wrong by up to {out.error:.2g}; {out.allowed:.2g} is "
                "allowed"
            )
    error, bound = (None, None) if out is None else out
    return RowSums(place.name, rows, place.T, lse.error, lse.allowed, error, bound, tuple(findings))


def _sample(place: Place, cells: int) -> Iterator[tuple[int, slice]]:
    """Return ranges of rows of steps: all of them, or evenly spaced ones."""
    each = max(1, place.B * len(place.heads) * place.N)
    wanted, length = max(1, cells // each), 1
    if wanted >= place.T and len(place.steps) <= MAX_ROW_RANGES:
        yield from ((n, slice(0, step.T)) for n, step in enumerate(place.steps) if step.T)
        return
    length = max(1, wanted // MAX_ROW_RANGES)
    counts = [-(-step.T // length) for step in place.steps]  # ranges of each step
    cumulative_counts = list(itertools.accumulate(counts))
    total = cumulative_counts[-1]
    n = max(1, min(MAX_ROW_RANGES, wanted // length, total))
    chosen = {round(i * (total - 1) / max(1, n - 1)) for i in range(n)} | {total - 1}
    for index in sorted(chosen):
        number = bisect.bisect_right(cumulative_counts, index)
        start = (index - cumulative_counts[number] + counts[number]) * length
        yield number, slice(start, min(start + length, place.steps[number].T))


def _error_bound(
    triples: list[tuple[Tensor, list[Tensor], Tensor]], extra_rounding: float
) -> ErrorBound:
    """Apply the error rule, plus `extra_rounding`, to all samples together."""
    error = plain = rounding = 0.0
    for x, plains, ref in triples:
        finite = ref.isfinite()
        if not bool(finite.any()):
            continue
        error = max(error, _max_abs((x.double() - ref)[finite]))
        plain = max([plain, *(_max_abs((y.double() - ref)[finite]) for y in plains)])
        rounding = max(rounding, two_roundings(ref, x.dtype))
    return ErrorBound(error, 2 * plain + rounding + extra_rounding)


def _max_abs(x: Tensor) -> float:
    """Return the largest |x|; NaN counts as infinite."""
    return float(torch.where(x.isnan(), torch.inf, x.abs()).max()) if x.numel() else 0.0


def _output_error(samples: list[AuditSample]) -> ErrorBound | None:
    """Return the error of the outputs, or None if no sample has any."""
    triples = [
        # rows that see no key are checked separately
        (e.out, e.plain_out, e.true_out.masked_fill(e.true_lse.isneginf()[..., None], torch.nan))
        for e in samples
        if e.out is not None and e.true_out is not None
    ]
    return _error_bound(triples, max(e.rounding_of_output for e in samples)) if triples else None


def _special_row_findings(samples: list[AuditSample]) -> Iterator[str]:
    """Return findings about rows that see no key, and about NaN that no visible number explains."""
    for e in samples:
        sees_no_key = e.true_lse.isneginf()
        wrong = sees_no_key & ~e.lse.isneginf()
        if bool(wrong.any()):
            value = float(e.lse[wrong][0])
            yield (
                f"a row that sees no key has the lse {value:g} (row {e.row(wrong)}); it must "
                "be -inf"
            )
            break
    for e in samples:
        sees_no_key = e.true_lse.isneginf()
        if e.out is not None and bool((e.out != 0).any(-1)[sees_no_key].any()):
            yield "a row that sees no key has an output other than 0"
            break
    for e in samples:
        wrong = e.lse.isnan() & e.true_lse.isfinite()
        if bool(wrong.any()):
            yield f"the lse is NaN although nothing visible is NaN (row {e.row(wrong)})"
            break
