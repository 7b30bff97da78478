"""The compiled decoding step of a whole model: one token for each row of a batch, in one call.

A layer has phases, each divided into tasks that the threads take one after another:

    1. norm, queries, keys and values: a task is one head. It computes the rows of the head, its
       norm and its rotation, and writes queries to a buffer, keys and values to the cache.
    2. attention: the tasks of `decode_loops.run_tasks`, and of `decode_quantized_loops.run_tasks`
       for slots that a cache stores as codes. Their entries are called by their addresses, so that
       their code is not compiled a second time.
    3. output map: a task is a block of rows.
    4. norm, gate, up and activation: a task is a block of hidden units.
    5. down: a task is a block of rows.

In a mixture of experts the phases 4 and 5 are the router, the experts' gate and up, and their maps
down (`step_network_loops`). Models with further parts, such as LayerNorms or networks without a
gate, have an entry of their own (`step_extended_loops`).

After the last layer come the norm and the head. Between two phases a thread waits until all tasks
of the phase are finished (`wait_until_finished`). This needs no number of threads: a step is right
with any number of them, also if one begins late or never, because the others take its tasks.

What all tasks of a phase need (the sum with the last sublayer's result, the norm, the vectors in
fp32) each thread computes for itself, when it takes its first task of the phase: while it holds the
task, no other thread can go on and overwrite the inputs. The thread that takes the first task of
all (`arrives_first`) stores the new hidden states for the next phase.

Every number that the modules of a model would store is rounded to the dtype of the weights here as
well, and sums have the same order (`gemv_loops.multiply_rows`, `rms_norm_loops.norm_rows`,
`decode_loops.run_tasks`). `regard.ops.decode_step` calls `entry_address`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from regard.ops.jit.argument_structs import (
    DECODE_QUANTIZED_STRUCT,
    DECODE_STRUCT,
    STEP_LAYER_STRUCT,
    STEP_STRUCT,
)
from regard.ops.jit.compile import njit_strict
from regard.ops.jit.decode_loops import join_row, page_table, sink_share, slot_in_memory
from regard.ops.jit.entry_points import (
    STORAGE,
    call_entry,
    entry_point,
    finish_task,
    memory_at,
    struct_at,
    take_next,
    take_task,
)
from regard.ops.jit.gemv_loops import VECTORS_PER_STEP, padded_count
from regard.ops.jit.half_precision import from_float32, to_float32
from regard.ops.jit.rms_norm_loops import norm_rows
from regard.ops.jit.step_network_loops import (
    add_attention,
    map_down,
    map_experts_down,
    open_experts,
    open_gates,
    route_tokens,
    sublayer_result,
    take_first,
)
from regard.ops.jit.step_parts import (
    STORED_ROWS,
    TASK_BYTES,
    add_result,
    arrives_first,
    block_count,
    copy_row,
    map_at,
    map_rows,
    multiply_blocks,
    norm_at,
    norm_vectors,
    padded_width,
    vectors_in,
    wait_until_finished,
)
from regard.ops.jit.stored_weight_loops import make_call, mark_changed

HEAD_TASK_BYTES = 1 << 18
"""The size in bytes of the rows of the head in one task."""

COUNTER_BYTES = 128
"""The distance in bytes from the counters of one phase to those of the next: whole cache lines, so
that threads do not disturb each other.
"""

STEP, LAYER, ATTENTION = STEP_STRUCT.dtype, STEP_LAYER_STRUCT.dtype, DECODE_STRUCT.dtype
CODES = DECODE_QUANTIZED_STRUCT.dtype
LAYER_BYTES, ATTENTION_BYTES, CODES_BYTES = LAYER.itemsize, ATTENTION.itemsize, CODES.itemsize


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


@njit_strict
def write_query(head, h, sizes, queries, tag):
    """Write the rows `[R, D]` of query head h to the queries of the attention, in fp32. sizes: (R,
    H, D).
    """
    R, H, D = sizes
    for r in range(R):
        for d in range(D):
            queries[(r * H + h) * D + d] = to_float32(head[r * D + d], tag)


@njit_strict
def write_to_cache(head, g, sizes, steps, where, memory):
    """Write the rows `[R, n]` of head g to the buffer of a cache with the strides `steps`. sizes:
    (R, n). where: (the slot of each row, the table of pages).
    """
    R, n = sizes
    slots, pages = where
    for r in range(R):
        slot = slot_in_memory(pages, r, slots[r])
        place = r * steps[0] + g * steps[1] + slot * steps[2]
        copy_row(head, r * n, memory, place, n)


@njit_strict
def project_heads(counters, layer, attention, sizes, states, last, scratch, dtype, tag):
    """Phase 1 of a layer: norm, queries, keys and values.

    states: (hidden states, the last sublayer's result, whether there is one, the norm on it, memory
    for the new hidden states). last: (the address of the last layer's mixture or 0, its memory).
    """
    R, M = sizes
    x, y, has_y, after, stored = states
    total, normed, raw, turned, wide, room, _, team = scratch
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
    slots, pages = memory_at(layer.slots, np.int64), page_table(attention)
    tasks = H + 2 * G
    task = take_next(counters, tasks, team)
    if task < tasks:
        if has_y:
            y = sublayer_result(last[0], y, sizes, last[1], scratch, tag)
            add_result(x, y, after, R, M, total, tag)
        else:
            copy_row(x, 0, total, 0, R * M)
        if arrives_first(counters):
            copy_row(total, 0, stored, 0, R * M)
        before = norm_at(layer.before_w, layer.before_eps, layer.before_offset, dtype)
        norm_vectors(total, before, R, M, normed, vectors, tag)
        mark_changed(room[1])
    while task < tasks:
        if task < H:
            rows = (task * D, (task + 1) * D)
            map_rows(q_map, rows, vectors, R, tag, room, (raw, 0, D))
            head = finish_head(raw, turned, q_norm, tables, R, D, tag)
            write_query(head, task, (R, H, D), queries, tag)
        elif task < H + G:
            g = task - H
            map_rows(k_map, (g * D, (g + 1) * D), vectors, R, tag, room, (raw, 0, D))
            head = finish_head(raw, turned, k_norm, tables, R, D, tag)
            write_to_cache(head, g, (R, D), attention.k_steps, (slots, pages), keys)
        else:
            g = task - H - G
            map_rows(v_map, (g * E, (g + 1) * E), vectors, R, tag, room, (raw, 0, E))
            write_to_cache(raw, g, (R, E), attention.v_steps, (slots, pages), values)
        finish_task(counters)
        task = take_next(counters, tasks, team)
    wait_until_finished(counters, tasks)


@njit_strict
def attend_to_cache(step, place, codes_place):
    """Phase 2 of a layer: attention of the new tokens to the cache, by the entry of decoding; to
    slots that are stored as codes by an entry of its own. place, codes_place: the addresses of the
    structs.
    """
    attention, codes = struct_at(place, ATTENTION), struct_at(codes_place, CODES)
    if codes.S:
        call_entry(step.attend_codes, codes_place)
    call_entry(step.attend, place)
    if codes.S:
        wait_until_finished(codes_place, attention_tasks(codes))
    wait_until_finished(place, attention_tasks(attention))


@njit_strict
def attention_tasks(call):
    """Return the number of tasks of a call of attention; joining the splits is one of them."""
    splits = call.out_shape[1]
    return call.out_shape[0] * splits + (1 if splits > 1 else 0)


@njit_strict
def read_row(call, row, E, out, lse):
    """Write the output of a row of a call of attention to out[:E] and its lse to lse[0]; split 0
    has the result of all splits.
    """
    heads, splits = call.out_shape[2], call.out_shape[1]
    place = row // heads * splits * heads + row % heads
    start = memory_at(call.out, np.float32)
    for e in range(E):
        out[e] = start[place * E + e]
    lse[0] = memory_at(call.lse, np.float32)[place]


@njit_strict
def map_output(counters, layer, calls, sizes, y, scratch, dtype, tag):
    """Phase 3 of a layer: the output map of the attention. calls: the structs of attention to codes
    and to the slots after them.
    """
    R, M = sizes
    wide, room, rounding = scratch[4], scratch[5], scratch[0]
    H, E = layer.H, layer.E
    vectors, team = vectors_in(wide, R, H * E), scratch[7]
    out_map = map_at(layer.out_w, layer.out_b, layer.out_stored, H * E, dtype)
    task = take_next(counters, block_count(out_map, M, TASK_BYTES), team)
    codes, attention = calls
    sink, several = memory_at(layer.sink, dtype), codes.S > 0
    out, lse = np.empty((2, E), np.float32), np.empty(2, np.float32)
    for r in range(R):
        for h in range(H):
            if several:
                read_row(codes, r * H + h, E, out[0], lse)
                read_row(attention, r * H + h, E, out[1], lse[1:])
                join_row(out, lse)
            else:
                read_row(attention, r * H + h, E, out[0], lse)
            share = np.float32(1)
            if layer.sink:
                share = sink_share(lse[0], to_float32(sink[h], tag))
            for e in range(E):
                stored = from_float32(out[0, e] * share, tag, rounding)
                vectors[r, h * E + e] = to_float32(stored, tag)
        vectors[r, H * E :] = np.float32(0)
    mark_changed(room[1])
    multiply_blocks((counters, task, team), out_map, M, R, vectors, TASK_BYTES, room, y, tag)


@njit_strict
def compute_logits(counters, step, sizes, states, last, scratch, dtype, tag):
    """The last phase: norm and head.

    states: (hidden states, the last sublayer's result, the norm on it). last: see `project_heads`.
    """
    R, M = sizes
    x, y, after = states
    total, normed, wide, room = scratch[0], scratch[1], scratch[4], scratch[5]
    vectors, team = vectors_in(wide, R, M), scratch[7]
    head, logits = (
        map_at(step.head_w, step.head_b, step.head_stored, M, dtype),
        memory_at(step.logits, dtype),
    )
    task = take_next(counters, block_count(head, step.V, HEAD_TASK_BYTES), team)
    y = sublayer_result(last[0], y, sizes, last[1], scratch, tag)
    add_result(x, y, after, R, M, total, tag)
    norm = norm_at(step.norm_w, step.norm_eps, step.norm_offset, dtype)
    norm_vectors(total, norm, R, M, normed, vectors, tag)
    mark_changed(room[1])
    counters_of_head = (counters, task, team)
    multiply_blocks(counters_of_head, head, step.V, R, vectors, HEAD_TASK_BYTES, room, logits, tag)


@njit_strict
def make_scratch(step, thread, dtype):
    """Return the scratch memory of a thread with a number, as `step_parts` describes it."""
    R, M = step.B, step.M
    block = R * max(step.head, 2 * TASK_BYTES // M + 1)  # codes have at least 4 bits
    size = padded_count(R) * padded_width(step.width)
    return (
        np.empty(R * M, dtype),
        np.empty(R * M, dtype),
        np.empty(block, dtype),
        np.empty(block, dtype),
        np.zeros(size, np.float32),
        (
            np.empty(VECTORS_PER_STEP, np.float32),
            make_call(R, padded_width(step.width)),
            np.empty((R, STORED_ROWS), np.float32),
        ),
        np.zeros(size, np.float32),
        (thread, step.runs),
    )


def _make_entry(dtype: Any, tag: Any, *, has_mixtures: bool) -> Callable[[int], None]:
    """Return the Python function of the entry for one storage dtype and tag, to be compiled. An
    entry for models without mixtures of experts has none of their phases, and compiles in half the
    time.
    """

    def entry(address: int) -> None:
        step = struct_at(address, STEP)
        R, M = step.B, step.M
        sizes, scratch = (R, M), make_scratch(step, take_task(address), dtype)
        x, x_mid = memory_at(step.x, dtype), memory_at(step.x_mid, dtype)
        y, hidden = memory_at(step.y, dtype), memory_at(step.hidden, dtype)
        pairs = (
            memory_at(step.shares, np.float32),
            memory_at(step.router_logits, np.float32),
            memory_at(step.parts, dtype),
        )
        states, counters, mixture = memory_at(step.embedded, dtype), step.counters, 0
        after = norm_at(0, 0.0, 0.0, dtype)
        for i in range(step.L):
            layer = struct_at(step.layers + i * LAYER_BYTES, LAYER)
            place = step.attention + i * ATTENTION_BYTES
            attention = struct_at(place, ATTENTION)
            project_heads(
                counters,
                layer,
                attention,
                sizes,
                (states, y, i > 0, after, x),
                (mixture, pairs),
                scratch,
                dtype,
                tag,
            )
            codes_place = step.codes + i * CODES_BYTES
            attend_to_cache(step, place, codes_place)
            counters += COUNTER_BYTES
            calls = (struct_at(codes_place, CODES), attention)
            map_output(counters, layer, calls, sizes, y, scratch, dtype, tag)
            counters += COUNTER_BYTES
            mixture = layer.mixture
            task, stores = take_first(counters, layer, M, scratch, dtype)
            add_attention(layer, stores, sizes, (x, y, x_mid), scratch, dtype, tag)
            # the compiler knows `has_mixtures`, and leaves the phases out where it is False
            if has_mixtures:  # noqa: SIM102
                if mixture:
                    route_tokens((counters, task), layer, sizes, pairs, scratch, dtype, tag)
                    counters += COUNTER_BYTES
                    open_experts(counters, layer, sizes, x_mid, hidden, scratch, dtype, tag)
                    counters += COUNTER_BYTES
                    map_experts_down(counters, layer, sizes, hidden, pairs, scratch, dtype, tag)
            if not mixture:
                open_gates((counters, task), layer, sizes, hidden, scratch, dtype, tag)
                counters += COUNTER_BYTES
                map_down(counters, layer, sizes, hidden, y, scratch, dtype, tag)
            counters += COUNTER_BYTES
            after = norm_at(layer.ff_after_w, layer.ff_after_eps, layer.ff_after_offset, dtype)
            states = x_mid
        compute_logits(
            counters, step, sizes, (states, y, after), (mixture, pairs), scratch, dtype, tag
        )

    return entry


@entry_point
def entry_address(dtype: torch.dtype, has_mixtures: bool) -> Callable[[int], None]:  # noqa: FBT001
    """Return the address of the compiled entry for a model whose weights have a dtype, with or
    without mixtures of experts.
    """
    return _make_entry(*STORAGE[dtype], has_mixtures=has_mixtures)
