"""A linear map of a few vectors on a CPU, at the memory's speed: what a decoded token spends its
time on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.ops.jit import has_numba, openmp
from regard.ops.jit.records import GEMV
from regard.process_state import is_compiling

ROWS = {torch.float32: 4, torch.bfloat16: 4, torch.float16: 15}
"""Most vectors, by dtype: beyond, torch's products of matrices are faster."""

LEAST = 1 << 14
"""Numbers of a weight from which on it pays: less is near, and a call costs."""

SHARE = 1 << 17
"""Numbers of a weight that are worth a thread."""


def check_map(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """x [...,M], weight [N,M] and bias [N] make a linear map: sizes, dtype and device agree.

    Raises:
        ArgumentError, ArgumentTypeError: they do not.

    >>> check_map(torch.ones(1, 4), torch.ones(2, 3), None)
    Traceback (most recent call last):
    regard.errors.ArgumentError: x is (1, 4); its last dimension must be 3, as the weight ...
    """
    fits = (
        isinstance(x, Tensor)
        and weight.ndim == 2
        and x.ndim > 0
        and x.shape[-1] == weight.shape[1]
        and x.dtype == weight.dtype
        and x.device == weight.device
        and (
            bias is None
            or (
                bias.shape == weight.shape[:1]
                and bias.dtype == weight.dtype
                and bias.device == weight.device
            )
        )
    )
    if not fits:  # what is wrong is found out only when something is
        _complain_of_map(x, weight, bias)


def _complain_of_map(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if not isinstance(x, Tensor):
        raise ArgumentTypeError(
            f"x is {type(x).__name__}; it must be a torch tensor [..., features]"
        )
    if weight.ndim != 2:
        raise ArgumentError(f"weight is {tuple(weight.shape)}; it must be [out, in]")
    N, M = weight.shape
    if x.ndim == 0 or x.shape[-1] != M:
        raise ArgumentError(
            f"x is {tuple(x.shape)}; its last dimension must be {M}, as the weight ({N}, {M}) "
            "takes it: "
            "give it what the layer was built for, or build the layer for this size"
        )
    if bias is not None and tuple(bias.shape) != (N,):
        raise ArgumentError(
            f"bias is {tuple(bias.shape)}; it must be ({N},), one number for each row of the "
            f"weight ({N}, {M})"
        )
    for name, y in (("weight", weight), ("bias", bias)):
        if y is None:
            continue
        if x.device != y.device:
            raise ArgumentError(f"x is on {x.device} and {name} on {y.device}; move one with .to()")
        if x.dtype != y.dtype and not torch.is_autocast_enabled(x.device.type):
            raise ArgumentTypeError(
                f"x is {_dtype(x)} and {name} is {_dtype(y)}; all must have one dtype: convert "
                "one with .to()"
            )


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def few_rows(
    x: object, weight: Tensor, bias: Tensor | None, *, only_if_faster: bool = True
) -> Tensor | None:
    """W x + b where compiled code can compute it, and is the faster; None where it cannot, is not,
    or something does not fit.

    Every matrix of a model passes here for every decoded token, so that each fact is asked for
    once, and in one function.
    """
    if not isinstance(x, Tensor) or type(x) not in _PLAIN or type(weight) not in _PLAIN:
        return None
    if is_compiling():  # a graph must not depend on the sizes below
        return None
    dtype, numbers = x.dtype, x.numel()
    if dtype not in ROWS or weight.dtype != dtype or weight.ndim != 2:
        return None
    N, M = weight.shape
    if only_if_faster and (numbers > ROWS[dtype] * M or N * M < LEAST):
        return None
    if numbers == 0 or N == 0 or x.shape[-1:] != (M,):
        return None
    if not (x.is_cpu and weight.is_cpu and weight.is_contiguous()):
        return None
    if bias is not None:
        if type(bias) not in _PLAIN or bias.shape != (N,) or bias.dtype != dtype:
            return None
        if not (bias.is_cpu and bias.is_contiguous()):
            return None
    if torch.is_grad_enabled() and any(y.requires_grad for y in (x, weight, bias) if y is not None):
        return None
    if torch.is_autocast_enabled("cpu") or not has_numba():
        return None
    x = x.contiguous()
    y = torch.empty(*x.shape[:-1], N, dtype=dtype)
    record = GEMV.pack_numbers(
        numbers // M,
        M,
        N,
        x.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
    )
    workers = min(openmp.threads(), 1 + N * M // SHARE)
    openmp.run(_entry()(dtype), record, workers)
    return y


def at_hand(x: object, weight: Tensor) -> bool:
    """Whether compiled code may read both: one dtype on a CPU, no graph, no gradient, no autocast;
    and Numba is there.
    """
    return (
        isinstance(x, Tensor)
        and type(x) in _PLAIN
        and type(weight) in _PLAIN
        and not is_compiling()
        and (dtype := x.dtype) in ROWS
        and dtype == weight.dtype
        and x.is_cpu
        and weight.is_cpu
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        and not torch.is_autocast_enabled("cpu")
        and has_numba()
    )


_PLAIN = (Tensor, torch.nn.Parameter)
"""Tensors whose memory is their numbers."""


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = W x + b for a few vectors x [..., M], W [N,M] and b [N] -> [..., N]: summed in fp32,
    rounded once.

    Raises:
        ArgumentError, ArgumentTypeError: sizes, dtypes or devices do not agree; or compiled code
            cannot read the tensors.

    >>> gemv(torch.ones(2, 3), torch.eye(3)).tolist()
    [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """
    check_map(x, weight, bias)
    y = few_rows(x, weight, bias, only_if_faster=False)
    if y is None:
        raise ArgumentError(
            f"gemv was given x {_dtype(x)} {tuple(x.shape)} and weight {_dtype(weight)} "
            f"{tuple(weight.shape)}; it reads "
            f"{', '.join(str(dtype).removeprefix('torch.') for dtype in ROWS)} on a CPU, "
            "contiguous, not empty, without "
            "gradients, autocast or a compiled graph, and needs Numba: use regard.nn.linear.linear"
        )
    return y


@cache
def _entry() -> Callable[[torch.dtype], int]:
    from regard.ops.jit import gemv

    return gemv.entry
