"""The compiled RMS norm. Torch computes it by several operators, each of which reads and writes all
rows. `regard.ops.rms_norm` calls `entry_address`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from regard.ops.jit.argument_structs import RMS_NORM_STRUCT
from regard.ops.jit.compile import njit_fastmath
from regard.ops.jit.entry_points import STORAGE, entry_point, memory_at, struct_at, take_task
from regard.ops.jit.half_precision import from_float32, to_float32

ARGUMENTS = RMS_NORM_STRUCT.dtype

TASK_SIZE = 1 << 14
"""About the number of elements in the rows of a task."""


@njit_fastmath
def norm_rows(x, w, y, R, M, eps, offset, tag):
    """Compute y = x / sqrt(mean(x^2) + eps) * (w + offset), row by row in fp32; x `[R, M]`, w `[M]`
    and y `[R, M]` are flat memory, encoded as the tag describes.
    """
    for r in range(R):
        row, out = x[r * M : (r + 1) * M], y[r * M : (r + 1) * M]
        total = np.float32(0)
        for i in range(M):
            a = to_float32(row[i], tag)
            total += a * a
        scale = np.float32(1 / math.sqrt(np.float64(total) / M + eps))
        for i in range(M):
            out[i] = from_float32(
                to_float32(row[i], tag) * scale * (to_float32(w[i], tag) + offset), tag, out
            )


def _make_entry(dtype: Any, tag: Any) -> Callable[[int], None]:
    """Return the Python function of the entry for one storage dtype and tag, to be compiled."""

    def entry(address: int) -> None:
        arguments = struct_at(address, ARGUMENTS)
        x, w, y = (
            memory_at(arguments.x, dtype),
            memory_at(arguments.w, dtype),
            memory_at(arguments.y, dtype),
        )
        R, M, offset = arguments.R, arguments.M, np.float32(arguments.offset)
        step = max(1, TASK_SIZE // M)
        while True:
            first = take_task(address) * step
            if first >= R:
                break
            rows = min(step, R - first)
            norm_rows(x[first * M :], w, y[first * M :], rows, M, arguments.eps, offset, tag)

    return entry


@entry_point
def entry_address(dtype: torch.dtype) -> Callable[[int], None]:
    """Return the address of the compiled entry for rows of a dtype."""
    return _make_entry(*STORAGE[dtype])
