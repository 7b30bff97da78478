"""The products of a gated feed-forward layer, silu(gate) * up, as a loop over LLVM vectors.
`regard.ops.gated_product` calls `entry_address`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from regard.ops.jit.argument_structs import GATED_PRODUCT_STRUCT
from regard.ops.jit.compile import njit_strict
from regard.ops.jit.entry_points import STORAGE, entry_point, memory_at, struct_at, take_task
from regard.ops.jit.llvm_vectors import FLOAT, LLVMLoop, array_data, load_floats
from regard.ops.jit.matmul import LANES
from regard.ops.jit.softmax_rows import vector_exp

ARGUMENTS = GATED_PRODUCT_STRUCT.dtype

TASK_SIZE = 1 << 14
"""The number of elements in a task."""

_FLOATS, _HALVES = (ir.VectorType(kind, LANES) for kind in (FLOAT, ir.HalfType()))
_WORDS, _SHORTS = (ir.VectorType(ir.IntType(n), LANES) for n in (32, 16))


def _rounded_bits(builder: Any, x: Any, tag: Any) -> Any:
    """Return the 16 bits of float32 numbers, rounded to nearest, ties to even, to float16 (a tag of
    type int16) or bfloat16; NaN stays NaN.
    """
    if tag == types.int16:
        return builder.bitcast(builder.fptrunc(x, _HALVES), _SHORTS)
    bits, upper = builder.bitcast(x, _WORDS), _words(16)
    odd = builder.and_(builder.lshr(bits, upper), _words(1))
    rounded = builder.lshr(builder.add(builder.add(bits, _words(0x7FFF)), odd), upper)
    bits_or_nan = builder.select(builder.fcmp_ordered("ord", x, x), rounded, _words(0x7FC0))
    return builder.trunc(bits_or_nan, _SHORTS)


def _words(n: int) -> Any:
    return ir.Constant(_WORDS, [n] * LANES)


def _from_bits(builder: Any, bits: Any, tag: Any) -> Any:
    """Return float16 or bfloat16 numbers, given by their bits, as float32."""
    if tag == types.int16:
        return builder.fpext(builder.bitcast(bits, _HALVES), _FLOATS)
    return builder.bitcast(builder.shl(builder.zext(bits, _WORDS), _words(16)), _FLOATS)


def _silu(builder: Any, x: Any) -> Any:
    """Return x / (1 + e^-x), without an overflow: with e = e^-|x|, it is x / (1 + e) from 0 on, and
    x e / (1 + e) below.
    """
    one = ir.Constant(_FLOATS, [1.0] * LANES)
    not_negative = builder.fcmp_ordered(">=", x, ir.Constant(_FLOATS, [0.0] * LANES))
    e = vector_exp(builder, builder.select(not_negative, builder.fneg(x), x))
    numerator = builder.select(not_negative, x, builder.fmul(x, e))
    return builder.fdiv(numerator, builder.fadd(one, e))


@intrinsic
def _silu_products(context, gate, up, out, first, stop, tag):
    """Write silu(gate[i]) * up[i] to out[i] for i from `first` to `stop` - 1, whose number is a
    multiple of LANES. silu is rounded to the dtype before it is multiplied.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        starts = [array_data(context, builder, signature.args[i], args[i]) for i in range(3)]
        loop = LLVMLoop(builder, args[3], args[4], LANES)
        places = [builder.gep(start, [loop.index]) for start in starts]
        x, u = (load_floats(builder, place, tag, LANES) for place in places[:2])
        y = _silu(builder, x)
        if starts[2].type.pointee == FLOAT:
            result = builder.fmul(y, u)
        else:
            y = _from_bits(builder, _rounded_bits(builder, y, tag), tag)
            result = _rounded_bits(builder, builder.fmul(y, u), tag)
        builder.store(result, builder.bitcast(places[2], result.type.as_pointer()), align=2)
        loop.close()
        return context.get_dummy_value()

    i = types.int64
    return types.none(gate, up, out, i, i, tag), code


@njit_strict
def run_tasks(address, arguments, gate, up, out, tag):
    """Take tasks, each a part of the elements, until none is left."""
    while True:
        first = take_task(address) * TASK_SIZE
        if first >= arguments.n:
            break
        _silu_products(gate, up, out, first, min(arguments.n, first + TASK_SIZE), tag)


def _make_entry(dtype: Any, tag: Any) -> Callable[[int], None]:
    """Return the Python function of the entry for one storage dtype and tag, to be compiled."""

    def entry(address: int) -> None:
        arguments = struct_at(address, ARGUMENTS)
        gate, up = memory_at(arguments.gate, dtype), memory_at(arguments.up, dtype)
        run_tasks(address, arguments, gate, up, memory_at(arguments.out, dtype), tag)

    return entry


@entry_point
def entry_address(dtype: torch.dtype) -> Callable[[int], None]:
    """Return the address of the compiled entry for numbers of a dtype."""
    return _make_entry(*STORAGE[dtype])
