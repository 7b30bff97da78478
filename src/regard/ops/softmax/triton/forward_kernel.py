"""The forward kernel: one program computes a block of queries of one head.

It reads the tiles of its list, fully visible ones first. Each tile updates

    m' = max(m, max_j s_j)    l' = l e^(m - m') + sum_j e^(s_j - m')
    o' = o e^(m - m') + sum_j e^(s_j - m') v_j

Masked pairs are selected away: a masked NaN has no effect, and a visible one propagates. Imported
only where triton is installed.

Source: Milakov and Gimelshein 2018 (arXiv 1805.02867); Dao 2023 (arXiv 2307.08691), section 3.1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.softmax.triton.scores import (
    LN2,
    LOG2E,
    UNSPECIALIZED,
    bias_of_tile,
    holds_odd_tile,
    is_not_finite,
    tanh,
    visible_pairs,
)


@triton.jit
def add_odd_values(
    acc, kp_ptr, v_at, tiles, full, listed, v_s, row, e, row_inside, S,
    start, stop, bits, bits_row,
    E: tl.constexpr, BN: tl.constexpr, RANGES: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Add values that are not finite to the rows that see them, from the tiles with masked pairs.

    The main loop replaces them by 0, because 0 times NaN is NaN. NaN counts as both infinities.
    """
    for low in tl.static_range(2):
        count = tl.zeros_like(acc)
        for x in range(full, listed):
            col = tl.load(tiles + x) * BN + tl.arange(0, BN)
            col_inside = col < S
            v_mask = col_inside[:, None] & (e < E)[None, :]
            v = tl.load(v_at + col.to(tl.int64)[:, None] * v_s + e[None, :], mask=v_mask, other=0.0)
            v = v.to(tl.float32)
            kp = tl.load(kp_ptr + col, mask=col_inside, other=-1)[None, :]
            visible = visible_pairs(
                kp, row[:, None], col[None, :],
                row_inside[:, None] & col_inside[None, :], row_inside[:, None],
                start, stop, bits, bits_row, RANGES, BITS,
            )  # fmt: skip
            odd = (v != v) | (v == (float("-inf") if low else float("inf")))
            count = tl.dot(visible.to(tl.float16), odd.to(tl.float16), count)
        acc = tl.where(count > 0.5, acc + (float("-inf") if low else float("inf")), acc)
    return acc


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, max_ptr, sum_ptr,
    q_pos_ptr, k_pos_ptr, start_ptr, stop_ptr, bits_ptr, counts_ptr, tiles_ptr,
    slope_ptr, bucket_ptr, weight_ptr, table_ptr, odd_ptr,
    q_b, q_h, q_t, k_b, k_g, k_s, v_b, v_g, v_s,
    q_pos_b, k_pos_b, mask_b, mask_h, list_b, list_h, bits_row,
    weight_h, table_b, table_h, table_t, table_s,
    H, group, T, S, query_blocks, key_tiles, scale, softcap,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, RANGES: tl.constexpr, BITS: tl.constexpr,
    SOFTCAP: tl.constexpr, LINEAR: tl.constexpr, MAX_DISTANCE: tl.constexpr, TABLE: tl.constexpr,
    PRECISE: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """The output, lse, m and l of a block of queries.

    With CAREFUL, a second launch, blocks are computed again that have a marked tile among those
    with masked pairs, because 0 times a value that is not finite is NaN.
    """
    # the last blocks first: under a causal mask they take longest
    block = query_blocks - 1 - tl.program_id(0)
    b, h = tl.program_id(1) // H, tl.program_id(1) % H
    g = h // group
    b64, h64, g64 = b.to(tl.int64), h.to(tl.int64), g.to(tl.int64)
    list_row = (b64 * list_b + h64 * list_h) * query_blocks + block
    full = tl.load(counts_ptr + list_row * 2)
    listed = tl.load(counts_ptr + list_row * 2 + 1)
    tiles = tiles_ptr + list_row * key_tiles
    if CAREFUL:
        odd = odd_ptr + (b64 * (H // group) + g64) * key_tiles
        if not holds_odd_tile(odd, tiles, full, listed):
            return
    row = block * BM + tl.arange(0, BM)
    row64 = row.to(tl.int64)
    row_inside = row < T
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    q_at = q_ptr + b64 * q_b + h64 * q_h + row64[:, None] * q_t + d[None, :]
    q = tl.load(q_at, mask=row_inside[:, None] & (d < D)[None, :], other=0.0)
    if WIDEN:
        q = q.to(tl.float32)
    qp = tl.load(q_pos_ptr + b64 * q_pos_b + row, mask=row_inside, other=-1)[:, None]
    slope = 0.0
    if LINEAR:
        slope = tl.load(slope_ptr + h)
    weight = weight_ptr + h64 * weight_h
    table = table_ptr + b64 * table_b + h64 * table_h
    mask_row = (b64 * mask_b + h64 * mask_h) * T
    start, stop = start_ptr + mask_row * RANGES, stop_ptr + mask_row * RANGES
    bits = bits_ptr + mask_row * bits_row
    # half precision: scores in units of ln 2, so that a weight is one multiply-add and 2^x
    UNIT: tl.constexpr = 1.0 if PRECISE else LOG2E
    TO_EXP2: tl.constexpr = LOG2E if PRECISE else 1.0
    m = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BLOCK_E], tl.float32)
    # 64 bits for the tile, 32 bits within it
    k_base, v_base = k_ptr + b64 * k_b + g64 * k_g, v_ptr + b64 * v_b + g64 * v_g
    k_offset = tl.arange(0, BN)[:, None] * k_s + d[None, :]
    v_offset = tl.arange(0, BN)[:, None] * v_s + e[None, :]
    for masked in tl.static_range(2):
        first, last = 0, full
        if masked:
            first, last = full, listed
        for x in range(first, last):
            first_col = tl.load(tiles + x) * BN
            col = first_col + tl.arange(0, BN)
            col_inside = col < S
            k_at = k_base + first_col.to(tl.int64) * k_s + k_offset
            v_at = v_base + first_col.to(tl.int64) * v_s + v_offset
            if masked:
                k = tl.load(k_at, mask=col_inside[:, None] & (d < D)[None, :], other=0.0)
                v = tl.load(v_at, mask=col_inside[:, None] & (e < E)[None, :], other=0.0)
                if CAREFUL:
                    v = tl.where(is_not_finite(v.to(tl.float32)), 0.0, v)
            else:  # a tile that sticks out of the keys is never full
                k = tl.load(k_at, mask=(d < D)[None, :], other=0.0)
                v = tl.load(v_at, mask=(e < E)[None, :], other=0.0)
            if WIDEN:
                k, v = k.to(tl.float32), v.to(tl.float32)
            kp = tl.load(k_pos_ptr + b64 * k_pos_b + col, mask=col_inside, other=-1)[None, :]
            s = tl.dot(q, k.T, input_precision=PRECISION)
            inside = row_inside[:, None] & col_inside[None, :]
            if SOFTCAP or LINEAR or MAX_DISTANCE or TABLE:
                s = s * scale
                if SOFTCAP:
                    s = softcap * tanh(s / softcap, PRECISE)
                s += bias_of_tile(
                    qp, kp, row[:, None], col[None, :], inside, slope, bucket_ptr, weight,
                    table, table_t, table_s, LINEAR, MAX_DISTANCE, TABLE,
                )  # fmt: skip
                s = s * UNIT
            else:
                s = s * (scale * UNIT)
            if masked:
                visible = visible_pairs(
                    kp, row[:, None], col[None, :], inside, row_inside[:, None],
                    start, stop, bits, bits_row, RANGES, BITS,
                )  # fmt: skip
                s = tl.where(visible, s, float("-inf"))
            new_m = tl.maximum(m, tl.max(s, 1))
            # a row that has seen nothing: -inf - (-inf) would be NaN
            shift = tl.where(new_m == float("-inf"), 0.0, new_m)
            p = tl.exp2((s - shift[:, None]) * TO_EXP2)
            correction = tl.exp2((m - shift) * TO_EXP2)
            total = total * correction + tl.sum(p, 1)
            acc = acc * correction[:, None]
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
            m = new_m

    if CAREFUL:
        acc = add_odd_values(
            acc, k_pos_ptr + b64 * k_pos_b, v_base, tiles, full, listed,
            v_s, row, e, row_inside, S, start, stop, bits, bits_row, E, BN, RANGES, BITS,
        )  # fmt: skip
    sees = m != float("-inf")
    m = tl.where(sees, m, 0.0)
    # a row of which every visible score is NaN has the sum NaN
    sees = sees | (total != 0.0)
    divisor = tl.where(sees, total, 1.0)
    acc = acc / divisor[:, None]
    lse = tl.where(sees, m * (1.0 / UNIT) + tl.log2(divisor) * LN2, float("-inf"))
    offset = (b64 * H + h) * T + row64
    tl.store(lse_ptr + offset, lse, mask=row_inside)
    tl.store(max_ptr + offset, m, mask=row_inside)
    tl.store(sum_ptr + offset, tl.where(sees, total, 0.0), mask=row_inside)
    out_at = out_ptr + offset[:, None] * E + e[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=row_inside[:, None] & (e < E)[None, :])
