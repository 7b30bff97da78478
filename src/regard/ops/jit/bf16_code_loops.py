"""The compiled products of bf16 vectors with a matrix of 4-bit or 8-bit codes, whose numbers are
looked up as bf16 numbers: every code is one, and so is its difference from a zero point.

A product of two bf16 numbers is exact in fp32, so that nothing is rounded here that the loops of
`stored_weight_loops` do not round, and one instruction adds 32 products. The conversion of scales,
which all loops need, is here as well.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from regard.ops.jit.compile import has_cpu_feature, njit_strict
from regard.ops.jit.llvm_vectors import (
    HAS_BF16_DOT,
    I64,
    LANES,
    ZEROS,
    LLVMLoop,
    array_data,
    bf16_dot_add,
    broadcast,
    fma,
    i64_constant,
    lane_sums,
    load_floats,
    prefetch_array,
    prefetch_bytes,
    row_pointer,
    shuffle_mask,
    store,
)

ROWS_PER_STEP = 4
"""The number of vectors that are multiplied with a code while it is in a register."""

INT4_BLOCK = 128
"""The number of columns whose 4-bit codes are in one block of 64 bytes."""

INT8_BLOCK = 64
"""The number of 8-bit codes that are looked up together."""

PREFETCH_DISTANCE = 4096
"""The distance in bytes from the codes that are read to those that are prefetched."""

SCALED_ROWS = 16
"""The number of rows whose scales are converted to fp32 at a time."""

HAS_BF16_TABLE = HAS_BF16_DOT and has_cpu_feature("avx512bw")
"""Whether one instruction looks up 32 numbers in a table of 32 bf16 numbers, and one multiplies
them.
"""

HAS_BYTE_TABLE = HAS_BF16_TABLE and has_cpu_feature("avx512vbmi")
"""Whether one instruction also looks up 64 bytes in a table of 128 bytes."""

INT4_BYTES = INT4_BLOCK // 2
"""The size in bytes of a block of 4-bit codes."""

TABLE_NUMBERS = np.int32(2 * LANES)
"""The number of bf16 numbers in a table of `TABLES`."""

_differences_16 = np.arange(16, dtype=np.float32) - np.arange(16, dtype=np.float32)[:, None]
TABLES = (np.tile(_differences_16, 2).view(np.uint32) >> 16).astype(np.uint16).ravel()
"""For each zero 0 ... 15 the bf16 numbers code - zero for the codes 0 ... 15, twice."""

_magnitudes = np.arange(128, dtype=np.float32)
_magnitudes[0] = 128
_patterns = (_magnitudes.view(np.uint32) >> 16).astype(np.uint16)
BYTE_TABLES = np.stack((_patterns & 0xFF, _patterns >> 8)).astype(np.int8)
"""The lower and the upper bytes of the bf16 numbers 128, 1, 2, ... 127, found by the seven lower
bits of a magnitude 1 ... 128.
"""

_I32 = ir.IntType(32)
_I32_VECTOR = ir.VectorType(_I32, LANES)
_I16_VECTOR = ir.VectorType(ir.IntType(16), 2 * LANES)
_I8_VECTOR = ir.VectorType(ir.IntType(8), 4 * LANES)


def _make_bf16_dot(lines: int, count: int) -> Any:
    """Return a compiled function that computes the dot products of `lines` rows of 4-bit codes with
    `count` vectors of bf16 numbers, and writes them to out[: lines count]. Every group is a block.

    A product of a bf16 number and the difference code - zero, which is a bf16 number too, is exact
    in fp32. One instruction looks up 32 differences, and one adds 32 products to 16 sums.

    Its arguments are the codes, the index of the first byte of the first row, and the size of a row
    in bytes; the scales and the places of the tables of the zeros, the index of the first of them
    for the first row, and the distance from one row to the next; the tables; the vectors as
    `pack_pairs` packs them, and the first of them; and out.
    """

    def product(
        context: Any,
        codes_type: Any,
        start_type: Any,
        size_type: Any,
        scales_type: Any,
        places_type: Any,
        first_type: Any,
        distance_type: Any,
        tables_type: Any,
        pairs_type: Any,
        vector_type: Any,
        out_type: Any,
    ) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            codes, start, size, scales, places, first, distance, tables, pairs, r, results = args
            codes = builder.gep(array_data(context, builder, codes_type, codes), [start])
            scales = array_data(context, builder, scales_type, scales)
            places = array_data(context, builder, places_type, places)
            tables = array_data(context, builder, tables_type, tables)
            vectors = [
                row_pointer(context, builder, pairs_type, pairs, builder.add(r, i64_constant(i)))
                for i in range(count)
            ]
            zeros, sums = builder.lshr(distance, i64_constant(1)), []
            for line in range(lines):
                row = builder.gep(codes, [builder.mul(size, i64_constant(line))])
                loop = LLVMLoop(builder, i64_constant(0), size, INT4_BYTES, [ZEROS] * count)
                place = builder.gep(row, [loop.index])
                prefetch_bytes(builder, place, PREFETCH_DISTANCE, INT4_BYTES)
                group = builder.udiv(loop.index, i64_constant(INT4_BYTES))
                here = builder.add(builder.mul(distance, i64_constant(line)), first)
                here = builder.add(here, group)
                scale = broadcast(builder, builder.load(builder.gep(scales, [here])))
                zero = builder.gep(places, [builder.add(here, zeros)])
                table = builder.gep(tables, [builder.sext(builder.load(zero), I64)])
                table = builder.load(builder.bitcast(table, _I16_VECTOR.as_pointer()), align=2)
                numbers = _differences(builder, place, table)
                after = []
                for now, vector in zip(loop.now, vectors, strict=True):
                    block = builder.gep(vector, [loop.index])  # 64 pairs, as many as bytes
                    inner = ZEROS
                    for k, number in enumerate(numbers):
                        pair = builder.gep(block, [i64_constant(k * LANES)])
                        pair = builder.bitcast(pair, _I32_VECTOR.as_pointer())
                        x = builder.load(pair, align=4)
                        inner = bf16_dot_add(builder, number, x, inner)
                    after.append(fma(builder, inner, scale, now))
                sums += loop.close(after)
            store(
                builder,
                lane_sums(builder, sums),
                array_data(context, builder, out_type, results),
                lines * count,
            )
            return context.get_dummy_value()

        return types.void(
            codes_type,
            start_type,
            size_type,
            scales_type,
            places_type,
            first_type,
            distance_type,
            tables_type,
            pairs_type,
            vector_type,
            out_type,
        ), code

    return intrinsic(product)


def _differences(builder: Any, place: Any, table: Any) -> list[Any]:
    """Emit the differences code - zero of a block of 4-bit codes as four vectors of 32 bf16
    numbers; table: 16 differences, twice, as the instruction reads five bits.

    Lane 2 i of vector k has code 16 k + i, and lane 2 i + 1 code 64 + 16 k + i.
    """
    codes = builder.load(builder.bitcast(place, _I16_VECTOR.as_pointer()), align=4)
    kind = ir.FunctionType(_I16_VECTOR, [_I16_VECTOR, _I16_VECTOR])
    name = "llvm.x86.avx512.permvar.hi.512"
    look_up = cgutils.get_or_insert_function(builder.module, kind, name)
    results = []
    for k in range(4):
        shifted = builder.lshr(codes, ir.Constant(_I16_VECTOR, [4 * k] * 2 * LANES))
        numbers = builder.call(look_up, [table, shifted])
        results.append(builder.bitcast(numbers, _I32_VECTOR))
    return results


_bf16_4_1, _bf16_1_1, _bf16_1_4 = (_make_bf16_dot(*x) for x in ((4, 1), (1, 1), (1, 4)))


def _make_int8_dot(group: int, lines: int, count: int) -> Any:
    """Return a compiled function that computes the dot products of `lines` rows of 8-bit codes with
    `count` vectors of bf16 numbers, and writes them to out[: lines count].

    Its arguments are the codes, the index of the first byte of the first row, and the size of a row
    in bytes; the scales, the index of the first of the first row, and the distance from one row to
    the next; the vectors as `pack_pairs_of_bytes` packs them, and the first of them; and out.
    """

    def product(
        context: Any,
        codes_type: Any,
        start_type: Any,
        size_type: Any,
        scales_type: Any,
        first_type: Any,
        distance_type: Any,
        pairs_type: Any,
        vector_type: Any,
        out_type: Any,
    ) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            codes, start, size, scales, first, distance, pairs, r, results = args
            codes = builder.gep(array_data(context, builder, codes_type, codes), [start])
            scales = array_data(context, builder, scales_type, scales)
            vectors = [
                row_pointer(context, builder, pairs_type, pairs, builder.add(r, i64_constant(i)))
                for i in range(count)
            ]
            tables = [ir.Constant(_I8_VECTOR, list(map(int, x))) for x in _HALVES]
            sums = []
            for line in range(lines):
                row = builder.gep(codes, [builder.mul(size, i64_constant(line))])
                here = builder.add(builder.mul(distance, i64_constant(line)), first)
                step = max(group, INT8_BLOCK)
                loop = LLVMLoop(builder, i64_constant(0), size, step, [ZEROS] * count)
                place = builder.gep(row, [loop.index])
                prefetch_bytes(builder, place, PREFETCH_DISTANCE, step)
                number = builder.add(here, builder.udiv(loop.index, i64_constant(group)))
                scale = _scales_of_block(builder, builder.gep(scales, [number]), group)
                inner = [ZEROS] * count
                for begin in range(0, step, INT8_BLOCK):
                    numbers = _signed_numbers(
                        builder, builder.gep(place, [i64_constant(begin)]), tables
                    )
                    words = builder.lshr(loop.index, i64_constant(1))
                    for k, x in enumerate(numbers):
                        word = builder.add(words, i64_constant(begin // 2 + k * LANES))
                        for c, vector in enumerate(vectors):
                            pair = builder.gep(vector, [word])
                            pair = builder.bitcast(pair, _I32_VECTOR.as_pointer())
                            y = builder.load(pair, align=4)
                            inner[c] = bf16_dot_add(builder, x, y, inner[c])
                sums += loop.close(
                    [fma(builder, x, scale, y) for x, y in zip(inner, loop.now, strict=True)]
                )
            store(
                builder,
                lane_sums(builder, sums),
                array_data(context, builder, out_type, results),
                lines * count,
            )
            return context.get_dummy_value()

        return types.void(
            codes_type,
            start_type,
            size_type,
            scales_type,
            first_type,
            distance_type,
            pairs_type,
            vector_type,
            out_type,
        ), code

    return intrinsic(product)


def _scales_of_block(builder: Any, place: Any, group: int) -> Any:
    """Emit the scale of each lane of the products of a block of 8-bit codes. With groups of 32, the
    lower eight lanes have the first 32 codes of the block, as `_signed_numbers` orders them.
    """
    if group >= INT8_BLOCK:
        return broadcast(builder, builder.load(place))
    kind = ir.VectorType(ir.FloatType(), 2)
    both = builder.load(builder.bitcast(place, kind.as_pointer()), align=4)
    order = shuffle_mask([i // (LANES // 2) for i in range(LANES)])
    return builder.shuffle_vector(both, ir.Constant(kind, ir.Undefined), order)


def _signed_numbers(builder: Any, place: Any, tables: list[Any]) -> list[Any]:
    """Emit 64 codes of 8 bits as two vectors of 32 bf16 numbers; tables: `_HALVES`.

    Both bytes of the magnitude are looked up; it is 0 or 128 where its seven lower bits are 0. Pair
    4 j + p of the first vector has the codes 16 j + 2 p and the next, of the second those 8 further
    on, as the instructions interleave bytes within 16 of them.
    """
    codes = builder.load(builder.bitcast(place, _I8_VECTOR.as_pointer()), align=1)
    zero = ir.Constant(_I8_VECTOR, [0] * 64)
    negative = builder.icmp_signed("<", codes, zero)
    magnitudes = builder.select(negative, builder.sub(zero, codes), codes)
    kind = ir.FunctionType(_I8_VECTOR, [_I8_VECTOR] * 3)
    look_up = cgutils.get_or_insert_function(
        builder.module, kind, "llvm.x86.avx512.vpermi2var.qi.512"
    )
    low = builder.call(look_up, [tables[0], magnitudes, tables[1]])
    high = builder.call(look_up, [tables[2], magnitudes, tables[3]])
    high = builder.select(builder.icmp_signed("!=", codes, zero), high, zero)
    high = builder.or_(high, builder.and_(codes, ir.Constant(_I8_VECTOR, [-128] * 64)))
    results = []
    for half in (0, 8):
        order = [x for j in range(4) for i in range(8) for x in _pair(16 * j + half + i)]
        words = builder.shuffle_vector(low, high, shuffle_mask(order))
        results.append(builder.bitcast(words, _I32_VECTOR))
    return results


def _pair(i: int) -> tuple[int, int]:
    """Return the places of byte i of one vector and of byte i of another one behind it."""
    return i, 4 * LANES + i


_HALVES = BYTE_TABLES.reshape(4, 64)
_int8_32_4_1, _int8_64_4_1, _int8_128_4_1 = (_make_int8_dot(x, 4, 1) for x in (32, 64, 128))
_int8_32_1_1, _int8_64_1_1, _int8_128_1_1 = (_make_int8_dot(x, 1, 1) for x in (32, 64, 128))
_int8_32_1_4, _int8_64_1_4, _int8_128_1_4 = (_make_int8_dot(x, 1, 4) for x in (32, 64, 128))


@intrinsic
def widen_scales(
    context: Any, scales: Any, begin: Any, count: Any, tag: Any, wide: Any, places: Any
) -> Any:
    """Convert `count` stored scales from `begin` on to fp32, and each of them, which may be a zero,
    to the place of its table in `TABLES`. LLVM alone converts one number at a time.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = builder.gep(array_data(context, builder, scales, args[0]), [args[1]])
        results = array_data(context, builder, wide, args[4])
        tables = array_data(context, builder, places, args[5])
        bounds = (i64_constant(0), builder.and_(args[2], i64_constant(-LANES)), args[2])
        for lanes, first, last in ((LANES, *bounds[:2]), (1, *bounds[1:])):
            loop = LLVMLoop(builder, first, last, lanes)
            x = load_floats(builder, builder.gep(source, [loop.index]), tag, lanes)
            store(builder, x, builder.gep(results, [loop.index]), lanes)
            zeros = builder.fptosi(x, _I32_VECTOR)
            lowest, highest, size = (
                ir.Constant(_I32_VECTOR, [n] * LANES) for n in (0, 15, int(TABLE_NUMBERS))
            )  # what is no zero must not lead out of the tables
            zeros = builder.select(builder.icmp_signed("<", zeros, lowest), lowest, zeros)
            zeros = builder.select(builder.icmp_signed(">", zeros, highest), highest, zeros)
            zeros = builder.mul(zeros, size)
            place = builder.gep(tables, [loop.index])
            if lanes == 1:
                builder.store(builder.extract_element(zeros, ir.Constant(_I32, 0)), place)
            else:
                builder.store(zeros, builder.bitcast(place, zeros.type.as_pointer()), align=4)
            loop.close()
        return context.get_dummy_value()

    return types.void(scales, begin, count, tag, wide, places), code


@njit_strict
def pack_pairs_of_bytes(vectors, width, pairs):
    """Write fp32 vectors `[P, >= width]` of bf16 numbers to pairs `[P, width / 2]`, in the order of
    `_signed_numbers`.
    """
    bits = vectors.view(np.uint32)
    for r in range(len(vectors)):
        for place in range(0, width, 16):  # 16 codes are 4 pairs of each vector of a block
            word = place // INT8_BLOCK * (INT8_BLOCK // 2) + place % INT8_BLOCK // 4
            for half in range(2):
                for p in range(4):
                    i = place + 8 * half + 2 * p
                    high = bits[r, i + 1] & np.uint32(0xFFFF0000)
                    pairs[r, word + 16 * half + p] = bits[r, i] >> np.uint32(16) | high


@njit_strict
def pack_pairs(vectors, width, pairs):
    """Write fp32 vectors `[P, >= width]` of bf16 numbers to pairs `[P, width / 2]`: number i of a
    block of 128 is the lower half, and number 64 + i the upper half, of word i of the block.
    """
    bits = vectors.view(np.uint32)
    for r in range(len(vectors)):
        for block in range(0, width, INT4_BLOCK):
            for i in range(INT4_BYTES):
                low = bits[r, block + i] >> np.uint32(16)
                high = bits[r, block + INT4_BYTES + i] & np.uint32(0xFFFF0000)
                pairs[r, block // 2 + i] = low | high


@njit_strict
def int4_bf16_rows(first, last, R, codes, scales, width, tag, room, sums):
    """Compute rows of W x as `int4_rows` does, for vectors of bf16 numbers, groups of 128, and
    zeros that are integers in 0 ... 15.

    room: (the sums of a step, the scales and zeros of `SCALED_ROWS` rows, the places of their
    tables, the vectors as `pack_pairs` packs them).
    """
    out, wide, places, pairs = room
    groups, size = width // INT4_BLOCK, width // 2
    distance = 2 * groups
    for begin in range(first, last, SCALED_ROWS):
        end = min(last, begin + SCALED_ROWS)
        widen_scales(scales, begin * distance, (end - begin) * distance, tag, wide, places)
        i = begin
        while i < end:
            n, start = (i - begin) * distance, i * size
            lines = ROWS_PER_STEP if R == 1 and i + ROWS_PER_STEP <= end else 1
            # the scales are not next to the codes, so that nothing else asks for them in time
            prefetch_array(scales, (i + SCALED_ROWS) * distance, lines * distance)
            for r in range(0, R, ROWS_PER_STEP):
                if lines > 1:
                    _bf16_4_1(codes, start, size, wide, places, n, distance, TABLES, pairs, r, out)
                elif R == 1:
                    _bf16_1_1(codes, start, size, wide, places, n, distance, TABLES, pairs, r, out)
                else:
                    _bf16_1_4(codes, start, size, wide, places, n, distance, TABLES, pairs, r, out)
                for j in range(lines if R == 1 else min(ROWS_PER_STEP, R - r)):
                    if R == 1:
                        sums[0, i + j] = out[j]
                    else:
                        sums[r + j, i] = out[j]
            i += lines


@njit_strict
def _lines_of_int8(lines, R, codes, start, size, wide, n, distance, group, pairs, r, out):
    """Multiply 4 rows with one vector, or one row with one vector or with 4 of them."""
    if lines > 1:
        if group == 32:
            _int8_32_4_1(codes, start, size, wide, n, distance, pairs, r, out)
        elif group == 64:
            _int8_64_4_1(codes, start, size, wide, n, distance, pairs, r, out)
        else:
            _int8_128_4_1(codes, start, size, wide, n, distance, pairs, r, out)
    elif R == 1:
        if group == 32:
            _int8_32_1_1(codes, start, size, wide, n, distance, pairs, r, out)
        elif group == 64:
            _int8_64_1_1(codes, start, size, wide, n, distance, pairs, r, out)
        else:
            _int8_128_1_1(codes, start, size, wide, n, distance, pairs, r, out)
    elif group == 32:
        _int8_32_1_4(codes, start, size, wide, n, distance, pairs, r, out)
    elif group == 64:
        _int8_64_1_4(codes, start, size, wide, n, distance, pairs, r, out)
    else:
        _int8_128_1_4(codes, start, size, wide, n, distance, pairs, r, out)


@njit_strict
def int8_bf16_rows(first, last, R, codes, scales, width, group, tag, room, sums):
    """Compute rows of W x as `stored_weight_loops.int8_rows` does, for vectors of bf16 numbers and
    a width that is a multiple of 64. room: see `int4_bf16_rows`.
    """
    out, wide, places, pairs = room
    distance = width // group
    for begin in range(first, last, SCALED_ROWS):
        end = min(last, begin + SCALED_ROWS)
        widen_scales(scales, begin * distance, (end - begin) * distance, tag, wide, places)
        i = begin
        while i < end:
            n, start = (i - begin) * distance, i * width
            lines = ROWS_PER_STEP if R == 1 and i + ROWS_PER_STEP <= end else 1
            prefetch_array(scales, (i + SCALED_ROWS) * distance, lines * distance)
            for r in range(0, R, ROWS_PER_STEP):
                _lines_of_int8(
                    lines, R, codes, start, width, wide, n, distance, group, pairs, r, out
                )
                for j in range(lines if R == 1 else min(ROWS_PER_STEP, R - r)):
                    if R == 1:
                        sums[0, i + j] = out[j]
                    else:
                        sums[r + j, i] = out[j]
            i += lines
