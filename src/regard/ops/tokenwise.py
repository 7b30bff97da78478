"""What acts on each token alone, in one pass on a CPU: the RMS norm, and silu(gate) * up."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.argument_checks import check_tensor
from regard.errors import ArgumentError
from regard.huge_pages import empty_like
from regard.ops.cpu import launch, threads
from regard.ops.cpu.arguments import struct_layout
from regard.ops.cpu.library import entry
from regard.ops.gemv import compiled_kernel_applies
from regard.process_state import is_tracing_onnx

SIZE_PER_THREAD = 1 << 16
"""The number of elements per additional thread, which pays for its start."""
_RMS_NORM, _GATED_PRODUCT = struct_layout("RmsNorm"), struct_layout("GatedProduct")

MIN_SIZE = 1 << 13
"""The smallest number of elements for which the compiled product beats torch."""

LANES = 16
"""The loop of the product computes a multiple of so many elements."""


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
        record = _RMS_NORM.pack_numbers(x.numel() // M, M, *addresses, eps, offset)
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


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up, where silu x = x / (1 + e^-x).

    silu(gate) is rounded first, as by two operators of torch. On a CPU without a gradient, one
    compiled loop computes both.

    Source: Elfwing et al. 2018 (arXiv 1702.03118), equation 5; Shazeer 2020 (arXiv 2002.05202).
    """
    if (
        # first, because torch.compile would specialize the graph on the sizes below
        compiled_kernel_applies(gate, up)
        and gate.numel() >= MIN_SIZE
        and gate.numel() % LANES == 0
        and gate.shape == up.shape
        and torch._C._len_torch_dispatch_stack() == 0
    ):
        gate, up = gate.contiguous(), up.contiguous()
        out, n = empty_like(gate, gate.shape), gate.numel()
        addresses = (launch.address(x, gate.dtype) for x in (gate, up, out))
        record = _GATED_PRODUCT.pack_numbers(n, *addresses)
        workers = min(threads.thread_count(), 1 + n // SIZE_PER_THREAD)
        threads.run_entry(entry("gated_product", gate.dtype), record, workers)
        return out
    return F.silu(gate) * up
