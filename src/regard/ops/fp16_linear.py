"""`fp16_linear`: y = W x + b for many fp16 vectors, on processors with AMX.

Every fp16 number is split into two bfloat16 numbers, whose products AMX computes; only the fp32
sums are rounded. It is two to five times as fast as torch's product (LOG.md).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from math import ceil

import torch
from torch import Tensor

from regard.huge_pages import empty_like
from regard.ops.gemv import check_linear_map, compiled_kernel_applies
from regard.ops.jit import launch, openmp
from regard.ops.jit.argument_structs import FP16_LINEAR_STRUCT
from regard.ops.jit.code_files import compiled_entry
from regard.units import plural

_entry = partial(compiled_entry, "fp16_linear_loops", "entry_address")

MIN_ROWS = 16
"""The least number of rows of x; `regard.ops.gemv` computes fewer."""

MIN_WEIGHTS = 1 << 14
"""The least number of weights: smaller products take microseconds."""

DEPTH_STEP, COLUMN_STEP, ROW_STEP = 32, 64, 32
"""The numbers of a vector, the outputs and the vectors of one compiled product."""

MAX_DEPTH, MAX_COLUMNS, MAX_ROWS = 512, 512, 1024
"""The most for which split weights fit into half of an L2 cache of 2 MiB, and sums into the rest.
"""


def fp16_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Compute W x + b in fp16, or return None where another product must run."""
    check_linear_map(x, weight, bias)
    if why_not_fp16_linear(x, weight, bias):
        return None
    x = x.contiguous()
    (N, M), R = weight.shape, x.numel() // x.shape[-1]
    workers = openmp.thread_count()
    columns, rows = _task_sizes(R, N, workers)
    y, wrong = empty_like(x, (*x.shape[:-1], N)), launch.full((1,), 0, dtype=torch.int64)
    record = FP16_LINEAR_STRUCT.pack_numbers(
        R,
        M,
        N,
        launch.address(x, torch.float16),
        launch.address(weight, torch.float16),
        0 if bias is None else launch.address(bias, torch.float16),
        launch.address(y, torch.float16),
        launch.address(wrong, torch.int64),
        columns,
        rows,
        _even_part(M, ceil(M / MAX_DEPTH), DEPTH_STEP),
    )
    openmp.run_entry(_entry(), record, min(workers, ceil(N / columns) * ceil(R / rows)))
    return None if int(wrong) else y


def why_not_fp16_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> list[str]:
    """Return the reasons why `fp16_linear` does not multiply these tensors; [] if it does."""
    rows = x.numel() // max(1, x.shape[-1])
    checks: tuple[tuple[str, Callable[[], bool]], ...] = (
        (
            "compiled code cannot read the tensors, or must not, as with a gradient or autocast",
            lambda: (
                not (
                    compiled_kernel_applies(x, weight)
                    and (bias is None or compiled_kernel_applies(bias, weight))
                )
            ),
        ),
        ("a tensor is not float16", lambda: x.dtype != torch.float16),
        ("a dispatch mode is active", lambda: torch._C._len_torch_dispatch_stack() > 0),
        ("the weight or the bias is not contiguous", lambda: not _contiguous(weight, bias)),
        (
            f"x has {plural(rows, 'row')}; at least {MIN_ROWS} are needed",
            lambda: rows < MIN_ROWS,
        ),
        (
            f"W has {plural(weight.numel(), 'weight')}; at least {MIN_WEIGHTS:,} are needed",
            lambda: weight.numel() < MIN_WEIGHTS,
        ),
        (
            f"the vectors have {plural(weight.shape[-1], 'number')}, not a multiple of 32",
            lambda: weight.shape[-1] % DEPTH_STEP != 0,
        ),
        ("the processor has no AMX", lambda: not _has_tiles()),
    )
    return next(([reason] for reason, applies in checks if applies()), [])


def _contiguous(*tensors: Tensor | None) -> bool:
    """Return whether all tensors are contiguous."""
    return all(y is None or y.is_contiguous() for y in tensors)


def _task_sizes(R: int, N: int, workers: int) -> tuple[int, int]:
    """Return the outputs and vectors of a task, at least two tasks for each thread."""
    row_blocks = ceil(R / MAX_ROWS)
    least = ceil(2 * workers / row_blocks) if workers > 1 else 1
    columns = _even_part(N, max(ceil(N / MAX_COLUMNS), least), COLUMN_STEP)
    return columns, _even_part(R, row_blocks, ROW_STEP)


def _even_part(n: int, parts: int, step: int) -> int:
    """Return the size of each of about `parts` parts of n, a multiple of `step`.

    >>> _even_part(896, 2, 64)
    448
    """
    return ceil(n / (parts * step)) * step


@cache
def _has_tiles() -> bool:
    """Return whether this process multiplies tiles of bfloat16 numbers."""
    from regard.ops.jit.matmul import BF16_TILES, bfloat16_factors

    return bfloat16_factors()[0] is BF16_TILES
