"""Decays between the tokens of a chunk, and products of queries and keys after a decay.

A decay is never a difference of two running sums, which loses digits and is NaN after a decay of 0.
Imported only where triton is installed.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def finite_or_zero(x):
    """x, and 0 where it is NaN or infinite."""
    return tl.where((x == x) & (tl.abs(x) != float("inf")), x, 0.0)


@triton.jit
def is_odd(x):
    """1 where x is NaN or infinite, else 0."""
    return ((x != x) | (tl.abs(x) == float("inf"))).to(tl.int32)


@triton.jit
def load_rows(pointer, row_stride, t, T, d, D: tl.constexpr):
    """Rows t of a matrix with D columns, in fp32; 0 outside."""
    place = pointer + t.to(tl.int64)[:, None] * row_stride + d[None, :]
    return tl.load(place, mask=(t < T)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)


@triton.jit
def load_column(pointer, row_stride, t, T):
    """One number for each token, `[C, 1]` in fp32; 0 outside."""
    x = tl.load(pointer + t.to(tl.int64) * row_stride, mask=t < T, other=0.0)
    return x.to(tl.float32)[:, None]


@triton.jit
def store_rows(pointer, x, row_stride, t, T, d, D: tl.constexpr):
    """Write rows t of a matrix with D columns, in its dtype."""
    place = pointer + t.to(tl.int64)[:, None] * row_stride + d[None, :]
    mask = (t < T)[:, None] & (d < D)[None, :]
    tl.store(place, x.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def load_decays(pointer, row_stride, t, inside, d, D: tl.constexpr, BY_CHANNEL: tl.constexpr):
    """g of the tokens t in fp32, `[C, 1]` or `[C, BLOCK_D]`; 0 outside."""
    place = pointer + t.to(tl.int64)[:, None] * row_stride
    mask = inside[:, None]
    if BY_CHANNEL:
        place, mask = place + d[None, :], mask & (d < D)[None, :]
    return tl.load(place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def is_odd_decay(g):
    """1 where g is NaN or +inf, else 0; -inf is a decay to 0."""
    return 1 - (g < float("inf")).to(tl.int32)


@triton.jit
def decay_or_zero(g):
    """g, and 0 where it is NaN or +inf."""
    return tl.where(g < float("inf"), g, 0.0)


@triton.jit
def load_both_decays(
    pointer, row_stride, t, i, T, d,
    D: tl.constexpr, C: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """g of the tokens of a chunk, and of the tokens behind them, which is 0 for the last one."""
    g = load_decays(pointer, row_stride, t, t < T, d, D, BY_CHANNEL)
    follows = (i < C - 1) & (t + 1 < T)
    g_next = load_decays(pointer, row_stride, t + 1, follows, d, D, BY_CHANNEL)
    return decay_or_zero(g), decay_or_zero(g_next)


@triton.jit
def decay_since_start(g):
    """exp(g_1 + ... + g_i), `[C, d]`: how far the state before the chunk has decayed."""
    return tl.exp(tl.cumsum(g, 0))


@triton.jit
def decay_until_end(g_next):
    """exp(g_{j+1} + ... + g_C), from the decay of the next token, which is 0 at the last one."""
    return tl.exp(tl.cumsum(g_next, 0, reverse=True))


@triton.jit
def pairwise_decay(g, i):
    """exp(g_{j+1} + ... + g_i) for j <= i, else 0, `[C, C]`, for g `[C, 1]`."""
    later = i[:, None] > i[None, :]
    sums = tl.cumsum(tl.where(later, g, 0.0), 0)
    return tl.where(i[:, None] >= i[None, :], tl.exp(sums), 0.0)


@triton.jit
def same_block(i, size):
    """Which pairs of tokens are in the same block of `size` tokens, `[C, C]`."""
    block = i // size
    return block[:, None] == block[None, :]


@triton.jit
def pairs_of_level(i, size):
    """Which pairs have the query in the second and the key in the first of two blocks."""
    second = (i // size) % 2 == 1
    return same_block(i, 2 * size) & second[:, None] & ~second[None, :]


@triton.jit
def factors_of_level(g, g_next, i, size, EXACT: tl.constexpr):
    """The decays from the border of two blocks to the second, and from the first; else 0."""
    second = ((i // size) % 2 == 1)[:, None]
    same = same_block(i, size)
    before = (same & (i[:, None] >= i[None, :])).to(tl.float32)
    since = tl.exp(tl.dot(before, g, input_precision=EXACT))
    g_next = tl.where(((i + 1) % size == 0)[:, None], 0.0, g_next)
    behind = (same & (i[:, None] <= i[None, :])).to(tl.float32)
    until = tl.exp(tl.dot(behind, g_next, input_precision=EXACT))
    return tl.where(second, since, 0.0), tl.where(second, 0.0, until)


@triton.jit
def bounded_decay(g):
    """g, of which -inf and all that is far below the smallest exponent of fp32 is finite."""
    return tl.maximum(g, -1e4)


@triton.jit
def decayed_products(
    x, k, g, g_next, i,
    DECAY: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """sum_d x_id k_jd exp(g_{j+1,d} + ... + g_{i,d}) for j <= i, else 0, by pairs of blocks."""
    if DECAY == 2:
        g, g_next = bounded_decay(g), bounded_decay(g_next)
        products = tl.where(i[:, None] == i[None, :], tl.sum(x * k, 1)[:, None], 0.0)
        for level in range(LEVELS):
            since, until = factors_of_level(g, g_next, i, 1 << level, EXACT)
            across = tl.dot(x * since, tl.trans(k * until), input_precision=PRECISION)
            products += tl.where(pairs_of_level(i, 1 << level), across, 0.0)
    else:
        products = tl.dot(x, tl.trans(k), input_precision=PRECISION)
        products = tl.where(i[:, None] >= i[None, :], products, 0.0)
    return products


@triton.jit
def sums_before(x, i, BY_CHANNEL: tl.constexpr, PRECISION: tl.constexpr):
    """sum_{j < l} x_j for each token l, for x `[C, d]`; not a difference of sums."""
    before = i[:, None] > i[None, :]
    if BY_CHANNEL:
        sums = tl.dot(before.to(tl.float32), x, input_precision=PRECISION)
    else:
        sums = tl.sum(tl.where(before, tl.trans(x), 0.0), 1)[:, None]
    return sums


@triton.jit
def gradients_of_products(
    d_products, x, k, g, g_next, i,
    DECAY: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The gradients of x, k and g (over pairs i >= l > j) from that of the products."""
    d_g = tl.zeros_like(g) if DECAY else 0.0
    if DECAY == 2:
        g, g_next = bounded_decay(g), bounded_decay(g_next)
        own = tl.sum(tl.where(i[:, None] == i[None, :], d_products, 0.0), 1)[:, None]
        d_x, d_k = own * k, own * x
        for level in range(LEVELS):
            since, until = factors_of_level(g, g_next, i, 1 << level, EXACT)
            d_across = tl.where(pairs_of_level(i, 1 << level), d_products, 0.0)
            d_later = tl.dot(d_across, k * until, input_precision=PRECISION) * since
            d_earlier = tl.dot(tl.trans(d_across), x * since, input_precision=PRECISION) * until
            d_x += d_later
            d_k += d_earlier
            same = same_block(i, 1 << level)
            behind = (same & (i[:, None] <= i[None, :])).to(tl.float32)
            before = (same & (i[:, None] > i[None, :])).to(tl.float32)
            d_g = tl.dot(behind, d_later * x, d_g, input_precision=PRECISION)
            d_g = tl.dot(before, d_earlier * k, d_g, input_precision=PRECISION)
    else:
        d_products = tl.where(i[:, None] >= i[None, :], d_products, 0.0)
        if DECAY == 1:
            d_products = d_products * pairwise_decay(g, i)
        d_x = tl.dot(d_products, k, input_precision=PRECISION)
        d_k = tl.dot(tl.trans(d_products), x, input_precision=PRECISION)
        if DECAY == 1:
            raw = tl.dot(x, tl.trans(k), input_precision=PRECISION)
            of_pairs = tl.cumsum(d_products * raw, 0, reverse=True)
            of_pairs = tl.where(i[:, None] > i[None, :], of_pairs, 0.0)
            d_g += tl.sum(of_pairs, 1)[:, None]
    return d_x, d_k, d_g
