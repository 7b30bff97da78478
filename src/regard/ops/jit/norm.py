"""The RMS norm of a few rows, compiled: for them torch's time is that of its calls, not of its
numbers. `entry` at the end is what `regard.ops.norm` calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

from regard.ops.jit.compile import fast
from regard.ops.jit.entries import KINDS, address_of, memory_at, record_at
from regard.ops.jit.half_precision import narrow, widen
from regard.ops.jit.records import NORM

RECORD = NORM.dtype


@fast
def norm_rows(x, w, y, R, M, eps, offset, tag):
    """y = x / sqrt(mean(x^2) + eps) * (w + offset), row by row, in fp32; flat memory."""
    for r in range(R):
        row, out = x[r * M : (r + 1) * M], y[r * M : (r + 1) * M]
        total = np.float32(0)
        for i in range(M):
            a = widen(row[i], tag)
            total += a * a
        scale = np.float32(1 / math.sqrt(np.float64(total) / M + eps))
        for i in range(M):
            out[i] = narrow(widen(row[i], tag) * scale * (widen(w[i], tag) + offset), tag, out)


def _entry(dtype: Any, tag: Any) -> Callable[[int], None]:
    def entry(address: int) -> None:
        given = record_at(address, RECORD)
        x, w, y = memory_at(given.x, dtype), memory_at(given.w, dtype), memory_at(given.y, dtype)
        norm_rows(x, w, y, given.R, given.M, given.eps, np.float32(given.offset), tag)

    return entry


@cache
def entry(dtype: torch.dtype) -> int:
    """The address of the entry for rows of a dtype."""
    return address_of(_entry(*KINDS[dtype]))
