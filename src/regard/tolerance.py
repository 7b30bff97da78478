"""How large the error of a numerical result may be: one rule, without tuned tolerances.

    max|x - ref|  <=  factor * max|plain - ref|  +  2 * max|((ref + 0.3) - 0.3) - ref|

`x` is the result. `ref` is its definition, computed in a wider dtype. `plain` is straightforward
computation in the dtype of `x`: an implementation may err a few times as much as that. The last
term is computed in the dtype of `x`. It is the error of one rounded addition, twice.
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
    """The right side of the rule. Only places where the reference is finite count.

    Args:
        plains: straightforward computations of equal standing in the tested dtype, such as
            different orders of the same sums; the largest error of them counts.
        reference: the definition in a wider dtype, of the same shape.
        factor: how many times the error of plain computation is allowed.

    Returns:
        The largest error that is allowed. A plain result that is infinite or NaN where the
        reference is finite adds nothing.

    >>> reference = torch.tensor([1.0, 2.0], dtype=torch.float64)
    >>> allowed_error([torch.tensor([1.0, 2.5])], reference) > 1.0
    True
    """
    finite = reference.isfinite()
    errors = [_largest((plain.to(reference) - reference)[finite]) for plain in plains]
    return factor * max(errors) + two_roundings(reference, plains[0].dtype)


def two_roundings(reference: Tensor, dtype: torch.dtype) -> float:
    """Twice the largest error of adding 0.3 to a finite value of the reference and taking it away.

    The error may be 0 by luck where few values are compared. The distance from the largest value
    to the next number of the dtype stands in for it then: two roundings amount to that at most.

    >>> two_roundings(torch.tensor([64.0]), torch.bfloat16) >= 0.5
    True
    >>> two_roundings(torch.tensor([torch.inf]), torch.bfloat16)
    0.0
    """
    values = reference[reference.isfinite()].to(dtype)
    if not values.numel():
        return 0.0
    rounding = 2 * _largest((values + 0.3 - 0.3 - values).double())
    return rounding or _spacing(values.abs().max())


def _spacing(x: Tensor) -> float:
    """The distance from x, at least 0, to the next larger number of its dtype."""
    return float(torch.nextafter(x, torch.full_like(x, torch.inf)).double() - x.double())


def _largest(x: Tensor) -> float:
    """The largest finite |x|; 0 where there is none."""
    finite = x[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
