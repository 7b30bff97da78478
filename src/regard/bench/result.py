"""Benchmark results as data: whether each peer's output is right, its times, and the JSON of a
run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.bench.interfaces import Outputs, Work
from regard.bench.machine import Ceilings
from regard.bench.timing import median, quartiles
from regard.error_rule import FACTOR, GRADIENT_FACTOR, allowed_error

SHARE = 1e-4
"""fp32 and fp64: the error that is allowed, as a share of the largest number of the answer."""

SENTENCE = (
    f"fp32: max|x - ref| <= {SHARE:g} max|ref|; half types: <= {FACTOR:g} max|plain - ref| "
    f"({GRADIENT_FACTOR:g} for gradients) + two roundings"
)
"""The rule in words; `ref` is the answer in a wider dtype, `plain` straightforward computation in
the same dtype.
"""


class Verdict(NamedTuple):
    """The largest error, and what is allowed, of the output that comes closest to the bound or is
    furthest behind it.
    """

    right: bool
    error: float
    allowed: float
    why: str


def compare(found: Outputs, reference: Outputs, plain: Outputs) -> Verdict:
    """Hold outputs against the reference; one that is missing, misshapen or not finite is wrong.

    Outputs are compared in the reference's dtype. A peer may leave out outputs, but not all of
    them.

    >>> one = {"out": torch.ones(2)}
    >>> compare(one, one, one).right, compare({"out": torch.ones(3)}, one, one).why
    (True, 'out is (3,), not (2,)')
    """
    known = [name for name in found if name in reference]
    if not known:
        return Verdict(False, float("nan"), 0.0, f"gives none of {', '.join(reference)}")
    verdicts = [_one(name, found[name], reference[name], plain.get(name)) for name in known]
    return max(verdicts, key=lambda v: (not v.right, _share(v)))


def _one(name: str, x: Tensor, reference: Tensor, plain: Tensor | None) -> Verdict:
    if x.shape != reference.shape:
        why = f"{name} is {tuple(x.shape)}, not {tuple(reference.shape)}"
        return Verdict(False, float("nan"), 0.0, why)
    allowed = _bound(name, x.dtype, reference, plain)
    error = float((x.to(reference) - reference).abs().max()) if x.numel() else 0.0
    if not error <= allowed:  # NaN is not
        return Verdict(
            False, error, allowed, f"{name} is off by {error:.2g}, allowed {allowed:.2g}"
        )
    return Verdict(True, error, allowed, "")


def _bound(name: str, dtype: torch.dtype, reference: Tensor, plain: Tensor | None) -> float:
    if not reference.numel():
        return 0.0
    if dtype in (torch.float32, torch.float64) or plain is None:
        return SHARE * float(reference.abs().max())
    factor = GRADIENT_FACTOR if name.startswith("d") else FACTOR
    return allowed_error([plain], reference, factor)


def _share(verdict: Verdict) -> float:
    if verdict.error != verdict.error:
        return float("inf")
    return verdict.error / verdict.allowed if verdict.allowed else verdict.error


SCHEMA = 1
"""Version of the JSON; it rises when a name in it changes its meaning or goes away."""

BAD = ("wrong", "failed")
"""Statuses that make a run fail. Others are "timed", "missing", "unable", "memory" and
"interrupted".
"""


@dataclass(frozen=True)
class Row:
    """One peer's result.

    Attributes:
        peer, status, why: who, what became of it, and the reason where it was not timed.
        kernel: which of its kernels ran, where it says so.
        seconds, quartiles, rounds: the median time of a call, its spread, and how many rounds.
        ratio: the median over rounds of its time by ours in that round: 2 is twice as slow as ours.
        bytes_per_second, flops_per_second: the least that the problem takes, by the median time;
            None where nothing is counted.
        of_read, of_gemm: these as shares of what the machine does at most: reads in the same
            rounds, multiplied before them.
        error, allowed: the largest error of its answer, and the rule's bound.
        peak_bytes: memory that a call takes at most, its result included, where it was measured.
    """

    peer: str
    status: str
    why: str = ""
    kernel: str = ""
    seconds: float | None = None
    quartiles: tuple[float, float] | None = None
    rounds: int = 0
    ratio: float | None = None
    bytes_per_second: float | None = None
    flops_per_second: float | None = None
    of_read: float | None = None
    of_gemm: float | None = None
    error: float | None = None
    allowed: float | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Measured:
    """A case at one size in one dtype.

    >>> found = Measured("demo", "", "B1", torch.float32, "cpu").refuse("needs 9.0 GiB")
    >>> found.failed, found.dtype_name
    (True, 'float32')
    """

    case: str
    about: str
    sizes: str
    dtype: torch.dtype
    device: str
    work: Work | None = None
    refused: str = ""
    rows: tuple[Row, ...] = ()
    interrupted: bool = False

    @property
    def dtype_name(self) -> str:
        """Without "torch."."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def failed(self) -> bool:
        """It was refused, or a peer gave a wrong answer or none."""
        return bool(self.refused) or any(row.status in BAD for row in self.rows)

    def refuse(self, why: str) -> Measured:
        """The same, not run."""
        return replace(self, refused=why)

    def with_work(self, work: Work) -> Measured:
        """The same with what it takes at least."""
        return replace(self, work=work)

    def with_rows(self, rows: Sequence[Row], *, interrupted: bool = False) -> Measured:
        """The same with results."""
        return replace(self, rows=tuple(rows), interrupted=interrupted)


@dataclass(frozen=True)
class Times:
    """Seconds of a peer, round by round; of ours, and of reading memory, in the same rounds."""

    own: Sequence[float]
    ours: Sequence[float] | None = None
    reading: Sequence[float] | None = None

    def by(self, others: Sequence[float] | None) -> float | None:
        """The median of the ratios to others."""
        if not others:
            return None
        return median([a / b for a, b in zip(self.own, others, strict=True)])


def timed(
    name: str, kernel: str, verdict: Verdict, times: Times, about: Measured, ceilings: Ceilings
) -> Row:
    """The row of a peer that was right."""
    right = {"kernel": kernel, "error": verdict.error, "allowed": verdict.allowed}
    if not times.own:
        return Row(name, "interrupted", "no round was complete", **right)  # type: ignore[arg-type]
    assert about.work is not None
    seconds, slower = median(times.own), times.by(times.reading)
    read = about.work.bytes / seconds or None
    gemm = about.work.flops / seconds or None
    share = None if read is None else ceilings.of_read(read)
    if read is not None and ceilings.reading is not None and slower is not None:
        share = about.work.bytes / ceilings.reading.bytes / slower
    return Row(
        name,
        "timed",
        "",
        kernel,
        seconds,
        quartiles(times.own),
        len(times.own),
        times.by(times.ours),
        read,
        gemm,
        share,
        None if gemm is None else ceilings.of_gemm(gemm, about.dtype),
        verdict.error,
        verdict.allowed,
    )


def as_json(
    machine: dict[str, Any], ceilings: Ceilings, found: Sequence[Measured], *, interrupted: bool
) -> dict[str, Any]:
    """The whole run; every number is finite or null, times are seconds.

    >>> told = as_json({}, Ceilings(4e10, {torch.float32: 2e11}), [], interrupted=False)
    >>> told["schema"], told["ceilings"]["gemm_flops_per_second"]
    (1, {'float32': 200000000000.0})
    """
    gemm = {str(dtype).removeprefix("torch."): top for dtype, top in ceilings.gemm.items()}
    return {
        "schema": SCHEMA,
        "machine": machine,
        "rule": SENTENCE,
        "ceilings": {"read_bytes_per_second": ceilings.read, "gemm_flops_per_second": gemm},
        "interrupted": interrupted,
        "cases": [_case(one) for one in found],
    }


def _case(one: Measured) -> dict[str, Any]:
    return {
        "case": one.case,
        "about": one.about,
        "sizes": one.sizes,
        "dtype": one.dtype_name,
        "device": one.device,
        "flops": None if one.work is None else one.work.flops,
        "bytes": None if one.work is None else one.work.bytes,
        "refused": one.refused or None,
        "interrupted": one.interrupted,
        "rows": [{name: _number(x) for name, x in vars(row).items()} for row in one.rows],
    }


def _number(x: Any) -> Any:
    """NaN and infinity are no JSON."""
    return None if isinstance(x, float) and not math.isfinite(x) else x
