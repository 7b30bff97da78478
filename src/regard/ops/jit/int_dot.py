"""Weighted sums of 8-bit codes, computed with products of 16-bit integers: an instruction computes
twice as many of them as in fp32. The weights w of a row r are rounded to integers W.

    sum_i w[r, i] x[i, c] = f_r (sum_i W[r, i] code[i, c] - 128 sum_i W[r, i]) + sum_i w[r, i]
    (zero[i] + 128 scale[i])
    W[r, i] = round(w[r, i] scale[i] / f_r),   f_r = max_i |w[r, i] scale[i]| / 32767

The 32-bit sums and the term that is subtracted may wrap around; their difference is still exact if
it is below 2^31, that is for up to `MAX_LINES` lines that contribute at most 2^22 each. Rounding
changes a weight by at most 2^-16 of the largest weight of its row, which is less than the rounding
of 16-bit inputs, but more than that of fp32 inputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from regard.ops.jit.compile import has_cpu_feature, njit_linked
from regard.ops.jit.llvm_vectors import (
    LANES,
    LLVMLoop,
    array_data,
    broadcast,
    i64_constant,
    max_abs_of,
    prefetch_bytes,
    row_pointer,
    shuffle_mask,
    store,
)

HAS_INT_DOT = has_cpu_feature("avx512bw")
"""Whether the processor multiplies pairs of 16-bit integers in registers of 512 bits."""

ROWS, MAX_LINES = 4, 511
"""The rows of weights that are summed together, and the largest number of lines in a sum."""

BLOCK_COLUMNS = 64
"""The number of columns that are summed together, a cache line of codes in each of two lines; their
sums for ROWS rows stay in registers.
"""

_I16, _I32 = ir.IntType(16), ir.IntType(32)
_I32_VECTOR, _I16_VECTOR = ir.VectorType(_I32, LANES), ir.VectorType(_I16, 2 * LANES)


def _load_code_pairs(builder: Any, codes: Any, offsets: tuple[Any, Any], columns: int) -> list[Any]:
    """Load the codes of two lines as vectors of 16-bit numbers in which the codes of both lines
    alternate.

    A 16-bit word of a line holds the codes of two neighbouring columns. For each of `_word_orders`
    the result has one vector of the even columns (the lower bytes) and one of the odd ones.
    """
    vector_type = ir.VectorType(_I16, columns // 2)
    a, b = (
        builder.load(builder.bitcast(builder.gep(codes, [x]), vector_type.as_pointer()), align=1)
        for x in offsets
    )
    low = ir.Constant(_I16_VECTOR, [0xFF] * (2 * LANES))
    high = ir.Constant(_I16_VECTOR, [8] * (2 * LANES))
    results = []
    for order in _word_orders(columns):
        words = builder.shuffle_vector(a, b, shuffle_mask(order))
        results += [builder.and_(words, low), builder.lshr(words, high)]
    return results


def _word_orders(columns: int) -> list[list[int]]:
    """Return for each register the order of the words of two lines in it.

    The words of the two lines alternate. A wide line needs two registers: one for the lower half of
    each quarter of its words, one for the upper half.
    """
    words = columns // 2
    runs: list[list[int]] = [list(range(words))]
    if columns == BLOCK_COLUMNS:
        runs = [[q + i for q in range(0, words, 8) for i in range(j, j + 4)] for j in (0, 4)]
    return [[i for word in run for i in (word, words + word)] for run in runs]


def _column_lanes(columns: int) -> list[int]:
    """Return for each column the lane of its sum, counted over the vectors of sums one after
    another.
    """
    words = columns // 2
    lane_of = {}
    for n, order in enumerate(_word_orders(columns)):
        for lane, word in enumerate(x for x in order if x < words):
            lane_of[2 * word], lane_of[2 * word + 1] = (
                2 * n * LANES + lane,
                (2 * n + 1) * LANES + lane,
            )
    return [lane_of[c] for c in range(columns)]


def _make_sum(columns: int) -> Any:
    """Return a compiled function that computes the weighted sums of `columns` columns for four
    rows, two lines at a time.

    lines: (bytes of the codes, index of the first byte of the first line, stride to the next line,
    an even number of lines, index of the first byte to prefetch). weights: (integers `[R, n]`,
    factors f `[R]`, the term added to every number of a row `[R]`, the sums of the integers `[R]`).
    out: (array `[R, n]`, first row, first column, whether the numbers are overwritten rather than
    added to).
    """

    def loop(context: Any, lines: Any, weights: Any, out: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            flat, start, step, count, prefetch_start = cgutils.unpack_tuple(builder, args[0])
            whole, *row_vectors = cgutils.unpack_tuple(builder, args[1])
            array, first, column, overwrite = cgutils.unpack_tuple(builder, args[2])
            rows = [builder.add(first, i64_constant(r)) for r in range(ROWS)]
            codes = array_data(context, builder, lines[0], flat)
            lines_of = [row_pointer(context, builder, weights[0], whole, r) for r in rows]
            words = [builder.bitcast(x, _I32.as_pointer()) for x in lines_of]
            n = columns // LANES
            nothing = [ir.Constant(_I32_VECTOR, [0] * LANES)] * (n * ROWS)
            loop = LLVMLoop(builder, i64_constant(0), count, 2, nothing)
            position = builder.add(start, builder.mul(loop.index, step))
            next_at = builder.add(prefetch_start, builder.mul(loop.index, i64_constant(columns)))
            prefetch_bytes(builder, builder.gep(codes, [next_at]), 0, 2 * columns)
            pairs = _load_code_pairs(
                builder, codes, (position, builder.add(position, step)), columns
            )
            next_sums = []
            for r, place in enumerate(words):
                word = builder.load(builder.gep(place, [builder.lshr(loop.index, i64_constant(1))]))
                weight = builder.bitcast(broadcast(builder, word), _I16_VECTOR)
                for j, x in enumerate(pairs):
                    more = builder.call(_multiply_add_pairs(builder), [x, weight])
                    next_sums.append(builder.add(loop.now[n * r + j], more))
            final = loop.close(next_sums)
            for i, r in enumerate(rows):
                sums = _concatenate(builder, final[n * i : n * (i + 1)], _column_lanes(columns))
                kinds = zip(weights[1:], row_vectors, strict=True)
                row_values = [
                    builder.load(builder.gep(array_data(context, builder, k, x), [r]))
                    for k, x in kinds
                ]
                place = builder.gep(row_pointer(context, builder, out[0], array, r), [column])
                _store_rescaled(builder, sums, row_values, place, overwrite)
            return context.get_dummy_value()

        return types.void(lines, weights, out), code

    return intrinsic(loop)


def _concatenate(builder: Any, vectors: list[Any], order: list[int]) -> Any:
    """Concatenate vectors into one, with its numbers in the given order."""
    while len(vectors) > 1:
        every = shuffle_mask(range(2 * vectors[0].type.count))
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [builder.shuffle_vector(a, b, every) for a, b in pairs]
    return builder.shuffle_vector(
        vectors[0], ir.Constant(vectors[0].type, ir.Undefined), shuffle_mask(order)
    )


def _multiply_add_pairs(builder: Any) -> Any:
    """Return the LLVM function that multiplies 32 pairs of 16-bit integers and adds neighbouring
    products, which gives 16 sums of 32 bits.
    """
    kind = ir.FunctionType(_I32_VECTOR, [_I16_VECTOR, _I16_VECTOR])
    return cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.pmaddw.d.512")


def _store_rescaled(
    builder: Any, integers: Any, row_values: list[Any], place: Any, overwrite: Any
) -> None:
    """Convert integer sums of a row to floats and store them, or add them to the stored numbers.

    row_values: the factor f of the row; the term added to every number of the row; the sum of its
    integer weights, which is subtracted 128 times, since the codes are counted from 128.
    """
    unit, added, weight_sum = row_values
    columns = integers.type.count
    wide = ir.VectorType(ir.FloatType(), columns)
    middle = builder.shl(weight_sum, ir.Constant(_I32, 7))
    integers = builder.sub(integers, broadcast(builder, middle, columns))
    x = builder.fmul(builder.sitofp(integers, wide), broadcast(builder, unit, columns))
    x = builder.fadd(x, broadcast(builder, added, columns))
    old = builder.load(builder.bitcast(place, wide.as_pointer()), align=4)
    nothing = ir.Constant(wide, [0.0] * columns)
    before = builder.select(builder.trunc(overwrite, ir.IntType(1)), nothing, old)
    store(builder, builder.fadd(before, x), place, columns)


_sum_64_columns, _sum_32_columns = _make_sum(BLOCK_COLUMNS), _make_sum(BLOCK_COLUMNS // 2)
njit_leaf = njit_linked(fastmath=("contract", "nsz"), makes_arrays=False)


@njit_leaf
def _quantize_weights(weighed, rows, count, whole, factors, totals):
    """Round the weights `weighed` `[R, n]` to 16-bit integers `whole` `[R, n]` times a factor per
    row `[R]`, and compute the sums of the integers `[R]`.
    """
    for r in range(rows):
        row_weights, line, total = weighed[r], whole[r], np.int32(0)
        largest = max_abs_of(weighed, r * weighed.shape[1], count)
        is_regular = np.float32(0) < largest < np.float32(np.inf)
        factors[r] = largest / np.float32(32767)
        inverse_unit = np.float32(32767) / largest if is_regular else np.float32(0)
        for i in range(count):
            integer = np.int32(np.rint(row_weights[i] * inverse_unit))
            line[i] = np.int16(integer)
            total += integer
        totals[r] = total


@njit_leaf
def int_weighted_sums(rows, lines, columns, weighed, added, scratch, out):
    """Compute `decode_quantized_loops.weighted_line_sums` for a multiple of `ROWS` rows and of 32
    columns.

    lines: (bytes of the codes, index of the first byte of the first line, stride to the next line,
    an even number of lines, index of the first byte to prefetch). weighed: the weights times the
    scales of the lines, `[R, n]`. added: the term added to every number of a row, `[R]`. scratch:
    (int16 `[R, n]`, `[R]`, int32 `[R]`). out: (array `[R, n]`, first column, whether the numbers
    are overwritten rather than added to).
    """
    whole, factors, totals = scratch
    codes, first_byte, step, count, prefetch_start = lines
    z, first, overwrite = out
    _quantize_weights(weighed, rows, count, whole, factors, totals)
    weights = (whole, factors, added, totals)
    wide, c = columns // BLOCK_COLUMNS * BLOCK_COLUMNS, 0
    while c < columns:
        for r in range(0, rows, ROWS):
            block = (
                codes,
                first_byte + c,
                step,
                count,
                prefetch_start + c * count if r == 0 else first_byte + c,
            )
            if c < wide:
                _sum_64_columns(block, weights, (z, r, first + c, overwrite))
            else:
                _sum_32_columns(block, weights, (z, r, first + c, overwrite))
        c += BLOCK_COLUMNS if c < wide else BLOCK_COLUMNS // 2
