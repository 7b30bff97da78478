"""The feed-forward phases of the compiled step: one gated network, or a mixture of experts.

A layer with one network has two phases, gate and up with the activation, and down. A mixture has
three: the router, gate and up of the used experts, and their maps down. An expert reads its weights
once for all of its tokens: what it computes for one of them is a pair of an expert and a token, and
pairs are ordered by the expert. Every thread adds the pairs of a token when it needs the sum, in
the order of the module, ascending.

`step_parts` says what the arguments `sizes` and `scratch` are.
"""

from __future__ import annotations

import math

import numpy as np

from regard.ops.jit.argument_structs import STEP_MIXTURE_STRUCT, STEP_NETWORK_STRUCT
from regard.ops.jit.compile import njit_fastmath, njit_strict
from regard.ops.jit.entry_points import finish_task, memory_at, struct_at, take_next, take_task
from regard.ops.jit.exp_tanh import exp, gelu_tanh
from regard.ops.jit.half_precision import from_float32, to_float32
from regard.ops.jit.step_parts import (
    TASK_BYTES,
    add_result,
    arrives_first,
    block_count,
    block_rows,
    copy_row,
    map_at,
    map_rows,
    multiply_blocks,
    norm_at,
    norm_vectors,
    vectors_in,
    wait_until_finished,
    write_vectors,
)
from regard.ops.jit.stored_weight_loops import mark_changed

NETWORK, MIXTURE = STEP_NETWORK_STRUCT.dtype, STEP_MIXTURE_STRUCT.dtype
NETWORK_BYTES = NETWORK.itemsize


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


@njit_fastmath
def gelu_products(gate, up, out, n, tag):
    """Write gelu(gate) * up to `out`, with the approximation of GELU by tanh."""
    for i in range(n):
        y = gelu_tanh(to_float32(gate[i], tag))
        y = to_float32(from_float32(y, tag, out), tag)
        out[i] = from_float32(y * to_float32(up[i], tag), tag, out)


@njit_strict
def relu_products(gate, up, out, n, tag):
    """Write relu(gate) * up to `out`; NaN stays NaN."""
    for i in range(n):
        x = to_float32(gate[i], tag)
        x = np.float32(0) if x < 0 else x
        out[i] = from_float32(x * to_float32(up[i], tag), tag, out)


@njit_fastmath
def clipped_silu_products(gate, up, out, limit, alpha, n, tag):
    """Write (clip(up) + 1) * x sigmoid(alpha x) with x = min(gate, limit) to `out`."""
    one = np.float32(1)
    limit = to_float32(from_float32(limit, tag, out), tag)
    for i in range(n):
        x, u = to_float32(gate[i], tag), to_float32(up[i], tag)
        if x > limit:
            x = limit
        if u > limit:
            u = limit
        elif u < -limit:
            u = -limit
        a = to_float32(from_float32(alpha * x, tag, out), tag)
        e = exp(-abs(a))
        y = one / (one + e) if a >= 0 else e / (one + e)
        y = to_float32(from_float32(y, tag, out), tag)
        y = to_float32(from_float32(x * y, tag, out), tag)
        u = to_float32(from_float32(u + one, tag, out), tag)
        out[i] = from_float32(u * y, tag, out)


@njit_strict
def activate(network, gate, up, out, n, tag):
    """Write f(gate) * up to `out`, with the activation f of a network."""
    activation = network.activation
    if activation == 0:
        silu_products(gate, up, out, n, tag)
    elif activation == 1:
        gelu_products(gate, up, out, n, tag)
    elif activation == 2:
        relu_products(gate, up, out, n, tag)
    else:
        limit, alpha = np.float32(network.limit), np.float32(network.alpha)
        clipped_silu_products(gate, up, out, limit, alpha, n, tag)


@njit_strict
def gate_and_up(network, M, dtype):
    """Return the maps gate and up of a network."""
    return (
        map_at(network.gate_w, network.gate_b, network.gate_stored, M, dtype),
        map_at(network.up_w, network.up_b, network.up_stored, M, dtype),
    )


@njit_strict
def units_of_task(network, M, dtype):
    """Return the number of hidden units of a network in one task."""
    gate_map, up_map = gate_and_up(network, M, dtype)
    units = block_rows(up_map)
    if network.gate_w or network.gate_stored:
        units = min(units, block_rows(gate_map))
    return units


@njit_strict
def take_first(counters, layer, M, scratch, dtype):
    """Return the number of the first task of a thread in phase 4 of a layer, and whether no other
    thread has taken one before.
    """
    if layer.mixture:
        task = take_task(counters)
        return task, task == 0
    network = struct_at(layer.network, NETWORK)
    step = units_of_task(network, M, dtype)
    tasks = (network.F + step - 1) // step
    task = take_next(counters, tasks, scratch[7])
    return task, task < tasks and arrives_first(counters)


@njit_strict
def open_rows(network, rows, vectors, sizes, out, scratch, dtype, tag):
    """Compute some hidden units of R vectors: gate, up and activation.

    rows: the first unit and one past the last one. sizes: (R, M). out: (memory, the place of the
    first unit of the first vector in it, the distance from one vector to the next).
    """
    gate, up, room = scratch[2], scratch[3], scratch[5]
    hidden, place, distance = out
    R, n = sizes[0], rows[1] - rows[0]
    gate_map, up_map = gate_and_up(network, sizes[1], dtype)
    map_rows(gate_map, rows, vectors, R, tag, room, (gate, 0, n))
    map_rows(up_map, rows, vectors, R, tag, room, (up, 0, n))
    for r in range(R):
        part, first = slice(r * n, (r + 1) * n), place + r * distance
        activate(network, gate[part], up[part], hidden[first : first + n], n, tag)


@njit_strict
def add_attention(layer, stores, sizes, states, scratch, dtype, tag):
    """Begin phase 4 of a layer: the sum of the hidden states and the attention's result, and the
    vectors of its norm. stores: whether this thread stores the sum.

    states: (hidden states, the attention's result, memory for the new hidden states).
    """
    R, M = sizes
    x, y, stored = states
    total, normed, wide, room = scratch[0], scratch[1], scratch[4], scratch[5]
    after = norm_at(layer.after_w, layer.after_eps, layer.after_offset, dtype)
    add_result(x, y, after, R, M, total, tag)
    if stores:
        copy_row(total, 0, stored, 0, R * M)
    before = norm_at(layer.ff_before_w, layer.ff_before_eps, layer.ff_before_offset, dtype)
    norm_vectors(total, before, R, M, normed, vectors_in(wide, R, M), tag)
    mark_changed(room[1])


@njit_strict
def open_gates(counters, layer, sizes, hidden, scratch, dtype, tag):
    """Phase 4 of a layer with one network: gate, up and activation.

    counters: (their address, the number of the first task of the caller, who has computed the
    normed vectors). sizes: (R, M).
    """
    R, M = sizes
    address, task = counters
    network = struct_at(layer.network, NETWORK)
    F = network.F
    vectors = vectors_in(scratch[4], R, M)
    step = units_of_task(network, M, dtype)
    tasks = (F + step - 1) // step
    while task < tasks:
        rows = (task * step, min(F, (task + 1) * step))
        open_rows(network, rows, vectors, sizes, (hidden, rows[0], F), scratch, dtype, tag)
        finish_task(address)
        task = take_next(address, tasks, scratch[7])
    wait_until_finished(address, tasks)


@njit_strict
def map_down(counters, layer, sizes, hidden, y, scratch, dtype, tag):
    """Phase 5 of a layer with one network: the map from the hidden units."""
    R, M = sizes
    network = struct_at(layer.network, NETWORK)
    wide, room, F, team = scratch[4], scratch[5], network.F, scratch[7]
    vectors = vectors_in(wide, R, F)
    down_map = map_at(network.down_w, network.down_b, network.down_stored, F, dtype)
    task = take_next(counters, block_count(down_map, M, TASK_BYTES), team)
    write_vectors(hidden, R, F, vectors, tag)
    mark_changed(room[1])
    multiply_blocks((counters, task, team), down_map, M, R, vectors, TASK_BYTES, room, y, tag)


@njit_strict
def comes_first(a, b):
    """Return whether a score a is chosen before a later score b: NaN counts as the largest."""
    return a > b or (a != a and b == b)


@njit_strict
def mark_best(scores, first, n, k, marks):
    """Set the marks of the k best of the scores first <= i < first + n, where of equal ones the
    first is the best; the others are left as they are.
    """
    for _ in range(k):
        best = -1
        for i in range(first, first + n):
            if not marks[i] and (best < 0 or comes_first(scores[i], scores[best])):
                best = i
        marks[best] = True


@njit_strict
def hide_groups(mixture, by, scores):
    """Set the scores of experts to -inf whose group is none of the best; groups are compared by the
    sums of the best numbers of `by` in each.
    """
    groups, best = mixture.groups, mixture.group_best
    size = mixture.n // groups
    sums, marks = np.zeros(groups, np.float32), np.zeros(mixture.n, np.bool_)
    for i in range(groups):
        mark_best(by, i * size, size, best, marks)
        for e in range(i * size, (i + 1) * size):
            if marks[e]:
                sums[i] += by[e]
    allowed = np.zeros(groups, np.bool_)
    mark_best(sums, 0, groups, mixture.group_topk, allowed)
    for e in range(mixture.n):
        if not allowed[e // size]:
            scores[e] = -np.float32(np.inf)


@njit_strict
def weigh_experts(mixture, logits, marks, weights, tag):
    """Mark the experts of a token by their logits `[n]`, and write the weights of all `[n]`, of
    which only those of marked ones count.
    """
    n, k = mixture.n, mixture.k
    scores, by = np.empty(n, np.float32), np.empty(n, np.float32)
    wide, total = np.empty(n, np.float64), 0.0
    if mixture.sigmoid:
        narrow, correction = (
            memory_at(mixture.correction, np.uint16),
            memory_at(mixture.correction, np.float32),
        )
        for e in range(n):
            wide[e] = 1 / (1 + math.exp(-np.float64(logits[e])))
            added = correction[e] if mixture.wide_correction else to_float32(narrow[e], tag)
            scores[e] = np.float32(wide[e]) + added
            by[e] = scores[e]
    else:
        top = logits[0]
        for e in range(n):
            top = logits[e] if comes_first(logits[e], top) else top
        for e in range(n):
            scores[e], wide[e] = logits[e], math.exp(np.float64(logits[e]) - np.float64(top))
            total += wide[e]
        for e in range(n):
            wide[e] /= total
            by[e] = wide[e]
    if mixture.groups:
        hide_groups(mixture, by, scores)
    mark_best(scores, 0, n, k, marks)
    if mixture.normalize and not mixture.sigmoid:  # the softmax over the chosen ones
        best = -1
        for e in range(n):
            if marks[e] and (best < 0 or comes_first(logits[e], logits[best])):
                best = e
        for e in range(n):
            wide[e] = math.exp(np.float64(logits[e]) - np.float64(logits[best]))
    total = 1e-20 if mixture.sigmoid else 0.0
    for e in range(n):
        if marks[e]:
            total += wide[e]
    for e in range(n):
        weight = wide[e] / total if mixture.normalize else wide[e]
        weights[e] = np.float32(weight) * np.float32(mixture.scale)


@njit_strict
def choose_experts(mixture, R, logits, routing, shares, tag):
    """Choose the experts of R tokens by their logits `[R, n]`, and write the pairs of an expert and
    a token, ordered by the expert and then by the token.

    routing: an output, int64 memory of this mixture alone, because a thread that is late may read
    it while others are in later layers: the number of used experts, then the lists of `pair_lists`.
    """
    n = mixture.n
    marks, weights = np.zeros((R, n), np.bool_), np.empty((R, n), np.float32)
    for r in range(R):
        weigh_experts(mixture, logits[r * n : (r + 1) * n], marks[r], weights[r], tag)
    experts, firsts, tokens = pair_lists(mixture, R, routing)
    used = pairs = 0
    for e in range(n):
        firsts[used] = pairs
        for r in range(R):
            if marks[r, e]:
                tokens[pairs], shares[pairs] = r, weights[r, e]
                pairs += 1
        if pairs > firsts[used]:
            experts[used] = e
            used += 1
    firsts[used] = pairs
    routing[0] = used


@njit_strict
def pair_lists(mixture, R, routing):
    """Return the three lists of int64 memory after the number of used experts: their numbers, the
    first pair of each and one past the last pair, and the token of each pair.
    """
    most = R * mixture.k
    return (
        routing[1 : 1 + most],
        routing[1 + most : 2 + 2 * most],
        routing[2 + 2 * most : 2 + 3 * most],
    )


@njit_strict
def expert_at(mixture, i, used, experts):
    """Return the address of the network of the i-th used expert; the one after the last is that for
    all tokens.
    """
    return mixture.shared if i == used else mixture.networks + experts[i] * NETWORK_BYTES


@njit_strict
def route_tokens(counters, layer, sizes, memory, scratch, dtype, tag):
    """Phase 4 of a layer with a mixture: the logits of the experts, and their choice by the thread
    that finishes last, which counts as one more task.

    counters: see `open_gates`. memory: see `sublayer_result`.
    """
    R, M = sizes
    address, task = counters
    mixture = struct_at(layer.mixture, MIXTURE)
    n, routing = mixture.n, memory_at(mixture.routing, np.int64)
    shares, logits, _ = memory
    vectors, room = vectors_in(scratch[4], R, M), scratch[5]
    router = map_at(mixture.router_w, mixture.router_b, mixture.router_stored, M, dtype)
    step = block_rows(router)
    blocks = (n + step - 1) // step
    tasks = blocks + (1 if mixture.gated else 0)
    while task < tasks:
        if task < blocks:
            rows = (task * step, min(n, (task + 1) * step))
            map_rows(router, rows, vectors, R, tag, room, (logits, rows[0], n))
        else:
            gate = map_at(
                mixture.shared_gate_w, mixture.shared_gate_b, mixture.shared_gate_stored, M, dtype
            )
            map_rows(gate, (0, 1), vectors, R, tag, room, (logits, R * n, 1))
        if finish_task(address) == tasks - 1:
            choose_experts(mixture, R, logits, routing, shares, tag)
            finish_task(address)
        task = take_task(address)
    wait_until_finished(address, tasks + 1)


@njit_strict
def open_experts(counters, layer, sizes, x, hidden, scratch, dtype, tag):
    """Phase 5 of a layer with a mixture: norm, then gate, up and activation of each used expert for
    its tokens. A task is a block of hidden units of one expert.

    x: the hidden states before the layer.
    """
    R, M = sizes
    mixture = struct_at(layer.mixture, MIXTURE)
    normed, wide, room, few = scratch[1], scratch[4], scratch[5], scratch[6]
    vectors, k = vectors_in(wide, R, M), mixture.k
    routing = memory_at(mixture.routing, np.int64)
    used, (experts, firsts, tokens) = routing[0], pair_lists(mixture, R, routing)
    F = struct_at(mixture.networks, NETWORK).F
    current, first, task = -1, 0, take_task(counters)
    before = norm_at(layer.ff_before_w, layer.ff_before_eps, layer.ff_before_offset, dtype)
    norm_vectors(x, before, R, M, normed, vectors, tag)
    mark_changed(room[1])
    for i in range(used + (1 if mixture.shared else 0)):
        network = struct_at(expert_at(mixture, i, used, experts), NETWORK)
        n, place = R, R * k * F
        if i < used:
            n, place = firsts[i + 1] - firsts[i], firsts[i] * F
        gate_map, up_map = gate_and_up(network, M, dtype)
        step = min(block_rows(gate_map), block_rows(up_map))
        blocks = (network.F + step - 1) // step
        while task < first + blocks:
            own = vectors
            if n < R:
                own = vectors_in(few, n, M)
                if current != i:
                    for j in range(n):
                        for d in range(own.shape[1]):
                            own[j, d] = vectors[tokens[firsts[i] + j], d]
            if current != i and R > 1:
                mark_changed(room[1])
            current = i
            rows = ((task - first) * step, min(network.F, (task - first + 1) * step))
            out = (hidden, place + rows[0], network.F)
            open_rows(network, rows, own, (n, M), out, scratch, dtype, tag)
            finish_task(counters)
            task = take_task(counters)
        first += blocks
    wait_until_finished(counters, first)


@njit_strict
def map_experts_down(counters, layer, sizes, hidden, memory, scratch, dtype, tag):
    """Phase 6 of a layer with a mixture: the map from the hidden units of each used expert. A task
    is a block of rows of one expert.

    memory: see `sublayer_result`.
    """
    R, M = sizes
    mixture = struct_at(layer.mixture, MIXTURE)
    wide, room, parts = scratch[4], scratch[5], memory[2]
    routing = memory_at(mixture.routing, np.int64)
    used, (experts, firsts, _) = routing[0], pair_lists(mixture, R, routing)
    width, k = struct_at(mixture.networks, NETWORK).F, mixture.k
    current, first, task = -1, 0, take_task(counters)
    for i in range(used + (1 if mixture.shared else 0)):
        network = struct_at(expert_at(mixture, i, used, experts), NETWORK)
        F, n, pair = network.F, R, R * k
        if i < used:
            n, pair = firsts[i + 1] - firsts[i], firsts[i]
        down_map = map_at(network.down_w, network.down_b, network.down_stored, F, dtype)
        step, vectors = block_rows(down_map), vectors_in(wide, n, F)
        blocks = (M + step - 1) // step
        while task < first + blocks:
            if current != i:
                write_vectors(hidden[pair * width : pair * width + n * F], n, F, vectors, tag)
                mark_changed(room[1])
                current = i
            rows = ((task - first) * step, min(M, (task - first + 1) * step))
            map_rows(down_map, rows, vectors, n, tag, room, (parts, pair * M + rows[0], M))
            finish_task(counters)
            task = take_task(counters)
        first += blocks
    wait_until_finished(counters, first)


@njit_strict
def add_experts(mixture, sizes, memory, total, out, tag):
    """Write to `out` the sums over the experts of each token, in ascending order, and over the
    network for all tokens; they are computed in fp32 in `total` [R M].
    """
    R, M = sizes
    shares, logits, parts = memory
    _, _, tokens = pair_lists(mixture, R, memory_at(mixture.routing, np.int64))
    for i in range(R * M):
        total[i] = np.float32(0)
    for p in range(R * mixture.k):
        row, share = tokens[p] * M, shares[p]
        for i in range(M):
            total[row + i] += to_float32(parts[p * M + i], tag) * share
    for r in range(R if mixture.shared else 0):
        row, place = r * M, (R * mixture.k + r) * M
        gate = np.float32(1)
        if mixture.gated:
            x = from_float32(logits[R * mixture.n + r], tag, out)
            gate = np.float32(1 / (1 + math.exp(-np.float64(to_float32(x, tag)))))
            gate = to_float32(from_float32(gate, tag, out), tag)
        for i in range(M):
            y = from_float32(gate * to_float32(parts[place + i], tag), tag, out)
            total[row + i] += to_float32(y, tag)
    for i in range(R * M):
        out[i] = from_float32(total[i], tag, out)


@njit_strict
def sublayer_result(address, y, sizes, memory, scratch, tag):
    """Return the result [R M] of the last feed-forward layer: y, or the sum over the experts of the
    mixture at an address, if it is not 0. Each thread computes the sum for itself.

    memory of a mixture: (the weight of each pair, the logits of the experts and of the gate, the
    results of the pairs and of the network for all tokens).
    """
    if address:
        add_experts(struct_at(address, MIXTURE), sizes, memory, scratch[6], scratch[1], tag)
        y = scratch[1]
    return y
