"""When do two outputs differ? The error rule of the tests, for code whose definition is the code
itself in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

FACTOR = 2.0


class Gap(NamedTuple):
    """Where an output is furthest from what it should be: beyond the rule."""

    at: tuple[int, ...]
    expected: float
    got: float
    allowed: float


def gap(x: Tensor, plains: Sequence[Tensor], ref64: Tensor) -> Gap | None:
    """Where x differs from ref64 by more than the error rule allows, or None.

    max|x - ref64| <= 2 max|plain - ref64| + 2 max|((ref + 0.3) - 0.3) - ref|

    Args:
        x: what is judged.
        plains: straightforward computations of equal standing in the same dtype, over which the
            largest error counts.
        ref64: the definition, float64. NaN and infinities must stand at the same places.

    >>> gap(torch.ones(2), [torch.ones(2)], torch.ones(2).double())
    >>> gap(torch.tensor([1.0, 3.0]), [torch.ones(2)], torch.ones(2).double())[:3]
    ((1,), 1.0, 3.0)
    """
    if x.shape != ref64.shape:
        return Gap((), float(ref64.numel()), float(x.numel()), 0.0)
    error = (x.double() - ref64).abs()
    # equal infinities have no difference, and a NaN that both have is none
    same = (x.double() == ref64) | (x.isnan() & ref64.isnan())
    error = torch.where(same, 0.0, error)
    allowed = allowance(plains, ref64)
    worst = torch.where(error.isnan(), torch.inf, error)
    if not worst.numel() or float(worst.max()) <= allowed:
        return None
    at = tuple(int(i) for i in torch.unravel_index(worst.argmax(), worst.shape))
    return Gap(at, float(ref64[at]), float(x[at]), allowed)


def allowance(plains: Sequence[Tensor], ref64: Tensor) -> float:
    """The error that the rule allows: twice that of plain computation, and two roundings."""
    seen = ref64.isfinite()
    if not bool(seen.any()):
        return 0.0
    errors = [_largest((plain.double() - ref64)[seen]) for plain in plains]
    rounded = ref64[seen].to(plains[0].dtype)
    floor = 2 * _largest((rounded + 0.3 - 0.3 - rounded).double())
    return FACTOR * max(errors) + floor


def _largest(x: Tensor) -> float:
    """The largest finite size in x: a plain computation that overflows allows nothing."""
    finite = x[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
