"""What acts on each token alone: in one pass on a CPU a linear map of a few tokens (`gemv`), the
RMS norm, and silu(gate) * up; and clipping.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from regard.argument_checks import check_tensor
from regard.errors import ArgumentError, ArgumentTypeError
from regard.huge_pages import empty_like
from regard.ops.cpu import arguments, threads
from regard.ops.cpu.arguments import MAX_RUNS, struct_layout
from regard.ops.cpu.library import DTYPES, entry, has_kernels, has_kernels_in_graph
from regard.process_state import (
    is_compiling,
    is_exporting,
    is_in_transform,
    is_tracing_onnx,
    is_transformed,
)


def _slow_in_torch() -> frozenset[torch.dtype]:
    """Return fp16, and bf16 on processors without AVX-512 or Arm's instructions for it."""
    supports_bf16 = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    return frozenset({torch.float16} | (set() if supports_bf16() else {torch.bfloat16}))


_SLOW_IN_TORCH = _slow_in_torch()
_MOST = {torch.float32: 8 if torch.backends.cpu.get_cpu_capability() == "AVX2" else 4}
MAX_VECTORS = {x: 15 if x in _SLOW_IN_TORCH else _MOST.get(x, 4) for x in DTYPES}
"""The largest number of vectors, by dtype, for which the compiled loop is faster than torch."""

MIN_WEIGHT_SIZE = 1 << 14
"""The smallest number of elements of a weight for which the compiled loop beats torch."""

_ARGUMENTS = struct_layout("Gemv")

WEIGHTS_PER_THREAD = 1 << 17
"""The number of elements of the weight per additional thread, which pays for its start."""


def is_slow_in_torch(dtype: torch.dtype) -> bool:
    """Return whether torch multiplies many vectors of a dtype on this CPU in up to seven times as
    long as in fp32 (LOG.md).
    """
    return dtype in _SLOW_IN_TORCH


def multiplies_in_fp32(x: Tensor) -> bool:
    """Return whether many vectors are multiplied in fp32, because torch is slow in their dtype."""
    return x.is_cpu and is_slow_in_torch(x.dtype) and not torch.is_autocast_enabled("cpu")


def check_linear_map(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Check that x `[..., M]`, weight `[N, M]` and bias `[N]` agree in sizes, dtype and device."""
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
    if not fits:  # only now, because every layer of a model calls this function for every token
        _raise_mismatch(x, weight, bias)


def _raise_mismatch(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise an error with the reason why x, weight and bias do not fit together."""
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
            "requires: pass vectors of that size, or build the layer for this one"
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
                f"x is {_dtype_name(x)} and {name} is {_dtype_name(y)}; all must have one dtype: "
                "convert one with .to()"
            )


def _dtype_name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def try_gemv(
    x: object,
    weight: Tensor,
    bias: Tensor | None,
    *,
    only_if_faster: bool = True,
    weights_per_thread: int = WEIGHTS_PER_THREAD,
) -> Tensor | None:
    """Compute W x + b with compiled code, or return None where it cannot run or is not faster."""
    if (
        not isinstance(x, Tensor)
        or type(x) not in _PLAIN_TENSOR_TYPES
        or type(weight) not in _PLAIN_TENSOR_TYPES
    ):
        return None
    if is_compiling():  # torch.compile would specialize the graph on the sizes below
        return _linear_operator(x, weight, bias)
    dtype, element_count = x.dtype, x.numel()
    if dtype not in MAX_VECTORS or weight.dtype != dtype or weight.ndim != 2:
        return None
    N, M = weight.shape
    if only_if_faster and (element_count > MAX_VECTORS[dtype] * M or N * M < MIN_WEIGHT_SIZE):
        return None
    if element_count == 0 or N == 0 or x.shape[-1:] != (M,):
        return None
    if not (x.is_cpu and weight.is_cpu and weight.is_contiguous()):
        return None
    if bias is not None:
        if type(bias) not in _PLAIN_TENSOR_TYPES or bias.shape != (N,) or bias.dtype != dtype:
            return None
        if not (bias.is_cpu and bias.is_contiguous()):
            return None
    if torch.is_grad_enabled() and any(y.requires_grad for y in (x, weight, bias) if y is not None):
        return None
    # a dispatch mode, such as torch's counter of FLOPs, sees torch's operations only
    observed = only_if_faster and torch._C._len_torch_dispatch_stack()
    if observed or torch.is_autocast_enabled("cpu") or is_transformed() or not has_kernels():
        return None
    x = x.contiguous()
    y = arguments.empty(*x.shape[:-1], N, dtype=dtype)
    workers = min(threads.thread_count(), 1 + N * M // weights_per_thread)
    record = _ARGUMENTS.pack_numbers(
        element_count // M,
        M,
        N,
        arguments.address(x, dtype),
        arguments.address(weight, dtype),
        0 if bias is None else arguments.address(bias, dtype),
        arguments.address(y, dtype),
        min(workers, MAX_RUNS),
    )
    threads.run_entry(entry("gemv", dtype), record, workers)
    return y


def _linear_operator(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Compute W x + b in a graph by the operator `regard::linear`; None: by torch's."""
    y = (x, weight) if bias is None else (x, weight, bias)
    if (
        is_exporting()
        or torch.is_autocast_enabled("cpu")
        or any(z.device.type != "cpu" or z.dtype != x.dtype for z in y)
        or (torch.is_grad_enabled() and any(z.requires_grad for z in y))
        or x.dtype not in MAX_VECTORS
        or is_in_transform()
        or not has_kernels_in_graph()
    ):
        return None
    N, M = weight.shape
    if x.shape[-1] != M or N * M < MIN_WEIGHT_SIZE or (bias is not None and bias.shape != (N,)):
        return None
    # `regard.nn.weights` multiplies them in fp32, and asks for their number: this adds no graph
    if is_slow_in_torch(x.dtype) and x.numel() > MAX_VECTORS[x.dtype] * M:
        return None
    z: Tensor = torch.ops.regard.linear(x, weight, bias)
    return z


_LIBRARY = torch.library.Library("regard", "FRAGMENT")
_LIBRARY.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute W x + b when the operator is executed."""
    y = try_gemv(x, weight, bias)
    return F.linear(x, weight, bias).contiguous() if y is None else y


def _linear_shape(x: Tensor, weight: Tensor, _bias: Tensor | None) -> Tensor:
    """Return the output of the operator without values."""
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _linear_flops(x: Tensor, weight: Tensor, *_others: object, **_options: object) -> int:
    """Return the FLOPs of W x."""
    return 2 * x.numel() * weight.shape[0]


_LIBRARY.impl("linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake("regard::linear", _linear_shape, lib=_LIBRARY)
register_flop_formula(torch.ops.regard.linear, get_raw=True)(_linear_flops)


def compiled_kernel_applies(x: object, weight: Tensor) -> bool:
    """Return whether compiled code may read both tensors, and there are kernels."""
    return (
        isinstance(x, Tensor)
        and type(x) in _PLAIN_TENSOR_TYPES
        and type(weight) in _PLAIN_TENSOR_TYPES
        and not is_compiling()
        and (dtype := x.dtype) in MAX_VECTORS
        and dtype == weight.dtype
        and x.is_cpu
        and weight.is_cpu
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        and not torch.is_autocast_enabled("cpu")
        and not is_transformed()
        and has_kernels()
    )


_PLAIN_TENSOR_TYPES = (Tensor, torch.nn.Parameter)
"""The tensor types whose `data_ptr()` is the address of their elements."""


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute y = W x + b for a few vectors; sums are in fp32 and rounded once."""
    check_linear_map(x, weight, bias)
    y = try_gemv(x, weight, bias, only_if_faster=False)
    if y is None:
        raise ArgumentError(
            f"gemv was given x {_dtype_name(x)} {tuple(x.shape)} and weight {_dtype_name(weight)} "
            f"{tuple(weight.shape)}; it supports "
            f"{', '.join(str(dtype).removeprefix('torch.') for dtype in MAX_VECTORS)} on a CPU, "
            "contiguous, not empty, without gradients or autocast, and it needs compiled kernels: "
            "use regard.nn.weights.linear"
        )
    return y


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
        addresses = (arguments.address(z, x.dtype) for z in (x, weight, y))
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


def clip(x: Tensor, low: float, high: float) -> Tensor:
    """Clip the numbers of x [...] to [low, high]; a bound that its dtype cannot hold is infinite.

    >>> clip(torch.tensor([-70000.0, 1.0]).half(), -2.0, 1e5)
    tensor([-2.,  1.], dtype=torch.float16)
    """
    largest = torch.finfo(x.dtype).max
    low, high = (y if abs(y) <= largest else math.copysign(math.inf, y) for y in (low, high))
    return x.clamp(low, high)


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
        addresses = (arguments.address(x, gate.dtype) for x in (gate, up, out))
        record = _GATED_PRODUCT.pack_numbers(n, *addresses)
        workers = min(threads.thread_count(), 1 + n // SIZE_PER_THREAD)
        threads.run_entry(entry("gated_product", gate.dtype), record, workers)
        return out
    return F.silu(gate) * up
