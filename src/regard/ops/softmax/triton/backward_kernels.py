"""The backward kernels: one for dq, one for dk and dv, one for the gradient of a bias table.

From m and l of each row (or lse and 1), and delta = rowsum(dO O) - d_lse,

    p = e^(s - m) / l    dp = dO v^T    ds = p (dp - delta)
    dq = ds k    dk = ds^T q    dv = p^T dO

Each program owns the numbers that it writes, so that gradients are the same in every run. A launch
with CAREFUL computes the blocks again in which a masked weight meets a number that is not finite.
Imported only where triton is installed.

Source: Dao et al. 2022 (arXiv 2205.14135), algorithm 4; Dao 2023 (arXiv 2307.08691), section 3.1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.softmax.triton.scores import (
    LOG2E,
    UNSPECIALIZED,
    bias_of_tile,
    buckets_of_tile,
    holds_odd_tile,
    is_not_finite,
    tanh,
    visible_pairs,
)


@triton.jit
def weights_and_slopes(
    qk, bias, visible, m, inverse_sum, scale, softcap,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, MASKED: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """The weights of a tile, and the derivative of the softcap (1 without one)."""
    UNIT: tl.constexpr = 1.0 if PRECISE else LOG2E
    TO_EXP2: tl.constexpr = LOG2E if PRECISE else 1.0
    slopes = 1.0
    if SOFTCAP or BIAS:
        s = qk * scale
        if SOFTCAP:
            y = tanh(s / softcap, PRECISE)
            slopes = 1.0 - y * y
            s = softcap * y
        s = (s + bias) * UNIT
    else:
        s = qk * (scale * UNIT)
    p = tl.exp2((s - m) * TO_EXP2) * inverse_sum
    if MASKED:
        p = tl.where(visible, p, 0.0)
    return p, slopes


@triton.jit
def without_odd(x, MASKED: tl.constexpr):
    """x with 0 for numbers that are not finite, in a tile with masked pairs: 0 times NaN is NaN."""
    if not MASKED:
        return x
    return tl.where(is_not_finite(x.to(tl.float32)), 0.0, x)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def row_deltas(
    out_ptr, d_out_ptr, d_lse_ptr, delta_ptr, d_b, d_h, d_t, H, T,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BM: tl.constexpr, HAS_D_LSE: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO O) - d_lse; `out` is contiguous, `d_out` has strides."""
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    inside = (row < T)[:, None] & (e < E)[None, :]
    offset = (b * H + h) * T + row
    out = tl.load(out_ptr + offset[:, None] * E + e[None, :], mask=inside, other=0.0)
    d_at = d_out_ptr + b * d_b + h * d_h + row[:, None] * d_t + e[None, :]
    d_out = tl.load(d_at, mask=inside, other=0.0)
    delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1)
    if HAS_D_LSE:
        delta -= tl.load(d_lse_ptr + offset, mask=row < T, other=0.0).to(tl.float32)
    tl.store(delta_ptr + offset, delta, mask=row < T)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_backward_q(
    q_ptr, k_ptr, v_ptr, d_out_ptr, max_ptr, sum_ptr, delta_ptr, d_lse_ptr,
    dq_ptr, d_slope_ptr, d_weight_ptr,
    q_pos_ptr, k_pos_ptr, start_ptr, stop_ptr, bits_ptr, counts_ptr, tiles_ptr,
    slope_ptr, bucket_ptr, weight_ptr, table_ptr, odd_ptr,
    q_b, q_h, q_t, k_b, k_g, k_s, v_b, v_g, v_s, d_b, d_h, d_t,
    q_pos_b, k_pos_b, mask_b, mask_h, list_b, list_h, bits_row,
    weight_h, table_b, table_h, table_t, table_s,
    H, group, T, S, query_blocks, key_tiles, scale, softcap,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, RANGES: tl.constexpr, BITS: tl.constexpr,
    SOFTCAP: tl.constexpr, LINEAR: tl.constexpr, MAX_DISTANCE: tl.constexpr, TABLE: tl.constexpr,
    PRECISE: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr,
    EXACT_SUMS: tl.constexpr, HAS_D_LSE: tl.constexpr, D_SLOPE: tl.constexpr,
    D_WEIGHT: tl.constexpr, BUCKETS: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """dq of a block of queries, and the part of this block in the gradients of slopes and weights.

    With EXACT_SUMS, delta is sum_j p_j dp_j over the tiles: only identical numbers cancel.
    """
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
    q_mask, d_mask = row_inside[:, None] & (d < D)[None, :], row_inside[:, None] & (e < E)[None, :]
    q_at = q_ptr + b64 * q_b + h64 * q_h + row64[:, None] * q_t + d[None, :]
    q = tl.load(q_at, mask=q_mask, other=0.0)
    d_at = d_out_ptr + b64 * d_b + h64 * d_h + row64[:, None] * d_t + e[None, :]
    d_out = tl.load(d_at, mask=d_mask, other=0.0)
    if WIDEN:
        q, d_out = q.to(tl.float32), d_out.to(tl.float32)
    d_out = d_out.to(q.dtype)
    offset = (b64 * H + h) * T + row64
    m = tl.load(max_ptr + offset, mask=row_inside, other=float("inf"))[:, None]
    total = tl.load(sum_ptr + offset, mask=row_inside, other=0.0)
    inverse_sum = tl.where(total == 0.0, 0.0, 1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    qp = tl.load(q_pos_ptr + b64 * q_pos_b + row, mask=row_inside, other=-1)[:, None]
    slope = 0.0
    if LINEAR:
        slope = tl.load(slope_ptr + h)
    weight = weight_ptr + h64 * weight_h
    table = table_ptr + b64 * table_b + h64 * table_h
    mask_row = (b64 * mask_b + h64 * mask_h) * T
    start, stop = start_ptr + mask_row * RANGES, stop_ptr + mask_row * RANGES
    bits = bits_ptr + mask_row * bits_row
    program = (b64 * H + h) * query_blocks + block

    dq = tl.zeros([BM, BLOCK_D], tl.float32)
    d_slope = tl.zeros([BM], tl.float32)
    bucket_numbers = tl.arange(0, BUCKETS)
    d_weight = tl.zeros([BUCKETS], tl.float32)
    delta = tl.zeros([BM], tl.float32)
    k_base, v_base = k_ptr + b64 * k_b + g64 * k_g, v_ptr + b64 * v_b + g64 * v_g
    k_offset = tl.arange(0, BN)[:, None] * k_s + d[None, :]
    # wide rows in fp32 would stay in registers during the loop, which are not there
    RELOAD: tl.constexpr = PRECISE and BLOCK_D > 128
    v_offset = tl.arange(0, BN)[:, None] * v_s + e[None, :]
    if not EXACT_SUMS:
        delta = tl.load(delta_ptr + offset, mask=row_inside, other=0.0)
    for sweep in tl.static_range(0 if EXACT_SUMS else 1, 2):
        for masked in tl.static_range(2):
            first, last = 0, full
            if masked:
                first, last = full, listed
            for x in range(first, last):
                first_col = tl.load(tiles + x) * BN
                col = first_col + tl.arange(0, BN)
                col_inside = col < S
                if RELOAD:
                    q = tl.load(q_at, mask=q_mask, other=0.0)
                    d_out = tl.load(d_at, mask=d_mask, other=0.0).to(q.dtype)
                k_at = k_base + first_col.to(tl.int64) * k_s + k_offset
                v_at = v_base + first_col.to(tl.int64) * v_s + v_offset
                k = tl.load(k_at, mask=col_inside[:, None] & (d < D)[None, :], other=0.0)
                v = tl.load(v_at, mask=col_inside[:, None] & (e < E)[None, :], other=0.0)
                if WIDEN:
                    k, v = k.to(tl.float32), v.to(tl.float32)
                kp = tl.load(k_pos_ptr + b64 * k_pos_b + col, mask=col_inside, other=-1)[None, :]
                inside = row_inside[:, None] & col_inside[None, :]
                bias = bias_of_tile(
                    qp, kp, row[:, None], col[None, :], inside, slope, bucket_ptr, weight,
                    table, table_t, table_s, LINEAR, MAX_DISTANCE, TABLE,
                )  # fmt: skip
                visible = inside
                if masked:
                    visible = visible_pairs(
                        kp, row[:, None], col[None, :], inside, row_inside[:, None],
                        start, stop, bits, bits_row, RANGES, BITS,
                    )  # fmt: skip
                qk = tl.dot(q, k.T, input_precision=PRECISION)
                p, slopes = weights_and_slopes(
                    qk, bias, visible, m, inverse_sum, scale, softcap,
                    SOFTCAP, (LINEAR + MAX_DISTANCE + TABLE) > 0, masked == 1, PRECISE,
                )  # fmt: skip
                dp = tl.dot(d_out, v.T, input_precision=PRECISION)
                if sweep == 0:
                    product = p * dp
                    if masked:
                        product = tl.where(visible, product, 0.0)
                    delta += tl.sum(product, 1)
                else:
                    ds = p * (dp - delta[:, None])
                    if masked:
                        ds = tl.where(visible, ds, 0.0)
                    if D_SLOPE:
                        distance = qp - kp
                        if LINEAR == 2:
                            distance = tl.abs(distance)
                        d_slope -= tl.sum(ds * distance.to(tl.float32), 1)
                    if D_WEIGHT:
                        matching = buckets_of_tile(qp, kp, bucket_ptr, MAX_DISTANCE)
                        lowest = tl.min(tl.min(tl.where(inside, matching, BUCKETS), 1), 0)
                        highest = tl.max(tl.max(tl.where(inside, matching, -1), 1), 0)
                        for y in range(lowest, highest + 1):
                            sums = tl.sum(tl.where(inside & (matching == y), ds, 0.0), 1)
                            d_weight += tl.where(bucket_numbers == y, tl.sum(sums, 0), 0.0)
                    ds = ds * slopes
                    keys = without_odd(k, CAREFUL and masked == 1)
                    dq = tl.dot(ds.to(k.dtype), keys, dq, input_precision=PRECISION)
        if sweep == 0:
            if HAS_D_LSE:
                delta -= tl.load(d_lse_ptr + offset, mask=row_inside, other=0.0)
            tl.store(delta_ptr + offset, delta, mask=row_inside)
    tl.store(
        dq_ptr + offset[:, None] * D + d[None, :],
        (dq * scale).to(dq_ptr.dtype.element_ty),
        mask=q_mask,
    )
    if D_SLOPE:
        tl.store(d_slope_ptr + program, tl.sum(d_slope, 0))
    if D_WEIGHT:
        tl.store(d_weight_ptr + program * BUCKETS + bucket_numbers, d_weight)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_backward_kv(
    q_ptr, k_ptr, v_ptr, d_out_ptr, max_ptr, sum_ptr, delta_ptr,
    dk_ptr, dv_ptr, d_column_ptr,
    q_pos_ptr, k_pos_ptr, start_ptr, stop_ptr, bits_ptr, counts_ptr, tiles_ptr,
    slope_ptr, bucket_ptr, weight_ptr, table_ptr, odd_ptr,
    q_b, q_h, q_t, k_b, k_g, k_s, v_b, v_g, v_s, d_b, d_h, d_t,
    q_pos_b, k_pos_b, mask_b, mask_h, list_b, list_h, bits_row,
    weight_h, table_b, table_h, table_t, table_s,
    H, group, T, S, key_tiles, query_blocks, scale, softcap,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, RANGES: tl.constexpr, BITS: tl.constexpr,
    SOFTCAP: tl.constexpr, LINEAR: tl.constexpr, MAX_DISTANCE: tl.constexpr, TABLE: tl.constexpr,
    PRECISE: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr, D_COLUMN: tl.constexpr,
    CAREFUL: tl.constexpr,
):  # fmt: skip
    """dk and dv of a transposed tile of keys, over the heads of a group, and sums of ds."""
    tile = tl.program_id(0)
    G = H // group
    b, g = tl.program_id(1) // G, tl.program_id(1) % G
    b64, g64 = b.to(tl.int64), g.to(tl.int64)
    col = tile * BN + tl.arange(0, BN)
    col64 = col.to(tl.int64)
    col_inside = col < S
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    k_mask, v_mask = col_inside[:, None] & (d < D)[None, :], col_inside[:, None] & (e < E)[None, :]
    k = tl.load(
        k_ptr + b64 * k_b + g64 * k_g + col64[:, None] * k_s + d[None, :], mask=k_mask, other=0.0
    )
    v = tl.load(
        v_ptr + b64 * v_b + g64 * v_g + col64[:, None] * v_s + e[None, :], mask=v_mask, other=0.0
    )
    if WIDEN:
        k, v = k.to(tl.float32), v.to(tl.float32)
    kp = tl.load(k_pos_ptr + b64 * k_pos_b + col, mask=col_inside, other=-1)[:, None]
    if CAREFUL:
        matching = tl.zeros([], tl.int32)
        for member in range(group):
            head = g64 * group + member
            list_row = (b64 * list_b + head * list_h) * key_tiles + tile
            full, listed = (
                tl.load(counts_ptr + list_row * 2),
                tl.load(counts_ptr + list_row * 2 + 1),
            )
            odd = odd_ptr + (b64 * H + head) * query_blocks
            blocks = tiles_ptr + list_row * query_blocks
            matching = matching | holds_odd_tile(odd, blocks, full, listed).to(tl.int32)
        if matching == 0:
            return
    dk = tl.zeros([BN, BLOCK_D], tl.float32)
    dv = tl.zeros([BN, BLOCK_E], tl.float32)
    q_offset = tl.arange(0, BM)[:, None] * q_t + d[None, :]
    d_offset = tl.arange(0, BM)[:, None] * d_t + e[None, :]
    for member in range(group):
        h = g * group + member
        h64 = h.to(tl.int64)
        slope = 0.0
        if LINEAR:
            slope = tl.load(slope_ptr + h)
        weight = weight_ptr + h64 * weight_h
        table = table_ptr + b64 * table_b + h64 * table_h
        mask_row = (b64 * mask_b + h64 * mask_h) * T
        start, stop = start_ptr + mask_row * RANGES, stop_ptr + mask_row * RANGES
        bits = bits_ptr + mask_row * bits_row
        list_row = (b64 * list_b + h64 * list_h) * key_tiles + tile
        full = tl.load(counts_ptr + list_row * 2)
        listed = tl.load(counts_ptr + list_row * 2 + 1)
        blocks = tiles_ptr + list_row * query_blocks
        d_column = tl.zeros([BN], tl.float32)
        q_base, d_base = q_ptr + b64 * q_b + h64 * q_h, d_out_ptr + b64 * d_b + h64 * d_h
        for masked in tl.static_range(2):
            first, last = 0, full
            if masked:
                first, last = full, listed
            for x in range(first, last):
                first_row = tl.load(blocks + x) * BM
                row = first_row + tl.arange(0, BM)
                row_inside = row < T
                q_at = q_base + first_row.to(tl.int64) * q_t + q_offset
                d_at = d_base + first_row.to(tl.int64) * d_t + d_offset
                q = tl.load(q_at, mask=row_inside[:, None] & (d < D)[None, :], other=0.0)
                d_out = tl.load(d_at, mask=row_inside[:, None] & (e < E)[None, :], other=0.0)
                if WIDEN:
                    q, d_out = q.to(tl.float32), d_out.to(tl.float32)
                d_out = d_out.to(q.dtype)
                offset = (b64 * H + h) * T + row
                m = tl.load(max_ptr + offset, mask=row_inside, other=float("inf"))[None, :]
                total = tl.load(sum_ptr + offset, mask=row_inside, other=0.0)
                inverse_sum = tl.where(total == 0.0, 0.0, 1.0 / tl.where(total == 0.0, 1.0, total))
                delta = tl.load(delta_ptr + offset, mask=row_inside, other=0.0)
                qp = tl.load(q_pos_ptr + b64 * q_pos_b + row, mask=row_inside, other=-1)[None, :]
                inside = row_inside[None, :] & col_inside[:, None]
                bias = bias_of_tile(
                    qp, kp, row[None, :], col[:, None], inside, slope, bucket_ptr, weight,
                    table, table_t, table_s, LINEAR, MAX_DISTANCE, TABLE,
                )  # fmt: skip
                visible = inside
                if masked:
                    visible = visible_pairs(
                        kp, row[None, :], col[:, None], inside, row_inside[None, :],
                        start, stop, bits, bits_row, RANGES, BITS,
                    )  # fmt: skip
                # in fp32 the same products as in the other kernels, whose roundings must cancel
                if PRECISE:
                    kq = tl.trans(tl.dot(q, k.T, input_precision=PRECISION))
                    dp = tl.trans(tl.dot(d_out, v.T, input_precision=PRECISION))
                else:
                    kq = tl.dot(k, q.T, input_precision=PRECISION)
                    dp = tl.dot(v, d_out.T, input_precision=PRECISION)
                p, slopes = weights_and_slopes(
                    kq, bias, visible, m, inverse_sum[None, :], scale, softcap,
                    SOFTCAP, (LINEAR + MAX_DISTANCE + TABLE) > 0, masked == 1, PRECISE,
                )  # fmt: skip
                if CAREFUL and masked:
                    # a gradient that is not finite reaches dv through delta, for visible pairs only
                    odd = is_not_finite(delta)
                    p = tl.where(visible & odd[None, :], float("nan"), p)
                dv = tl.dot(
                    p.to(q.dtype),
                    without_odd(d_out, CAREFUL and masked == 1),
                    dv,
                    input_precision=PRECISION,
                )
                ds = p * (dp - delta[None, :])
                if masked:
                    ds = tl.where(visible, ds, 0.0)
                if D_COLUMN:
                    d_column += tl.sum(ds, 1)
                ds = ds * slopes
                rows = without_odd(q, CAREFUL and masked == 1)
                dk = tl.dot(ds.to(q.dtype), rows, dk, input_precision=PRECISION)
        if D_COLUMN:
            tl.store(d_column_ptr + (b64 * H + h) * S + col64, d_column, mask=col_inside)
    offset = (b64 * G + g) * S + col64
    tl.store(
        dk_ptr + offset[:, None] * D + d[None, :],
        (dk * scale).to(dk_ptr.dtype.element_ty),
        mask=k_mask,
    )
    tl.store(dv_ptr + offset[:, None] * E + e[None, :], dv.to(dv_ptr.dtype.element_ty), mask=v_mask)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_backward_table(
    q_ptr, k_ptr, v_ptr, d_out_ptr, max_ptr, sum_ptr, delta_ptr, d_table_ptr,
    q_pos_ptr, k_pos_ptr, start_ptr, stop_ptr, bits_ptr, kinds_ptr,
    slope_ptr, bucket_ptr, weight_ptr, table_ptr,
    q_b, q_h, q_t, k_b, k_g, k_s, v_b, v_g, v_s, d_b, d_h, d_t,
    q_pos_b, k_pos_b, mask_b, mask_h, list_b, list_h, bits_row,
    weight_h, table_b, table_h, table_t, table_s,
    B, H, group, T, S, query_blocks, key_tiles, scale, softcap, table_rows, table_heads,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, RANGES: tl.constexpr, BITS: tl.constexpr,
    SOFTCAP: tl.constexpr, LINEAR: tl.constexpr, MAX_DISTANCE: tl.constexpr,
    PRECISE: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of a bias table `[table_rows, table_heads, T, S]`, the ordered sum of ds."""
    block, tile = tl.program_id(0) // key_tiles, tl.program_id(0) % key_tiles
    owner_b, owner_h = tl.program_id(1) // table_heads, tl.program_id(1) % table_heads
    row, col = block * BM + tl.arange(0, BM), tile * BN + tl.arange(0, BN)
    row64, col64 = row.to(tl.int64), col.to(tl.int64)
    row_inside, col_inside = row < T, col < S
    inside = row_inside[:, None] & col_inside[None, :]
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    q_mask, d_mask = row_inside[:, None] & (d < D)[None, :], row_inside[:, None] & (e < E)[None, :]
    k_mask, v_mask = col_inside[:, None] & (d < D)[None, :], col_inside[:, None] & (e < E)[None, :]
    total_ds = tl.zeros([BM, BN], tl.float32)
    # the owner of an entry of its own, or every batch row or head
    for i in range(B // table_rows):
        for j in range(H // table_heads):
            b, h = owner_b + i * table_rows, owner_h + j * table_heads
            b64, h64, g64 = b.to(tl.int64), h.to(tl.int64), (h // group).to(tl.int64)
            list_row = (b64 * list_b + h64 * list_h) * query_blocks + block
            if tl.load(kinds_ptr + list_row * key_tiles + tile) != 0:
                q_at = q_ptr + b64 * q_b + h64 * q_h + row64[:, None] * q_t + d[None, :]
                d_at = d_out_ptr + b64 * d_b + h64 * d_h + row64[:, None] * d_t + e[None, :]
                k_at = k_ptr + b64 * k_b + g64 * k_g + col64[:, None] * k_s + d[None, :]
                v_at = v_ptr + b64 * v_b + g64 * v_g + col64[:, None] * v_s + e[None, :]
                q, k = tl.load(q_at, mask=q_mask, other=0.0), tl.load(k_at, mask=k_mask, other=0.0)
                v = tl.load(v_at, mask=v_mask, other=0.0)
                d_out = tl.load(d_at, mask=d_mask, other=0.0)
                if WIDEN:
                    q, k = q.to(tl.float32), k.to(tl.float32)
                    v, d_out = v.to(tl.float32), d_out.to(tl.float32)
                d_out = d_out.to(q.dtype)
                offset = (b64 * H + h) * T + row64
                m = tl.load(max_ptr + offset, mask=row_inside, other=float("inf"))[:, None]
                total = tl.load(sum_ptr + offset, mask=row_inside, other=0.0)
                inverse_sum = tl.where(total == 0.0, 0.0, 1.0 / tl.where(total == 0.0, 1.0, total))
                delta = tl.load(delta_ptr + offset, mask=row_inside, other=0.0)[:, None]
                qp = tl.load(q_pos_ptr + b64 * q_pos_b + row, mask=row_inside, other=-1)[:, None]
                kp = tl.load(k_pos_ptr + b64 * k_pos_b + col, mask=col_inside, other=-1)[None, :]
                slope = 0.0
                if LINEAR:
                    slope = tl.load(slope_ptr + h)
                bias = bias_of_tile(
                    qp, kp, row[:, None], col[None, :], inside, slope, bucket_ptr,
                    weight_ptr + h64 * weight_h, table_ptr + b64 * table_b + h64 * table_h,
                    table_t, table_s, LINEAR, MAX_DISTANCE, True,
                )  # fmt: skip
                mask_row = (b64 * mask_b + h64 * mask_h) * T
                visible = visible_pairs(
                    kp, row[:, None], col[None, :], inside, row_inside[:, None],
                    start_ptr + mask_row * RANGES, stop_ptr + mask_row * RANGES,
                    bits_ptr + mask_row * bits_row, bits_row, RANGES, BITS,
                )  # fmt: skip
                qk = tl.dot(q, k.T, input_precision=PRECISION)
                p, _ = weights_and_slopes(
                    qk, bias, visible, m, inverse_sum[:, None], scale, softcap,
                    SOFTCAP, True, True, PRECISE,
                )  # fmt: skip
                dp = tl.dot(d_out, v.T, input_precision=PRECISION)
                total_ds += tl.where(visible, p * (dp - delta), 0.0)
    table_at = tl.program_id(1).to(tl.int64) * T * S + row64[:, None] * S + col64[None, :]
    tl.store(d_table_ptr + table_at, total_ds, mask=inside)
