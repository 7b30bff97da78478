"""The compiled product of a matrix and a few vectors, y = W x + b. Each number of W is read once,
in the order of its memory.

One row of W is read at a time: a core that reads four rows at once reaches half of the memory
bandwidth (LOG.md). `regard.ops.gemv` calls `entry_address`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from regard.ops.jit.argument_structs import GEMV_STRUCT
from regard.ops.jit.compile import njit_strict
from regard.ops.jit.entry_points import (
    STORAGE,
    entry_point,
    memory_at,
    struct_at,
    take_next,
    take_task,
)
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
"""The number of vectors x that are multiplied with a number of W while it is in a register."""

PREFETCH_DISTANCE = 8192
"""The distance in bytes from the numbers of W that are read to those that are prefetched."""

TASK_BYTES = 1 << 17
"""The size in bytes of the rows of W in one task."""


ARGUMENTS = GEMV_STRUCT.dtype


def make_row_dot(rows: int) -> Any:
    """Return a compiled function that computes the dot products of one row of W with `rows`
    vectors, and writes them to out[:rows].
    """

    def product(
        context: Any,
        weights_type: Any,
        start_type: Any,
        vectors_type: Any,
        first_type: Any,
        tag_type: Any,
        out_type: Any,
    ) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            flat, start, vectors, r, _, results = args
            row = builder.gep(array_data(context, builder, weights_type, flat), [start])
            vector_rows = [
                row_pointer(
                    context, builder, vectors_type, vectors, builder.add(r, i64_constant(i))
                )
                for i in range(rows)
            ]
            vectors_array = context.make_array(vectors_type)(context, builder, value=vectors)
            M = cgutils.unpack_tuple(builder, vectors_array.shape)[1]
            # fp32 numbers are read slower if an iteration reads more than one cache line (LOG.md)
            unrolled = 1 if pointee_size(row) == 4 else VECTORS_PER_STEP // rows
            wide = unrolled * LANES
            bounds = [
                i64_constant(0),
                *(builder.and_(M, i64_constant(-step)) for step in (wide, LANES)),
                M,
            ]
            total = [ZEROS] * rows
            for begin, end, step in zip(bounds, bounds[1:], (wide, LANES, 1), strict=False):
                total = _sum_over_dims(
                    builder, (begin, end, step), row, vector_rows, tag_type, total
                )
            store(
                builder,
                lane_sums(builder, total),
                array_data(context, builder, out_type, results),
                rows,
            )
            return context.get_dummy_value()

        return types.void(
            weights_type, start_type, vectors_type, first_type, tag_type, out_type
        ), code

    return intrinsic(product)


def _sum_over_dims(
    builder: Any,
    run: tuple[Any, Any, int],
    row: Any,
    vectors: list[Any],
    tag: Any,
    total: list[Any],
) -> list[Any]:
    """Emit the loop that adds the products of a range of dimensions. An iteration covers several
    LLVM vectors of dimensions, each with its own sum.

    Args:
        builder: the LLVM builder.
        run: begin, end and step of the range.
        row: a pointer to the row of W.
        vectors: pointers to the vectors x.
        tag: the Numba type that describes the encoding of the numbers.
        total: the sums so far, an LLVM vector for each vector x.

    Returns:
        The sums after the loop, in the same form.
    """
    begin, end, step = run
    vectors_per_step, lanes, rows = max(1, step // LANES), min(step, LANES), len(vectors)
    loop = LLVMLoop(builder, begin, end, step, [*total, *[ZEROS] * (rows * (vectors_per_step - 1))])
    row_position = builder.gep(row, [loop.index])
    if step > 1:
        size = pointee_size(row_position)
        prefetch_bytes(builder, row_position, PREFETCH_DISTANCE, step * size)
    sums_after = list(loop.now)
    for j in range(vectors_per_step):
        place = [builder.add(loop.index, i64_constant(j * LANES))]
        k = load(builder, builder.gep(row, place), tag, lanes)
        for i, x in enumerate(vectors):
            v, n = load(builder, builder.gep(x, place), tag, lanes), j * rows + i
            sums_after[n] = multiply_add(builder, k, v, sums_after[n])
    final = loop.close(sums_after)
    results = final[:rows]
    for j in range(1, vectors_per_step):
        more = final[j * rows : (j + 1) * rows]
        results = [builder.fadd(a, b) for a, b in zip(results, more, strict=True)]
    return results


_dot_4, _dot_1 = make_row_dot(VECTORS_PER_STEP), make_row_dot(1)


@njit_strict
def multiply_rows(linear_map, rows, vectors, R, tag, products, out):
    """Compute some of the rows of W x + b for R vectors x.

    linear_map: (W, b, whether there is a bias). rows: the first row and one past the last one.
    vectors: fp32 `[R', M]`, where R' is 1, or R rounded up to a multiple of VECTORS_PER_STEP.
    products: room for VECTORS_PER_STEP numbers. out: (memory y, the place of the first row of the
    first vector in it, the distance from one vector to the next).
    """
    w, b, has_bias = linear_map
    y, place, stride = out
    M = vectors.shape[1]
    for i in range(rows[0], rows[1]):
        bias = to_float32(b[i], tag) if has_bias else np.float32(0)
        for r in range(0, R, VECTORS_PER_STEP):
            if R == 1:
                _dot_1(w, i * M, vectors, r, tag, products)
            else:
                _dot_4(w, i * M, vectors, r, tag, products)
            for j in range(min(VECTORS_PER_STEP, R - r)):
                y[place + (r + j) * stride + i - rows[0]] = from_float32(products[j] + bias, tag, y)


@njit_strict
def padded_count(R):
    """Return the number of rows of the array in which `multiply_rows` takes R vectors."""
    return 1 if R == 1 else (R + VECTORS_PER_STEP - 1) // VECTORS_PER_STEP * VECTORS_PER_STEP


@njit_strict
def run_tasks(address, arguments, x, w, b, y, tag):
    """Take tasks, blocks of rows of W, until none is left, and write their results to y.

    The vectors are first converted to fp32, and their number is padded to a multiple of
    VECTORS_PER_STEP (a single vector is not padded).
    """
    R, M, N = arguments.R, arguments.M, arguments.N
    vectors = np.zeros((padded_count(R), M), np.float32)
    for r in range(R):
        for i in range(M):
            vectors[r, i] = to_float32(x[r * M + i], tag)
    step, products = max(1, TASK_BYTES // (M * w.itemsize)), np.empty(VECTORS_PER_STEP, np.float32)
    tasks, team = (N + step - 1) // step, (take_task(address), arguments.runs)
    task = take_next(address, tasks, team)
    while task < tasks:
        n = task * step
        rows = (n, min(N, n + step))
        multiply_rows((w, b, arguments.b != 0), rows, vectors, R, tag, products, (y, n, N))
        task = take_next(address, tasks, team)


def _make_entry(dtype: Any, tag: Any) -> Callable[[int], None]:
    """Return the Python function of the entry for one storage dtype and tag, to be compiled."""

    def entry(address: int) -> None:
        arguments = struct_at(address, ARGUMENTS)
        x, w = memory_at(arguments.x, dtype), memory_at(arguments.w, dtype)
        b, y = memory_at(arguments.b, dtype), memory_at(arguments.y, dtype)
        run_tasks(address, arguments, x, w, b, y, tag)

    return entry


@entry_point
def entry_address(dtype: torch.dtype) -> Callable[[int], None]:
    """Return the address of the compiled entry for weights of a dtype."""
    return _make_entry(*STORAGE[dtype])
