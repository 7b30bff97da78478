"""The compiled decoding step of models with parts beyond those of `step_loops`, chosen by data: any
norm of `step_norm_loops`, and factors on what a sublayer adds; queries, keys and values in one
matrix, clipped, or normed over all heads; networks without a gate; sublayers in parallel; a factor
on the hidden states before the head.

It is an entry of its own, so that models without these parts compile none of them. Attention, its
output map, the map down and the mixtures of experts are the functions that the other entry calls,
too. A norm over all heads takes one more phase, because it needs all heads: the rows of queries and
keys are stored, and the next phase, a task for each head, norms and rotates them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from regard.ops.jit.argument_structs import STEP_EXTENSION_STRUCT
from regard.ops.jit.compile import njit_fastmath, njit_strict
from regard.ops.jit.decode_loops import page_table
from regard.ops.jit.entry_points import (
    STORAGE,
    entry_point,
    finish_task,
    memory_at,
    struct_at,
    take_next,
    take_task,
)
from regard.ops.jit.half_precision import from_float32, to_float32
from regard.ops.jit.step_activation_loops import open_units
from regard.ops.jit.step_loops import (
    ATTENTION,
    ATTENTION_BYTES,
    CODES,
    CODES_BYTES,
    COUNTER_BYTES,
    HEAD_TASK_BYTES,
    LAYER,
    LAYER_BYTES,
    STEP,
    attend_to_cache,
    make_scratch,
    map_output,
    rotate_row,
    write_query,
    write_to_cache,
)
from regard.ops.jit.step_network_loops import (
    NETWORK,
    map_down,
    map_experts_down,
    open_experts,
    open_gates,
    route_tokens,
    sublayer_result,
    take_first,
)
from regard.ops.jit.step_norm_loops import add_normed, apply_norm, scale_rows, write_normed
from regard.ops.jit.step_parts import (
    arrives_first,
    block_count,
    copy_row,
    map_at,
    map_rows,
    multiply_blocks,
    vectors_in,
    wait_until_finished,
    write_vectors,
)
from regard.ops.jit.stored_weight_loops import mark_changed

EXTENSION = STEP_EXTENSION_STRUCT.dtype
EXTENSION_BYTES = EXTENSION.itemsize


@njit_fastmath
def clip_rows(x, limit, n, tag):
    """Clip n numbers to [-limit, limit], with the limit rounded as they are; NaN stays NaN."""
    limit = to_float32(from_float32(limit, tag, x), tag)
    for i in range(n):
        a = to_float32(x[i], tag)
        if a > limit:
            a = limit
        elif a < -limit:
            a = -limit
        x[i] = from_float32(a, tag, x)


@njit_strict
def head_rows(i, block, n):
    """Return the first row of head i and one past its last one in a matrix with n rows for a head.

    block: see STEP_EXTENSION_STRUCT: (first, run, step).
    """
    first, run, step = block
    place = (first + i // run * step + i % run) * n
    return place, place + n


@njit_strict
def finish_any_head(x, turned, place, tables, R, D, dtype, tag):
    """Apply the norm at an address and the rotation to the rows `[R, D]` of a head; return the
    array with the result, `x` or `turned`.
    """
    x = apply_norm(x, place, R, D, turned, dtype, tag)
    for r in range(R):
        rotate_row(x, r * D, tables, r, D, tag)
    return x


@njit_strict
def rotary_tables(layer, dtype):
    """Return the tables of a layer, as `rotate_row` takes them."""
    cos, sin = memory_at(layer.cos, dtype), memory_at(layer.sin, dtype)
    return cos, sin, layer.tables, layer.pairs, layer.interleaved != 0


@njit_strict
def project_any_heads(counters, layer, more, attention, sizes, states, last, scratch, dtype, tag):
    """Phase 1 of a layer: norm, queries, keys and values. Where a norm over all heads follows, the
    rows of its heads are stored as they are.

    more: its STEP_EXTENSION_STRUCT. states: (hidden states, the last sublayer's result, whether
    there is one, the address of the norm on it, memory for the new hidden states, memory for rows
    before a norm over all heads). last: see `step_loops.project_heads`.
    """
    R, M = sizes
    x, y, has_y, after, stored, waiting = states
    total, normed, raw, turned, wide, room, _, team = scratch
    H, G, D, E = layer.H, layer.G, layer.D, layer.E
    vectors = vectors_in(wide, R, M)
    q_map, k_map = (
        map_at(layer.q_w, layer.q_b, layer.q_stored, M, dtype),
        map_at(layer.k_w, layer.k_b, layer.k_stored, M, dtype),
    )
    v_map = map_at(layer.v_w, layer.v_b, layer.v_stored, M, dtype)
    q_block, k_block = (
        (more.q_first, more.q_run, more.q_step),
        (more.k_first, more.k_run, more.k_step),
    )
    v_block, tables = (more.v_first, more.v_run, more.v_step), rotary_tables(layer, dtype)
    queries, clip = memory_at(attention.q, np.float32), np.float32(more.clip)
    keys, values = memory_at(attention.k, dtype), memory_at(attention.v, dtype)
    where = (memory_at(layer.slots, np.int64), page_table(attention))
    tasks = H + 2 * G
    task = take_next(counters, tasks, team)
    if task < tasks:
        if has_y:
            y = sublayer_result(last[0], y, sizes, last[1], scratch, tag)
            add_normed(x, y, after, R, M, total, dtype, tag)
        else:
            copy_row(x, 0, total, 0, R * M)
        if arrives_first(counters):
            copy_row(total, 0, stored, 0, R * M)
        write_normed(total, more.before, R, M, normed, vectors, dtype, tag)
        mark_changed(room[1])
    while task < tasks:
        if task < H:
            rows = head_rows(task, q_block, D)
            map_rows(q_map, rows, vectors, R, tag, room, (raw, 0, D))
            if clip > 0:
                clip_rows(raw, clip, R * D, tag)
            if more.q_flat:
                for r in range(R):
                    copy_row(raw, r * D, waiting, (r * H + task) * D, D)
            else:
                head = finish_any_head(raw, turned, more.q_norm, tables, R, D, dtype, tag)
                write_query(head, task, (R, H, D), queries, tag)
        elif task < H + G:
            g = task - H
            map_rows(k_map, head_rows(g, k_block, D), vectors, R, tag, room, (raw, 0, D))
            if clip > 0:
                clip_rows(raw, clip, R * D, tag)
            if more.k_flat:
                for r in range(R):
                    copy_row(raw, r * D, waiting, (R * H + r * G + g) * D, D)
            else:
                head = finish_any_head(raw, turned, more.k_norm, tables, R, D, dtype, tag)
                write_to_cache(head, g, (R, D), attention.k_steps, where, keys)
        else:
            g = task - H - G
            map_rows(v_map, head_rows(g, v_block, E), vectors, R, tag, room, (raw, 0, E))
            if clip > 0:
                clip_rows(raw, clip, R * E, tag)
            write_to_cache(raw, g, (R, E), attention.v_steps, where, values)
        finish_task(counters)
        task = take_next(counters, tasks, team)
    wait_until_finished(counters, tasks)


@njit_strict
def finish_all_heads(counters, layer, more, attention, R, waiting, joined, scratch, dtype, tag):
    """The phase after a norm over all heads: that norm, then the steps of each head.

    waiting: the stored rows, queries `[R, H D]` and then keys `[R, G D]`. joined: memory of the
    thread for the normed ones.
    """
    raw, turned = scratch[2], scratch[3]
    H, G, D = layer.H, layer.G, layer.D
    tables, queries = rotary_tables(layer, dtype), memory_at(attention.q, np.float32)
    keys = memory_at(attention.k, dtype)
    where = (memory_at(layer.slots, np.int64), page_table(attention))
    first, size = (0 if more.q_flat else H), R * H * D
    tasks = (H if more.q_flat else 0) + (G if more.k_flat else 0)
    task = take_task(counters)
    if task < tasks:
        if more.q_flat:
            apply_norm(waiting, more.q_flat, R, H * D, joined, dtype, tag)
        if more.k_flat:
            apply_norm(waiting[size:], more.k_flat, R, G * D, joined[size:], dtype, tag)
    while task < tasks:
        head = first + task
        if head < H:
            for r in range(R):
                copy_row(joined, (r * H + head) * D, raw, r * D, D)
            turned_head = finish_any_head(raw, turned, more.q_norm, tables, R, D, dtype, tag)
            write_query(turned_head, head, (R, H, D), queries, tag)
        else:
            g = head - H
            for r in range(R):
                copy_row(joined, size + (r * G + g) * D, raw, r * D, D)
            turned_head = finish_any_head(raw, turned, more.k_norm, tables, R, D, dtype, tag)
            write_to_cache(turned_head, g, (R, D), attention.k_steps, where, keys)
        finish_task(counters)
        task = take_task(counters)
    wait_until_finished(counters, tasks)


@njit_strict
def begin_network(more, stores, sizes, states, scratch, dtype, tag):
    """Begin phase 4 of a layer, as `step_network_loops.add_attention` does, with any norms: the sum
    of the hidden states and the attention's result, which one thread stores, and the vectors of the
    norm of the sum, or of the hidden states before the attention if the sublayers are parallel.
    """
    R, M = sizes
    x, y, stored = states
    total, normed, wide, room = scratch[0], scratch[1], scratch[4], scratch[5]
    add_normed(x, y, more.after, R, M, total, dtype, tag)
    if stores:
        copy_row(total, 0, stored, 0, R * M)
    source = x if more.parallel else total
    write_normed(source, more.ff_before, R, M, normed, vectors_in(wide, R, M), dtype, tag)
    mark_changed(room[1])


@njit_strict
def compute_any_logits(counters, step, sizes, states, last, scratch, dtype, tag):
    """The last phase: norm, factor and head. states, last: see `step_loops.compute_logits`; the
    norm is given by its address.
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
    add_normed(x, y, after, R, M, total, dtype, tag)
    result = apply_norm(total, step.last_norm, R, M, normed, dtype, tag)
    scale_rows(result, np.float32(step.logit_scale), normed, R * M, tag)
    write_vectors(normed, R, M, vectors, tag)
    mark_changed(room[1])
    counters_of_head = (counters, task, team)
    multiply_blocks(counters_of_head, head, step.V, R, vectors, HEAD_TASK_BYTES, room, logits, tag)


def _make_entry(dtype: Any, tag: Any, *, has_mixtures: bool) -> Callable[[int], None]:
    """Return the Python function of the entry for one storage dtype and tag, to be compiled; with
    or without the phases of mixtures of experts.
    """

    def entry(address: int) -> None:
        step = struct_at(address, STEP)
        R, M = step.B, step.M
        sizes, scratch = (R, M), make_scratch(step, take_task(address), dtype)
        joined = np.empty(R * step.raw_width, dtype)
        x, x_mid = memory_at(step.x, dtype), memory_at(step.x_mid, dtype)
        y, hidden = memory_at(step.y, dtype), memory_at(step.hidden, dtype)
        pairs = (
            memory_at(step.shares, np.float32),
            memory_at(step.router_logits, np.float32),
            memory_at(step.parts, dtype),
        )
        waiting, after = memory_at(step.raw, dtype), 0
        states, counters, mixture = memory_at(step.embedded, dtype), step.counters, 0
        for i in range(step.L):
            layer = struct_at(step.layers + i * LAYER_BYTES, LAYER)
            more = struct_at(step.extensions + i * EXTENSION_BYTES, EXTENSION)
            place = step.attention + i * ATTENTION_BYTES
            attention = struct_at(place, ATTENTION)
            project_any_heads(
                counters,
                layer,
                more,
                attention,
                sizes,
                (states, y, i > 0, after, x, waiting),
                (mixture, pairs),
                scratch,
                dtype,
                tag,
            )
            counters += COUNTER_BYTES
            if more.q_flat or more.k_flat:
                finish_all_heads(
                    counters, layer, more, attention, R, waiting, joined, scratch, dtype, tag
                )
                counters += COUNTER_BYTES
            codes_place = step.codes + i * CODES_BYTES
            attend_to_cache(step, place, codes_place)
            calls = (struct_at(codes_place, CODES), attention)
            map_output(counters, layer, calls, sizes, y, scratch, dtype, tag)
            counters += COUNTER_BYTES
            mixture = layer.mixture
            task, stores = take_first(counters, layer, M, scratch, dtype)
            begin_network(more, stores, sizes, (x, y, x_mid), scratch, dtype, tag)
            # the compiler knows `has_mixtures`, and leaves the phases out where it is False
            if has_mixtures:  # noqa: SIM102
                if mixture:
                    route_tokens((counters, task), layer, sizes, pairs, scratch, dtype, tag)
                    counters += COUNTER_BYTES
                    open_experts(counters, layer, sizes, x_mid, hidden, scratch, dtype, tag)
                    counters += COUNTER_BYTES
                    map_experts_down(counters, layer, sizes, hidden, pairs, scratch, dtype, tag)
            if not mixture:
                network = struct_at(layer.network, NETWORK)
                if network.gate_w or network.gate_stored:
                    open_gates((counters, task), layer, sizes, hidden, scratch, dtype, tag)
                else:
                    open_units((counters, task), layer, sizes, hidden, scratch, dtype, tag)
                counters += COUNTER_BYTES
                map_down(counters, layer, sizes, hidden, y, scratch, dtype, tag)
            counters += COUNTER_BYTES
            after, states = more.ff_after, x_mid
        compute_any_logits(
            counters, step, sizes, (states, y, after), (mixture, pairs), scratch, dtype, tag
        )

    return entry


@entry_point
def entry_address(dtype: torch.dtype, has_mixtures: bool) -> Callable[[int], None]:  # noqa: FBT001
    """Return the address of the compiled entry for a model whose weights have a dtype, with or
    without mixtures of experts.
    """
    return _make_entry(*STORAGE[dtype], has_mixtures=has_mixtures)
