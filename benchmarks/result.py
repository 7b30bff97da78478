"""Benchmark results as data: the check of each peer's outputs, its times, and the JSON of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.interfaces import MinimumWork, Outputs, name_of
from regard.timing import Ceilings, MachineFacts, median, quartiles, round_ratios
from regard.tolerance import ERROR_FACTOR, GRADIENT_ERROR_FACTOR, allowed_error

RELATIVE_TOLERANCE = 1e-4
"""The allowed error of fp32 and fp64 outputs, relative to the largest number of the reference."""

TOLERANCE_RULE = (
    f"fp32: max|x - ref| <= {RELATIVE_TOLERANCE:g} max|ref|, or the next bound if it is larger and "
    f"the problem has a plain computation; half types: <= {ERROR_FACTOR:g} max|plain - ref| "
    f"({GRADIENT_ERROR_FACTOR:g} for gradients) + two roundings"
)
"""The largest allowed error, as text: `x` is the output, `ref` the reference in a wider dtype, and
`plain` a straightforward computation in the same dtype.
"""


class OutputCheck(NamedTuple):
    """A peer's output with the largest error relative to its bound; `why` says what is wrong."""

    correct: bool
    error: float
    allowed: float
    why: str


def check_outputs(outputs: Outputs, reference: Outputs, plain: Outputs) -> OutputCheck:
    """Compare outputs with the reference.

    An output with a wrong shape, or with NaN or infinity where the reference has none, is wrong. A
    peer may leave out some outputs, but not all. Outputs are converted to the reference's dtype.
    """
    names = [name for name in outputs if name in reference]
    if not names:
        return OutputCheck(False, float("nan"), 0.0, f"returns none of {', '.join(reference)}")
    checks = [
        _check_output(name, outputs[name], reference[name], plain.get(name)) for name in names
    ]
    return max(checks, key=lambda v: (not v.correct, _error_ratio(v)))


def _check_output(name: str, x: Tensor, reference: Tensor, plain: Tensor | None) -> OutputCheck:
    """Compare one output with its reference."""
    if x.shape != reference.shape:
        why = f"{name} has shape {tuple(x.shape)}, not {tuple(reference.shape)}"
        return OutputCheck(False, float("nan"), 0.0, why)
    allowed = _allowed_error(name, x.dtype, reference, plain)
    error = float((x.to(reference) - reference).abs().max()) if x.numel() else 0.0
    if not error <= allowed:  # also true for NaN
        return OutputCheck(
            False, error, allowed, f"{name} has an error of {error:.2g}, allowed is {allowed:.2g}"
        )
    return OutputCheck(True, error, allowed, "")


def _allowed_error(name: str, dtype: torch.dtype, reference: Tensor, plain: Tensor | None) -> float:
    """Return the largest allowed error of an output, by the rule `TOLERANCE_RULE`."""
    if not reference.numel():
        return 0.0
    share = RELATIVE_TOLERANCE * float(reference.abs().max())
    if plain is None:
        return share
    factor = GRADIENT_ERROR_FACTOR if name.startswith("d") else ERROR_FACTOR
    bound = allowed_error([plain], reference, factor)
    return max(share, bound) if dtype in (torch.float32, torch.float64) else bound


def _error_ratio(verdict: OutputCheck) -> float:
    """Return the error relative to the allowed error; infinity for NaN."""
    if verdict.error != verdict.error:
        return float("inf")
    return verdict.error / verdict.allowed if verdict.allowed else verdict.error


SCHEMA = 1
"""The version of the JSON; it increases when a name is removed or changes its meaning."""

FAILURE_STATUSES = ("wrong", "failed")
"""The statuses with which a run fails. The other ones are "timed", "missing", "unable", "memory"
and "interrupted".
"""


@dataclass(frozen=True)
class PeerResult:
    """The result of one peer.

    Attributes:
        seconds, quartiles, rounds: the median time of a call, its quartiles, and how many rounds.
        ratio: the median over rounds of its time divided by regard's time in the same round.
        bytes_per_second, flops_per_second: the minimum work of the problem divided by the median
            time; None where nothing is counted.
        of_read, of_gemm: these rates as shares of the machine's: the bandwidth is measured in the
            same rounds, the FLOP rate before them.
        error, allowed: the largest error of its outputs, and the bound of the rule.
        peak_bytes: the peak memory of a call with its result, if it was measured.
    """

    peer: str
    status: str
    why: str = ""
    kernel: str = ""
    seconds: float | None = None
    quartiles: tuple[float, float] | None = None
    rounds: int = 0
    ratio: float | None = None
    ratio_quartiles: tuple[float, float] | None = None
    bytes_per_second: float | None = None
    flops_per_second: float | None = None
    of_read: float | None = None
    of_gemm: float | None = None
    error: float | None = None
    allowed: float | None = None
    peak_bytes: int | None = None
    figures: Mapping[str, float] | None = None


@dataclass(frozen=True)
class CaseResult:
    """The result of a case at one size in one dtype."""

    case: str
    description: str
    sizes: str
    dtype: torch.dtype
    device: str
    work: MinimumWork | None = None
    refused: str = ""
    rows: tuple[PeerResult, ...] = ()
    interrupted: bool = False

    @property
    def dtype_name(self) -> str:
        """The name of the dtype without "torch."."""
        return name_of(self.dtype)

    @property
    def failed(self) -> bool:
        """Whether the case was not run, or a peer's outputs are wrong or missing."""
        return bool(self.refused) or any(row.status in FAILURE_STATUSES for row in self.rows)

    def refuse(self, why: str) -> CaseResult:
        """Return the result of a case that was not run, with the reason."""
        return replace(self, refused=why)

    def with_work(self, work: MinimumWork) -> CaseResult:
        """Return the result with the minimum work."""
        return replace(self, work=work)

    def with_rows(self, rows: Sequence[PeerResult], *, interrupted: bool = False) -> CaseResult:
        """Return the result with the results of the peers."""
        return replace(self, rows=tuple(rows), interrupted=interrupted)


def timed_result(
    name: str,
    kernel: str,
    check: OutputCheck,
    own: Sequence[float],
    ours: Sequence[float] | None,
    probe: Sequence[float] | None,
    case: CaseResult,
    ceilings: Ceilings,
) -> PeerResult:
    """Return the result of a peer from the seconds of each round, or "interrupted"."""
    row = PeerResult(name, "timed", "", kernel, error=check.error, allowed=check.allowed)
    if not own:
        return replace(row, status="interrupted", why="no round was completed")
    assert case.work is not None
    seconds = median(own)
    bytes_rate, flops_rate = (x / seconds or None for x in (case.work.bytes, case.work.flops))
    of_read = None if bytes_rate is None else ceilings.of_read(bytes_rate)
    if bytes_rate is not None and ceilings.probe is not None and probe:
        of_read = case.work.bytes / ceilings.probe.bytes / median(round_ratios(own, probe))
    ratios = round_ratios(own, ours) if ours else None
    return replace(
        row,
        seconds=seconds,
        quartiles=quartiles(own),
        rounds=len(own),
        ratio=median(ratios) if ratios else None,
        ratio_quartiles=quartiles(ratios) if ratios else None,
        bytes_per_second=bytes_rate,
        flops_per_second=flops_rate,
        of_read=of_read,
        of_gemm=None if flops_rate is None else ceilings.of_gemm(flops_rate, case.dtype),
    )


def as_json(
    machine: MachineFacts, ceilings: Ceilings, results: Sequence[CaseResult], *, interrupted: bool
) -> dict[str, object]:
    """Return a whole run as plain values for JSON; numbers that are not finite are None."""
    gemm = {name_of(dtype): rate for dtype, rate in ceilings.gemm.items()}
    return {
        "schema": SCHEMA,
        "machine": machine,
        "rule": TOLERANCE_RULE,
        "ceilings": {"read_bytes_per_second": ceilings.read, "gemm_flops_per_second": gemm},
        "interrupted": interrupted,
        "cases": [_case_as_json(result) for result in results],
    }


def _case_as_json(result: CaseResult) -> dict[str, object]:
    """Return the result of a case as plain values for JSON."""
    return {
        "case": result.case,
        "about": result.description,
        "sizes": result.sizes,
        "dtype": result.dtype_name,
        "device": result.device,
        "flops": None if result.work is None else result.work.flops,
        "bytes": None if result.work is None else result.work.bytes,
        "refused": result.refused or None,
        "interrupted": result.interrupted,
        "rows": [
            {name: _finite_or_none(x) for name, x in vars(row).items()} for row in result.rows
        ],
    }


def _finite_or_none(x: object) -> object:
    """Return a value, or None for NaN and infinity, which JSON does not have."""
    return None if isinstance(x, float) and not math.isfinite(x) else x
