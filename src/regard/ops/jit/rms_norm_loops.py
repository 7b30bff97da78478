"""The RMS norm of a few rows, compiled: for them torch's time is that of its calls, not of its
numbers. `entry` at the end is what `regard.ops.rms_norm` calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

from regard.ops.jit.argument_structs import RMS_NORM_STRUCT
from regard.ops.jit.compile import njit_fastmath
from regard.ops.jit.entry_points import STORAGE, compile_entry, memory_at, struct_at
from regard.ops.jit.half_precision import from_float32, to_float32

ARGUMENTS = RMS_NORM_STRUCT.dtype


@njit_fastmath
def norm_rows(x, w, y, R, M, eps, offset, tag):
    """y = x / sqrt(mean(x^2) + eps) * (w + offset), row by row, in fp32; flat memory."""
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
    def entry(address: int) -> None:
        given = struct_at(address, ARGUMENTS)
        x, w, y = memory_at(given.x, dtype), memory_at(given.w, dtype), memory_at(given.y, dtype)
        norm_rows(x, w, y, given.R, given.M, given.eps, np.float32(given.offset), tag)

    return entry


@cache
def entry_address(dtype: torch.dtype) -> int:
    """The address of the entry for rows of a dtype."""
    return compile_entry(_make_entry(*STORAGE[dtype]))
