"""Conversions of bfloat16 and float16 numbers to and from float32, without tables and library
calls, so that the compiler vectorizes the loops that use them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from regard.ops.jit.compile import njit_strict

BF16, FP16 = np.int8(0), np.int16(0)
"""Tags for the encoding of 16-bit numbers in compiled code. Only their type matters: int8 stands
for bfloat16, int16 for float16.
"""


@intrinsic
def to_float32(context: Any, x: Any, tag: Any) -> Any:
    """Convert a stored number to float32: a float32 is returned unchanged, 16 bits are read as
    bfloat16 or float16 according to the type of the tag.
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
def bits_to_float(context: Any, x: Any) -> Any:
    """Reinterpret the 32 bits of an int32 as a float32."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), code


@intrinsic
def float_to_bits(context: Any, x: Any) -> Any:
    """Reinterpret the 32 bits of a float32 as an int32."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), code


@njit_strict
def _round_to_bfloat16(x):
    """Round a float32 to the 16 bits of a bfloat16, to nearest, ties to even; NaN stays NaN."""
    u = float_to_bits(x)
    rounded = (u + np.int32(0x7FFF) + ((u >> np.int32(16)) & np.int32(1))) >> np.int32(16)
    return np.uint16(rounded) if x == x else np.uint16(0x7FC0)


def _unchanged(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Emit the code of the identity."""
    return args[0]


@intrinsic
def from_float32(context: Any, x: Any, tag: Any, like: Any) -> Any:
    """Convert a float32 to a number for the array `like`: unchanged if it holds float32, else to
    bfloat16 or float16 bits according to the type of the tag.
    """

    def bfloat(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = types.uint16(types.float32)
        return context.compile_internal(builder, lambda x: _round_to_bfloat16(x), kind, args[:1])

    def half(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    if like.dtype == types.float32:
        return types.float32(types.float32, tag, like), _unchanged
    return like.dtype(types.float32, tag, like), bfloat if tag == types.int8 else half


@intrinsic
def convert(context: Any, x: Any, tag: Any, like: Any) -> Any:
    """Convert a stored number for the array `like`: if it holds 16-bit numbers, the 16 bits are
    copied; if it holds float32, the number is converted to float32.
    """

    def wide(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = types.float32(*signature.args[:2])
        return context.compile_internal(builder, lambda x, tag: to_float32(x, tag), kind, args[:2])

    if like.dtype.bitwidth == 16:
        return like.dtype(x, tag, like), _unchanged
    return types.float32(x, tag, like), wide
