"""The compiled loops of prefill: blocks of queries attend to tiles of keys, with scores in fp32.
Tiles that the mask hides from all queries of a block are not multiplied.

For each row b of the batch and each key/value head g, the queries of its n = H/G query heads form
T n rows: row r is query r // n of query head g n + r % n, so that neighbouring rows see almost the
same keys. A block consists of as many rows as fit into the L2 cache, divided into groups of as many
rows as one product multiplies; a tile consists of TILE_PANELS panels of PANEL_COLUMNS keys. For
each tile, a group computes the scores of the panels that it sees, converts them to weights (online
softmax, Milakov and Gimelshein 2018, arXiv 1805.02867), and multiplies the weights with the values
from the first to the last of these panels.

The module `prefill` calls `run_tasks`. Arguments that the functions share:
    block: (b, g, the first row of the block, its number of rows, n)
    mask: (positions of the keys [b,S], -1 for an empty slot; for each panel of keys the smallest
        and the largest position, and whether no slot is empty [b,panels,3]; starts and stops of
        the ranges of positions that each query sees [b,h,t,n])
    extra: (scale, softcap or 0, whether ALiBi is symmetric, its slopes [H] or empty, positions of
        the queries [b,T])
where in shapes b, h and t are B, H and T, or 1. Loops run from index 0 over slices of the arrays:
an index that cannot be negative needs no check of its sign, so that the compiler vectorizes the
loop.
"""

from __future__ import annotations

import numpy as np

from regard.ops.jit.amx import configure_tiles, restore_tiles
from regard.ops.jit.compile import njit_fastmath_no_arrays, njit_strict_no_arrays
from regard.ops.jit.exp_tanh import exp, tanh
from regard.ops.jit.half_precision import convert, from_float32
from regard.ops.jit.matmul import (
    HALF_PANEL,
    PANEL_COLUMNS,
    matmul,
    matmul_add,
    matmul_add_half,
    product_rows,
)
from regard.ops.jit.softmax_rows import hide_outside, largest_score, weigh_scores

ZERO, ONE, NEG_INF = np.float32(0), np.float32(1), np.float32(-np.inf)


@njit_strict_no_arrays
def mask_row(x, b, h, t):
    """Return the index of the row of an array `[b, h, t, n]` for a batch row, a head and a query; a
    dimension of 1 is shared.
    """
    return min(b, x.shape[0] - 1), min(h, x.shape[1] - 1), min(t, x.shape[2] - 1)


@njit_strict_no_arrays
def hide_masked(s, b, h, t, keys, mask):
    """Set the scores s of one row to -inf for each of the keys keys[0] to keys[1] - 1 that the row
    does not see.
    """
    k_positions, _, starts, stops = mask
    lo, hi = starts[mask_row(starts, b, h, t)], stops[mask_row(stops, b, h, t)]
    positions = k_positions[min(b, k_positions.shape[0] - 1), keys[0] : keys[1]]
    if lo.shape[0] == 1:
        hide_outside(s, positions, keys[1] - keys[0], lo[0], hi[0])
        return
    for c in range(positions.shape[0]):
        inside = False
        for i in range(lo.shape[0]):
            inside |= (lo[i] <= positions[c]) & (positions[c] < hi[i])
        s[c] = s[c] if inside else NEG_INF


@njit_fastmath_no_arrays
def adjust_scores(s, first, b, h, t, k_positions, extra):
    """Apply the softcap and ALiBi, and the scale before them, to the scores of one row with the
    keys from `first` on, and return the scale that is still to be applied: 1, or the scale itself
    where it is positive and nothing comes after it, because it then keeps the order of the scores.
    """
    scale, cap, symmetric, slopes, q_positions = extra
    if scale > ZERO and cap == ZERO and slopes.shape[0] == 0:
        return scale
    for c in range(s.shape[0]):
        s[c] *= scale
    if cap > 0:
        for c in range(s.shape[0]):
            s[c] = cap * tanh(s[c] / cap)
    if slopes.shape[0]:
        positions, slope = (
            k_positions[min(b, k_positions.shape[0] - 1), first : first + s.shape[0]],
            slopes[h],
        )
        q = q_positions[min(b, q_positions.shape[0] - 1), t]
        for c in range(s.shape[0]):
            distance = q - positions[c]
            s[c] -= slope * np.float32(abs(distance) if symmetric else distance)
    return ONE


@njit_fastmath_no_arrays
def online_softmax(s, p, scale, acc, top, total, r):
    """Convert the scores s of row r to weights p = exp(scale s - top), where top is the largest
    scaled score of the row so far, and rescale the earlier sums to this maximum.
    """
    largest = scale * largest_score(s, s.shape[0])
    if largest > top[r]:
        shrink = exp(top[r] - largest)
        total[r] *= shrink
        for e in range(acc.shape[0]):
            acc[e] *= shrink
        top[r] = largest
    base = top[r] if top[r] > NEG_INF else ZERO
    total[r] += weigh_scores(s, p, s.shape[0], scale, base)


TILE_PANELS = 256 // PANEL_COLUMNS
"""The number of panels of keys in a tile."""

TILE_KEYS = TILE_PANELS * PANEL_COLUMNS
MAX_BLOCK_ROWS = 258
"""About the largest number of rows in a block: with a tile of 256 keys, their scores, weights,
queries and sums fit into the L2 cache.
"""

NO_POSITION = 1 << 62
"""Larger than any position."""


@njit_strict_no_arrays
def _panel_visibility(ranges, bounds):
    """Return 0 if no range of positions overlaps a panel of keys, 2 if one range covers the panel
    and the panel has no empty slot, else 1.

    ranges: (starts, stops) of a query. bounds: the entries of the panel in `mask`.
    """
    state = 0
    lo, hi = ranges
    for i in range(lo.shape[0]):
        if lo[i] <= bounds[1] and hi[i] > bounds[0]:
            state = max(state, 1)
            if lo[i] <= bounds[0] and hi[i] > bounds[1] and bounds[2]:
                state = 2
    return state


@njit_strict_no_arrays
def head_and_query(block, r):
    """Return the query head and the query of row r of a block."""
    _, g, r0, _, n = block
    return g * n + (r0 + r) % n, (r0 + r) // n


@njit_strict_no_arrays
def block_reach(block, mask, hull):
    """Set hull[i] to the smallest start and the largest stop of range i over all rows of a block,
    so that no row sees a tile outside of all `hull[i]`.
    """
    b, _, _, rows, _ = block
    hull[:, 0], hull[:, 1] = NO_POSITION, 0
    for r in range(rows):
        h, t = head_and_query(block, r)
        lo, hi = mask[2][mask_row(mask[2], b, h, t)], mask[3][mask_row(mask[3], b, h, t)]
        for i in range(lo.shape[0]):
            if lo[i] < hi[i]:
                hull[i, 0], hull[i, 1] = min(hull[i, 0], lo[i]), max(hull[i, 1], hi[i])


@njit_strict_no_arrays
def tile_in_reach(block, first, mask, hull):
    """Return whether a row of a block may see some panel of the tile whose first panel is `first`;
    False only if no row sees any.
    """
    bounds = mask[1][min(block[0], mask[1].shape[0] - 1)]
    for p in range(first, min(first + TILE_PANELS, bounds.shape[0])):
        if _panel_visibility((hull[:, 0], hull[:, 1]), bounds[p]):
            return True
    return False


@njit_strict_no_arrays
def survey_tile(block, first, group_rows, mask, spans, hidden):
    """Determine which panels of the tile whose first panel is `first` each group of `group_rows`
    rows sees, and return whether any group sees any of them.

    spans[group] is set to the first visible panel and one past the last one. hidden[group, panel]
    is set to 0 if all rows see all of the panel, to 2 if no row sees any of it, else to 1.
    """
    b, _, _, rows, _ = block
    _, bounds, starts, stops = mask
    panels, any_visible = min(TILE_PANELS, bounds.shape[1] - first), False
    bound = bounds[min(b, bounds.shape[0] - 1)]
    for group in range(spans.shape[0]):
        spans[group, 0], spans[group, 1] = TILE_PANELS, 0
        for p in range(panels):
            smallest, largest, previous_query = 2, 0, -1
            for r in range(group * group_rows, min(rows, (group + 1) * group_rows)):
                h, t = head_and_query(block, r)
                if t == previous_query and starts.shape[1] == 1:
                    continue
                previous_query = t
                state = _panel_visibility(
                    (starts[mask_row(starts, b, h, t)], stops[mask_row(stops, b, h, t)]),
                    bound[first + p],
                )
                smallest, largest = min(smallest, state), max(largest, state)
            hidden[group, p] = 2 if largest == 0 else smallest != 2
            if largest:
                spans[group, 0], spans[group, 1] = min(spans[group, 0], p), p + 1
        any_visible |= spans[group, 1] > 0
    return any_visible


@njit_fastmath_no_arrays
def add_product(left, panel, panel_start, k, target, columns):
    """Add a product of `product_rows` rows with a panel, of which only the first `columns` columns
    are not padding, to the target.

    left, target: (flat array, offset, distance of the rows).
    """
    a, a_at, a_step = left
    c, c_at, c_step = target
    if columns <= HALF_PANEL:
        matmul_add_half(a, a_at, a_step, panel, panel_start, k, c, c_at, c_step)
    else:
        matmul_add(a, a_at, a_step, panel, panel_start, k, c, c_at, c_step)


@njit_fastmath_no_arrays
def _attend_tile(block, first, q, head, spans, hidden, scratch, mask, extra, sums):
    """Compute the scores and weights of a block of queries with one tile of keys, and add the
    weighted values to the sums.
    """
    b, _, _, rows, _ = block
    depth, k, k_at, v, v_at, v_panel = head
    s, p = scratch
    acc, width, E, top, total = sums
    group_rows = product_rows(q)
    for panel in range(TILE_PANELS):
        offset = k_at + (first + panel) * PANEL_COLUMNS * depth
        for group in range(spans.shape[0]):
            if hidden[group, panel] < 2:
                r = group * group_rows
                matmul(
                    q,
                    r * depth,
                    depth,
                    k,
                    offset,
                    depth,
                    s,
                    r * TILE_KEYS + panel * PANEL_COLUMNS,
                    TILE_KEYS,
                )
    for r in range(rows):
        group, (h, t) = r // group_rows, head_and_query(block, r)
        start, stop = spans[group, 0], spans[group, 1]
        if start >= stop:
            continue
        row = s[r * TILE_KEYS + start * PANEL_COLUMNS : r * TILE_KEYS + stop * PANEL_COLUMNS]
        scale = adjust_scores(row, (first + start) * PANEL_COLUMNS, b, h, t, mask[0], extra)
        for panel in range(start, stop):
            if hidden[group, panel]:
                keys = ((first + panel) * PANEL_COLUMNS, (first + panel + 1) * PANEL_COLUMNS)
                hide_masked(s[r * TILE_KEYS + panel * PANEL_COLUMNS :], b, h, t, keys, mask)
        weights = p[r * TILE_KEYS + start * PANEL_COLUMNS : r * TILE_KEYS + stop * PANEL_COLUMNS]
        online_softmax(row, weights, scale, acc[r * width : (r + 1) * width], top, total, r)
    for e in range(0, E, PANEL_COLUMNS):
        for group in range(spans.shape[0]):
            start, stop = spans[group, 0], spans[group, 1]
            if start < stop:
                r = group * group_rows
                add_product(
                    (p, r * TILE_KEYS + start * PANEL_COLUMNS, TILE_KEYS),
                    v,
                    v_at + e // PANEL_COLUMNS * v_panel + (first + start) * PANEL_COLUMNS**2,
                    (stop - start) * PANEL_COLUMNS,
                    (acc, r * width + e, width),
                    E - e,
                )


@njit_strict_no_arrays
def load_queries(queries, block, q, depth):
    """Copy the queries of a block to q `[rows, depth]`, in the dtype of the products; rows after
    the last one, and dimensions from D on, are not written.
    """
    flat, b_step, h_step, t_step, tag, D = queries
    for r in range(block[3]):
        h, t = head_and_query(block, r)
        start = block[0] * b_step + h * h_step + t * t_step
        row, numbers = q[r * depth : r * depth + D], flat[start : start + D]
        for d in range(D):
            row[d] = convert(numbers[d], tag, q)


@njit_strict_no_arrays
def run_tasks(queries, packed, sizes, mask, extra, scratch, results, first, stride):
    """Compute the blocks first, first + stride, ... of all rows and heads, beginning with the last
    queries.

    results: out `[B, H, T, E]`, and for each query the largest score and the sum of exp(score -
    largest), `[B, H, T]`. queries: (flat memory, strides of B, H and T, tag, D). packed: the
    results of `pack_panels`, and the strides of a head in both and of a panel of values. sizes: B,
    H, G, T, E, rows of a block, D as packed. scratch: the result of
    `_forward_scratch` in `prefill`.
    """
    B, H, G, T, E, step, depth = sizes
    k, v, k_head, v_head, v_panel = packed
    q, s, p, acc, (top, total), (spans, hidden), hull, configuration = scratch
    n, sums, group_rows = H // G, (acc, acc.shape[0] // step, E, top, total), product_rows(q)
    blocks = (T * n + step - 1) // step
    configure_tiles(q, configuration)
    for task in range(first, B * G * blocks, stride):
        number, pair = blocks - 1 - task // (B * G), task % (B * G)
        block = (pair // G, pair % G, number * step, min(step, T * n - number * step), n)
        head = (depth, k, pair * k_head, v, pair * v_head, v_panel)
        load_queries(queries, block, q, depth)
        block_reach(block, mask, hull)
        acc[:] = 0
        top[:] = NEG_INF
        total[:] = 0
        for panel in range(0, mask[1].shape[1], TILE_PANELS):
            if tile_in_reach(block, panel, mask, hull) and survey_tile(
                block, panel, group_rows, mask, spans, hidden
            ):
                _attend_tile(block, panel, q, head, spans, hidden, (s, p), mask, extra, sums)
        _write_output(block, T, H, E, sums, queries[4], results)
    restore_tiles(q, configuration)


@njit_fastmath_no_arrays
def _write_output(block, T, H, E, sums, tag, results):
    """Divide the sums of each row of a block by the total of its weights and write them; a row that
    saw no key gets the output 0 and the total 0.
    """
    acc, width, _, top, total = sums
    out, tops, totals = results
    for r in range(block[3]):
        h, t = head_and_query(block, r)
        row_index = (block[0] * H + h) * T + t
        sees_nothing = total[r] == 0
        factor = ZERO if sees_nothing else ONE / total[r]
        tops[row_index], totals[row_index] = ZERO if sees_nothing else top[r], total[r]
        row, sums_of_row = out[row_index * E : (row_index + 1) * E], acc[r * width : r * width + E]
        for e in range(E):
            row[e] = from_float32(ZERO if sees_nothing else sums_of_row[e] * factor, tag, out)
