"""`stored_linear`: y = W x + b for a weight that is stored in fewer bits (`StoredWeight`).

Few vectors are multiplied by compiled loops; for many, torch multiplies dequantized panels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.ops.cpu import arguments, threads
from regard.ops.cpu.arguments import MAX_RUNS, struct_layout
from regard.ops.cpu.instruction_sets import why_none
from regard.ops.cpu.library import DTYPES, entry, has_kernels, why_not_dtype
from regard.ops.onednn import onednn_linear
from regard.ops.stored_weights import FORMS, NUMBERS_OF_DTYPES, StoredWeight
from regard.ops.tokenwise import multiplies_in_fp32
from regard.process_state import is_compiling, is_transformed
from regard.units import plural

MAX_VECTORS = 12
"""The most vectors for which the compiled loops beat products of a dequantized weight."""

BYTES_PER_THREAD = 1 << 17
"""The number of stored bytes per additional thread, which pays for its start."""

_LINEAR, _DEQUANTIZE = struct_layout("StoredLinear"), struct_layout("Dequantize")

_PLAIN = (Tensor, torch.nn.Parameter)

PANEL_ELEMENTS = 1 << 19
"""The number of elements of the weight that are dequantized at a time."""


def stored_linear(
    x: Float[Tensor, "*L M"], weight: StoredWeight, bias: Float[Tensor, " N"] | None = None
) -> Float[Tensor, "*L N"]:
    """Compute y = W x + b, where W is stored in fewer bits; sums are in fp32 (bf16: as torch's)."""
    y = _try_compiled(x, weight, bias)
    if y is None:
        _check(x, weight, bias)
        return _by_panels(x, weight, bias)
    return y


def _try_compiled(x: object, weight: StoredWeight, bias: Tensor | None) -> Tensor | None:
    """Compute W x + b by the compiled loops, or return None where they do not run."""
    if is_compiling() or type(x) not in _PLAIN or (layout := weight.layout) is None:
        return None
    assert isinstance(x, Tensor)
    N, M, row_bytes = layout[0], layout[1], layout[4]
    dtype, elements = x.dtype, x.numel()
    if dtype != weight.dtype or not 0 < elements <= MAX_VECTORS * M or x.shape[-1] != M:
        return None
    if bias is not None and not (
        type(bias) in _PLAIN
        and bias.shape == (N,)
        and bias.dtype == dtype
        and bias.is_cpu
        and bias.is_contiguous()
    ):
        return None
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return None
    if not x.is_cpu or dtype not in DTYPES or torch._C._len_torch_dispatch_stack():
        return None
    if torch.is_autocast_enabled("cpu") or is_transformed() or not has_kernels():
        return None
    matrix = weight.matrix_struct
    assert matrix is not None
    x = x.contiguous()
    y = arguments.empty(*x.shape[:-1], N, dtype=dtype)
    workers = min(threads.thread_count(), 1 + N * row_bytes // BYTES_PER_THREAD)
    record = _LINEAR.pack_numbers(
        elements // M,
        M,
        N,
        arguments.address(x, dtype),
        matrix.buffer_info()[0],
        0 if bias is None else arguments.address(bias, dtype),
        arguments.address(y, dtype),
        min(workers, MAX_RUNS),
    )
    threads.run_entry(entry("stored_linear", dtype), record, workers)
    return y


def plan_linear(x: Tensor, weight: StoredWeight, bias: Tensor | None = None) -> str:
    """Return what `stored_linear` runs for these arguments, and why."""
    _check(x, weight, bias)
    reasons = why_not_compiled(x, weight, bias)
    return f"dequantized panels: {'; '.join(reasons)}" if reasons else f"compiled {weight.form}"


def why_not_compiled(x: Tensor, weight: StoredWeight, bias: Tensor | None) -> list[str]:
    """Return the reasons why the compiled loops do not multiply these arguments; [] if they do."""
    vectors, M = x.numel() // max(1, x.shape[-1]), weight.shape[1]
    tensors = [x] if bias is None else [x, bias]
    checks: tuple[tuple[str, Callable[[], bool]], ...] = (
        ("torch.compile is active", is_compiling),
        (
            f"x has {plural(vectors, 'vector')}; compiled loops win for at most {MAX_VECTORS}",
            lambda: vectors > MAX_VECTORS,
        ),
        ("x or the weight is empty", lambda: x.numel() == 0 or M == 0),
        (
            "a stored tensor is not plain, contiguous and on a CPU, in a dtype of compiled code",
            lambda: weight.layout is None,
        ),
        (
            "x or bias is not a plain tensor on a CPU",
            lambda: not all(type(y) in _PLAIN and y.is_cpu for y in tensors),
        ),
        ("bias is not contiguous", lambda: bias is not None and not bias.is_contiguous()),
        (f"{why_not_dtype(x.dtype)}", lambda: x.dtype not in DTYPES),
        (
            "a gradient is needed",
            lambda: torch.is_grad_enabled() and any(y.requires_grad for y in tensors),
        ),
        ("autocast is active", lambda: torch.is_autocast_enabled("cpu")),
        ("a transform of torch.func is active", is_transformed),
        ("a dispatch mode is active", lambda: torch._C._len_torch_dispatch_stack() > 0),
        (f"{why_none()}", lambda: not has_kernels()),
    )
    return next(([reason] for reason, applies in checks if applies()), [])


def _by_panels(x: Tensor, weight: StoredWeight, bias: Tensor | None) -> Tensor:
    """Compute W x + b by panels of dequantized rows, in fp32 where torch is slow in the dtype."""
    N, M = weight.shape
    step = max(1, PANEL_ELEMENTS // max(1, M))
    wide = torch.float32 if multiplies_in_fp32(x) else x.dtype
    factors = x.to(wide)
    parts = []
    for first in range(0, N, step):
        panel = _dequantize_rows(weight, first, min(N, first + step), wide)
        b = None if bias is None else bias[first : first + step].to(wide)
        y = onednn_linear(factors, panel, b)
        parts.append((F.linear(factors, panel, b) if y is None else y).to(x.dtype))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _dequantize_rows(weight: StoredWeight, first: int, last: int, dtype: torch.dtype) -> Tensor:
    """Return the rows first <= n < last of W as `weight.dequantize(dtype)` has them."""
    part = weight.rows(first, last)
    layout = part.layout  # not that of `weight`, which may be older than the memory of its tensors
    if (
        is_compiling()
        or layout is None
        or weight.form not in ("int8", "int4")
        or dtype not in DTYPES
        or not has_kernels()
        or is_transformed()
        or torch._C._len_torch_dispatch_stack()
    ):
        return part.dequantize(dtype)
    _, M, _, group, row_bytes, row_scales, codes, scales = layout
    y = arguments.empty(last - first, M, dtype=dtype)
    numbers = FORMS.index(weight.form), NUMBERS_OF_DTYPES[part.scale_dtype], last - first, M
    record = _DEQUANTIZE.pack_numbers(
        *numbers, group, row_bytes, row_scales, codes, scales, arguments.address(y, dtype)
    )
    workers = min(threads.thread_count(), 1 + (last - first) * row_bytes // BYTES_PER_THREAD)
    threads.run_entry(entry("dequantize", dtype), record, workers)
    return y


def _check(x: Tensor, weight: StoredWeight, bias: Tensor | None) -> None:
    """Check that x [..., M], the weight [N, M] and bias [N] agree."""
    if not isinstance(x, Tensor):
        raise ArgumentTypeError(
            f"x is {type(x).__name__}; it must be a torch tensor [..., features]"
        )
    N, M = weight.shape
    if x.ndim == 0 or x.shape[-1] != M:
        raise ArgumentError(
            f"x is {tuple(x.shape)}; its last dimension must be {M}, as the {weight.form} weight "
            f"({N}, {M}) requires: pass vectors of that size"
        )
    if x.dtype != weight.dtype:
        raise ArgumentTypeError(
            f"x is {x.dtype}, and the {weight.form} weight computes in {weight.dtype}: convert x, "
            "or load the model with that dtype"
        )
    device = next(iter(weight.tensors().values())).device
    if x.device != device:
        raise ArgumentError(f"x is on {x.device} and the weight on {device}; move one with .to()")
    if bias is not None and (bias.shape != (N,) or bias.dtype != x.dtype or bias.device != device):
        raise ArgumentError(
            f"bias is {bias.dtype} {tuple(bias.shape)} on {bias.device}; it must be {x.dtype} "
            f"({N},) on {device}"
        )
