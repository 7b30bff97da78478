"""The compiled conversion of rows of codes to numbers, each computed in fp32 and rounded once, as
`dequantize` of `regard.ops.stored_weights` defines it. For many vectors torch multiplies the
numbers, and its own operations would take longer to convert them than to multiply.

`regard.ops.stored_linear` calls `entry_address`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from regard.ops.jit.argument_structs import DEQUANTIZE_STRUCT
from regard.ops.jit.entry_points import STORAGE, entry_point, memory_at, struct_at, take_task
from regard.ops.jit.half_precision import to_float32
from regard.ops.jit.llvm_vectors import (
    FLOAT,
    LANES,
    LLVMLoop,
    array_data,
    broadcast,
    i64_constant,
)

ARGUMENTS = DEQUANTIZE_STRUCT.dtype

TASK_NUMBERS = 1 << 15
"""The number of codes of one task."""

_WORDS = 16
"""The number of words of a block of 128 codes of 4 bits, whose layout `Int4Weight` describes."""


def _write_numbers(
    builder: Any, lanes: int, codes: Any, factors: tuple[Any, Any], place: Any, tag: Any
) -> None:
    """Emit scale (code - zero) of some 32-bit codes, rounded to the dtype of the output at `place`;
    factors: the scale, and the zero or None.
    """
    scale, zero = factors
    floats, words = ir.VectorType(FLOAT, lanes), codes.type
    x = builder.sitofp(codes, floats)
    if zero is not None:
        x = builder.fsub(x, broadcast(builder, zero, lanes))
    x = builder.fmul(x, broadcast(builder, scale, lanes))
    short = ir.VectorType(ir.IntType(16), lanes)
    if place.type.pointee == FLOAT:
        numbers = x
    elif tag == types.int16:
        numbers = builder.bitcast(builder.fptrunc(x, ir.VectorType(ir.HalfType(), lanes)), short)
    else:  # to nearest, ties to even; NaN stays NaN
        upper, bits = ir.Constant(words, [16] * lanes), builder.bitcast(x, words)
        odd = builder.and_(builder.lshr(bits, upper), ir.Constant(words, [1] * lanes))
        rounded = builder.add(builder.add(bits, ir.Constant(words, [0x7FFF] * lanes)), odd)
        nan = builder.fcmp_unordered("uno", x, x)
        rounded = builder.select(nan, ir.Constant(words, [0x7FC0 << 16] * lanes), rounded)
        numbers = builder.trunc(builder.lshr(rounded, upper), short)
    builder.store(numbers, builder.bitcast(place, numbers.type.as_pointer()), align=2)


def _make_write(bits: int) -> Any:
    """Return a compiled function that writes `count` numbers to y from an index on.

    Its arguments are the codes (bytes, or words of eight 4-bit codes) and the index of the first,
    the shift of 4-bit codes, scale and zero, the count, y, the index, and the tag of y.
    """

    def write(
        context: Any,
        codes: Any,
        first: Any,
        shift: Any,
        scale: Any,
        zero: Any,
        count: Any,
        y: Any,
        index: Any,
        tag: Any,
    ) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            source = builder.gep(array_data(context, builder, codes, args[0]), [args[1]])
            results = builder.gep(array_data(context, builder, y, args[6]), [args[7]])
            whole = builder.and_(args[5], i64_constant(-LANES))
            runs = ((LANES, i64_constant(0), whole), (1, whole, args[5]))
            for lanes, begin, end in runs:
                words = ir.VectorType(ir.IntType(32), lanes)
                loop = LLVMLoop(builder, begin, end, lanes)
                place, out = (builder.gep(x, [loop.index]) for x in (source, results))
                kind = words if bits == 4 else ir.VectorType(ir.IntType(8), lanes)
                numbers = builder.load(builder.bitcast(place, kind.as_pointer()), align=1)
                factors = args[3], None
                if bits == 8:
                    numbers = builder.sext(numbers, words)
                else:
                    distance = builder.trunc(args[2], ir.IntType(32))
                    numbers = builder.lshr(numbers, broadcast(builder, distance, lanes))
                    numbers = builder.and_(numbers, ir.Constant(words, [15] * lanes))
                    factors = args[3], args[4]
                _write_numbers(builder, lanes, numbers, factors, out, tag)
                loop.close()
            return context.get_dummy_value()

        return types.void(
            codes, first, types.int64, types.float32, types.float32, count, y, index, tag
        ), code

    return intrinsic(write)


_write_int8, _write_int4 = _make_write(8), _make_write(4)


def _make_int8(stored: Any, tag: Any, kind: Any, kind_tag: Any) -> Callable[[int], None]:
    """Return the Python function of the entry for 8-bit codes, to be compiled."""

    def entry(address: int) -> None:
        arguments = struct_at(address, ARGUMENTS)
        M, group = arguments.M, arguments.group
        codes, scales = memory_at(arguments.codes, np.int8), memory_at(arguments.scales, stored)
        y, step = memory_at(arguments.y, kind), max(1, TASK_NUMBERS // M)
        while True:
            first = take_task(address) * step
            if first >= arguments.N:
                break
            for n in range(first, min(arguments.N, first + step)):
                for i in range(0, M, group):
                    scale = to_float32(scales[n * arguments.row_scales + i // group], tag)
                    place, count = n * arguments.row_bytes + i, min(group, M - i)
                    out = n * M + i
                    _write_int8(codes, place, 0, scale, scale, count, y, out, kind_tag)

    return entry


def _make_int4(stored: Any, tag: Any, kind: Any, kind_tag: Any) -> Callable[[int], None]:
    """Return the Python function of the entry for 4-bit codes, to be compiled."""

    def entry(address: int) -> None:
        arguments = struct_at(address, ARGUMENTS)
        M, group = arguments.M, arguments.group
        words, scales = memory_at(arguments.codes, np.uint32), memory_at(arguments.scales, stored)
        y, step = memory_at(arguments.y, kind), max(1, TASK_NUMBERS // M)
        zeros = arguments.row_scales // 2
        while True:
            first = take_task(address) * step
            if first >= arguments.N:
                break
            for n in range(first, min(arguments.N, first + step)):
                place, out = n * (arguments.row_bytes // 4), n * M
                number = n * arguments.row_scales
                for start in range(0, M, group):
                    scale = to_float32(scales[number], tag)
                    zero = to_float32(scales[number + zeros], tag)
                    number += 1
                    for i in range(start, min(M, start + group), _WORDS):
                        # i is in line (i / 16) mod 8 of block i / 128, which has 16 words
                        first_word, shift = place + ((i >> 7) << 4), (i >> 2) & 28
                        count = min(_WORDS, M - i)
                        _write_int4(
                            words, first_word, shift, scale, zero, count, y, out + i, kind_tag
                        )

    return entry


_MAKE = {"int8": _make_int8, "int4": _make_int4}

FORMS = tuple(_MAKE)
"""The forms of stored weights that have an entry."""


@entry_point
def entry_address(form: str, stored: torch.dtype, dtype: torch.dtype) -> Callable[[int], None]:
    """Return the address of the compiled entry for a form, the dtype of its scales, and the dtype
    of the numbers.
    """
    return _MAKE[form](*STORAGE[stored], *STORAGE[dtype])
