"""The RMS norm of a few rows, compiled: for them torch's time is that of its calls, not of its
numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

from regard.ops.jit.bits import widen
from regard.ops.jit.pack import compiled, narrow
from regard.ops.jit.tasks import KINDS, address_of, line_at, numbers, real

BUILT_UPON = "6d77e3833c5c7658"
"""Of what it compiles in: Numba keeps compiled code until this very file changes
(tests/ops/test_jit.py).
"""

LENGTH = 8
"""Numbers that the entry is given: one unused, R, M, addresses of x [R,M], the weight [M] and y,
eps, offset.
"""


@compiled
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
        given = numbers(address, LENGTH)
        x, w, y = line_at(given[3], dtype), line_at(given[4], dtype), line_at(given[5], dtype)
        norm_rows(x, w, y, given[1], given[2], real(given[6]), np.float32(real(given[7])), tag)

    return entry


@cache
def entry(dtype: torch.dtype) -> int:
    """The address of the entry for rows of a dtype."""
    return address_of(_entry(*KINDS[dtype]))
