"""The RMS norm, in fp32 or better whatever the dtype."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.argument_checks import check_tensor
from regard.errors import ArgumentError
from regard.ops.gemv import at_hand
from regard.ops.jit import openmp
from regard.ops.jit.records import NORM

FEW = 1 << 14
"""Numbers of a call up to which the compiled one is the faster."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * (weight + offset) for x [..., M] and weight [M] -> [..., M],
    rounded once.

    >>> rms_norm(torch.tensor([3.0, 4.0, 0.0, 0.0]), torch.ones(4), 0.0).tolist()
    [1.2000000476837158, 1.600000023841858, 0.0, 0.0]

    Raises:
        ArgumentError, ArgumentTypeError: x is no floating tensor, or the weight is not of the size
            of its last dimension.

    Source: Zhang and Sennrich 2019 (arXiv 1910.07467), equation 4.
    """
    if (
        at_hand(x, weight)  # first, since a compiled graph must not depend on the sizes below
        and x.shape[-1:] == weight.shape
        and 0 < x.numel() <= FEW
        and weight.is_contiguous()
    ):
        x = x.contiguous()
        y, M = torch.empty_like(x), x.shape[-1]
        record = NORM.pack_numbers(
            x.numel() // M, M, x.data_ptr(), weight.data_ptr(), y.data_ptr(), eps, offset
        )
        openmp.run(_entry()(x.dtype), record, 1)
        return y
    _check(x, weight)
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = weight.to(wide) + offset if offset else weight.to(wide)
    return F.rms_norm(x.to(wide), x.shape[-1:], scale, eps).to(x.dtype)


def _check(x: Tensor, weight: Tensor) -> None:
    """x [...,M] is a floating tensor, and weight [M] has a number for each feature of it, on the
    same device.
    """
    fits = (
        isinstance(x, Tensor)
        and weight.ndim == 1
        and x.shape[-1:] == weight.shape
        and x.is_floating_point()
        and weight.is_floating_point()
        and x.device == weight.device
    )
    if fits:
        return
    check_tensor("x", x)
    check_tensor("weight", weight)
    if x.shape[-1:] != weight.shape:
        raise ArgumentError(
            f"x is {tuple(x.shape)} and the norm's weight {tuple(weight.shape)}; the last "
            "dimension of x must have one "
            "number of the weight for each feature: build the norm for this size"
        )
    raise ArgumentError(f"x is on {x.device} and weight on {weight.device}; move one with .to()")


@cache
def _entry() -> Callable[[torch.dtype], int]:
    from regard.ops.jit import norm

    return norm.entry
