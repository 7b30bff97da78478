"""The compiled decoding step of a whole model: one token for each row of a batch, in one call.

A layer has five phases, each divided into tasks that the threads take one after another:

    1. norm, queries, keys and values: a task is one head. It computes the rows of the head, its
       norm and its rotation, and writes queries to a buffer, keys and values to the cache.
    2. attention: the tasks of `decode_loops.run_tasks`. Its entry is called by its address, so that
       its code is not compiled a second time.
    3. output map: a task is a block of rows.
    4. norm, gate, up and activation: a task is a block of hidden units.
    5. down: a task is a block of rows.

After the last layer come the norm and the head. Between two phases a thread waits until all tasks
of the phase are finished (`wait_until_finished`). This needs no number of threads: a step is right
with any number of them, also if one begins late or never, because the others take its tasks.

What all tasks of a phase need (the sum with the last sublayer's result, the norm, the vectors in
fp32) each thread computes for itself, when it takes its first task of the phase: while it holds the
task, no other thread can go on and overwrite the inputs. The thread with task 0 stores the new
hidden states for the next phase.

Every number that the modules of a model would store is rounded to the dtype of the weights here as
well, and sums have the same order (`gemv_loops.multiply_rows`, `rms_norm_loops.norm_rows`,
`decode_loops.run_tasks`). `regard.ops.decode_step` calls `entry_address`.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from regard.ops.jit.argument_structs import (
    DECODE_STRUCT,
    STEP_LAYER_STRUCT,
    STEP_STRUCT,
    STORED_MATRIX_STRUCT,
)
from regard.ops.jit.compile import njit_fastmath, njit_strict
from regard.ops.jit.decode_loops import sink_share
from regard.ops.jit.entry_points import (
    STORAGE,
    call_entry,
    compile_entry,
    finish_task,
    memory_at,
    struct_at,
    take_task,
)
from regard.ops.jit.exp_tanh import exp, tanh
from regard.ops.jit.gemv_loops import VECTORS_PER_STEP, multiply_rows, padded_count
from regard.ops.jit.half_precision import from_float32, to_float32
from regard.ops.jit.rms_norm_loops import norm_rows
from regard.ops.jit.stored_weight_loops import make_call, mark_changed, multiply_stored

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "relu": 2}
"""The number of each activation in `STEP_LAYER_STRUCT`."""

TASK_BYTES, HEAD_TASK_BYTES = 1 << 16, 1 << 18
"""The size in bytes of the rows of a weight in one task, in a layer and in the head. The last task
of a phase keeps the other threads waiting, so that tasks of a layer are small.
"""

PHASES = 4
"""The number of phases of a layer that have counters in `STEP_STRUCT`; attention has its own."""

COUNTER_BYTES = 128
"""The distance in bytes from the counters of one phase to those of the next: whole cache lines, so
that threads do not disturb each other.
"""

SPINS = 2000
"""How often a waiting thread looks at the counter before it offers its core to other threads."""

STORED_ROWS = 256
"""The number of rows of a stored matrix whose sums are computed at a time."""

VECTOR_BLOCK = 128
"""The sizes of vectors in fp32 are multiples of it, as the codes of a stored matrix may be padded;
the numbers behind a vector are 0.
"""

STEP, LAYER, ATTENTION = STEP_STRUCT.dtype, STEP_LAYER_STRUCT.dtype, DECODE_STRUCT.dtype
MATRIX = STORED_MATRIX_STRUCT.dtype
LAYER_BYTES, ATTENTION_BYTES = LAYER.itemsize, ATTENTION.itemsize

_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
_HAS_YIELD = os.name == "posix"


@intrinsic
def finished_tasks(context: Any, address: Any) -> Any:
    """Return the number of finished tasks in the counters at an address; what the threads wrote
    before they finished these can be read afterwards.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        place = builder.inttoptr(builder.add(args[0], ir.Constant(word, 8)), word.as_pointer())
        return builder.load_atomic(place, "acquire", 8)

    return types.int64(types.int64), code


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
    while finished_tasks(address) < tasks:
        looks += 1
        if looks < SPINS:
            pause()
        else:
            offer_core()


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
    """Normalise x `[R, M]`, and write the result to the fp32 vectors `[R', M']`."""
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
def rotate_row(x, start, tables, r, D, tag):
    """Rotate the pairs of the head x[start : start + D] in place, with every product and every sum
    rounded as torch rounds it. tables: (cos, sin, the number of their rows, pairs, interleaved).
    """
    cos, sin, rows, pairs, interleaved = tables
    first = min(r, rows - 1) * pairs
    for i in range(pairs):
        p = start + (2 * i if interleaved else i)
        q = p + 1 if interleaved else p + pairs
        a, b = to_float32(x[p], tag), to_float32(x[q], tag)
        c, s = to_float32(cos[first + i], tag), to_float32(sin[first + i], tag)
        ac, bs = from_float32(a * c, tag, x), from_float32(b * s, tag, x)
        bc, as_ = from_float32(b * c, tag, x), from_float32(a * s, tag, x)
        x[p] = from_float32(to_float32(ac, tag) - to_float32(bs, tag), tag, x)
        x[q] = from_float32(to_float32(bc, tag) + to_float32(as_, tag), tag, x)


@njit_strict
def finish_head(raw, normed, norm, tables, R, D, tag):
    """Apply the norm and the rotation of a head to its rows `[R, D]`; return the array with the
    result, `raw` or `normed`.
    """
    weight, has_norm, eps, offset = norm
    if has_norm:
        norm_rows(raw, weight, normed, R, D, eps, offset, tag)
        raw = normed
    for r in range(R):
        rotate_row(raw, r * D, tables, r, D, tag)
    return raw


@njit_fastmath
def silu_products(gate, up, out, n, tag):
    """Write silu(gate) * up to `out`; silu x = x / (1 + e^-x)."""
    one = np.float32(1)
    for i in range(n):
        x = to_float32(gate[i], tag)
        e = exp(-abs(x))
        y = x / (one + e) if x >= 0 else x * e / (one + e)
        y = to_float32(from_float32(y, tag, out), tag)
        out[i] = from_float32(y * to_float32(up[i], tag), tag, out)


_GELU_SCALE, _GELU_CUBE = np.float32(math.sqrt(2 / math.pi)), np.float32(0.044715)


@njit_fastmath
def gelu_products(gate, up, out, n, tag):
    """Write gelu(gate) * up to `out`, with the approximation of GELU by tanh."""
    half, one = np.float32(0.5), np.float32(1)
    for i in range(n):
        x = to_float32(gate[i], tag)
        y = half * x * (one + tanh(_GELU_SCALE * (x + _GELU_CUBE * x * x * x)))
        y = to_float32(from_float32(y, tag, out), tag)
        out[i] = from_float32(y * to_float32(up[i], tag), tag, out)


@njit_strict
def relu_products(gate, up, out, n, tag):
    """Write relu(gate) * up to `out`; NaN stays NaN."""
    for i in range(n):
        x = to_float32(gate[i], tag)
        x = np.float32(0) if x < 0 else x
        out[i] = from_float32(x * to_float32(up[i], tag), tag, out)


@njit_strict
def activate(activation, gate, up, out, n, tag):
    """Write f(gate) * up to `out`, with the activation f of this number in `ACTIVATIONS`."""
    if activation == 0:
        silu_products(gate, up, out, n, tag)
    elif activation == 1:
        gelu_products(gate, up, out, n, tag)
    else:
        relu_products(gate, up, out, n, tag)


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
def project_heads(counters, layer, attention, sizes, states, scratch, dtype, tag):
    """Phase 1 of a layer: norm, queries, keys and values.

    sizes: (B, M). states: (hidden states, the last sublayer's result, whether there is one, the
    norm on it, memory for the new hidden states). scratch: see `_make_entry`.
    """
    R, M = sizes
    x, y, has_y, after, stored = states
    total, normed, raw, turned, wide, room = scratch
    H, G, D, E = layer.H, layer.G, layer.D, layer.E
    vectors = vectors_in(wide, R, M)
    q_map, k_map = (
        map_at(layer.q_w, layer.q_b, layer.q_stored, M, dtype),
        map_at(layer.k_w, layer.k_b, layer.k_stored, M, dtype),
    )
    v_map = map_at(layer.v_w, layer.v_b, layer.v_stored, M, dtype)
    q_norm = norm_at(layer.q_norm_w, layer.q_norm_eps, layer.q_norm_offset, dtype)
    k_norm = norm_at(layer.k_norm_w, layer.k_norm_eps, layer.k_norm_offset, dtype)
    cos, sin = memory_at(layer.cos, dtype), memory_at(layer.sin, dtype)
    tables = (cos, sin, layer.tables, layer.pairs, layer.interleaved != 0)
    queries = memory_at(attention.q, np.float32)
    keys, values = memory_at(attention.k, dtype), memory_at(attention.v, dtype)
    tasks = H + 2 * G
    task = take_task(counters)
    if task < tasks:
        if has_y:
            add_result(x, y, after, R, M, total, tag)
        else:
            copy_row(x, 0, total, 0, R * M)
        if task == 0:
            copy_row(total, 0, stored, 0, R * M)
        before = norm_at(layer.before_w, layer.before_eps, layer.before_offset, dtype)
        norm_vectors(total, before, R, M, normed, vectors, tag)
        mark_changed(room[1])
    while task < tasks:
        if task < H:
            rows = (task * D, (task + 1) * D)
            map_rows(q_map, rows, vectors, R, tag, room, (raw, 0, D))
            head = finish_head(raw, turned, q_norm, tables, R, D, tag)
            for r in range(R):
                for d in range(D):
                    queries[(r * H + task) * D + d] = to_float32(head[r * D + d], tag)
        elif task < H + G:
            g, steps = task - H, attention.k_steps
            map_rows(k_map, (g * D, (g + 1) * D), vectors, R, tag, room, (raw, 0, D))
            head = finish_head(raw, turned, k_norm, tables, R, D, tag)
            for r in range(R):
                place = r * steps[0] + g * steps[1] + layer.slot * steps[2]
                copy_row(head, r * D, keys, place, D)
        else:
            g, steps = task - H - G, attention.v_steps
            map_rows(v_map, (g * E, (g + 1) * E), vectors, R, tag, room, (raw, 0, E))
            for r in range(R):
                place = r * steps[0] + g * steps[1] + layer.slot * steps[2]
                copy_row(raw, r * E, values, place, E)
        finish_task(counters)
        task = take_task(counters)
    wait_until_finished(counters, tasks)


@njit_strict
def attend_to_cache(entry, address, attention):
    """Phase 2 of a layer: attention of the new tokens to the cache, by the entry of decoding."""
    call_entry(entry, address)
    splits = attention.out_shape[1]
    wait_until_finished(address, attention.out_shape[0] * splits + (1 if splits > 1 else 0))


@njit_strict
def multiply_blocks(counters, linear_map, N, R, vectors, task_bytes, room, out, tag):
    """Take blocks of the N rows of a linear map until none is left, and write them to `out`
    `[R, N]`, beginning with the first task of the caller. Return when all blocks are finished.

    counters: (their address, the number of the first task).
    """
    address, task = counters
    step = max(1, task_bytes // row_size(linear_map))
    tasks = (N + step - 1) // step
    while task < tasks:
        rows = (task * step, min(N, (task + 1) * step))
        map_rows(linear_map, rows, vectors, R, tag, room, (out, rows[0], N))
        finish_task(address)
        task = take_task(address)
    wait_until_finished(address, tasks)


@njit_strict
def map_output(counters, layer, attention, sizes, y, scratch, dtype, tag):
    """Phase 3 of a layer: the output map of the attention."""
    R, M = sizes
    wide, room, rounding = scratch[4], scratch[5], scratch[0]
    H, E = layer.H, layer.E
    vectors = vectors_in(wide, R, H * E)
    task = take_task(counters)
    # the output of attention is [B G,P,R,E]; split 0 has the result
    out, shape = memory_at(attention.out, np.float32), attention.out_shape
    lse, sink = memory_at(attention.lse, np.float32), memory_at(layer.sink, dtype)
    heads, rows = shape[2], shape[1] * shape[2]
    for r in range(R):
        for h in range(H):
            place = (r * (H // heads) + h // heads) * rows + h % heads
            share = np.float32(1)
            if layer.sink:
                share = sink_share(lse[place], to_float32(sink[h], tag))
            for e in range(E):
                stored = from_float32(out[place * E + e] * share, tag, rounding)
                vectors[r, h * E + e] = to_float32(stored, tag)
        vectors[r, H * E :] = np.float32(0)
    mark_changed(room[1])
    out_map = map_at(layer.out_w, layer.out_b, layer.out_stored, H * E, dtype)
    multiply_blocks((counters, task), out_map, M, R, vectors, TASK_BYTES, room, y, tag)


@njit_strict
def open_gates(counters, layer, sizes, states, hidden, scratch, dtype, tag):
    """Phase 4 of a layer: norm, gate, up and activation.

    states: (hidden states, the attention's result, memory for the new hidden states).
    """
    R, M = sizes
    x, y, stored = states
    total, normed, gate, up, wide, room = scratch
    F = layer.F
    vectors = vectors_in(wide, R, M)
    gate_map = map_at(layer.gate_w, layer.gate_b, layer.gate_stored, M, dtype)
    up_map = map_at(layer.up_w, layer.up_b, layer.up_stored, M, dtype)
    step = max(1, TASK_BYTES // max(row_size(gate_map), row_size(up_map)))
    tasks = (F + step - 1) // step
    task = take_task(counters)
    if task < tasks:
        after = norm_at(layer.after_w, layer.after_eps, layer.after_offset, dtype)
        add_result(x, y, after, R, M, total, tag)
        if task == 0:
            copy_row(total, 0, stored, 0, R * M)
        before = norm_at(layer.ff_before_w, layer.ff_before_eps, layer.ff_before_offset, dtype)
        norm_vectors(total, before, R, M, normed, vectors, tag)
        mark_changed(room[1])
    while task < tasks:
        rows = (task * step, min(F, (task + 1) * step))
        n = rows[1] - rows[0]
        map_rows(gate_map, rows, vectors, R, tag, room, (gate, 0, n))
        map_rows(up_map, rows, vectors, R, tag, room, (up, 0, n))
        for r in range(R):
            part = slice(r * n, (r + 1) * n)
            units = hidden[r * F + rows[0] : r * F + rows[1]]
            activate(layer.activation, gate[part], up[part], units, n, tag)
        finish_task(counters)
        task = take_task(counters)
    wait_until_finished(counters, tasks)


@njit_strict
def map_down(counters, layer, sizes, hidden, y, scratch, dtype, tag):
    """Phase 5 of a layer: the map from the hidden units."""
    R, M = sizes
    wide, room, F = scratch[4], scratch[5], layer.F
    vectors = vectors_in(wide, R, F)
    task = take_task(counters)
    write_vectors(hidden, R, F, vectors, tag)
    mark_changed(room[1])
    down_map = map_at(layer.down_w, layer.down_b, layer.down_stored, F, dtype)
    multiply_blocks((counters, task), down_map, M, R, vectors, TASK_BYTES, room, y, tag)


@njit_strict
def compute_logits(counters, step, sizes, states, scratch, dtype, tag):
    """The last phase: norm and head.

    states: (hidden states, the last sublayer's result, the norm on it).
    """
    R, M = sizes
    x, y, after = states
    total, normed, wide, room = scratch[0], scratch[1], scratch[4], scratch[5]
    vectors = vectors_in(wide, R, M)
    task = take_task(counters)
    add_result(x, y, after, R, M, total, tag)
    norm = norm_at(step.norm_w, step.norm_eps, step.norm_offset, dtype)
    norm_vectors(total, norm, R, M, normed, vectors, tag)
    mark_changed(room[1])
    head, logits = (
        map_at(step.head_w, step.head_b, step.head_stored, M, dtype),
        memory_at(step.logits, dtype),
    )
    multiply_blocks((counters, task), head, step.V, R, vectors, HEAD_TASK_BYTES, room, logits, tag)


@njit_strict
def most_numbers(step):
    """Return the largest width of the vectors of a step, and the largest size of a head."""
    width, head = step.M, 0
    for i in range(step.L):
        layer = struct_at(step.layers + i * LAYER_BYTES, LAYER)
        width = max(width, layer.H * layer.E, layer.F)
        head = max(head, layer.D, layer.E)
    return width, head


def _make_entry(dtype: Any, tag: Any) -> Callable[[int], None]:
    """Return the Python function of the entry for one storage dtype and tag, to be compiled.

    Each thread has scratch memory of its own: (the sum [B M], its norm [B M], two blocks of rows in
    the dtype of the weights, the vectors of a product in fp32, the room of `map_rows`).
    """

    def entry(address: int) -> None:
        step = struct_at(address, STEP)
        R, M = step.B, step.M
        sizes = (R, M)
        width, head = most_numbers(step)
        block = R * max(head, 2 * TASK_BYTES // M + 1)  # codes have at least 4 bits
        scratch = (
            np.empty(R * M, dtype),
            np.empty(R * M, dtype),
            np.empty(block, dtype),
            np.empty(block, dtype),
            np.zeros(padded_count(R) * padded_width(width), np.float32),
            (
                np.empty(VECTORS_PER_STEP, np.float32),
                make_call(R, padded_width(width)),
                np.empty((R, STORED_ROWS), np.float32),
            ),
        )
        x, x_mid = memory_at(step.x, dtype), memory_at(step.x_mid, dtype)
        y, hidden = memory_at(step.y, dtype), memory_at(step.hidden, dtype)
        states, counters = memory_at(step.embedded, dtype), step.counters
        after = norm_at(0, 0.0, 0.0, dtype)
        size = COUNTER_BYTES
        for i in range(step.L):
            layer = struct_at(step.layers + i * LAYER_BYTES, LAYER)
            place = step.attention + i * ATTENTION_BYTES
            attention = struct_at(place, ATTENTION)
            project_heads(
                counters, layer, attention, sizes, (states, y, i > 0, after, x), scratch, dtype, tag
            )
            attend_to_cache(step.attend, place, attention)
            map_output(counters + size, layer, attention, sizes, y, scratch, dtype, tag)
            open_gates(
                counters + 2 * COUNTER_BYTES,
                layer,
                sizes,
                (x, y, x_mid),
                hidden,
                scratch,
                dtype,
                tag,
            )
            map_down(counters + 3 * size, layer, sizes, hidden, y, scratch, dtype, tag)
            after = norm_at(layer.ff_after_w, layer.ff_after_eps, layer.ff_after_offset, dtype)
            states, counters = x_mid, counters + PHASES * size
        compute_logits(counters, step, sizes, (states, y, after), scratch, dtype, tag)

    return entry


@cache
def entry_address(dtype: torch.dtype) -> int:
    """Return the address of the compiled entry for a model whose weights have a dtype."""
    return compile_entry(_make_entry(*STORAGE[dtype]))
