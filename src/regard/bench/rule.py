"""When are two outputs equal? Checked before anything is timed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.bench.case import Outputs

SHARE = 1e-4
"""fp32 and fp64: the error that is allowed, as a share of the largest number of the answer."""

FACTOR, GRADIENT_FACTOR = 2.0, 3.0
"""Half types: the error that is allowed, in errors of the straightforward computation in the same dtype."""

SENTENCE = (
    f"fp32: max|x - ref| <= {SHARE:g} max|ref|; half types: <= {FACTOR:g} max|plain - ref| "
    f"({GRADIENT_FACTOR:g} for gradients) + two roundings"
)
"""The rule in words; `ref` is the answer in a wider dtype, `plain` straightforward computation in the same dtype."""


class Verdict(NamedTuple):
    """The largest error, and what is allowed, of the output that comes closest to the bound or is furthest behind it."""

    right: bool
    error: float
    allowed: float
    why: str


def compare(found: Outputs, reference: Outputs, plain: Outputs) -> Verdict:
    """Hold outputs against the reference; one that is missing, misshapen or not finite is wrong.

    Outputs are compared in the reference's dtype. A peer may leave out outputs, but not all of them.

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
    rounded = reference.to(dtype)
    roundings = 2 * float((rounded + 0.3 - 0.3 - rounded).abs().max())
    factor = GRADIENT_FACTOR if name.startswith("d") else FACTOR
    return factor * float((plain.to(reference) - reference).abs().max()) + roundings


def _share(verdict: Verdict) -> float:
    if verdict.error != verdict.error:
        return float("inf")
    return verdict.error / verdict.allowed if verdict.allowed else verdict.error
