"""A matrix with a few vectors, compiled: y = W x + b, each weight read once, in the order in which
it lies in memory.

One row of W at a time: a core that reads four at once reads at half the memory's speed (LOG.md).
`entry` at the end is what `regard.ops.gemv` calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from regard.ops.jit.argument_structs import GEMV_STRUCT
from regard.ops.jit.compile import njit_strict
from regard.ops.jit.entry_points import STORAGE, compile_entry, memory_at, struct_at, take_task
from regard.ops.jit.half_precision import from_float32, to_float32
from regard.ops.jit.llvm_vectors import (
    LANES,
    ZEROS,
    LLVMLoop,
    array_data,
    i64_constant,
    lane_sums,
    pointee_size,
    prefetch_bytes,
    row_pointer,
    store,
)
from regard.ops.jit.llvm_vectors import fma as multiply_add
from regard.ops.jit.llvm_vectors import load_floats as load

VECTORS_PER_STEP = 4
"""Vectors that a weight is multiplied with once it is in a register."""

PREFETCH_DISTANCE = 2048
"""Bytes ahead of a weight that are asked for."""

TASK_BYTES = 1 << 17
"""Bytes of weights that make a task."""


ARGUMENTS = GEMV_STRUCT.dtype


def _make_row_dot(rows: int) -> Any:
    """The products of one row of W with so many vectors, to out[:rows]."""

    def product(context: Any, w: Any, at: Any, x: Any, first: Any, tag: Any, out: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            flat, start, vectors, r, _, found = args
            row = builder.gep(array_data(context, builder, w, flat), [start])
            given = [
                row_pointer(context, builder, x, vectors, builder.add(r, i64_constant(i)))
                for i in range(rows)
            ]
            made = context.make_array(x)(context, builder, value=vectors)
            M = cgutils.unpack_tuple(builder, made.shape)[1]
            wide = VECTORS_PER_STEP // rows * LANES
            ends = [
                i64_constant(0),
                *(builder.and_(M, i64_constant(-step)) for step in (wide, LANES)),
                M,
            ]
            total = [ZEROS] * rows
            for begin, end, step in zip(ends, ends[1:], (wide, LANES, 1), strict=False):
                total = _sum_over_dims(builder, (begin, end, step), row, given, tag, total)
            store(
                builder, lane_sums(builder, total), array_data(context, builder, out, found), rows
            )
            return context.get_dummy_value()

        return types.void(w, at, x, first, tag, out), code

    return intrinsic(product)


def _sum_over_dims(
    builder: Any, run: tuple[Any, Any, int], row: Any, given: list[Any], tag: Any, total: list[Any]
) -> list[Any]:
    """A run of dims, so many to a turn of the loop, each vector of them with a sum of its own."""
    begin, end, step = run
    many, lanes, rows = max(1, step // LANES), min(step, LANES), len(given)
    loop = LLVMLoop(builder, begin, end, step, [*total, *[ZEROS] * (rows * (many - 1))])
    here = builder.gep(row, [loop.i])
    if step > 1:
        prefetch_bytes(builder, here, PREFETCH_DISTANCE, step * pointee_size(here))
    after = list(loop.now)
    for j in range(many):
        place = [builder.add(loop.i, i64_constant(j * LANES))]
        k = load(builder, builder.gep(row, place), tag, lanes)
        for i, x in enumerate(given):
            v, n = load(builder, builder.gep(x, place), tag, lanes), j * rows + i
            after[n] = multiply_add(builder, k, v, after[n])
    done = loop.close(after)
    found = done[:rows]
    for j in range(1, many):
        more = done[j * rows : (j + 1) * rows]
        found = [builder.fadd(a, b) for a, b in zip(found, more, strict=True)]
    return found


_dot_4, _dot_1 = _make_row_dot(VECTORS_PER_STEP), _make_row_dot(1)


@njit_strict
def run_tasks(address, given, x, w, b, y, tag):
    """Blocks of rows of W, while there are any; flat memory. Vectors are widened once, to a
    multiple of four or one.
    """
    R, M, N = given.R, given.M, given.N
    vectors = np.zeros(
        (1 if R == 1 else (R + VECTORS_PER_STEP - 1) // VECTORS_PER_STEP * VECTORS_PER_STEP, M),
        np.float32,
    )
    for r in range(R):
        for i in range(M):
            vectors[r, i] = to_float32(x[r * M + i], tag)
    step, found = max(1, TASK_BYTES // (M * w.itemsize)), np.empty(VECTORS_PER_STEP, np.float32)
    while True:
        n = take_task(address) * step
        if n >= N:
            break
        for i in range(n, min(N, n + step)):
            bias = to_float32(b[i], tag) if given.b else np.float32(0)
            for r in range(0, R, VECTORS_PER_STEP):
                if R == 1:
                    _dot_1(w, i * M, vectors, r, tag, found)
                else:
                    _dot_4(w, i * M, vectors, r, tag, found)
                for j in range(min(VECTORS_PER_STEP, R - r)):
                    y[(r + j) * N + i] = from_float32(found[j] + bias, tag, y)


def _make_entry(dtype: Any, tag: Any) -> Callable[[int], None]:
    def entry(address: int) -> None:
        given = struct_at(address, ARGUMENTS)
        x, w = memory_at(given.x, dtype), memory_at(given.w, dtype)
        b, y = memory_at(given.b, dtype), memory_at(given.y, dtype)
        run_tasks(address, given, x, w, b, y, tag)

    return entry


@cache
def entry_address(dtype: torch.dtype) -> int:
    """The address of the entry for weights of a dtype."""
    return compile_entry(_make_entry(*STORAGE[dtype]))
