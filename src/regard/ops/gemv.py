"""`gemv`: y = W x + b for a few vectors x on a CPU, as fast as W can be read from memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from regard.errors import ArgumentError, ArgumentTypeError
from regard.ops.cpu import launch, threads
from regard.ops.cpu.arguments import MAX_RUNS, struct_layout
from regard.ops.cpu.library import DTYPES, entry, has_kernels, has_kernels_in_graph
from regard.process_state import is_compiling, is_exporting, is_in_transform, is_transformed

_MOST = {torch.float32: 4, torch.bfloat16: 4, torch.float16: 15}
MAX_VECTORS = {dtype: _MOST[dtype] for dtype in DTYPES}
"""The largest number of vectors, by dtype, for which the compiled loop is faster than torch."""

MIN_WEIGHT_SIZE = 1 << 14
"""The smallest number of elements of a weight for which the compiled loop beats torch."""

_ARGUMENTS = struct_layout("Gemv")

WEIGHTS_PER_THREAD = 1 << 17
"""The number of elements of the weight per additional thread, which pays for its start."""


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
    y = launch.empty(*x.shape[:-1], N, dtype=dtype)
    workers = min(threads.thread_count(), 1 + N * M // weights_per_thread)
    record = _ARGUMENTS.pack_numbers(
        element_count // M,
        M,
        N,
        launch.address(x, dtype),
        launch.address(weight, dtype),
        0 if bias is None else launch.address(bias, dtype),
        launch.address(y, dtype),
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
    # many fp16 vectors take three times as long in torch's operation as in
    # `regard.nn.weights`, which asks for their number as well: this adds no graph
    if x.dtype == torch.float16 and x.numel() > MAX_VECTORS[x.dtype] * M:
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
