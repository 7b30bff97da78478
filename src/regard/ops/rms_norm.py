"""The RMS norm, computed in fp32 or better whatever the dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.argument_checks import check_tensor
from regard.errors import ArgumentError
from regard.ops.cpu import launch, threads
from regard.ops.cpu.arguments import struct_layout
from regard.ops.cpu.library import entry
from regard.ops.gemv import compiled_kernel_applies
from regard.process_state import is_tracing_onnx

SIZE_PER_THREAD = 1 << 16
"""The number of elements per additional thread, which pays for its start."""
_ARGUMENTS = struct_layout("RmsNorm")


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Compute y = x / sqrt(mean(x^2) + eps) * (weight + offset) over the last dimension.

    It is computed in fp32 (fp64 for fp64 inputs) and rounded once to the dtype of x.

    Source: Zhang and Sennrich 2019 (arXiv 1910.07467), equation 4.
    """
    if (
        # first, because torch.compile would specialize the graph on the sizes below
        compiled_kernel_applies(x, weight)
        and x.shape[-1:] == weight.shape
        and x.numel() > 0
        and weight.is_contiguous()
        # a dispatch mode, such as torch's counter of FLOPs, sees torch's operations only
        and torch._C._len_torch_dispatch_stack() == 0
    ):
        x = x.contiguous()
        y, M = torch.empty_like(x), x.shape[-1]
        addresses = (launch.address(z, x.dtype) for z in (x, weight, y))
        record = _ARGUMENTS.pack_numbers(x.numel() // M, M, *addresses, eps, offset)
        workers = min(threads.thread_count(), 1 + x.numel() // SIZE_PER_THREAD)
        threads.run_entry(entry("rms_norm", x.dtype), record, workers)
        return y
    _check_sizes(x, weight)
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = weight.to(wide) + offset if offset else weight.to(wide)
    if is_tracing_onnx():  # that exporter has no rms_norm
        return _normalize(x if x.dtype == wide else x.to(wide), scale, eps).to(x.dtype)
    return F.rms_norm(x.to(wide), x.shape[-1:], scale, eps).to(x.dtype)


def _normalize(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * scale by single operations."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * scale


def _check_sizes(x: Tensor, weight: Tensor) -> None:
    """Check that x `[..., M]` is a float tensor, with a weight `[M]` on its device."""
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
            f"x is {tuple(x.shape)} and the weight of the norm is {tuple(weight.shape)}; the "
            "weight must have one number for each feature of x: build the norm for this size"
        )
    raise ArgumentError(f"x is on {x.device} and weight on {weight.device}; move one with .to()")
