"""Codes of 8 bits, weighed by whole numbers of 16: twice as many products to an instruction as in fp32.

    sum_i w[r, i] x[i, c] = f_r sum_i W[r, i] (code[i, c] - 128) + sum_i w[r, i] (zero[i] + 128 scale[i])
    W[r, i] = round(w[r, i] scale[i] / f_r),   f_r = max_i |w[r, i] scale[i]| / 32767

The sum of the whole numbers is exact: fewer than 2^16 lines of less than 2^22 each would be needed to leave 32 bits, and a tile
has fewer. A weight is off by 2^-16 of the largest of its row, which numbers of 16 bits do not notice; fp32 would.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from regard.ops.jit.bits import bits_of, float_of
from regard.ops.jit.vectors import LANES, Loop, ask, data, everywhere, line, number, put, turns

BUILT_UPON = "88d17110907f6de4"
"""Of what it compiles in: Numba keeps compiled code until this very file changes (tests/ops/test_jit.py)."""

THERE = bool(binding.get_host_cpu_features().get("avx512bw"))
"""Whether the processor multiplies pairs of 16 bits in long registers."""

COLUMNS, ROWS = 32, 4
_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_SUMS, _PAIRS = ir.VectorType(_I32, LANES), ir.VectorType(_I16, 2 * LANES)


def _words(builder: Any, codes: Any, at: Any) -> Any:
    """32 codes as whole numbers from -128 to 127, of 16 bits."""
    kind = ir.VectorType(ir.IntType(8), COLUMNS)
    x = builder.load(builder.bitcast(builder.gep(codes, [at]), kind.as_pointer()), align=1)
    return builder.sub(builder.zext(x, _PAIRS), ir.Constant(_PAIRS, [128] * COLUMNS))


def _product(builder: Any) -> Any:
    """Products of neighbours, added: 32 numbers of 16 bits each -> 16 of 32."""
    kind = ir.FunctionType(_SUMS, [_PAIRS, _PAIRS])
    return cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.pmaddw.d.512")


_LOW = [i for q in range(0, COLUMNS, 8) for j in range(q, q + 4) for i in (j, COLUMNS + j)]
"""Neighbours of two lines, side by side: of columns 0 to 3 of each eight; the others are 4 further."""

_ORDER = [4 * (c // 8) + c % 4 + (LANES if c % 8 >= 4 else 0) for c in range(COLUMNS)]
"""Where a column's sum stands in the two registers."""


@intrinsic
def _sum(context: Any, lines: Any, weights: Any, out: Any) -> Any:
    """The sums of four rows over pairs of lines, for 32 columns.

    lines: (bytes of the codes, byte of the first line, step to the next, how many: even; byte from which on lines are asked for,
    in order). weights: (whole numbers [R,n], factors
    [R], what is added to every number of a row [R]). out: (array [R,n], first row, first column, whether it is written anew).
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        flat, start, step, count, later = cgutils.unpack_tuple(builder, args[0])
        whole, factors, added = cgutils.unpack_tuple(builder, args[1])
        array, first, column, fresh = cgutils.unpack_tuple(builder, args[2])
        rows = [builder.add(first, number(r)) for r in range(ROWS)]
        codes = data(context, builder, lines[0], flat)
        lines_of = [line(context, builder, weights[0], whole, r) for r in rows]
        words = [builder.bitcast(x, _I32.as_pointer()) for x in lines_of]
        loop = Loop(builder, number(0), count, 2, [ir.Constant(_SUMS, [0] * LANES)] * (2 * ROWS))
        at = builder.add(start, builder.mul(loop.i, step))
        next_at = builder.add(later, builder.mul(loop.i, number(COLUMNS)))
        ask(builder, builder.gep(codes, [next_at]), 0, 2 * COLUMNS)
        a, b = _words(builder, codes, at), _words(builder, codes, builder.add(at, step))
        pairs = [builder.shuffle_vector(a, b, turns([i + j for i in _LOW])) for j in (0, 4)]
        kind = ir.FunctionType(_SUMS, [_PAIRS, _PAIRS])
        product = cgutils.get_or_insert_function(
            builder.module, kind, "llvm.x86.avx512.pmaddw.d.512"
        )
        after = []
        for r, place in enumerate(words):
            word = builder.load(builder.gep(place, [builder.lshr(loop.i, number(1))]))
            weight = builder.bitcast(everywhere(builder, word), _PAIRS)
            for j, x in enumerate(pairs):
                more = builder.call(product, [x, weight])
                after.append(builder.add(loop.now[2 * r + j], more))
        done = loop.close(after)
        for i, r in enumerate(rows):
            found = builder.shuffle_vector(done[2 * i], done[2 * i + 1], turns(_ORDER))
            worth, plus = (
                builder.load(builder.gep(data(context, builder, kind, x), [r]))
                for kind, x in ((weights[1], factors), (weights[2], added))
            )
            place = builder.gep(line(context, builder, out[0], array, r), [column])
            _give(builder, found, worth, plus, place, fresh)
        return context.get_dummy_value()

    return types.void(lines, weights, out), code


def _give(builder: Any, found: Any, worth: Any, plus: Any, place: Any, fresh: Any) -> None:
    """Whole numbers times what one is worth, and one more number: added to what is there, or in its place."""
    wide = ir.VectorType(ir.FloatType(), COLUMNS)
    x = builder.fmul(builder.sitofp(found, wide), everywhere(builder, worth, COLUMNS))
    x = builder.fadd(x, everywhere(builder, plus, COLUMNS))
    old = builder.load(builder.bitcast(place, wide.as_pointer()), align=4)
    nothing = ir.Constant(wide, [0.0] * COLUMNS)
    before = builder.select(builder.trunc(fresh, ir.IntType(1)), nothing, old)
    put(builder, builder.fadd(before, x), place, COLUMNS)


compiled = njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "nsz"})


@compiled
def _round(weighed, rows, count, whole, factors):
    """Weights [R,n] as whole numbers of 16 bits, and what one of them is worth [R]."""
    for r in range(rows):
        given, line, top = weighed[r], whole[r], np.int32(0)
        for i in range(count):  # as bits, of which a loop of SIMD finds the largest, NaN above all
            top = max(top, bits_of(given[i]) & np.int32(0x7FFFFFFF))
        largest = float_of(top)
        usual = np.float32(0) < largest < np.float32(np.inf)
        factors[r] = largest / np.float32(32767)
        turn = np.float32(32767) / largest if usual else np.float32(0)
        for i in range(count):
            line[i] = np.int16(np.int32(np.rint(given[i] * turn)))


@compiled
def sum_words(rows, lines, columns, weighed, added, scratch, out):
    """As `regard.ops.jit.tile_quantised.sum_lines` for rows and columns that are whole numbers of `ROWS` and `COLUMNS`.

    lines: (codes, byte of the first line, step, how many: even; byte from which as much is read next). weighed: [R,n] with the scales in them. scratch: (int16 [R,n],
    [R]). out: (array [R,n], first column, whether it is written anew).
    """
    whole, factors = scratch
    codes, at, step, count, later = lines
    z, first, fresh = out
    _round(weighed, rows, count, whole, factors)
    for c in range(0, columns, COLUMNS):
        for r in range(0, rows, ROWS):
            then = later + c * count if r == 0 else at + c
            _sum(
                (codes, at + c, step, count, then),
                (whole, factors, added),
                (z, r, first + c, fresh),
            )
