"""Codes of 8 bits, weighed by whole numbers of 16: twice as many products to an instruction as in
fp32.

    sum_i w[r, i] x[i, c] = f_r (sum_i W[r, i] code[i, c] - 128 sum_i W[r, i]) + sum_i w[r, i]
    (zero[i] + 128 scale[i])
    W[r, i] = round(w[r, i] scale[i] / f_r),   f_r = max_i |w[r, i] scale[i]| / 32767

Sums of 32 bits wrap around, and so does what is subtracted: what is left is exact where it is less
than 2^31, up to `MOST` lines of at most 2^22 each. A weight is off by 2^-16 of the largest of its
row, which numbers of 16 bits do not notice; fp32 would.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from regard.ops.jit.compile import has_cpu_feature, njit_cached
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
"""Whether the processor multiplies pairs of 16 bits in long registers."""

ROWS, MAX_LINES = 4, 511
BLOCK_COLUMNS = 64
"""Columns that are summed together: whole lines of the cache, of two lines of codes, so that sums
stay in registers.
"""

_I16, _I32 = ir.IntType(16), ir.IntType(32)
_I32_VECTOR, _I16_VECTOR = ir.VectorType(_I32, LANES), ir.VectorType(_I16, 2 * LANES)


def _load_code_pairs(builder: Any, codes: Any, at: tuple[Any, Any], columns: int) -> list[Any]:
    """Codes of two lines, side by side as numbers of 16 bits: the even columns of each eight words,
    and the odd ones.
    """
    kind = ir.VectorType(_I16, columns // 2)
    a, b = (
        builder.load(builder.bitcast(builder.gep(codes, [x]), kind.as_pointer()), align=1)
        for x in at
    )
    low = ir.Constant(_I16_VECTOR, [0xFF] * (2 * LANES))
    high = ir.Constant(_I16_VECTOR, [8] * (2 * LANES))
    found = []
    for order in _word_orders(columns):
        words = builder.shuffle_vector(a, b, shuffle_mask(order))
        found += [builder.and_(words, low), builder.lshr(words, high)]
    return found


def _word_orders(columns: int) -> list[list[int]]:
    """Words of two lines in turns, register by register; of a wide line what stands in the lower
    and upper halves of quarters.
    """
    words = columns // 2
    runs: list[list[int]] = [list(range(words))]
    if columns == BLOCK_COLUMNS:
        runs = [[q + i for q in range(0, words, 8) for i in range(j, j + 4)] for j in (0, 4)]
    return [[i for word in run for i in (word, words + word)] for run in runs]


def _column_lanes(columns: int) -> list[int]:
    """Where a column's sum stands, in the sums of all registers."""
    words = columns // 2
    at = {}
    for n, order in enumerate(_word_orders(columns)):
        for lane, word in enumerate(x for x in order if x < words):
            at[2 * word], at[2 * word + 1] = 2 * n * LANES + lane, (2 * n + 1) * LANES + lane
    return [at[c] for c in range(columns)]


def _make_sum(columns: int) -> Any:
    """The sums of four rows over pairs of lines, for so many columns.

    lines: (bytes of the codes, byte of the first line, step to the next, how many: even; byte from
        which on lines are asked for, in order). weights: (whole numbers [R,n], factors [R], what is
        added to every number of a row [R], the sums of the whole numbers [R]). out: (array [R,n],
        first row, first column, whether it is written anew).
    """

    def loop(context: Any, lines: Any, weights: Any, out: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            flat, start, step, count, later = cgutils.unpack_tuple(builder, args[0])
            whole, *ends = cgutils.unpack_tuple(builder, args[1])
            array, first, column, fresh = cgutils.unpack_tuple(builder, args[2])
            rows = [builder.add(first, i64_constant(r)) for r in range(ROWS)]
            codes = array_data(context, builder, lines[0], flat)
            lines_of = [row_pointer(context, builder, weights[0], whole, r) for r in rows]
            words = [builder.bitcast(x, _I32.as_pointer()) for x in lines_of]
            n = columns // LANES
            nothing = [ir.Constant(_I32_VECTOR, [0] * LANES)] * (n * ROWS)
            loop = LLVMLoop(builder, i64_constant(0), count, 2, nothing)
            at = builder.add(start, builder.mul(loop.i, step))
            next_at = builder.add(later, builder.mul(loop.i, i64_constant(columns)))
            prefetch_bytes(builder, builder.gep(codes, [next_at]), 0, 2 * columns)
            pairs = _load_code_pairs(builder, codes, (at, builder.add(at, step)), columns)
            after = []
            for r, place in enumerate(words):
                word = builder.load(builder.gep(place, [builder.lshr(loop.i, i64_constant(1))]))
                weight = builder.bitcast(broadcast(builder, word), _I16_VECTOR)
                for j, x in enumerate(pairs):
                    more = builder.call(_multiply_add_pairs(builder), [x, weight])
                    after.append(builder.add(loop.now[n * r + j], more))
            done = loop.close(after)
            for i, r in enumerate(rows):
                found = _concatenate(builder, done[n * i : n * (i + 1)], _column_lanes(columns))
                kinds = zip(weights[1:], ends, strict=True)
                given = [
                    builder.load(builder.gep(array_data(context, builder, k, x), [r]))
                    for k, x in kinds
                ]
                place = builder.gep(row_pointer(context, builder, out[0], array, r), [column])
                _store_rescaled(builder, found, given, place, fresh)
            return context.get_dummy_value()

        return types.void(lines, weights, out), code

    return intrinsic(loop)


def _concatenate(builder: Any, vectors: list[Any], order: list[int]) -> Any:
    """Vectors as one, its numbers in an order."""
    while len(vectors) > 1:
        every = shuffle_mask(range(2 * vectors[0].type.count))
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [builder.shuffle_vector(a, b, every) for a, b in pairs]
    return builder.shuffle_vector(
        vectors[0], ir.Constant(vectors[0].type, ir.Undefined), shuffle_mask(order)
    )


def _multiply_add_pairs(builder: Any) -> Any:
    """Products of neighbours, added: 32 numbers of 16 bits each -> 16 of 32."""
    kind = ir.FunctionType(_I32_VECTOR, [_I16_VECTOR, _I16_VECTOR])
    return cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.pmaddw.d.512")


def _store_rescaled(builder: Any, found: Any, given: list[Any], place: Any, fresh: Any) -> None:
    """Whole numbers, counted from the middle, times what one is worth, and one more number: added
    to what is there, or in its place.
    """
    worth, plus, total = given
    columns = found.type.count
    wide = ir.VectorType(ir.FloatType(), columns)
    middle = builder.shl(total, ir.Constant(_I32, 7))
    found = builder.sub(found, broadcast(builder, middle, columns))
    x = builder.fmul(builder.sitofp(found, wide), broadcast(builder, worth, columns))
    x = builder.fadd(x, broadcast(builder, plus, columns))
    old = builder.load(builder.bitcast(place, wide.as_pointer()), align=4)
    nothing = ir.Constant(wide, [0.0] * columns)
    before = builder.select(builder.trunc(fresh, ir.IntType(1)), nothing, old)
    store(builder, builder.fadd(before, x), place, columns)


_sum_64_columns, _sum_32_columns = _make_sum(BLOCK_COLUMNS), _make_sum(BLOCK_COLUMNS // 2)
njit_leaf = njit_cached(fastmath=("contract", "nsz"), makes_arrays=False)


@njit_leaf
def _quantize_weights(weighed, rows, count, whole, factors, totals):
    """Weights [R,n] as whole numbers of 16 bits, what one of them is worth [R], and their sums
    [R].
    """
    for r in range(rows):
        given, line, total = weighed[r], whole[r], np.int32(0)
        largest = max_abs_of(weighed, r * weighed.shape[1], count)
        usual = np.float32(0) < largest < np.float32(np.inf)
        factors[r] = largest / np.float32(32767)
        turn = np.float32(32767) / largest if usual else np.float32(0)
        for i in range(count):
            word = np.int32(np.rint(given[i] * turn))
            line[i] = np.int16(word)
            total += word
        totals[r] = total


@njit_leaf
def int_weighted_sums(rows, lines, columns, weighed, added, scratch, out):
    """`decode_quantised.sum_lines` for rows that are a whole number of `ROWS`, and columns of 32.

    lines: (codes, byte of the first line, step, how many: even; byte from which as much is read
        next). weighed: [R,n] with the scales in them. scratch: (int16 [R,n], [R], int32 [R]). out:
        (array [R,n], first column, whether it is written anew).
    """
    whole, factors, totals = scratch
    codes, at, step, count, later = lines
    z, first, fresh = out
    _quantize_weights(weighed, rows, count, whole, factors, totals)
    weights = (whole, factors, added, totals)
    wide, c = columns // BLOCK_COLUMNS * BLOCK_COLUMNS, 0
    while c < columns:
        for r in range(0, rows, ROWS):
            there = (codes, at + c, step, count, later + c * count if r == 0 else at + c)
            if c < wide:
                _sum_64_columns(there, weights, (z, r, first + c, fresh))
            else:
                _sum_32_columns(there, weights, (z, r, first + c, fresh))
        c += BLOCK_COLUMNS if c < wide else BLOCK_COLUMNS // 2
