"""The decoding kernels: few queries against many keys, which are split among programs.

A program computes one span of the keys for all query heads that share them, as rows of one product.
Spans begin at multiples of a fixed number of slots, so that a row has the same digits alone and in
a batch. A second kernel joins the parts in order:

    lse = ln sum_p exp(lse_p)        out = sum_p exp(lse_p - lse) out_p

Source: Dao et al. 2023 (Flash-Decoding), and Milakov and Gimelshein 2018 (arXiv 1805.02867).
Imported only where triton is installed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.softmax.triton.scores import (
    LN2,
    LOG2E,
    UNSPECIALIZED,
    bias_of_tile,
    is_not_finite,
    tanh,
    visible_pairs,
)


@triton.jit
def add_values(acc, p, v, visible, PRECISION: tl.constexpr):
    """acc + p v, in which a value that is not finite reaches only the rows that see it."""
    wide = v.to(tl.float32)
    odd = is_not_finite(wide)
    acc = tl.dot(p.to(v.dtype), tl.where(odd, 0.0, v), acc, input_precision=PRECISION)
    if tl.max(tl.max(odd.to(tl.int32), 1), 0) > 0:
        sees_key = visible.to(tl.float16)
        # NaN counts as both infinities, whose sum is NaN
        high = tl.dot(sees_key, (odd & ~(wide == float("-inf"))).to(tl.float16))
        low = tl.dot(sees_key, (odd & ~(wide == float("inf"))).to(tl.float16))
        acc = tl.where(high > 0.5, acc + float("inf"), acc)
        acc = tl.where(low > 0.5, acc + float("-inf"), acc)
    return acc


@triton.jit
def restored(code, scale, zero, ROUND: tl.constexpr):
    """zero + code * scale, in the dtype of the scale; ROUND rounds to bf16 in the interpreter."""
    x = zero.to(tl.float32) + code.to(tl.float32) * scale.to(tl.float32)
    if ROUND:
        word = x.to(tl.int32, bitcast=True)
        word += 0x7FFF + ((word >> 16) & 1)
        x = (word & -65536).to(tl.float32, bitcast=True)
    else:
        x = x.to(scale.dtype)
    return x


@triton.jit
def float8_numbers(code, scale, FRACTION: tl.constexpr, ROUND: tl.constexpr):
    """The numbers of 8-bit floats times a power of two, by their bits in a 16-bit float."""
    bits = code.to(tl.int32)
    if FRACTION == 2:
        half = (bits << 8).to(tl.int16).to(tl.float16, bitcast=True)
        x = half.to(tl.float32) * scale.to(tl.float32)
    else:
        magnitude = bits & 127
        half = (((bits & 128) << 8) | (magnitude << 7)).to(tl.int16).to(tl.float16, bitcast=True)
        x = half.to(tl.float32) * 256.0 * scale.to(tl.float32)
        x = tl.where(magnitude == 127, float("nan"), x)
    if not ROUND:
        x = x.to(scale.dtype)
    return x


@triton.jit
def numbers_of_octets(octets, scale, zero, CODE_BITS: tl.constexpr, ROUND: tl.constexpr):
    """The numbers of the codes in octets `[n, m]`, `[n, m * 8 / CODE_BITS]`, lowest bits first."""
    code = octets.to(tl.int32)
    if CODE_BITS == 8:
        numbers = restored(code, scale, zero, ROUND)
    elif CODE_BITS == 4:
        low = restored(code & 15, scale, zero, ROUND)
        numbers = tl.interleave(low, restored(code >> 4, scale, zero, ROUND))
    else:
        first = restored(code & 3, scale, zero, ROUND)
        second = restored((code >> 2) & 3, scale, zero, ROUND)
        third = restored((code >> 4) & 3, scale, zero, ROUND)
        fourth = restored(code >> 6, scale, zero, ROUND)
        numbers = tl.interleave(tl.interleave(first, third), tl.interleave(second, fourth))
    return numbers


@triton.jit
def coded_keys(
    k_base, scale_base, zero_base, first_col, stop_slot, d, k_s, scale_s,
    D: tl.constexpr, BN: tl.constexpr, CODE_BITS: tl.constexpr, GROUP: tl.constexpr,
    ROUND: tl.constexpr,
):  # fmt: skip
    """The keys `[BLOCK_D, BN]` of a tile from codes `[R, D, octets]` in groups of GROUP tokens."""
    PER: tl.constexpr = 8 // CODE_BITS
    octet = tl.arange(0, BN // PER)
    row = first_col + octet * PER
    inside = (d < D)[:, None] & (row < stop_slot)[None, :]
    if GROUP % BN == 0:  # a tile has one group
        group = (first_col // GROUP).to(tl.int64)
        octet_at = k_base + group * k_s + (first_col % GROUP) // PER
        octet_at = octet_at + (d * (GROUP // PER))[:, None] + octet[None, :]
        scale_at = group * scale_s + d
        scale = tl.load(scale_base + scale_at, mask=d < D, other=0.0)[:, None]
        zero = tl.load(zero_base + scale_at, mask=d < D, other=0.0)[:, None]
    else:
        group = (row // GROUP).to(tl.int64)
        octet_at = k_base + (group * k_s + (row % GROUP) // PER)[None, :]
        octet_at = octet_at + (d * (GROUP // PER))[:, None]
        scale_at = (group * scale_s)[None, :] + d[:, None]
        scale = tl.load(scale_base + scale_at, mask=inside, other=0.0)
        zero = tl.load(zero_base + scale_at, mask=inside, other=0.0)
    octets = tl.load(octet_at, mask=inside, other=0)
    return numbers_of_octets(octets, scale, zero, CODE_BITS, ROUND)


@triton.jit
def coded_values(
    v_base, scale_base, zero_base, first_col, stop_slot, v_s, scale_s, scale_line,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BN: tl.constexpr, CODE_BITS: tl.constexpr,
    GROUP: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """The values `[BN, BLOCK_E]` of a tile from codes `[S, octets]` in groups of channels."""
    PER: tl.constexpr = 8 // CODE_BITS
    row, octet = tl.arange(0, BN), tl.arange(0, BLOCK_E // PER)
    first = first_col.to(tl.int64)
    used = first_col + row < stop_slot
    inside = used[:, None] & (octet * PER < E)[None, :]
    octet_at = v_base + first * v_s + (row * v_s)[:, None] + octet[None, :]
    octets = tl.load(octet_at, mask=inside, other=0)
    if BLOCK_E % GROUP == 0 and E == BLOCK_E:  # the octets of a group are neighbours
        LINES: tl.constexpr = E // GROUP
        line = tl.arange(0, LINES)
        scale_at = (first + row) * scale_s
        scale_at = scale_at[:, None] + line[None, :] * scale_line
        scale = tl.load(scale_base + scale_at, mask=used[:, None], other=0.0)
        zero = tl.load(zero_base + scale_at, mask=used[:, None], other=0.0)
        octets = tl.reshape(octets, [BN * LINES, GROUP // PER])
        scale, zero = tl.reshape(scale, [BN * LINES, 1]), tl.reshape(zero, [BN * LINES, 1])
        numbers = numbers_of_octets(octets, scale, zero, CODE_BITS, ROUND)
        numbers = tl.reshape(numbers, [BN, BLOCK_E])
    else:
        line = (octet * PER) // GROUP
        scale_at = ((first + row) * scale_s)[:, None] + (line * scale_line)[None, :]
        scale = tl.load(scale_base + scale_at, mask=inside, other=0.0)
        zero = tl.load(zero_base + scale_at, mask=inside, other=0.0)
        numbers = numbers_of_octets(octets, scale, zero, CODE_BITS, ROUND)
    return numbers


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_decode(
    q_ptr, k_ptr, v_ptr, part_ptr, part_lse_ptr,
    q_pos_ptr, k_pos_ptr, start_ptr, stop_ptr, bits_ptr, bounds_ptr,
    slope_ptr, bucket_ptr, weight_ptr, table_ptr,
    pages_ptr, k_scale_ptr, k_zero_ptr, v_scale_ptr, v_zero_ptr,
    q_b, q_h, q_t, k_b, k_g, k_s, v_b, v_g, v_s,
    pages_b, k_page, v_page,
    k_scale_b, k_scale_g, k_scale_s, v_scale_b, v_scale_g, v_scale_s, v_scale_line,
    q_pos_b, k_pos_b, mask_b, mask_h, list_b, list_h, bits_row,
    weight_h, table_b, table_h, table_t, table_s,
    H, group, T, first_slot, stop_slot, spans, first_span, row_blocks, scale, softcap,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    REST: tl.constexpr, SHARED_VALUES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, RANGES: tl.constexpr, BITS: tl.constexpr,
    SOFTCAP: tl.constexpr, LINEAR: tl.constexpr, MAX_DISTANCE: tl.constexpr, TABLE: tl.constexpr,
    PRECISE: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr,
    CAREFUL: tl.constexpr,
    PAGE: tl.constexpr, CODE_BITS: tl.constexpr, K_GROUP: tl.constexpr, V_GROUP: tl.constexpr,
    FLOAT8: tl.constexpr,
):  # fmt: skip
    """Attention of all queries of one group of heads over one span of keys: out and lse.

    The slots are `first_slot` to `stop_slot`: with PAGE in pages of so many slots, with CODE_BITS
    as codes from slot 0 on, with FLOAT8 as 8-bit floats with a scale for each slot.

    With CAREFUL, a second launch, a program computes again what is not finite. Key channels behind
    BLOCK_D are a second product of REST channels. With SHARED_VALUES the values are the first
    channels of the keys, loaded once.
    """
    span = tl.program_id(0)
    G = H // group
    head, row_block = tl.program_id(1) // row_blocks, tl.program_id(1) % row_blocks
    b, g = head // G, head % G
    b64, g64 = b.to(tl.int64), g.to(tl.int64)
    # row r of the product is query r % T of head g * group + r // T
    packed = row_block * BM + tl.arange(0, BM)
    row, h = packed % T, g * group + packed // T
    row_inside = packed < group * T
    h64 = h.to(tl.int64)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    q_at = q_ptr + b64 * q_b + (h64 * q_h + row.to(tl.int64) * q_t)[:, None] + d[None, :]
    q = tl.load(q_at, mask=row_inside[:, None] & (d < D)[None, :], other=0.0)
    if WIDEN:
        q = q.to(tl.float32)
    if REST:
        rest = BLOCK_D + tl.arange(0, REST)
        q_rest_at = q_ptr + b64 * q_b + (h64 * q_h + row.to(tl.int64) * q_t)[:, None]
        q_rest_mask = row_inside[:, None] & (rest < D)[None, :]
        q_rest = tl.load(q_rest_at + rest[None, :], mask=q_rest_mask, other=0.0)
        if WIDEN:
            q_rest = q_rest.to(tl.float32)
        rest_offset = tl.arange(0, BN)[:, None] * k_s + rest[None, :]
    qp = tl.load(q_pos_ptr + b64 * q_pos_b + row, mask=row_inside, other=-1)[:, None]
    slope = 0.0
    if LINEAR:
        slope = tl.load(slope_ptr + h, mask=row_inside, other=0.0)[:, None]
    weight = weight_ptr + (tl.where(row_inside, h64, 0) * weight_h)[:, None]
    table = table_ptr + b64 * table_b + (h64 * table_h)[:, None]
    mask_row = (b64 * mask_b + h64 * mask_h)[:, None] * T
    start, stop = start_ptr + mask_row * RANGES, stop_ptr + mask_row * RANGES
    bits = bits_ptr + mask_row * bits_row
    k_base, v_base = k_ptr + g64 * k_g, v_ptr + g64 * v_g
    if not PAGE:  # all rows share the pages
        k_base, v_base = k_base + b64 * k_b, v_base + b64 * v_b
    if CODE_BITS or FLOAT8:
        k_scale_base = k_scale_ptr + b64 * k_scale_b + g64 * k_scale_g
        v_scale_base = v_scale_ptr + b64 * v_scale_b + g64 * v_scale_g
    if CODE_BITS:
        k_zero_base = k_zero_ptr + b64 * k_scale_b + g64 * k_scale_g
        v_zero_base = v_zero_ptr + b64 * v_scale_b + g64 * v_scale_g
    else:
        k_offset = tl.arange(0, BN)[:, None] * k_s + d[None, :]
        v_offset = tl.arange(0, BN)[:, None] * v_s + e[None, :]
    # the first tile of the span that some query sees, and one past the last
    bounds = bounds_ptr + (b64 * list_b * tl.num_programs(0) + span) * 2
    first_tile, last_tile = tl.load(bounds), tl.load(bounds + 1)
    offset = ((b64 * H + h64) * T + row) * spans + first_span + span
    part_at = part_ptr + offset[:, None] * E + e[None, :]
    part_mask = row_inside[:, None] & (e < E)[None, :]
    if CAREFUL:
        odd = is_not_finite(tl.load(part_at, mask=part_mask, other=0.0)).to(tl.int32)
        if tl.max(tl.max(odd, 1), 0) == 0:
            return
    UNIT: tl.constexpr = 1.0 if PRECISE else LOG2E
    TO_EXP2: tl.constexpr = LOG2E if PRECISE else 1.0
    m = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BLOCK_E], tl.float32)
    for tile in range(first_tile, last_tile):
        first_col = tile * BN
        col = first_col + tl.arange(0, BN)
        col_inside = (col >= first_slot) & (col < stop_slot)
        if CODE_BITS:
            k_rows = coded_keys(
                k_base, k_scale_base, k_zero_base, first_col, stop_slot, d, k_s, k_scale_s,
                D, BN, CODE_BITS, K_GROUP, WIDEN,
            )  # fmt: skip
            v = coded_values(
                v_base, v_scale_base, v_zero_base, first_col, stop_slot, v_s, v_scale_s,
                v_scale_line, E, BLOCK_E, BN, CODE_BITS, V_GROUP, WIDEN,
            )  # fmt: skip
        else:
            if PAGE:
                page_at = pages_ptr + b64 * pages_b + col // PAGE
                page = tl.load(page_at, mask=col_inside, other=0).to(tl.int64)
                k_from = k_base + (page * k_page + (col % PAGE) * k_s)[:, None]
                v_from = v_base + (page * v_page + (col % PAGE) * v_s)[:, None]
                k_at, v_at = k_from + d[None, :], v_from + e[None, :]
            else:
                first = (first_col - first_slot).to(tl.int64)
                k_from, v_from = k_base + first * k_s, v_base + first * v_s
                k_at, v_at = k_from + k_offset, v_from + v_offset
            k = tl.load(k_at, mask=col_inside[:, None] & (d < D)[None, :], other=0)
            if SHARED_VALUES:
                v = k
            else:
                v = tl.load(v_at, mask=col_inside[:, None] & (e < E)[None, :], other=0)
            if FLOAT8:
                slot = first_col.to(tl.int64) + tl.arange(0, BN)
                k_scale = tl.load(k_scale_base + slot * k_scale_s, mask=col_inside, other=0.0)
                v_scale = tl.load(v_scale_base + slot * v_scale_s, mask=col_inside, other=0.0)
                k = float8_numbers(k, k_scale[:, None], FLOAT8, WIDEN)
                v = float8_numbers(v, v_scale[:, None], FLOAT8, WIDEN)
            elif WIDEN:
                k, v = k.to(tl.float32), v.to(tl.float32)
            k_rows = k.T
        kp = tl.load(k_pos_ptr + b64 * k_pos_b + col, mask=col_inside, other=-1)[None, :]
        inside = row_inside[:, None] & col_inside[None, :]
        s = tl.dot(q, k_rows, input_precision=PRECISION)
        if REST:
            k_rest_at = k_from + (rest[None, :] if PAGE else rest_offset)
            k_rest = tl.load(k_rest_at, mask=col_inside[:, None] & (rest < D)[None, :], other=0)
            if FLOAT8:
                k_rest = float8_numbers(k_rest, k_scale[:, None], FLOAT8, WIDEN)
            elif WIDEN:
                k_rest = k_rest.to(tl.float32)
            s = tl.dot(q_rest, k_rest.T, s, input_precision=PRECISION)
        s = s * scale
        if SOFTCAP:
            s = softcap * tanh(s / softcap, PRECISE)
        if LINEAR or MAX_DISTANCE or TABLE:
            s += bias_of_tile(
                qp, kp, row[:, None], col[None, :], inside, slope, bucket_ptr, weight,
                table, table_t, table_s, LINEAR, MAX_DISTANCE, TABLE,
            )  # fmt: skip
        visible = visible_pairs(
            kp, row[:, None], col[None, :], inside, row_inside[:, None],
            start, stop, bits, bits_row, RANGES, BITS,
        )  # fmt: skip
        s = tl.where(visible, s * UNIT, float("-inf"))
        new_m = tl.maximum(m, tl.max(s, 1))
        shift = tl.where(new_m == float("-inf"), 0.0, new_m)
        p = tl.exp2((s - shift[:, None]) * TO_EXP2)
        correction = tl.exp2((m - shift) * TO_EXP2)
        total = total * correction + tl.sum(p, 1)
        acc = acc * correction[:, None]
        if CAREFUL:
            acc = add_values(acc, p, v, visible, PRECISION)
        else:
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        m = new_m
    sees = (m != float("-inf")) | (total != 0.0)
    divisor = tl.where(sees, total, 1.0)
    m = tl.where(m == float("-inf"), 0.0, m)
    lse = tl.where(sees, m * (1.0 / UNIT) + tl.log2(divisor) * LN2, float("-inf"))
    tl.store(part_lse_ptr + offset, lse, mask=row_inside)
    tl.store(part_at, acc / divisor[:, None], mask=part_mask)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def join_spans(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr, spans,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_SPANS: tl.constexpr,
):  # fmt: skip
    """Join the parts of one row, in the order of their spans."""
    row = tl.program_id(0).to(tl.int64)
    e, n = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_SPANS)
    lse_at = part_lse_ptr + row * spans
    part_lse = tl.load(lse_at + n, mask=n < spans, other=float("-inf"))
    m = tl.max(part_lse, 0)
    m = tl.where(m == float("-inf"), 0.0, m)
    total = tl.sum(tl.exp2((part_lse - m) * LOG2E), 0)
    acc = tl.zeros([BLOCK_E], tl.float32)
    for span in range(spans):
        share = tl.exp2((tl.load(lse_at + span) - m) * LOG2E)
        part = tl.load(part_ptr + (row * spans + span) * E + e, mask=e < E, other=0.0)
        # a span that a row does not see holds 0 and has no share; NaN comes with a share of NaN
        acc += tl.where(share == 0.0, 0.0, share * part)
    divisor = tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * E + e, (acc / divisor).to(out_ptr.dtype.element_ty), mask=e < E)
    tl.store(lse_ptr + row, tl.where(total == 0.0, float("-inf"), m + tl.log2(divisor) * LN2))
