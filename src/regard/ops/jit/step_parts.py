"""What all phases of the compiled step are made of: waiting for the other threads, norms, and the
rows of linear maps. `step_loops` describes the phases.

Arguments that functions of several phases share:
    sizes: (R, the number of vectors; M, the model dim)
    scratch: memory of the thread: (the sum [R M], its norm [R M], two blocks of rows in the dtype
        of the weights, the vectors of a product in fp32, the room of `map_rows`, the vectors of an
        expert in fp32, the team of `take_next`)
"""

from __future__ import annotations

import os
import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from regard.ops.jit.argument_structs import STORED_MATRIX_STRUCT
from regard.ops.jit.compile import njit_strict
from regard.ops.jit.entry_points import (
    counter_at,
    finish_task,
    memory_at,
    struct_at,
    take_next,
    take_task,
)
from regard.ops.jit.gemv_loops import multiply_rows, padded_count
from regard.ops.jit.half_precision import from_float32, to_float32
from regard.ops.jit.rms_norm_loops import norm_rows
from regard.ops.jit.stored_weight_loops import multiply_stored

TASK_BYTES = 1 << 16
"""The size in bytes of the rows of a weight in one task of a layer. The last task of a phase keeps
the other threads waiting, so that tasks are small.
"""

SPINS = 2000
"""How often a waiting thread looks at the counter before it offers its core to other threads."""

STORED_ROWS = 256
"""The number of rows of a stored matrix whose sums are computed at a time."""

VECTOR_BLOCK = 128
"""The sizes of vectors in fp32 are multiples of it, as the codes of a stored matrix may be padded;
the numbers behind a vector are 0.
"""

MATRIX = STORED_MATRIX_STRUCT.dtype

_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
_HAS_YIELD = os.name == "posix"


@intrinsic
def pause(context: Any) -> Any:
    """Tell the processor that this thread waits in a loop."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _IS_X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            name = "llvm.x86.sse2.pause"
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])
        return context.get_dummy_value()

    return types.void(), code


@intrinsic
def offer_core(context: Any) -> Any:
    """Let other threads of the machine run first, where more threads are ready than cores."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _HAS_YIELD:
            kind = ir.FunctionType(ir.IntType(32), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), code


@njit_strict
def wait_until_finished(address, tasks):
    """Return when all tasks of the counters at an address are finished."""
    looks = 0
    while counter_at(address + 8) < tasks:
        looks += 1
        if looks < SPINS:
            pause()
        else:
            offer_core()


@njit_strict
def arrives_first(address):
    """Return whether a thread, which has a task of a phase with runs of tasks, is the first that
    asks. While it has the task the phase does not end, so that it may do what must be done once.
    """
    return take_task(address) == 0


@njit_strict
def add_result(x, y, norm, R, M, out, tag):
    """Write to `out` the sum of the hidden states x and a sublayer's result y, all `[R, M]`; a norm
    (weight, whether there is one, eps, offset) is applied to y first.
    """
    weight, has_norm, eps, offset = norm
    if has_norm:
        norm_rows(y, weight, out, R, M, eps, offset, tag)
        y = out
    for i in range(R * M):
        out[i] = from_float32(to_float32(x[i], tag) + to_float32(y[i], tag), tag, out)


@njit_strict
def padded_width(M):
    """Return the size in memory of a vector of M numbers."""
    return (M + VECTOR_BLOCK - 1) // VECTOR_BLOCK * VECTOR_BLOCK


@njit_strict
def vectors_in(memory, R, M):
    """Return the array `[R', M']` of R vectors of M numbers in scratch memory."""
    P, width = padded_count(R), padded_width(M)
    return memory[: P * width].reshape((P, width))


@njit_strict
def write_vectors(x, R, M, vectors, tag):
    """Write x `[R, M]` to the fp32 vectors `[R', M']`, with zeros behind each."""
    for r in range(R):
        for i in range(M):
            vectors[r, i] = to_float32(x[r * M + i], tag)
        vectors[r, M:] = np.float32(0)


@njit_strict
def norm_vectors(x, norm, R, M, scratch, vectors, tag):
    """Normalize x `[R, M]`, and write the result to the fp32 vectors `[R', M']`."""
    weight, has_norm, eps, offset = norm
    if has_norm:
        norm_rows(x, weight, scratch, R, M, eps, offset, tag)
        x = scratch
    write_vectors(x, R, M, vectors, tag)


@njit_strict
def map_rows(linear_map, rows, vectors, R, tag, room, out):
    """Compute some of the rows of W x + b for R vectors x; W is an array, or stored in fewer bits.

    linear_map: see `map_at`. rows: the first row and one past the last one. vectors: fp32
    `[R', M']`. room: (the products of a row, the struct of a call, sums `[R, STORED_ROWS]`).
    out: (memory y, the place of the first row of the first vector in it, the distance from one
    vector to the next).
    """
    w, b, has_bias, stored, M = linear_map
    products, call, sums = room
    if stored == 0:
        multiply_rows((w, b, has_bias), rows, vectors[:, :M], R, tag, products, out)
        return
    y, place, distance = out
    for first in range(rows[0], rows[1], STORED_ROWS):
        last = min(rows[1], first + STORED_ROWS)
        multiply_stored(stored, first, last, R, vectors, call, sums)
        for r in range(R):
            for i in range(last - first):
                bias = to_float32(b[first + i], tag) if has_bias else np.float32(0)
                p = place + r * distance + first - rows[0] + i
                y[p] = from_float32(sums[r, i] + bias, tag, y)


@njit_strict
def copy_row(x, start, out, place, n):
    """Copy n numbers from x[start] on to out[place]."""
    for i in range(n):
        out[place + i] = x[start + i]


@njit_strict
def norm_at(weight, eps, offset, dtype):
    """Return a norm by the address of its weight: (weight, whether there is one, eps, offset)."""
    return memory_at(weight, dtype), weight != 0, eps, np.float32(offset)


@njit_strict
def map_at(weight, bias, stored, M, dtype):
    """Return the linear map from M numbers whose weight, bias and stored matrix are at these
    addresses: (W, b, whether there is a bias, the address of the stored matrix or 0, M).
    """
    return memory_at(weight, dtype), memory_at(bias, dtype), bias != 0, stored, M


@njit_strict
def row_size(linear_map):
    """Return the size in bytes of a row of the weight of a linear map."""
    w, _, _, stored, M = linear_map
    return struct_at(stored, MATRIX).row_bytes if stored else M * w.itemsize


@njit_strict
def block_rows(linear_map):
    """Return the number of rows of a linear map in one task."""
    return max(1, TASK_BYTES // row_size(linear_map))


@njit_strict
def block_count(linear_map, N, task_bytes):
    """Return the number of tasks of a linear map with N rows."""
    step = max(1, task_bytes // row_size(linear_map))
    return (N + step - 1) // step


@njit_strict
def multiply_blocks(counters, linear_map, N, R, vectors, task_bytes, room, out, tag):
    """Take blocks of the N rows of a linear map until none is left, and write them to `out`
    `[R, N]`, beginning with the first task of the caller. Return when all blocks are finished.

    counters: (their address, the number of the first task, the team of `take_next`).
    """
    address, task, team = counters
    step = max(1, task_bytes // row_size(linear_map))
    tasks = (N + step - 1) // step
    while task < tasks:
        rows = (task * step, min(N, (task + 1) * step))
        map_rows(linear_map, rows, vectors, R, tag, room, (out, rows[0], N))
        finish_task(address)
        task = take_next(address, tasks, team)
    wait_until_finished(address, tasks)
