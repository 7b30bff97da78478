"""A linear map of a few vectors on a CPU, at the memory's speed: what a decoded token spends its time on."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from regard.ops.jit import has_numba

ROWS = {torch.float32: 4, torch.bfloat16: 4, torch.float16: 15}
"""Most vectors, by dtype: beyond, torch's products of matrices are faster."""

LEAST = 1 << 14
"""Numbers of a weight from which on it pays: less is near, and a call costs."""

SHARE = 1 << 17
"""Numbers of a weight that are worth a thread."""


def suits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `gemv` can do it, and is the faster one."""
    return (
        weight.numel() >= LEAST
        and 0 < x.numel() <= ROWS.get(x.dtype, 0) * weight.shape[1]
        and at_hand(x, weight)
        and weight.is_contiguous()
        and (bias is None or (at_hand(bias, weight) and bias.is_contiguous()))
    )


def at_hand(x: Tensor, weight: Tensor) -> bool:
    """Whether compiled code may read both: one dtype on a CPU, no graph, no gradient, no autocast; and Numba is there."""
    return (
        x.dtype == weight.dtype
        and x.dtype in ROWS
        and x.is_cpu
        and weight.is_cpu
        and type(x) in _PLAIN
        and type(weight) in _PLAIN
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and has_numba()
    )


_PLAIN = (Tensor, torch.nn.Parameter)
"""Tensors whose memory is their numbers."""


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = W x + b for a few vectors x [..., M], W [N,M] and b [N] -> [..., N]: summed in fp32, rounded once.

    >>> gemv(torch.ones(2, 3), torch.eye(3)).tolist()
    [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """
    entry, run, threads = _compiled()
    N, M = weight.shape
    x = x.contiguous()
    y = torch.empty(*x.shape[:-1], N, dtype=weight.dtype)
    at = (x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), y.data_ptr())
    workers = min(threads(), 1 + weight.numel() // SHARE)
    run(entry(weight.dtype), (0, x.numel() // M, M, N, *at, 0), workers)
    return y


@cache
def _compiled() -> Any:
    from regard.ops.jit import gemv as jit
    from regard.ops.jit import pool, team

    return jit.entry, team.run, pool.threads
