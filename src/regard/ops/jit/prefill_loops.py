"""The loops of prefill: blocks of queries against tiles of keys, scores in fp32; what is masked is
not multiplied.

For a row of the batch and a key/value head g, row r is query r // n of head g n + r % n, n = H/G:
neighbours see almost the same keys. So many rows as fit the second cache are a block, (b, g, its
first row, its rows, n), STEP rows a group. For each tile of keys the groups that see some of it
multiply the panels between the first and the last that they see, become weights (online softmax,
Milakov and Gimelshein 2018, arXiv 1805.02867), and are multiplied with the values of the same
panels.

`run_tasks` at the end is where the door `prefill` comes in. What the functions pass on:
    mask: (positions of the keys [b,S], -1 where there is none; of each panel of keys the least and
        the largest position, and whether all are there [b,panels,3]; starts and stops of the ranges
        of positions that a query sees [b,h,t,n])
    extra: (scale, softcap or 0, whether ALiBi is symmetric, its slopes [H] or none, positions of
        the queries [b,T])
b, h and t are B, H and T, or 1. Arrays are slices that begin where the work begins: an index that
runs from 0 needs no look at its sign, and the loop is SIMD.
"""

from __future__ import annotations

import numpy as np

from regard.ops.jit.compile import njit_fastmath, njit_strict
from regard.ops.jit.exp_tanh import exp, tanh
from regard.ops.jit.half_precision import convert, from_float32
from regard.ops.jit.matmul import PANEL_COLUMNS, REGISTER_ROWS, matmul, matmul_add

ZERO, ONE, NEG_INF = np.float32(0), np.float32(1), np.float32(-np.inf)


@njit_strict
def row_of(x, b, h, t):
    """The line of an array [b,h,t,n] that serves a row of the batch, a head and a query."""
    return x[min(b, x.shape[0] - 1), min(h, x.shape[1] - 1), min(t, x.shape[2] - 1)]


@njit_strict
def hide_masked(s, b, h, t, keys, mask):
    """Scores of one row with some keys become -inf where it may not see."""
    where, _, starts, stops = mask
    lo, hi = row_of(starts, b, h, t), row_of(stops, b, h, t)
    at = where[min(b, where.shape[0] - 1), keys[0] : keys[1]]
    for c in range(at.shape[0]):
        inside = False
        for i in range(lo.shape[0]):
            inside |= (lo[i] <= at[c]) & (at[c] < hi[i])
        s[c] = s[c] if inside else NEG_INF


@njit_fastmath
def adjust_scores(s, first, b, h, t, where, extra):
    """The scale, then the softcap, then ALiBi, on the scores of one row with the keys from `first`
    on.
    """
    scale, cap, symmetric, slopes, q_where = extra
    for c in range(s.shape[0]):
        s[c] *= scale
    if cap > 0:
        for c in range(s.shape[0]):
            s[c] = cap * tanh(s[c] / cap)
    if slopes.shape[0]:
        at, slope = where[min(b, where.shape[0] - 1), first : first + s.shape[0]], slopes[h]
        q = q_where[min(b, q_where.shape[0] - 1), t]
        for c in range(s.shape[0]):
            far = q - at[c]
            s[c] -= slope * np.float32(abs(far) if symmetric else far)


@njit_fastmath
def _row_maximum(s, lanes):
    """The largest score of a row of whole panels; NaN counts for nothing. Lane by lane, so that the
    loop is SIMD.
    """
    for i in range(PANEL_COLUMNS):
        lanes[i] = NEG_INF
    for at in range(0, s.shape[0], PANEL_COLUMNS):
        panel = s[at : at + PANEL_COLUMNS]
        for i in range(PANEL_COLUMNS):
            # not max: Numba's looks for NaN as well
            lanes[i] = panel[i] if panel[i] > lanes[i] else lanes[i]  # noqa: FURB136
    largest = NEG_INF
    for i in range(PANEL_COLUMNS):
        largest = lanes[i] if lanes[i] > largest else largest  # noqa: FURB136
    return largest


@njit_fastmath
def online_softmax(s, p, acc, top, total, r, tag, lanes):
    """Scores of a row become weights p relative to its maximum so far; what was summed before is
    scaled to it.
    """
    largest = _row_maximum(s, lanes)
    if largest > top[r]:
        shrink = exp(top[r] - largest)
        total[r] *= shrink
        for e in range(acc.shape[0]):
            acc[e] *= shrink
        top[r] = largest
    base = top[r] if top[r] > NEG_INF else ZERO
    added = ZERO
    for c in range(s.shape[0]):
        weight = exp(s[c] - base)
        added += weight
        s[c] = weight
    total[r] += added
    if p.itemsize < s.itemsize:  # else p is s
        for c in range(s.shape[0]):
            p[c] = from_float32(s[c], tag, p)


TILE_PANELS = 256 // PANEL_COLUMNS
"""Panels of keys in a tile."""

TILE_KEYS = TILE_PANELS * PANEL_COLUMNS
MAX_BLOCK_ROWS = 43 * REGISTER_ROWS
"""The most rows of a block: with 256 keys their scores, weights, queries and sums stay in the
second cache.
"""

NO_POSITION = 1 << 62


@njit_strict
def _panel_visibility(ranges, bounds):
    """0 if no range meets a panel, 2 if one covers it and no key is missing, else 1."""
    state = 0
    lo, hi = ranges
    for i in range(lo.shape[0]):
        if lo[i] <= bounds[1] and hi[i] > bounds[0]:
            state = max(state, 1)
            if lo[i] <= bounds[0] and hi[i] > bounds[1] and bounds[2]:
                state = 2
    return state


@njit_strict
def head_and_query(block, r):
    """The head and the query of a row."""
    _, g, r0, _, n = block
    return g * n + (r0 + r) % n, (r0 + r) // n


@njit_strict
def block_reach(block, mask, hull):
    """Find for each of the ranges the least start and the largest stop of all rows: a tile outside
    of all of them cannot be seen.
    """
    b, _, _, rows, _ = block
    hull[:, 0], hull[:, 1] = NO_POSITION, 0
    for r in range(rows):
        h, t = head_and_query(block, r)
        lo, hi = row_of(mask[2], b, h, t), row_of(mask[3], b, h, t)
        for i in range(lo.shape[0]):
            if lo[i] < hi[i]:
                hull[i, 0], hull[i, 1] = min(hull[i, 0], lo[i]), max(hull[i, 1], hi[i])


@njit_strict
def tile_in_reach(block, first, mask, hull):
    """Whether some panel of a tile can be seen."""
    bounds = mask[1][min(block[0], mask[1].shape[0] - 1)]
    for p in range(first, min(first + TILE_PANELS, bounds.shape[0])):
        if _panel_visibility((hull[:, 0], hull[:, 1]), bounds[p]):
            return True
    return False


@njit_strict
def survey_tile(block, first, mask, spans, hidden):
    """What each group sees of the tile whose first panel is `first`: panels spans[group], 1 of
    hidden[group] if in part, 2 if nothing.

    Returns whether any group sees any of it.
    """
    b, _, _, rows, _ = block
    _, bounds, starts, stops = mask
    panels, any_at_all = min(TILE_PANELS, bounds.shape[1] - first), False
    bound = bounds[min(b, bounds.shape[0] - 1)]
    for group in range(spans.shape[0]):
        spans[group, 0], spans[group, 1] = TILE_PANELS, 0
        for p in range(panels):
            least, most, before = 2, 0, -1
            for r in range(group * REGISTER_ROWS, min(rows, (group + 1) * REGISTER_ROWS)):
                h, t = head_and_query(block, r)
                if t == before and starts.shape[1] == 1:
                    continue
                before = t
                state = _panel_visibility(
                    (row_of(starts, b, h, t), row_of(stops, b, h, t)), bound[first + p]
                )
                least, most = min(least, state), max(most, state)
            hidden[group, p] = 2 if most == 0 else least != 2
            if most:
                spans[group, 0], spans[group, 1] = min(spans[group, 0], p), p + 1
        any_at_all |= spans[group, 1] > 0
    return any_at_all


@njit_fastmath
def _attend_tile(block, first, q, head, spans, hidden, scratch, mask, extra, sums):
    """Scores, weights and their values for one tile."""
    b, _, _, rows, _ = block
    depth, k, k_at, v, v_at, v_panel, tag = head
    s, p, lanes = scratch
    acc, width, top, total = sums
    for panel in range(TILE_PANELS):
        at = k_at + (first + panel) * PANEL_COLUMNS * depth
        for group in range(spans.shape[0]):
            if hidden[group, panel] < 2:
                r = group * REGISTER_ROWS
                matmul(
                    q,
                    r * depth,
                    depth,
                    k,
                    at,
                    depth,
                    s,
                    r * TILE_KEYS + panel * PANEL_COLUMNS,
                    TILE_KEYS,
                )
    for r in range(rows):
        group, (h, t) = r // REGISTER_ROWS, head_and_query(block, r)
        start, stop = spans[group, 0], spans[group, 1]
        if start >= stop:
            continue
        row = s[r * TILE_KEYS + start * PANEL_COLUMNS : r * TILE_KEYS + stop * PANEL_COLUMNS]
        adjust_scores(row, (first + start) * PANEL_COLUMNS, b, h, t, mask[0], extra)
        for panel in range(start, stop):
            if hidden[group, panel]:
                keys = ((first + panel) * PANEL_COLUMNS, (first + panel + 1) * PANEL_COLUMNS)
                hide_masked(s[r * TILE_KEYS + panel * PANEL_COLUMNS :], b, h, t, keys, mask)
        weights = p[r * TILE_KEYS + start * PANEL_COLUMNS : r * TILE_KEYS + stop * PANEL_COLUMNS]
        online_softmax(row, weights, acc[r * width : (r + 1) * width], top, total, r, tag, lanes)
    for e in range(width // PANEL_COLUMNS):
        for group in range(spans.shape[0]):
            start, stop = spans[group, 0], spans[group, 1]
            if start < stop:
                at, r = (
                    v_at + e * v_panel + (first + start) * PANEL_COLUMNS * PANEL_COLUMNS,
                    group * REGISTER_ROWS,
                )
                matmul_add(
                    p,
                    r * TILE_KEYS + start * PANEL_COLUMNS,
                    TILE_KEYS,
                    v,
                    at,
                    (stop - start) * PANEL_COLUMNS,
                    acc,
                    r * width + e * PANEL_COLUMNS,
                    width,
                )


@njit_strict
def load_queries(queries, block, q, depth):
    """The rows of a block, side by side, as the product reads them; rows and dims that are missing
    stay 0.
    """
    flat, b_step, h_step, t_step, tag, D = queries
    for r in range(block[3]):
        h, t = head_and_query(block, r)
        start = block[0] * b_step + h * h_step + t * t_step
        row, numbers = q[r * depth : r * depth + D], flat[start : start + D]
        for d in range(D):
            row[d] = convert(numbers[d], tag, q)


@njit_strict
def run_tasks(queries, packed, sizes, mask, extra, scratch, results, first, stride):
    """Blocks first, first + stride, ... of all rows and heads, the last queries first.

    results: out [B,H,T,E]; the largest score and the sum of exp(score - largest) of each row,
        [B,H,T].
    queries: (flat memory, steps of B, H and T, tag, D). packed: of `pack`, and the steps of a head
        and of a panel of values. sizes: B, H, G, T, E, rows of a block, D as it is packed. scratch:
        q, scores, weights, sums, lanes.
    """
    B, H, G, T, E, step, depth = sizes
    k, v, k_head, v_head, v_panel = packed
    q, s, p, acc, lanes = scratch
    n, width, groups = H // G, acc.shape[0] // step, step // REGISTER_ROWS
    blocks = (T * n + step - 1) // step
    top, total = (
        np.empty(groups * REGISTER_ROWS, np.float32),
        np.empty(groups * REGISTER_ROWS, np.float32),
    )
    spans, hidden = np.empty((groups, 2), np.int64), np.empty((groups, TILE_PANELS), np.int8)
    hull, sums = np.empty((mask[2].shape[3], 2), np.int64), (acc, width, top, total)
    for task in range(first, B * G * blocks, stride):
        number, pair = blocks - 1 - task // (B * G), task % (B * G)
        block = (pair // G, pair % G, number * step, min(step, T * n - number * step), n)
        head = (depth, k, pair * k_head, v, pair * v_head, v_panel, queries[4])
        load_queries(queries, block, q, depth)
        block_reach(block, mask, hull)
        acc[:] = 0
        top[:] = NEG_INF
        total[:] = 0
        for panel in range(0, mask[1].shape[1], TILE_PANELS):
            if tile_in_reach(block, panel, mask, hull) and survey_tile(
                block, panel, mask, spans, hidden
            ):
                _attend_tile(block, panel, q, head, spans, hidden, (s, p, lanes), mask, extra, sums)
        _write_output(block, T, H, E, sums, queries[4], results)


@njit_fastmath
def _write_output(block, T, H, E, sums, tag, results):
    """The rows of a block, divided by their totals; a row that saw nothing is 0, and so is its
    total.
    """
    acc, width, top, total = sums
    out, tops, totals = results
    for r in range(block[3]):
        h, t = head_and_query(block, r)
        at = (block[0] * H + h) * T + t
        blind = total[r] == 0
        share = ZERO if blind else ONE / total[r]
        tops[at], totals[at] = ZERO if blind else top[r], total[r]
        row, sums_of_row = out[at * E : (at + 1) * E], acc[r * width : r * width + E]
        for e in range(E):
            row[e] = from_float32(ZERO if blind else sums_of_row[e] * share, tag, out)
