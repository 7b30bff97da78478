"""The softmax of one row of scores in prefill, and its gradient, as loops over LLVM vectors: a row
is read twice, and every exponential takes about one cycle for two numbers.

A row is a contiguous fp32 array of whole panels (PANEL_COLUMNS numbers each, as in `matmul`). An
iteration computes one panel with REGISTERS independent vectors. A loop in plain Python would take
three to four times as long: LLVM limits such loops to half of a register on many processors, and
it does not vectorize a loop over the ranges of positions of a mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from regard.ops.jit.llvm_vectors import I64, LLVMLoop, array_data, fma, i64_constant
from regard.ops.jit.matmul import HAS_AVX512, LANES, PANEL_COLUMNS, REGISTERS

_I32, _F32 = ir.IntType(32), ir.FloatType()
_VECTOR, _BITS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_HALVES = ir.VectorType(ir.IntType(16), LANES)
_LEAST = -87.0
"""Below this, e^x is set to 0; it would be subnormal in fp32."""


def _all(x: float) -> Any:
    """Return the constant vector with x in every lane."""
    return ir.Constant(_VECTOR, [x] * LANES)


def _spread(builder: Any, x: Any) -> Any:
    """Return a vector with the number x in every lane."""
    nothing = ir.Constant(ir.VectorType(x.type, LANES), ir.Undefined)
    one = builder.insert_element(nothing, x, _I32(0))
    return builder.shuffle_vector(one, nothing, ir.Constant(_BITS, [0] * LANES))


def vector_exp(builder: Any, x: Any) -> Any:
    """Return e^x in every lane for x up to about 1, accurate to about one rounding: 0 below -87,
    and NaN for NaN.

    e^x = 2^n e^r,  n = round(x / ln 2),  r = x - n ln 2 in two parts

    n is rounded by adding 1.5 * 2^23, after which it is in the low bits of the sum; no number is
    converted to an integer, because that is undefined for NaN. e^r is a polynomial of degree 7
    with the coefficients of Cephes' expf, as in `exp_tanh`.
    """
    too_small = builder.fcmp_ordered("<", x, _all(_LEAST))
    y = builder.select(too_small, _all(_LEAST), x)
    magic = _all(12582912.0)
    shifted = fma(builder, y, _all(1.4426950408889634), magic)
    n = builder.fsub(shifted, magic)
    r = fma(builder, n, _all(-0.693359375), y)
    r = fma(builder, n, _all(2.12194440e-4), r)
    p = _all(1.9875691500e-4)
    for coefficient in (
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    ):
        p = fma(builder, p, r, _all(coefficient))
    power = builder.fadd(fma(builder, p, builder.fmul(r, r), r), _all(1.0))
    if HAS_AVX512:  # multiplies by 2^n, and sets the other lanes to 0
        has_weight = builder.bitcast(builder.not_(too_small), ir.IntType(LANES))
        kinds = [_VECTOR, _VECTOR, _VECTOR, ir.IntType(LANES), _I32]
        name = "llvm.x86.avx512.mask.scalef.ps.512"
        scale = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_VECTOR, kinds), name
        )
        return builder.call(scale, [power, n, _all(0.0), has_weight, _I32(4)])  # 4: round as usual
    exponent = builder.shl(builder.bitcast(shifted, _BITS), ir.Constant(_BITS, [23] * LANES))
    two_to_n = builder.add(exponent, ir.Constant(_BITS, [127 << 23] * LANES))
    e = builder.fmul(power, builder.bitcast(two_to_n, _VECTOR))
    return builder.select(too_small, _all(0.0), e)


def _product(builder: Any, x: Any, y: Any) -> Any:
    """Return x y, rounded before anything is added to it: the largest score of a row times the
    scale is then exactly the number that is subtracted, and its weight exactly 1.
    """
    kind = ir.FunctionType(_VECTOR, [_VECTOR])
    name = f"llvm.arithmetic.fence.v{LANES}f32"
    fence = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(fence, [builder.fmul(x, y)])


def _larger(builder: Any, x: Any, y: Any) -> Any:
    """Return the greater of two vectors, lane by lane; y where x is NaN."""
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


def _sum(builder: Any, x: Any, y: Any) -> Any:
    """Return the sum of two vectors."""
    return builder.fadd(x, y)


def _join_lanes(builder: Any, vectors: list[Any], join: Callable[..., Any]) -> Any:
    """Join all lanes of all vectors to one number, halves with halves."""
    while len(vectors) > 1:
        half = len(vectors) // 2
        vectors = [join(builder, x, y) for x, y in zip(vectors[:half], vectors[half:], strict=True)]
    (x,), width = vectors, LANES
    while width > 1:
        width //= 2
        nothing = ir.Constant(x.type, ir.Undefined)
        low, high = (
            builder.shuffle_vector(
                x, nothing, ir.Constant(ir.VectorType(_I32, width), [*range(first, first + width)])
            )
            for first in (0, width)
        )
        x = join(builder, low, high)
    return builder.extract_element(x, _I32(0))


def _vector_at(builder: Any, start: Any, index: Any, kind: Any = _VECTOR) -> Any:
    """Return a pointer to the vector that begins at an index of an array."""
    return builder.bitcast(builder.gep(start, [index]), kind.as_pointer())


def _to_bf16(builder: Any, x: Any) -> Any:
    """Round a vector to the 16 bits of bfloat16 numbers, with AVX512-BF16, without which no product
    has such factors; numbers too small for a normal bfloat16 become 0.
    """
    kind = ir.FunctionType(_HALVES, [_VECTOR])
    name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [x])


def _store(builder: Any, x: Any, start: Any, index: Any) -> None:
    """Store a vector at an index of an array of fp32 numbers, or of bfloat16 numbers."""
    if start.type.pointee == _F32:
        builder.store(x, _vector_at(builder, start, index), align=4)
    else:
        builder.store(_to_bf16(builder, x), _vector_at(builder, start, index, _HALVES), align=2)


def _panel_loop(builder: Any, count: Any, carried: list[Any]) -> tuple[LLVMLoop, list[Any]]:
    """Open a loop over the panels of a row; return it and the index of each vector of a panel."""
    loop = LLVMLoop(builder, i64_constant(0), count, PANEL_COLUMNS, carried)
    places = [builder.add(loop.index, i64_constant(v * LANES)) for v in range(REGISTERS)]
    return loop, places


@intrinsic
def largest_score(context: Any, s: Any, count: Any) -> Any:
    """Return the largest of the first `count` numbers of a row, ignoring NaN; -inf if all are
    NaN.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        row = array_data(context, builder, s, args[0])
        loop, places = _panel_loop(builder, args[1], [_all(-math.inf)] * REGISTERS)
        loaded = [builder.load(_vector_at(builder, row, i), align=4) for i in places]
        largest = [_larger(builder, x, best) for x, best in zip(loaded, loop.now, strict=True)]
        return _join_lanes(builder, loop.close(largest), _larger)

    return types.float32(s, types.int64), code


@intrinsic
def weigh_scores(context: Any, s: Any, p: Any, count: Any, scale: Any, base: Any) -> Any:
    """Write the weights exp(scale s - base) of the first `count` scores of a row to p, rounded if p
    has the 16 bits of bfloat16 numbers, and return their sum before they are rounded. p may be s.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        row, out = (array_data(context, builder, x, y) for x, y in ((s, args[0]), (p, args[1])))
        factor, shift = (_spread(builder, x) for x in args[3:])
        loop, places = _panel_loop(builder, args[2], [_all(0.0)] * REGISTERS)
        sums = []
        for i, total in zip(places, loop.now, strict=True):
            scores = builder.load(_vector_at(builder, row, i), align=4)
            x = _product(builder, scores, factor)
            weight = vector_exp(builder, builder.fsub(x, shift))
            _store(builder, weight, out, i)
            sums.append(builder.fadd(total, weight))
        return _join_lanes(builder, loop.close(sums), _sum)

    return types.float32(s, p, types.int64, types.float32, types.float32), code


@intrinsic
def round_row(context: Any, x: Any, out: Any, count: Any) -> Any:
    """Write the first `count` numbers of a row to `out` as the 16 bits of bfloat16 numbers."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        row, target = (
            array_data(context, builder, kind, y) for kind, y in ((x, args[0]), (out, args[1]))
        )
        loop, places = _panel_loop(builder, args[2], [])
        for i in places:
            _store(builder, builder.load(_vector_at(builder, row, i), align=4), target, i)
        loop.close()
        return context.get_dummy_value()

    return types.void(x, out, types.int64), code


@intrinsic
def round_pairs(context: Any, even: Any, odd: Any, words: Any, count: Any) -> Any:
    """Write the first `count` numbers of two rows as bfloat16 to words of 32 bits: those of `even`
    in the lower half, those of `odd` in the upper one.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows = [array_data(context, builder, even, x) for x in args[:2]]
        target = array_data(context, builder, words, args[2])
        loop, places = _panel_loop(builder, args[3], [])
        for i in places:
            low, high = (
                builder.zext(
                    _to_bf16(builder, builder.load(_vector_at(builder, row, i), align=4)), _BITS
                )
                for row in rows
            )
            upper = builder.shl(high, ir.Constant(_BITS, [16] * LANES))
            builder.store(builder.or_(low, upper), _vector_at(builder, target, i, _BITS), align=4)
        loop.close()
        return context.get_dummy_value()

    return types.void(even, odd, words, types.int64), code


@intrinsic
def hide_outside(context: Any, s: Any, positions: Any, count: Any, start: Any, stop: Any) -> Any:
    """Set the first `count` scores of a row to -inf where the position of the key is not between
    `start` and `stop - 1`; `count` is a number of whole vectors.
    """
    wide = ir.VectorType(I64, LANES)

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        row = array_data(context, builder, s, args[0])
        keys = array_data(context, builder, positions, args[1])
        first, stop = args[3:]
        is_empty = builder.icmp_signed("<", stop, first)
        length = builder.select(is_empty, i64_constant(0), builder.sub(stop, first))
        low, span = _spread(builder, first), _spread(builder, length)
        loop = LLVMLoop(builder, i64_constant(0), args[2], LANES)
        here = builder.load(_vector_at(builder, keys, loop.index, wide), align=8)
        inside = builder.icmp_unsigned("<", builder.sub(here, low), span)
        place = _vector_at(builder, row, loop.index)
        builder.store(
            builder.select(inside, builder.load(place, align=4), _all(-math.inf)), place, align=4
        )
        loop.close()
        return context.get_dummy_value()

    i = types.int64
    return types.void(s, positions, i, i, i), code


@intrinsic
def weigh_with_gradient(
    context: Any,
    s: Any,
    d: Any,
    count: Any,
    scale: Any,
    top: Any,
    share: Any,
    shift: Any,
    alone: Any,
) -> Any:
    """Replace the scores s of a row by its weights p = exp(scale s - top) share, and the gradients
    d of the weights by those of the scaled scores, p (d - shift).

    Where a weight is exactly 1, the other weights of the row are lost in rounding. Then dp and dO O
    are the same number, summed in another order, and their difference is set to 0: what remains of
    p (d - shift) is `alone`, the gradient of the lse. Where p = 0, 0 is selected, because p (d -
    shift) would be NaN if a masked key has NaN in d; a NaN in d of a visible key stays.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scores, gradients = (
            array_data(context, builder, kind, x) for kind, x in zip((s, d), args[:2], strict=True)
        )
        factor, largest, part, middle, rest = (_spread(builder, x) for x in args[3:])
        loop, places = _panel_loop(builder, args[2], [])
        for i in places:
            at_s, at_d = _vector_at(builder, scores, i), _vector_at(builder, gradients, i)
            x = _product(builder, builder.load(at_s, align=4), factor)
            p = builder.fmul(vector_exp(builder, builder.fsub(x, largest)), part)
            change = builder.fsub(builder.load(at_d, align=4), middle)
            is_number = builder.fcmp_ordered("ord", change, change)
            is_alone = builder.and_(builder.fcmp_ordered("==", p, _all(1.0)), is_number)
            result = builder.select(is_alone, rest, builder.fmul(p, change))
            is_hidden = builder.fcmp_ordered("==", p, _all(0.0))
            builder.store(p, at_s, align=4)
            builder.store(builder.select(is_hidden, _all(0.0), result), at_d, align=4)
        loop.close()
        return context.get_dummy_value()

    f = types.float32
    return types.void(s, d, types.int64, f, f, f, f, f), code
