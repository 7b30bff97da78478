"""The compiled loops of the gradient of prefill, with blocks of rows and panels of keys as in
`prefill_loops`; the weights are computed again.

    p = e^(s - m) / l        dp = dO v^T        ds = p (dp - shift) slope        shift = dO O - dlse
    dv += p^T dO             dk += ds^T q       dq += ds k

Here m is the largest score of a row, l the sum of e^(s - m), dO the gradient of the output O, and
slope the derivative of the softcap. A block of rows is combined with one panel of keys after
another. dv and dk are summed transposed, as dv^T = dO^T p and dk^T = q^T ds: p and ds [rows,
PANEL_COLUMNS] then are right factors, and only q and dO are transposed, once per block. In a
bfloat16 product two neighbours along the sum share a 32-bit word: p and ds are stored with two rows
per word, and ds a second time row by row, for dq.

The module `prefill` calls `pack_for_gradient` and `run_tasks`. Arguments that the functions share,
in addition to `block`, `mask` and `extra` of `prefill_loops`:
    rows: (m, 1/l, shift, dlse) of each row of a block
    scores: (s, dp, the derivatives of the softcap for one row), the first two [rows,PANEL_COLUMNS]
    left: (q, q transposed, dO, dO transposed), [rows,dims] and [dims,rows]
    factors: (p, p as 32-bit words, ds, ds as 32-bit words, ds row by row); where products are
        not in bfloat16, p and ds are the arrays s and dp of `scores`
    sums: (dq of the block, dk, offset of the panel in dk, dv, offset of the panel in dv)

Source: Dao et al. 2022 (arXiv 2205.14135), algorithm 4; Dao 2023 (arXiv 2307.08691), section 3.1.
"""

from __future__ import annotations

import numpy as np

from regard.ops.jit.amx import configure_tiles, restore_tiles
from regard.ops.jit.compile import njit_fastmath_no_arrays, njit_strict_no_arrays
from regard.ops.jit.exp_tanh import exp
from regard.ops.jit.half_precision import from_float32, to_float32
from regard.ops.jit.matmul import (
    PANEL_COLUMNS,
    matmul,
    matmul_add,
    pack_keys,
    pack_values,
    product_rows,
)
from regard.ops.jit.prefill_loops import (
    ONE,
    TILE_PANELS,
    ZERO,
    add_product,
    adjust_scores,
    block_reach,
    head_and_query,
    hide_masked,
    load_queries,
    survey_tile,
    tile_in_reach,
)
from regard.ops.jit.softmax_rows import round_pairs, round_row, weigh_with_gradient


@njit_fastmath_no_arrays
def transpose(x, rows, step, D, out):
    """Transpose x `[step, depth]` to out `[D, step]`; the columns of `out` from `rows` on are set
    to 0.
    """
    depth = x.size // step
    for d in range(D):
        line = out[d * step : (d + 1) * step]
        for r in range(rows):
            line[r] = x[r * depth + d]
        for r in range(rows, step):
            line[r] = 0


@njit_fastmath_no_arrays
def _softcap_slopes(s, scale, cap, out):
    """Compute the derivative 1 - tanh(x)^2 of the softcap, x = scale s / cap, from the scores s
    before scaling, as 4e / (1 + e)^2 with e = exp(-2|x|), which loses no digits where tanh is near
    1.
    """
    for c in range(s.shape[0]):
        e = exp(np.float32(-2) * abs(s[c] * scale / cap))
        out[c] = np.float32(4) * e / ((ONE + e) * (ONE + e))


@njit_fastmath_no_arrays
def recompute_weights(block, panel, group, hidden, rows, scores, mask, extra):
    """Compute the weights and score gradients of a group of rows, group = (first row, one past the
    last one), for a panel of keys; rows after the last one of the block become 0.

    hidden: whether the mask hides some keys of the panel from some rows.
    """
    s, d, slopes = scores
    for r in range(*group):
        here, change = (
            s[r * PANEL_COLUMNS : (r + 1) * PANEL_COLUMNS],
            d[r * PANEL_COLUMNS : (r + 1) * PANEL_COLUMNS],
        )
        if r >= block[3]:
            here[:], change[:] = ZERO, ZERO
            continue
        h, t = head_and_query(block, r)
        if extra[1] > 0:
            _softcap_slopes(here, extra[0], extra[1], slopes)
        scale = adjust_scores(here, panel * PANEL_COLUMNS, block[0], h, t, mask[0], extra)
        if hidden:
            hide_masked(
                here, block[0], h, t, (panel * PANEL_COLUMNS, (panel + 1) * PANEL_COLUMNS), mask
            )
        weigh_with_gradient(
            here,
            change,
            PANEL_COLUMNS,
            scale,
            rows[0][r],
            rows[1][r],
            rows[2][r],
            rows[3][r],
        )
        if extra[1] > 0:
            for c in range(PANEL_COLUMNS):
                change[c] *= slopes[c]


@njit_fastmath_no_arrays
def pack_row_pairs(x, group, words):
    """Write the rows of a group as bfloat16 with two rows per word, for a product that sums over
    rows.
    """
    for r in range(group[0], group[1], 2):
        even, odd = (
            x[r * PANEL_COLUMNS : (r + 1) * PANEL_COLUMNS],
            x[(r + 1) * PANEL_COLUMNS : (r + 2) * PANEL_COLUMNS],
        )
        out = words[r // 2 * PANEL_COLUMNS : (r // 2 + 1) * PANEL_COLUMNS]
        round_pairs(even, odd, out, PANEL_COLUMNS)


ROWS_PER_SUM = 64
"""About the largest number of rows that one product sums. A sum of partial sums rounds less than
one long sum, and so many rows of a panel stay in the L1 cache.
"""


@njit_fastmath_no_arrays
def pack_for_gradient(keys, values, sizes, packed, first, stride):
    """Pack the panels first, first + stride, ... of all rows and heads: keys and values `[dims,
    PANEL_COLUMNS]`, and keys `[S, PANEL_COLUMNS]`.

    keys, values: (flat memory, strides of B, G and the tokens, tag). sizes: B, G, S, D, E, numbers
    per word. packed: the outputs, keys `[dims, PANEL_COLUMNS]`, values `[dims, PANEL_COLUMNS]` and
    keys `[S, PANEL_COLUMNS]`, flat; their padding must be zeros.
    """
    B, G, S, D, E, each = sizes
    by_dims, values_by_dims, by_tokens = packed
    heads, count = B * G, (S + PANEL_COLUMNS - 1) // PANEL_COLUMNS
    k_size, v_size = by_dims.size // (heads * count), values_by_dims.size // (heads * count)
    for task in range(first, heads * count, stride):
        head, panel = task // count, task % count
        tokens = (panel * PANEL_COLUMNS, min(S, (panel + 1) * PANEL_COLUMNS))
        source = (keys[0], head // G * keys[1] + head % G * keys[2], keys[3], keys[4])
        pack_keys(source, tokens, D, each, by_dims, task * k_size)
        offset = head * (by_tokens.size // heads)
        pack_values(
            source, tokens, D, each, by_tokens, offset, count * PANEL_COLUMNS * PANEL_COLUMNS
        )
        source = (values[0], head // G * values[1] + head % G * values[2], values[3], values[4])
        pack_keys(source, tokens, E, each, values_by_dims, task * v_size)


@njit_fastmath_no_arrays
def _row_dot(x, y, b, h, t):
    """Return the dot product of x[b, h, t] and y[b, h, t]; x, y: (flat memory, strides of B, H and
    T, tag, number of dimensions).
    """
    i, j = b * x[1] + h * x[2] + t * x[3], b * y[1] + h * y[2] + t * y[3]
    a, c, total = x[0][i : i + x[5]], y[0][j : j + x[5]], ZERO
    for e in range(x[5]):
        total += to_float32(a[e], x[4]) * to_float32(c[e], y[4])
    return total


@njit_strict_no_arrays
def _load_block(block, tensors, T, H, saved, left, rows):
    """Load the data of a block: write its queries, its output gradients and their transposes to
    `left`, and m, 1/l, shift and dlse of its rows to `rows`.
    """
    (queries, output_gradients, outs), (q, q_turned, d_out, d_out_turned) = tensors, left
    top, share, shift, lse_gradient = rows
    step = top.size
    width = d_out.size // step
    load_queries(queries, block, q, q.size // step)
    load_queries(output_gradients, block, d_out, width)
    for r in range(block[3]):
        h, t = head_and_query(block, r)
        row_index = (block[0] * H + h) * T + t
        sees_nothing = saved[1][row_index] == 0
        top[r] = saved[0][row_index]
        share[r] = ZERO if sees_nothing else ONE / saved[1][row_index]
        lse_gradient[r] = ZERO if sees_nothing else saved[2][row_index]
        shift[r] = (
            ZERO
            if sees_nothing
            else _row_dot(output_gradients, outs, block[0], h, t) - saved[2][row_index]
        )
        if sees_nothing:  # the output is 0 whatever the inputs are, so its gradient has no effect
            d_out[r * width : (r + 1) * width] = 0
    transpose(q, block[3], step, queries[5], q_turned)
    transpose(d_out, block[3], step, output_gradients[5], d_out_turned)


@njit_fastmath_no_arrays
def _panel_weights(block, where, visibility, head, left, rows, scores, factors, mask, extra):
    """Compute the weights of a block for a panel of keys, and the gradients of the scores; return
    the first group of rows that sees some of the panel, and one past the last such group.
    """
    (panel, p), (_, hidden), (k, k_at, v, v_at) = where, visibility, head
    (q, _, d_out, _), (s, d, _), (weights, words, _, d_words, d_rows) = left, scores, factors
    depth, width = q.size // rows[0].size, d_out.size // rows[0].size
    first_group, stop_group, group_rows = hidden.shape[0], 0, product_rows(q)
    for group in range(hidden.shape[0]):
        if hidden[group, p] < 2:
            first_group, stop_group = min(first_group, group), group + 1
    for group in range(first_group, stop_group):
        r, offset = group * group_rows, group * group_rows * PANEL_COLUMNS
        rows_of_group = (r, r + group_rows)
        if hidden[group, p] < 2:
            matmul(q, r * depth, depth, k, k_at, depth, s, offset, PANEL_COLUMNS)
            matmul(d_out, r * width, width, v, v_at, width, d, offset, PANEL_COLUMNS)
            recompute_weights(
                block, panel, rows_of_group, hidden[group, p], rows, scores, mask, extra
            )
        else:
            (
                s[offset : offset + group_rows * PANEL_COLUMNS],
                d[offset : offset + group_rows * PANEL_COLUMNS],
            ) = ZERO, ZERO
        if weights.itemsize < s.itemsize:  # otherwise the factors are s and d
            pack_row_pairs(s, rows_of_group, words)
            pack_row_pairs(d, rows_of_group, d_words)
            stop = offset + group_rows * PANEL_COLUMNS  # row by row, for a sum over keys
            round_row(d[offset:stop], d_rows[offset:stop], stop - offset)
    return first_group, stop_group


@njit_fastmath_no_arrays
def _add_panel_gradients(low, high, step, left, factors, keys, sums):
    """Add the contribution of the groups low to high - 1 of a block to the gradients of a panel
    of keys and values, and of the queries.
    """
    (_, q_turned, _, d_out_turned), (weights, _, slopes, _, d_rows) = left, factors
    w, w_at, w_panel, D = keys
    d_q, d_k, k_at, d_v, v_at = sums
    group_rows = product_rows(d_rows)
    rows_per_sum = ROWS_PER_SUM // group_rows * group_rows
    first, last, width = low * group_rows, high * group_rows, d_q.size // step
    for r in range(first, last, rows_per_sum):
        n = min(rows_per_sum, last - r)
        for e in range(0, d_out_turned.size // step, group_rows):
            x, to = e * step + r, v_at + e * PANEL_COLUMNS
            matmul_add(d_out_turned, x, step, weights, r * PANEL_COLUMNS, n, d_v, to, PANEL_COLUMNS)
        for e in range(0, q_turned.size // step, group_rows):
            x, to = e * step + r, k_at + e * PANEL_COLUMNS
            matmul_add(q_turned, x, step, slopes, r * PANEL_COLUMNS, n, d_k, to, PANEL_COLUMNS)
    for e in range(0, D, PANEL_COLUMNS):
        y = w_at + e // PANEL_COLUMNS * w_panel
        for r in range(first, last, group_rows):
            rows = (d_rows, r * PANEL_COLUMNS, PANEL_COLUMNS)
            add_product(rows, w, y, PANEL_COLUMNS, (d_q, r * width + e, width), D - e)


@njit_fastmath_no_arrays
def _process_panel(block, where, visibility, keys, block_data, buffers, score_rules, sums):
    """Combine all rows of a block with one panel of keys: compute the weights and the gradients of
    the scores, and add their contributions to dq, dk and dv.
    """
    (left, rows), (scores, factors), (mask, extra) = block_data, buffers, score_rules
    shared = left, rows, scores, factors, mask, extra
    low, high = _panel_weights(block, where, visibility, keys[:4], *shared)
    if low < high:
        _add_panel_gradients(low, high, rows[0].size, left, factors, keys[4:], sums)


@njit_strict_no_arrays
def run_tasks(tensors, packed, sizes, mask, extra, saved, scratch, results, first, stride):
    """Run the tasks first, first + stride, ...; each is all blocks of one batch row, one key/value
    head and one split.

    tensors: queries, the gradient of the output, and the output, each (flat memory, strides of B, H
    and T, tag, D). packed: the result of `pack_for_gradient`. sizes: B, H, G, T, rows of a block,
    splits. saved: m, l and dlse of each row. results: dq `[B, H, T, D]`; dk without the factor
    scale, and dv, both `[splits, B, G, panels, D, PANEL_COLUMNS]` in fp32 with D and E
    rounded up to the rows of a product.
    """
    B, H, G, T, step, splits = sizes
    left, scores, factors, d_q, rows, visibility, hull, configuration = scratch
    (k, v, w), (_, d_k, d_v), n = packed, results, H // G
    heads, count, blocks = B * G, mask[1].shape[1], (T * n + step - 1) // step
    panels, square = heads * count, PANEL_COLUMNS * PANEL_COLUMNS
    k_size, v_size, w_size = k.size // panels, v.size // panels, w.size // heads
    dk_size, dv_size = d_k.size // (splits * panels), d_v.size // (splits * panels)
    block_data, buffers, score_rules = (left, rows), (scores, factors), (mask, extra)
    group_rows = product_rows(left[0])
    configure_tiles(left[0], configuration)
    for task in range(first, heads * splits, stride):
        pair, split = task // splits, task % splits
        for number in range(split, blocks, splits):
            block = (pair // G, pair % G, number * step, min(step, T * n - number * step), n)
            _load_block(block, tensors, T, H, saved, left, rows)
            block_reach(block, mask, hull)
            d_q[:] = 0
            for tile in range(0, count, TILE_PANELS):
                if not tile_in_reach(block, tile, mask, hull) or not survey_tile(
                    block, tile, group_rows, mask, *visibility
                ):
                    continue
                for panel in range(tile, min(tile + TILE_PANELS, count)):
                    panel_index = pair * count + panel
                    w_at = pair * w_size + panel * square
                    keys = (
                        k,
                        panel_index * k_size,
                        v,
                        panel_index * v_size,
                        w,
                        w_at,
                        count * square,
                        tensors[0][5],
                    )
                    to = split * panels + panel_index
                    sums = (d_q, d_k, to * dk_size, d_v, to * dv_size)
                    where = (panel, panel - tile)
                    _process_panel(
                        block, where, visibility, keys, block_data, buffers, score_rules, sums
                    )
            _write_query_gradient(block, T, H, tensors[0], d_q, step, extra[0], results[0])
    restore_tiles(left[0], configuration)


@njit_fastmath_no_arrays
def _write_query_gradient(block, T, H, queries, d_q, step, scale, out):
    """Write the sums of a block to the gradient of the queries, multiplied by the scale."""
    D, width = queries[5], d_q.size // step
    for r in range(block[3]):
        h, t = head_and_query(block, r)
        start = ((block[0] * H + h) * T + t) * D
        row, sums = out[start : start + D], d_q[r * width : r * width + D]
        for d in range(D):
            row[d] = from_float32(sums[d] * scale, queries[4], out)
