"""A linear map of a few vectors on a CPU, at the memory's speed: what a decoded token spends its
time on.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.ops.jit import has_numba
from regard.process import is_compiling

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
    regard.errors.ArgumentError: x is (1, 4); its last dimension must be 3, as the weight (2, 3) takes it: ...
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


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """W x + b where compiled code can compute it, and is the faster; None where it cannot, is not,
    or something does not fit.

    A decoded token passes here for every matrix of the model: each fact is asked for once.
    """
    if type(x) not in _PLAIN or type(weight) not in _PLAIN or is_compiling():
        return None
    dtype, numbers = x.dtype, x.numel()
    if dtype not in ROWS or weight.dtype != dtype or weight.ndim != 2:
        return None
    N, M = weight.shape
    if not (0 < numbers <= ROWS[dtype] * M and N * M >= LEAST and x.shape[-1:] == (M,)):
        return None
    if not (x.is_cpu and weight.is_cpu and weight.is_contiguous()):
        return None
    if bias is not None and not (bias.shape == (N,) and _goes_with(bias, weight)):
        return None
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return None
    if torch.is_autocast_enabled("cpu") or not has_numba():
        return None
    return _multiply(x, weight, bias, numbers // M)


def _readable(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return (
        at_hand(x, weight)
        and weight.is_contiguous()
        and (bias is None or _goes_with(bias, weight))
    )


def _goes_with(bias: Tensor, weight: Tensor) -> bool:
    """Whether compiled code may read the bias where it may read the weight."""
    return (
        bias.dtype == weight.dtype
        and bias.is_cpu
        and type(bias) in _PLAIN
        and bias.is_contiguous()
        and not (torch.is_grad_enabled() and bias.requires_grad)
    )


def at_hand(x: Tensor, weight: Tensor) -> bool:
    """Whether compiled code may read both: one dtype on a CPU, no graph, no gradient, no autocast;
    and Numba is there.
    """
    return (
        type(x) in _PLAIN
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
    if 0 in (x.numel(), weight.numel()) or not _readable(x, weight, bias):
        raise ArgumentError(
            f"gemv was given x {_dtype(x)} {tuple(x.shape)} and weight {_dtype(weight)} "
            f"{tuple(weight.shape)}; it reads "
            f"{', '.join(str(dtype).removeprefix('torch.') for dtype in ROWS)} on a CPU, "
            "contiguous, not empty, without "
            "gradients, autocast or a compiled graph, and needs Numba: use regard.nn.linear.linear"
        )
    return _multiply(x, weight, bias, x.numel() // weight.shape[1])


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    """The same without a look at the arguments."""
    entry, run, threads = _compiled()
    N, M = weight.shape
    x = x.contiguous()
    y = torch.empty(*x.shape[:-1], N, dtype=weight.dtype)
    at = (x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), y.data_ptr())
    workers = min(threads(), 1 + N * M // SHARE)
    run(entry(weight.dtype), (0, rows, M, N, *at, 0), workers)
    return y


@cache
def _compiled() -> Any:
    from regard.ops.jit import gemv as jit
    from regard.ops.jit import pool, team

    return jit.entry, team.run, pool.threads
