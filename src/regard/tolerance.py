"""The largest error that is allowed for a numerical result: one rule, without tuned tolerances.

    max|x - ref|  <=  factor * max|plain - ref|  +  2 * max|((ref + 0.3) - 0.3) - ref|

`ref` is the definition of the result `x` in a wider dtype, `plain` a straightforward computation in
the dtype of `x`; the last term, in that dtype too, is twice the error of one rounded addition.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ERROR_FACTOR, GRADIENT_ERROR_FACTOR = 2.0, 3.0
"""How many times the error of plain computation is allowed: for results, and for gradients."""


def allowed_error(
    plains: Sequence[Tensor], reference: Tensor, factor: float = ERROR_FACTOR
) -> float:
    """Return the largest error that the rule allows, where the reference is finite."""
    finite = reference.isfinite()
    errors = [_largest((plain.to(reference) - reference)[finite]) for plain in plains]
    return factor * max(errors) + two_roundings(reference, plains[0].dtype)


def two_roundings(reference: Tensor, dtype: torch.dtype) -> float:
    """Return twice the largest error of adding 0.3 to a finite reference and subtracting it; by
    chance 0 for few values, and then the distance from the largest one to the next number of the
    dtype.
    """
    values = reference[reference.isfinite()].to(dtype)
    if not values.numel():
        return 0.0
    rounding = 2 * _largest((values + 0.3 - 0.3 - values).double())
    return rounding or _spacing(values.abs().max())


def _spacing(x: Tensor) -> float:
    """Return the distance from x >= 0 to the next larger number of its dtype."""
    return float(torch.nextafter(x, torch.full_like(x, torch.inf)).double() - x.double())


def _largest(x: Tensor) -> float:
    """Return the largest finite |x|, or 0 if there is none."""
    finite = x[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
