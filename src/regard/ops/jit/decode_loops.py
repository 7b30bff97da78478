"""The compiled loops of decoding: attention of a few queries to many keys, in which each key and
value is read once.

For each row of the batch and each key/value head, all queries that use the head are the R = H/G * T
rows of one block: row r is query r % T of query head g H/G + r // T. The keys are processed in
tiles; for each tile the scores, their maximum and sum, and the weighted values are computed
together (online softmax, Milakov and Gimelshein 2018, arXiv 1805.02867). The keys of a head are
divided into splits. A task is one split of one head, and the results of the splits are joined by
their lse. While a tile is computed, the cache lines of the next one are prefetched in order, one
beside each load: a core that waits for every line reaches half of the memory bandwidth (LOG.md).

The first half of the file computes one tile: `compute_scores`, `online_softmax` and `add_values` do
not use the mask, because a masked key has the score -inf there. The second half determines which
keys each query sees and processes the tasks (`run_tasks`). The module `decode` calls
`entry_address`.

Arguments that the functions share:
    keys, values: (flat memory, offset of the head in it, stride from one token to the next, tag of
        the encoding)
    index: int64; the first n entries are the indices of the n keys of the tile that some row sees,
        and there is room up to the next multiple of eight
    s: the scores, later the weights, of the rows and of these n keys [R,TILE]
    acc, top, total: for each row the sum of weighted values [R,E], the largest score so far [R],
        and the sum of the weights [R]
    mask: (positions of the keys [b,S] or empty; the position of key 0; starts and stops of the
        ranges of positions that each query sees [b,h,t,n]; which keys each query sees [b,h,t,S],
        or empty where there are ranges)
    extra: (softcap or 0, whether ALiBi is symmetric, its slopes [H] or empty, any other bias
        [b,h,t,S] or empty, positions of the queries [b,T])
where b, h and t are B, H and T, or 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from regard.ops.jit.argument_structs import DECODE_STRUCT
from regard.ops.jit.compile import (
    FASTMATH_FLAGS,
    njit_linked,
    njit_strict,
    njit_strict_no_arrays,
)
from regard.ops.jit.entry_points import (
    STORAGE,
    array_4d_at,
    entry_point,
    finish_task,
    memory_at,
    struct_at,
    take_task,
)
from regard.ops.jit.exp_tanh import exp
from regard.ops.jit.half_precision import float_to_bits, to_float32
from regard.ops.jit.llvm_vectors import (
    CACHE_LINE,
    HAS_BF16_DOT,
    LANES,
    ZEROS,
    LLVMLoop,
    array_data,
    bf16_dot_add,
    broadcast,
    fma,
    i64_constant,
    lane_sums,
    load_bf16_pairs,
    load_floats,
    max_of,
    pointee_size,
    prefetch_bytes,
    prefetch_elements,
    row_pointer,
    split_vector,
    store,
)

TILE = 64
"""The number of keys in a tile; they and their values fit into the L1 cache."""

KEYS_PER_STEP = {4: 4, 1: 8}
"""For 4 rows of q and for 1 row, the number of keys whose scores with these rows are computed
together, so that all sums stay in registers.
"""

ZERO, NEG_INF = np.float32(0), np.float32(-np.inf)
njit_fast_leaf = njit_linked(fastmath=(*FASTMATH_FLAGS, "arcp"), makes_arrays=False)


def _make_score_loop(rows: int) -> Any:
    """Return a compiled loop over keys that computes their scores with `rows` rows of q: the scale
    times the dot products.
    """

    def loop(context: Any, q: Any, r: Any, keys: Any, index: Any, n: Any, s: Any) -> Any:
        paired = HAS_BF16_DOT and keys[0].dtype != types.float32 and keys[3] == types.int8

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            (
                (queries, bf16_queries, scale),
                first,
                (flat, base, step, _),
                index_array,
                count,
                s_array,
            ) = (cgutils.unpack_tuple(builder, x) if i in (0, 2) else x for i, x in enumerate(args))
            row_numbers = [builder.add(first, i64_constant(r)) for r in range(rows)]
            query_rows = [row_pointer(context, builder, q[0], queries, r) for r in row_numbers]
            bf16_query_rows = [
                row_pointer(context, builder, q[1], bf16_queries, r) for r in row_numbers
            ]
            score_rows = [row_pointer(context, builder, s, s_array, r) for r in row_numbers]
            memory, chosen = (
                array_data(context, builder, keys[0], flat),
                array_data(context, builder, index, index_array),
            )
            queries_array = context.make_array(q[0])(context, builder, value=queries)
            D, tag = cgutils.unpack_tuple(builder, queries_array.shape)[1], keys[3]
            tile = LLVMLoop(builder, i64_constant(0), count, KEYS_PER_STEP[rows])
            places = []
            for j in range(KEYS_PER_STEP[rows]):
                token = builder.load(
                    builder.gep(chosen, [builder.add(tile.index, i64_constant(j))])
                )
                places.append(builder.gep(memory, [builder.add(base, builder.mul(token, step))]))
            next_tile = builder.mul(step, i64_constant(TILE))
            rows_of_q = query_rows, bf16_query_rows if paired else None
            total = _sum_over_dims(builder, D, (places, next_tile), rows_of_q, tag)
            dots = lane_sums(builder, total)
            dots = builder.fmul(dots, broadcast(builder, scale, dots.type.count))
            for row, x in zip(score_rows, split_vector(builder, dots, len(places)), strict=True):
                store(builder, x, builder.gep(row, [tile.index]), len(places))
            tile.close()
            return context.get_dummy_value()

        return types.void(q, r, keys, index, n, s), code

    return intrinsic(loop)


def _sum_over_dims(
    builder: Any, D: Any, keys: tuple[list[Any], Any], queries: tuple[Any, Any], tag: Any
) -> list[Any]:
    """Emit the dot products over D of each row of q with each key; where `queries` has a bfloat16
    form, as many dimensions as possible are multiplied in pairs of bfloat16 numbers.

    keys: (pointers to the keys, distance from each to the key of the next tile that is prefetched).
    """
    places, next_tile = keys
    float_queries, bf16_queries = queries
    sizes = (*((2 * LANES,) if bf16_queries else ()), LANES, 1)
    bounds = [i64_constant(0), *(builder.and_(D, i64_constant(-x)) for x in sizes)]
    total = [ZEROS] * (len(float_queries) * len(places))
    for start, stop, lanes in zip(bounds, bounds[1:], sizes, strict=False):
        dims = LLVMLoop(builder, start, stop, lanes, total)
        k = [builder.gep(x, [dims.index]) for x in places]
        if lanes > 1:
            _prefetch_line_by_line(builder, k, dims.index, lanes, next_tile)
        x = [
            builder.gep(y, [dims.index]) for y in (bf16_queries if lanes > LANES else float_queries)
        ]
        if lanes > LANES:
            k, x = ([load_bf16_pairs(builder, y) for y in z] for z in (k, x))
        else:
            k, x = ([load_floats(builder, y, tag, lanes) for y in z] for z in (k, x))
        add = bf16_dot_add if lanes > LANES else fma
        terms = zip([(a, b) for a in x for b in k], dims.now, strict=True)
        total = dims.close([add(builder, a, b, z) for (a, b), z in terms])
    return total


def _prefetch_line_by_line(
    builder: Any, places: list[Any], index: Any, lanes: int, next_tile: Any
) -> None:
    """Emit the prefetch of one cache line of the next tile for each line that is loaded: all lines
    of a key in a row would keep the loads behind them waiting.

    If two loads are a line, half of the keys have their line prefetched beside each.
    """
    if lanes * pointee_size(places[0]) < CACHE_LINE:
        half = len(places) // 2
        even = builder.icmp_signed("==", builder.and_(index, i64_constant(lanes)), i64_constant(0))
        pairs = zip(places[:half], places[half:], strict=True)
        places = [builder.select(even, a, b) for a, b in pairs]
    for place in places:
        prefetch_bytes(builder, builder.gep(place, [next_tile]), 0, CACHE_LINE)


def _make_value_loop(rows: int, columns: int) -> Any:
    """Return a compiled loop over the values of a tile that adds them, multiplied by the weights of
    `rows` rows, to `columns` columns of `acc`.
    """
    lanes, steps = min(LANES, columns), [i64_constant(i) for i in range(0, columns, LANES)]

    def loop(context: Any, s: Any, r: Any, values: Any, index: Any, n: Any, out: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            s_array, first, (flat, base, step, _), index_array, count, (acc, column, ahead) = (
                cgutils.unpack_tuple(builder, x) if i in (2, 5) else x for i, x in enumerate(args)
            )
            row_numbers = [builder.add(first, i64_constant(r)) for r in range(rows)]
            weights = [row_pointer(context, builder, s, s_array, r) for r in row_numbers]
            memory, chosen = (
                array_data(context, builder, values[0], flat),
                array_data(context, builder, index, index_array),
            )
            sums_of = [
                builder.gep(row_pointer(context, builder, out[0], acc, r), [column])
                for r in row_numbers
            ]
            sum_pointers = [builder.gep(x, [i]) for x in sums_of for i in steps]
            so_far = [load_floats(builder, x, types.none, lanes) for x in sum_pointers]
            tile = LLVMLoop(builder, i64_constant(0), count, 1, so_far)
            token = builder.load(builder.gep(chosen, [tile.index]))
            value = builder.gep(memory, [builder.add(base, builder.mul(token, step))])
            value = builder.gep(value, [column])
            next_tile = builder.gep(value, [builder.mul(step, i64_constant(TILE))])
            prefetch_elements(builder, next_tile, ahead)
            v = [load_floats(builder, builder.gep(value, [i]), values[3], lanes) for i in steps]
            w = [broadcast(builder, builder.load(builder.gep(x, [tile.index]))) for x in weights]
            terms = zip([(a, b) for a in w for b in v], tile.now, strict=True)
            final_sums = tile.close([fma(builder, a, b, z) for (a, b), z in terms])
            for x, place in zip(final_sums, sum_pointers, strict=True):
                store(builder, x, place, lanes)
            return context.get_dummy_value()

        return types.void(s, r, values, index, n, out), code

    return intrinsic(loop)


_score_4, _score_1 = _make_score_loop(4), _make_score_loop(1)
_mix_4_64, _mix_4_16, _mix_4_1 = (
    _make_value_loop(4, 64),
    _make_value_loop(4, 16),
    _make_value_loop(4, 1),
)
_mix_1_128, _mix_1_16, _mix_1_1 = (
    _make_value_loop(1, 128),
    _make_value_loop(1, 16),
    _make_value_loop(1, 1),
)


@njit_strict_no_arrays
def to_bfloat16(x, words):
    """Write the fp32 numbers x `[R, D]` to `words` as bfloat16, by dropping the lower 16 bits; this
    is exact for numbers that were bfloat16 before.
    """
    for r in range(x.shape[0]):
        for d in range(x.shape[1]):
            words[r, d] = np.int16(float_to_bits(x[r, d]) >> np.int32(16))


@njit_strict_no_arrays
def compute_scores(q, rows, keys, index, n, s):
    """Compute the scores of all rows of q with n keys: four rows at a time, and one row alone if
    only one remains. q: (fp32 `[R, D]`, the same numbers as bfloat16 `[R, D]`, the scale).
    """
    for c in range(n, (n + 7) // 8 * 8):
        index[c] = index[n - 1]
    fours = rows // 4 * 4 if rows % 4 < 2 else q[0].shape[0]
    for r in range(0, fours, 4):
        _score_4(q, r, keys, index, n, s)
    if fours < rows:
        _score_1(q, rows - 1, keys, index, n, s)


@njit_strict_no_arrays
def add_values(s, rows, values, index, n, acc):
    """Compute acc `[R, E]` += weights times values: four rows at a time, and one row alone if only
    one remains.
    """
    E, r, e = acc.shape[1], 0, 0
    while r < rows:
        four, left = rows - r > 1, E - e
        # while the first rows are added, each pass prefetches its columns of the next tile
        columns = 64 if four else 128
        if left < columns:
            columns = 16 if left >= 16 else 1
        out = (acc, e, columns if r == 0 else 0)
        if four and columns == 64:
            _mix_4_64(s, r, values, index, n, out)
        elif four and columns == 16:
            _mix_4_16(s, r, values, index, n, out)
        elif four:
            _mix_4_1(s, r, values, index, n, out)
        elif columns == 128:
            _mix_1_128(s, r, values, index, n, out)
        elif columns == 16:
            _mix_1_16(s, r, values, index, n, out)
        else:
            _mix_1_1(s, r, values, index, n, out)
        e += columns
        if e == E:
            r, e = r + (4 if four else 1), 0


@njit_fast_leaf
def add_visible_values(s, rows, values, index, n, acc):
    """Compute acc `[R, E]` += weights times values, row by row, without reading a value whose
    weight is 0, because a masked value may be NaN.
    """
    flat, base, step, tag = values
    E = acc.shape[1]
    for r in range(rows):
        row = acc[r]
        for c in range(n):
            weight = s[r, c]
            if weight == ZERO:
                continue
            offset = base + index[c] * step
            value = flat[offset : offset + E]
            for e in range(E):
                row[e] += weight * to_float32(value[e], tag)


@njit_fast_leaf
def online_softmax(s, rows, n, acc, top, total):
    """Replace the scores s of all rows by the weights exp(s - top), where top is the largest score
    of the row so far, and rescale the earlier sums `acc` and `total` to this maximum.
    """
    for r in range(rows):
        scores = s[r, :n]
        new_max = max(top[r], max_of(s, r * s.shape[1], n))
        if new_max > top[r]:
            correction, row = exp(top[r] - new_max), acc[r]
            total[r] *= correction
            for e in range(row.shape[0]):
                row[e] *= correction
            top[r] = new_max
        added = ZERO
        if new_max == NEG_INF:  # all scores are -inf or NaN: the weights are 0, or stay NaN
            for c in range(n):
                scores[c] = scores[c] * ZERO if scores[c] != scores[c] else ZERO
                added += scores[c]
        else:
            for c in range(n):
                weight = exp(scores[c] - new_max)
                scores[c] = weight
                added += weight
        total[r] += added


@njit_strict
def _row_of(x, b, h, t):
    """Return the row of an array `[b, h, t, n]` for a batch row, a head and a query; a
    dimension of 1 is shared.
    """
    return x[min(b, x.shape[0] - 1), min(h, x.shape[1] - 1), min(t, x.shape[2] - 1)]


@njit_strict
def tile_coverage(b, g, tile, rows, T, mask):
    """Return 2 if every row sees all keys of a tile, 0 if no row sees any of them, else 1; for keys
    at contiguous positions.
    """
    _, origin, starts, stops, _ = mask
    heads = rows // T
    every, some = True, False
    p0, p1 = origin + tile[0], origin + tile[1]
    for r in range(rows):
        lo, hi = (
            _row_of(starts, b, g * heads + r // T, r % T),
            _row_of(stops, b, g * heads + r // T, r % T),
        )
        whole = False
        for i in range(lo.shape[0]):
            whole |= lo[i] <= p0 and p1 <= hi[i]
            some |= lo[i] < p1 and p0 < hi[i]
        every &= whole
    return 2 if every else 1 if some else 0


@njit_strict
def query_visibility(b, h, t, tile, mask, visible):
    """Set visible[c] to whether query t of head h sees key c of a tile."""
    k_positions, origin, starts, stops, dense = mask
    j0, j1 = tile
    if dense.shape[3]:
        line = _row_of(dense, b, h, t)
        for j in range(j0, j1):
            visible[j - j0] = line[j]
        return
    lo, hi = _row_of(starts, b, h, t), _row_of(stops, b, h, t)
    for j in range(j0, j1):
        p = (
            origin + j
            if k_positions.shape[1] == 0
            else k_positions[min(b, k_positions.shape[0] - 1), j]
        )
        inside = False
        for i in range(lo.shape[0]):
            inside |= lo[i] <= p < hi[i]
        visible[j - j0] = inside and p >= 0


@njit_strict
def _gather_visible_keys(b, g, tile, rows, T, mask, vis, index):
    """Write the indices of the keys of a tile that some row sees to `index`, and which row sees
    which of them to `vis`; return their number and whether every row sees all of them.
    """
    heads = rows // T
    for r in range(rows):
        query_visibility(b, g * heads + r // T, r % T, tile, mask, vis[r])
    n, full = 0, True
    for c in range(tile[1] - tile[0]):
        some, every = False, True
        for r in range(rows):
            some |= vis[r, c]
            every &= vis[r, c]
        if some:
            for r in range(rows):
                vis[r, n] = vis[r, c]
            index[n] = tile[0] + c
            n += 1
            full &= every
    return n, full


@njit_strict
def apply_softcap_and_bias(s, b, g, rows, T, n, index, mask, extra):
    """Apply the softcap, then the bias, to the scores of a tile."""
    k_positions, origin = mask[0], mask[1]
    cap, symmetric, slopes, bias, q_positions = extra
    heads = rows // T
    for r in range(rows):
        h, t = g * heads + r // T, r % T
        if cap > 0:
            for c in range(n):
                s[r, c] = cap * np.float32(math.tanh(s[r, c] / cap))
        if slopes.shape[0]:
            q = q_positions[min(b, q_positions.shape[0] - 1), t]
            for c in range(n):
                j = index[c]
                p = (
                    origin + j
                    if k_positions.shape[1] == 0
                    else k_positions[min(b, k_positions.shape[0] - 1), j]
                )
                s[r, c] -= slopes[h] * np.float32(abs(q - p) if symmetric else q - p)
        if bias.shape[3]:
            line = _row_of(bias, b, h, t)
            for c in range(n):
                s[r, c] += line[index[c]]


@njit_strict
def write_output(acc, top, total, out, lse):
    """Divide the weighted sums of a task by their totals, and write them to the output `[R, E]`
    and the lse `[R]`.
    """
    for r in range(out.shape[0]):
        some = total[r] != 0
        # computed in fp64 and rounded once to fp32
        lse[r] = np.float64(top[r]) + math.log(np.float64(total[r])) if some else NEG_INF
        for e in range(out.shape[1]):
            out[r, e] = acc[r, e] / total[r] if some else ZERO


@njit_strict
def join_row(out, lse):
    """Join the splits of one row, out `[P, E]` and lse `[P]`, into split 0."""
    top = NEG_INF
    for x in lse:
        top = x if x > top or x != x else top
    if top == NEG_INF:
        return
    total = 0.0
    for x in lse:
        total += math.exp(x - top)
    for e in range(out.shape[1]):
        z = 0.0
        for p in range(out.shape[0]):
            weight = math.exp(lse[p] - top)
            if weight != 0:
                z += weight * out[p, e]
        out[0, e] = z / total
    lse[0] = top + math.log(total)


@njit_strict
def join_splits(out, lse):
    """Join the splits out `[B, G, P, R, E]` by their lse `[B, G, P, R]`, into split 0 of both."""
    B, G, _, R, _ = out.shape
    for b in range(B):
        for g in range(G):
            for r in range(R):
                join_row(out[b, g, :, r], lse[b, g, :, r])


@njit_strict
def sink_share(lse, sink):
    """Return the share of a softmax that its keys keep beside a sink: sigmoid(lse - sink), computed
    in fp64 and rounded once. A row that sees no key keeps its output of 0.
    """
    if lse == NEG_INF:
        return np.float32(1)
    return np.float32(1 / (1 + math.exp(np.float64(sink) - np.float64(lse))))


@njit_strict
def apply_sinks(out, lse, sink, T):
    """Multiply each row of out `[B, G, R, E]` by its share beside the sink `[H]` of its head, given
    its lse `[B, G, R]`; row r of key/value head g belongs to head g H/G + r // T.
    """
    B, G, R, E = out.shape
    for b in range(B):
        for g in range(G):
            for r in range(R):
                share = sink_share(lse[b, g, r], sink[g * (R // T) + r // T])
                for e in range(E):
                    out[b, g, r, e] *= share


@njit_strict
def slot_in_memory(pages, b, slot):
    """Return where a slot of row b is in memory. pages: (the pages of each row [b,n], or empty; the
    number of slots of a page).
    """
    table, size = pages
    if table.shape[1] == 0:
        return slot
    return table[min(b, table.shape[0] - 1), slot // size] * size + slot % size


@njit_strict
def run_tasks(address, call, keys, values, pages):
    """Take tasks until none of the B G P tasks of a call is left, and write their results to out
    `[B, G, P, R, E]` and lse `[B, G, P, R]`. Joining the splits of a call counts as one more
    finished task.

    call: (q `[B, G, R, D]`, the scale, T, mask, extra, out, lse). keys, values: (flat memory,
    strides of B, G and the tokens, tag, number of tokens S). pages: see `slot_in_memory`.
    """
    q_all, scale, T, mask, extra, out, lse = call
    B, G, P, R, E = out.shape
    padded = R if R % 4 < 2 else (R + 3) // 4 * 4
    q, acc = np.zeros((padded, q_all.shape[3]), np.float32), np.empty((padded, E), np.float32)
    words = np.zeros(q.shape, np.int16)
    top, total = np.empty(padded, np.float32), np.empty(padded, np.float64)
    s, vis = np.zeros((padded, TILE), np.float32), np.empty((R, TILE), np.bool_)
    index = np.empty(TILE, np.int64)
    # where the keys of a tile are in memory; without pages their indices themselves
    paged = pages[0].shape[1] > 0
    places = np.empty(TILE, np.int64) if paged else index
    S = keys[5]
    tiles = (S + TILE - 1) // TILE
    share = (tiles + P - 1) // P
    contiguous = mask[0].shape[1] == 0 and mask[4].shape[3] == 0
    plain = extra[0] == 0 and extra[2].shape[0] == 0 and extra[3].shape[3] == 0
    while True:
        task = take_task(address)
        if task >= B * G * P:
            break
        b, g, p = task // (G * P), task // P % G, task % P
        for r in range(R):  # Numba takes two seconds to compile the assignment of an array
            for d in range(q.shape[1]):
                q[r, d] = q_all[b, g, r, d]
        to_bfloat16(q, words)
        acc[:] = 0
        top[:] = NEG_INF
        total[:] = 0
        head_k = (keys[0], b * keys[1] + g * keys[2], keys[3], keys[4])
        head_v = (values[0], b * values[1] + g * values[2], values[3], values[4])
        for i in range(p * share, min(tiles, (p + 1) * share)):
            tile = (i * TILE, min(S, (i + 1) * TILE))
            cover = tile_coverage(b, g, tile, R, T, mask) if contiguous else 1
            n, full = tile[1] - tile[0], True
            if cover == 2:
                for c in range(n):
                    index[c] = tile[0] + c
            elif cover == 1:
                n, full = _gather_visible_keys(b, g, tile, R, T, mask, vis, index)
            if cover == 0 or n == 0:
                continue
            for c in range(n if paged else 0):
                places[c] = slot_in_memory(pages, b, index[c])
            compute_scores((q, words, scale), R, head_k, places, n, s)
            if not plain:
                apply_softcap_and_bias(s, b, g, R, T, n, index, mask, extra)
            for r in range(R):
                for c in range(0 if full else n):
                    if not vis[r, c]:
                        s[r, c] = NEG_INF
            online_softmax(s, R, n, acc, top, total)
            if full:
                add_values(s, R, head_v, places, n, acc)
            else:
                add_visible_values(s, R, head_v, places, n, acc)
        write_output(acc, top, total, out[b, g, p], lse[b, g, p])
        if finish_task(address) == B * G * P - 1 and P > 1:
            join_splits(out, lse)
            finish_task(address)


@njit_strict
def decode_arguments(arguments):
    """Read a struct: q `[B, G, R, D]`, the scale, T, mask, extra, out `[B, G, P, R, E]`, lse
    `[B, G, P, R]`.
    """
    q = array_4d_at(arguments.q, arguments.q_shape, np.float32)
    out = array_4d_at(arguments.out, arguments.out_shape, np.float32)
    lse = array_4d_at(arguments.lse, arguments.lse_shape, np.float32)
    B, G, R = q.shape[0], q.shape[1], q.shape[2]
    P, E = out.shape[1], out.shape[3]
    mask = (
        array_4d_at(arguments.k_positions, arguments.k_positions_shape, np.int64)[0, 0],
        arguments.origin,
        array_4d_at(arguments.starts, arguments.starts_shape, np.int64),
        array_4d_at(arguments.stops, arguments.stops_shape, np.int64),
        array_4d_at(arguments.visible, arguments.visible_shape, np.bool_),
    )
    extra = (
        np.float32(arguments.softcap),
        arguments.symmetric != 0,
        array_4d_at(arguments.slopes, arguments.slopes_shape, np.float32)[0, 0, 0],
        array_4d_at(arguments.bias, arguments.bias_shape, np.float32),
        array_4d_at(arguments.q_positions, arguments.q_positions_shape, np.int64)[0, 0],
    )
    scale = np.float32(arguments.scale)
    return q, scale, arguments.T, mask, extra, out.reshape(B, G, P, R, E), lse.reshape(B, G, P, R)


@njit_strict
def page_table(arguments):
    """Read the pages of a struct, as `slot_in_memory` takes them."""
    table = array_4d_at(arguments.pages, arguments.pages_shape, np.int64)[0, 0]
    return table, arguments.page_size


ARGUMENTS = DECODE_STRUCT.dtype


def _make_entry(dtype: Any, tag: Any) -> Callable[[int], None]:
    """Return the Python function of the entry for one storage dtype and tag, to be compiled."""

    def entry(address: int) -> None:
        arguments = struct_at(address, ARGUMENTS)
        S, k_steps, v_steps = arguments.S, arguments.k_steps, arguments.v_steps
        keys = (memory_at(arguments.k, dtype), k_steps[0], k_steps[1], k_steps[2], tag, S)
        values = (memory_at(arguments.v, dtype), v_steps[0], v_steps[1], v_steps[2], tag, S)
        run_tasks(address, decode_arguments(arguments), keys, values, page_table(arguments))

    return entry


@entry_point
def entry_address(dtype: torch.dtype) -> Callable[[int], None]:
    """Return the address of the compiled entry for keys and values of a dtype."""
    return _make_entry(*STORAGE[dtype])
