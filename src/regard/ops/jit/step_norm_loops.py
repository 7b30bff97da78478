"""The norms of the compiled step that are chosen by data: RMS norms, LayerNorms with and without
weight and bias, and factors in the place of a norm.
"""

from __future__ import annotations

import math

import numpy as np

from regard.ops.jit.argument_structs import STEP_NORM_STRUCT
from regard.ops.jit.compile import njit_fastmath, njit_strict
from regard.ops.jit.entry_points import memory_at, struct_at
from regard.ops.jit.half_precision import from_float32, to_float32
from regard.ops.jit.rms_norm_loops import norm_rows
from regard.ops.jit.step_parts import write_vectors

NORM = STEP_NORM_STRUCT.dtype


@njit_fastmath
def layer_norm_rows(x, parts, y, R, M, numbers, tag):
    """Compute y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * (w + offset) + b, row by row
    in fp32; x, y `[R, M]` are flat memory. w + offset is rounded, as the modules store it.

    parts: (w, whether there is one, b, whether there is one). numbers: (eps, offset).
    """
    w, has_weight, b, has_bias = parts
    eps, offset = numbers
    for r in range(R):
        row, out = x[r * M : (r + 1) * M], y[r * M : (r + 1) * M]
        total = np.float32(0)
        for i in range(M):
            total += to_float32(row[i], tag)
        mean, squares = np.float32(total / np.float32(M)), np.float32(0)
        for i in range(M):
            a = to_float32(row[i], tag) - mean
            squares += a * a
        scale = np.float32(1 / math.sqrt(np.float64(squares) / M + eps))
        for i in range(M):
            factor, shift = np.float32(1), np.float32(0)
            if has_weight:
                stored = from_float32(to_float32(w[i], tag) + offset, tag, out)
                factor = to_float32(stored, tag)
            if has_bias:
                shift = to_float32(b[i], tag)
            normed = (to_float32(row[i], tag) - mean) * scale
            out[i] = from_float32(normed * factor + shift, tag, out)


@njit_fastmath
def scale_rows(x, factor, y, n, tag):
    """Write n numbers of x times a factor to y."""
    for i in range(n):
        y[i] = from_float32(to_float32(x[i], tag) * factor, tag, y)


@njit_strict
def apply_norm(x, place, R, M, out, dtype, tag):
    """Apply the norm at an address to x `[R, M]`, and write the result to `out`.

    Returns the array with the result, which is x if the address is 0, which stands for no norm.
    """
    if place == 0:
        return x
    norm = struct_at(place, NORM)
    offset = np.float32(norm.offset)
    w, b = memory_at(norm.w, dtype), memory_at(norm.b, dtype)
    if norm.kind == 0:
        norm_rows(x, w, out, R, M, norm.eps, offset, tag)
    elif norm.kind == 1:
        layer_norm_rows(x, (w, norm.w != 0, b, norm.b != 0), out, R, M, (norm.eps, offset), tag)
    else:
        scale_rows(x, offset, out, R * M, tag)
    return out


@njit_strict
def add_normed(x, y, place, R, M, out, dtype, tag):
    """Write to `out` the sum of the hidden states x and the norm at an address of a sublayer's
    result y, all `[R, M]`.
    """
    y = apply_norm(y, place, R, M, out, dtype, tag)
    for i in range(R * M):
        out[i] = from_float32(to_float32(x[i], tag) + to_float32(y[i], tag), tag, out)


@njit_strict
def write_normed(x, place, R, M, room, vectors, dtype, tag):
    """Write the norm at an address of x `[R, M]` to the fp32 vectors `[R', M']`. room: memory for
    R M numbers.
    """
    write_vectors(apply_norm(x, place, R, M, room, dtype, tag), R, M, vectors, tag)
