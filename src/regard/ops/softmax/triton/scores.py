"""What every kernel computes for a tile of scores: softcap, bias, and which pairs are visible.

Rows and columns are index tensors that broadcast, so that the kernel of dk and dv can compute the
transposed tile. Imported only where triton is installed.
"""

from __future__ import annotations

import triton
import triton.language as tl

UNSPECIALIZED = (
    "H", "group", "T", "S", "B", "heads", "n", "query_blocks", "key_tiles", "spans", "row_blocks",
    "q_pos_b", "k_pos_b", "mask_b", "mask_h", "list_b", "list_h", "bits_row", "weight_h",
    "table_b", "table_h", "table_rows", "table_heads", "first_slot", "stop_slot", "first_span",
    "pages_b", "k_scale_b", "k_scale_g", "k_scale_s", "v_scale_b", "v_scale_g", "v_scale_s",
    "v_scale_line",
)  # fmt: skip
"""Numbers that triton must not look at, since special values would compile a kernel again."""

LOG2E = tl.constexpr(1.4426950408889634)
"""Weights are computed as powers of 2: e^x = 2^(x log2 e)."""
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(x, PRECISE: tl.constexpr):
    """tanh x from 2^-|x|; for small x in fp32 from its series, because 1 - e^-2x cancels there."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    y = (1.0 - e) / (1.0 + e)
    y = tl.where(x < 0.0, -y, y)
    if PRECISE:
        z = x * x
        series = 0.021869488536155203 + z * (-0.008863235529902197 + z * 0.003592128036572481)
        series = 0.13333333333333333 + z * (-0.05396825396825397 + z * series)
        series = x + x * z * (-0.3333333333333333 + z * series)
        y = tl.where(tl.abs(x) < 0.35, series, y)
    return y


@triton.jit
def bias_of_tile(
    qp,
    kp,
    row,
    col,
    inside,
    slope,
    bucket,
    weight,
    table,
    table_row,
    table_col,
    LINEAR: tl.constexpr,
    MAX_DISTANCE: tl.constexpr,
    TABLE: tl.constexpr,
):
    """The bias of a tile: slopes times distances, the weights of buckets, and a table."""
    bias = tl.zeros_like((qp - kp).to(tl.float32))
    if LINEAR:
        distance = qp - kp
        if LINEAR == 2:
            distance = tl.abs(distance)
        bias -= slope * distance.to(tl.float32)
    if MAX_DISTANCE:
        bias += tl.load(weight + buckets_of_tile(qp, kp, bucket, MAX_DISTANCE))
    if TABLE:
        offset = table + row.to(tl.int64) * table_row + col.to(tl.int64) * table_col
        bias += tl.load(offset, mask=inside, other=0.0).to(tl.float32)
    return bias


@triton.jit
def buckets_of_tile(qp, kp, bucket, MAX_DISTANCE: tl.constexpr):
    """The bucket of each pair."""
    distance = tl.minimum(tl.maximum(kp - qp, -MAX_DISTANCE), MAX_DISTANCE)
    return tl.load(bucket + distance + MAX_DISTANCE)


@triton.jit
def visible_pairs(
    kp,
    row,
    col,
    inside,
    row_inside,
    start,
    stop,
    bits,
    bits_row,
    RANGES: tl.constexpr,
    BITS: tl.constexpr,
):
    """Which pairs of a tile are visible."""
    visible = inside & (kp >= 0)
    if RANGES:
        matching = inside & (kp < 0) & (kp >= 0)
        for i in tl.static_range(RANGES):
            first = tl.load(start + row * RANGES + i, mask=row_inside, other=2147483647)
            last = tl.load(stop + row * RANGES + i, mask=row_inside, other=0)
            matching = matching | ((kp >= first) & (kp < last))
        visible = visible & matching
    if BITS:
        octet = tl.load(bits + row.to(tl.int64) * bits_row + col // 8, mask=inside, other=0)
        visible = visible & (((octet.to(tl.int32) >> (col % 8)) & 1) != 0)
    return visible


@triton.jit
def is_not_finite(x):
    """Whether a number is NaN or infinite."""
    return (x != x) | (tl.abs(x) == float("inf"))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def mark_odd_tiles(
    x_ptr, odd_ptr, x_b, x_h, x_n, heads, n,
    WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mark the tiles of x `[B, heads, n, WIDTH]` that hold a number that is not finite."""
    b, h = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, BLOCK_WIDTH)
    offset = x_ptr + b * x_b + h * x_h + row.to(tl.int64)[:, None] * x_n + column[None, :]
    inside = (row < n)[:, None] & (column < WIDTH)[None, :]
    odd = is_not_finite(tl.load(offset, mask=inside, other=0.0).to(tl.float32)).to(tl.int32)
    program = (b * heads + h) * tl.num_programs(0) + tl.program_id(0)
    # a second launch may mark the same tiles for another tensor
    tl.store(odd_ptr + program, tl.max(tl.max(odd, 1), 0) | tl.load(odd_ptr + program))


@triton.jit
def holds_odd_tile(odd, tiles, first, last):
    """Whether one of the listed tiles is marked."""
    matching = tl.zeros([], tl.int32)
    for x in range(first, last):
        matching = matching | tl.load(odd + tl.load(tiles + x))
    return matching != 0
