"""Numbers in registers: half precision widened without a table, and an exponential that loops of
SIMD can use.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

BF16, FP16 = np.int8(0), np.int16(0)
"""Tags that say by their type how 16 bits are meant."""


@intrinsic
def widen(context: Any, x: Any, tag: Any) -> Any:
    """X as float32: as it is, or from the 16 bits of a bfloat16 or a float16, as the type of the
    tag says.
    """

    def as_it_is(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return args[0]

    def bfloat16(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        i32 = ir.IntType(32)
        upper = builder.shl(builder.zext(args[0], i32), ir.Constant(i32, 16))
        return builder.bitcast(upper, ir.FloatType())

    def float16(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    half = bfloat16 if tag == types.int8 else float16
    code = half if isinstance(x, types.Integer) else as_it_is
    return types.float32(x, tag), code


@intrinsic
def float_of(context: Any, x: Any) -> Any:
    """The 32 bits of an int32, read as a float32."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), code


@intrinsic
def bits_of(context: Any, x: Any) -> Any:
    """The 32 bits of a float32, read as an int32."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), code


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


@njit(nogil=True, cache=True, fastmath={"contract", "nsz"})
def exp(x: np.float32) -> np.float32:
    """e^x for x <= 0 to about a rounding; 0 below -87, where fp32 is no longer normal; NaN stays
    NaN.

    e^x = 2^n e^r,  n = round(x / ln 2),  r = x - n ln 2 in two parts;  e^r by a polynomial of degree 7
    (the coefficients of Cephes' expf). Written so that a loop over it becomes SIMD, which no call
    into libm does.
    """
    y = max(x, _LEAST)
    n = np.floor(y * _LOG2E + _HALF)
    r = y - n * _LN2_HIGH - n * _LN2_LOW
    p = ((((_C0 * r + _C1) * r + _C2) * r + _C3) * r + _C4) * r + _C5
    e = (p * r * r + r + _ONE) * float_of((np.int32(n) + np.int32(127)) << np.int32(23))
    if x >= _LEAST:
        return e
    return _ZERO if x < _LEAST else x
