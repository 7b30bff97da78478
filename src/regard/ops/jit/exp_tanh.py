"""The exponential and the hyperbolic tangent without calls to libm, which would keep the compiler
from vectorising the loops that compute them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from regard.ops.jit.compile import has_cpu_feature, njit_cached, njit_fastmath, njit_fastmath_leaf
from regard.ops.jit.half_precision import bits_to_float, from_float32
from regard.ops.jit.llvm_vectors import (
    LANES,
    VECTOR,
    ZEROS,
    LLVMLoop,
    array_data,
    broadcast,
    fma,
    i64_constant,
    load_floats,
    store,
    use_wide_vectors,
)

_LOG2E, _LN2_HIGH, _LN2_LOW = (
    np.float32(1.4426950408889634),
    np.float32(0.693359375),
    np.float32(-2.12194440e-4),
)
_C0, _C1, _C2, _C3, _C4, _C5 = (
    np.float32(1.9875691500e-4),
    np.float32(1.3981999507e-3),
    np.float32(8.3334519073e-3),
    np.float32(4.1665795894e-2),
    np.float32(1.6666665459e-1),
    np.float32(5.0000001201e-1),
)
_HALF, _ONE, _ZERO, _LEAST = np.float32(0.5), np.float32(1), np.float32(0), np.float32(-87)


@njit_cached(fastmath=("contract", "nsz"))
def exp(x: np.float32) -> np.float32:
    """Return e^x for x <= 0, accurate to about one rounding. It is 0 for x below -87, where e^x
    would be subnormal in fp32, and NaN for NaN.

    e^x = 2^n e^r,  n = round(x / ln 2),  r = x - n ln 2 in two parts

    e^r is a polynomial of degree 7 with the coefficients of Cephes' expf.
    """
    y = max(x, _LEAST)
    n = np.floor(y * _LOG2E + _HALF)
    r = y - n * _LN2_HIGH - n * _LN2_LOW
    p = ((((_C0 * r + _C1) * r + _C2) * r + _C3) * r + _C4) * r + _C5
    e = (p * r * r + r + _ONE) * bits_to_float((np.int32(n) + np.int32(127)) << np.int32(23))
    if x >= _LEAST:
        return e
    return _ZERO if x < _LEAST else x


@njit_fastmath
def tanh(x):
    """Return tanh x, accurate to a few roundings: by the odd polynomial of Cephes' tanhf near
    0, otherwise by the exponential.
    """
    a = abs(x)
    z = x * x
    p = (
        (
            (np.float32(-5.70498872745e-3) * z + np.float32(2.06390887954e-2)) * z
            - np.float32(5.37397155531e-2)
        )
        * z
        + np.float32(1.33314422036e-1)
    ) * z - np.float32(3.33332819422e-1)
    e = exp(np.float32(-2) * a)
    far = (_ONE - e) / (_ONE + e)
    return x + x * z * p if a < np.float32(0.625) else math.copysign(far, x)


def _emit_exp(builder: Any, x: Any) -> Any:
    """Emit `exp` of 16 numbers with AVX-512, which multiplies by 2^n in one instruction."""

    def constant(value: np.float32) -> Any:
        return ir.Constant(VECTOR, [float(value)] * LANES)

    def call(name: str, kinds: list[Any], args: list[Any]) -> Any:
        signature = ir.FunctionType(VECTOR, kinds)
        return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), args)

    least = constant(_LEAST)
    y = builder.select(builder.fcmp_ordered("<", x, least), least, x)
    n = call("llvm.rint.v16f32", [VECTOR], [builder.fmul(y, constant(_LOG2E))])
    r = fma(builder, n, constant(-_LN2_LOW), fma(builder, n, constant(-_LN2_HIGH), y))
    p = constant(_C0)
    for c in (_C1, _C2, _C3, _C4, _C5):
        p = fma(builder, p, r, constant(c))
    e = builder.fadd(fma(builder, p, builder.fmul(r, r), r), constant(_ONE))
    has_weight = builder.bitcast(builder.fcmp_unordered(">=", x, least), ir.IntType(16))
    i32, name = ir.IntType(32), "llvm.x86.avx512.mask.scalef.ps.512"
    kinds = [VECTOR, VECTOR, VECTOR, ir.IntType(16), i32]
    return call(name, kinds, [e, n, ZEROS, has_weight, i32(4)])  # 4: round as usual


@intrinsic
def _exp_row_avx512(context, s, base, out):
    """Compute `exp_row` with AVX-512, and with AVX512-BF16 where the numbers of `out` have 16
    bits.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        places = [array_data(context, builder, signature.args[i], args[i]) for i in (0, 2)]
        length = context.make_array(signature.args[0])(context, builder, args[0]).nitems
        shift = broadcast(builder, args[1])
        loop = LLVMLoop(builder, i64_constant(0), length, LANES, [ZEROS])
        x, target = (builder.gep(place, [loop.index]) for place in places)
        weights = _emit_exp(builder, builder.fsub(load_floats(builder, x, None, LANES), shift))
        if out.dtype == types.float32:
            store(builder, weights, target)
        else:
            halves = ir.VectorType(ir.IntType(16), LANES)
            kind = ir.FunctionType(halves, [VECTOR])
            name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
            rounded = cgutils.get_or_insert_function(builder.module, kind, name)
            place = builder.bitcast(target, halves.as_pointer())
            builder.store(builder.call(rounded, [weights]), place, align=2)
        (sums,) = loop.close([builder.fadd(loop.now[0], weights)])
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType(), VECTOR])
        reduce = cgutils.get_or_insert_function(
            builder.module, kind, "llvm.vector.reduce.fadd.v16f32"
        )
        zero = ir.Constant(ir.FloatType(), 0.0)
        return builder.call(reduce, [zero, sums], fastmath=["reassoc"])

    return types.float32(s, types.float32, out), code


@njit_fastmath_leaf
def _exp_row_loops(s, base, out, tag):
    """Compute `exp_row` with loops that every processor runs."""
    use_wide_vectors()
    added = _ZERO
    for c in range(s.shape[0]):
        weight = exp(s[c] - base)
        added += weight
        s[c] = weight
    if out.itemsize < s.itemsize:  # otherwise out and s are the same array
        for c in range(s.shape[0]):
            out[c] = from_float32(s[c], tag, out)
    return added


@njit_fastmath_leaf
def _exp_row_vectors(s, base, out, tag):
    """Compute `exp_row` with the vectors of 512 bits of AVX-512."""
    return _exp_row_avx512(s, base, out)


exp_row = _exp_row_vectors if has_cpu_feature("avx512f") else _exp_row_loops
"""Compiled function of (s, base, out, tag) that writes e^(s - base) to `out`, for a row of a
multiple of 16 numbers, and returns their sum before they are rounded to the 16 bits of `out`. It
may overwrite s. An `out` of 16 bits is for bfloat16 products, which need AVX512-BF16.
"""
