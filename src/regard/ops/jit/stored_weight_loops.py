"""The compiled products of a few vectors with a matrix that is stored in fewer bits than the
vectors: fp16 or bf16 numbers, 8-bit codes, or 4-bit codes, with a scale for each group of codes.

Codes become fp32 numbers in registers, so that arithmetic is in fp32 and memory is read once, in
order. Vectors of 16-bit numbers become integers instead where the processor has the instructions
(`digit_loops`). Other compiled code computes some rows of the result with `multiply_stored`, which
calls the entry of the form by its address (`rows_address`). The functions `plain_rows`, `int8_rows`
and `int4_rows` have the same arguments:

    first, last: the rows of the matrix, first <= i < last
    R: the number of vectors
    vectors: fp32 `[P, width]`, whose rows may lie apart; P is 1 for one vector, otherwise R rounded
        up to a multiple of 4; numbers beyond the input size are 0
    codes: the matrix as flat memory; row i begins at number `i * width` (4-bit codes: half of that)
    scales: the scales as flat memory; `plain_rows` does not read them
    width: the number of columns in memory, a multiple of `group` (4-bit codes: of 128)
    group: the number of columns for each scale, one of `GROUPS`; `plain_rows` does not read it
    tag: the encoding of 16-bit scales (`plain_rows`: of the matrix)
    sums: fp32 `[R, >= last]`; `sums[r, i]` is written

The layouts are those of `regard.ops.stored_weights`, which packs STORED_MATRIX_STRUCT;
`regard.ops.stored_linear` calls `entry_address`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from regard.ops.jit.argument_structs import (
    STORED_MATRIX_STRUCT,
    STORED_ROWS_STRUCT,
    STORED_WEIGHT_STRUCT,
)
from regard.ops.jit.compile import has_cpu_feature, njit_strict
from regard.ops.jit.digit_loops import (
    HAS_BYTE_DOT,
    INT4_BLOCK,
    INT8_BLOCK,
    PREFETCH_DISTANCE,
    ROWS_PER_STEP,
    SCALED_ROWS,
    WORDS_PER_BLOCK,
    block_words,
    int4_digit_rows,
    int8_digit_rows,
    pack_int4_digits,
    pack_int8_digits,
    widen_scales,
)
from regard.ops.jit.entry_points import (
    STORAGE,
    call_entry,
    entry_point,
    int_to_pointer,
    memory_at,
    struct_at,
    take_next,
    take_task,
)
from regard.ops.jit.gemv_loops import make_row_dot
from regard.ops.jit.half_precision import from_float32, to_float32
from regard.ops.jit.llvm_vectors import (
    CACHE_LINE,
    LANES,
    VECTOR,
    ZEROS,
    LLVMLoop,
    array_data,
    broadcast,
    fma,
    i64_constant,
    lane_sums,
    load_floats,
    prefetch_bytes,
    row_pointer,
    store,
)

GROUPS = (32, 64, 128)
"""The numbers of columns that may share a scale."""

TASK_BYTES = 1 << 16
"""The size in bytes of the codes of one task."""

HAS_FLOAT_TABLE = has_cpu_feature("avx512f")
"""Whether one instruction looks up 16 numbers in a table of 16 float32 numbers."""

ARGUMENTS, ROWS = STORED_WEIGHT_STRUCT.dtype, STORED_ROWS_STRUCT.dtype
MATRIX = STORED_MATRIX_STRUCT.dtype

CALL_NUMBERS = ROWS.itemsize // 8
"""The size of a STORED_ROWS_STRUCT in 8-byte integers."""

_I32 = ir.IntType(32)
_I32_VECTOR = ir.VectorType(_I32, LANES)
_I16_VECTOR = ir.VectorType(ir.IntType(16), 2 * LANES)


def _int8_numbers(builder: Any, place: Any, group: int) -> list[list[Any]]:
    """Emit the codes of a group of 8-bit codes as vectors of fp32, without their scale; returned
    as the one group of its block.
    """
    kind, results = ir.VectorType(ir.IntType(8), LANES), []
    for first in range(0, group, LANES):
        codes = builder.gep(place, [i64_constant(first)])
        narrow = builder.load(builder.bitcast(codes, kind.as_pointer()), align=1)
        results.append(builder.sitofp(builder.sext(narrow, _I32_VECTOR), VECTOR))
    return [results]


def _int4_numbers(
    builder: Any, place: Any, group: int, factors: list[tuple[Any, Any]]
) -> list[list[Any]]:
    """Emit the numbers scale (code - zero) of a block of 4-bit codes, as vectors of fp32 for each
    of its groups; factors: the scale and the zero of each group.

    Code c of a block of 128 is in bits 4 (c // 16) to 4 (c // 16) + 3 of word c % 16, so that 16
    neighbouring codes are one shift away from a vector of words.
    """
    words = builder.load(builder.bitcast(place, _I32_VECTOR.as_pointer()), align=4)
    every = ir.Constant(VECTOR, [float(i) for i in range(LANES)])
    table_type = ir.FunctionType(VECTOR, [VECTOR, _I32_VECTOR])
    results = []
    for n, (scale, zero) in enumerate(factors):
        table = builder.fmul(builder.fsub(every, zero), scale)
        numbers = []
        for j in range(n * group // LANES, (n + 1) * group // LANES):
            codes = builder.lshr(words, ir.Constant(_I32_VECTOR, [4 * j] * LANES))
            if HAS_FLOAT_TABLE:  # the instruction reads the low 4 bits only
                name = "llvm.x86.avx512.permvar.sf.512"
                look_up = cgutils.get_or_insert_function(builder.module, table_type, name)
                numbers.append(builder.call(look_up, [table, codes]))
            else:
                low = builder.and_(codes, ir.Constant(_I32_VECTOR, [15] * LANES))
                difference = builder.fsub(builder.sitofp(low, VECTOR), zero)
                numbers.append(builder.fmul(difference, scale))
        results.append(numbers)
    return results


def _make_group_dot(bits: int, group: int, rows: int) -> Any:
    """Return a compiled function that computes the dot products of one row of codes with `rows`
    vectors, and writes them to out[:rows].

    Its arguments are the codes and the index of the first byte of the row; the scales as flat fp32
    memory, the index of the first of the row, and the distance from a scale to its zero; the
    vectors, the first of them, and out.
    """
    block = group if bits == 8 else INT4_BLOCK
    chains = ROWS_PER_STEP // rows  # independent sums, as an addition takes several cycles

    def product(
        context: Any,
        codes_type: Any,
        start_type: Any,
        scales_type: Any,
        scale_type: Any,
        distance_type: Any,
        vectors_type: Any,
        first_type: Any,
        out_type: Any,
    ) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            flat, start, scales, scale_start, distance, vectors, r, results = args
            row = builder.gep(array_data(context, builder, codes_type, flat), [start])
            scales = builder.gep(array_data(context, builder, scales_type, scales), [scale_start])
            lines = [
                row_pointer(
                    context, builder, vectors_type, vectors, builder.add(r, i64_constant(i))
                )
                for i in range(rows)
            ]
            array = context.make_array(vectors_type)(context, builder, value=vectors)
            width = cgutils.unpack_tuple(builder, array.shape)[1]
            loop = LLVMLoop(builder, i64_constant(0), width, block, [ZEROS] * (rows * chains))
            place = builder.gep(
                row, [loop.index if bits == 8 else builder.lshr(loop.index, i64_constant(1))]
            )
            prefetch_bytes(builder, place, PREFETCH_DISTANCE, block * bits // 8)
            factors, number = [], builder.udiv(loop.index, i64_constant(group))
            for n in range(block // group):
                scale = builder.gep(scales, [builder.add(number, i64_constant(n))])
                zero = builder.gep(scale, [distance])
                factors.append(
                    tuple(
                        broadcast(builder, builder.load(x))
                        for x in (scale, zero)[: 2 if bits == 4 else 1]
                    )
                )
            if bits == 8:
                weights = _int8_numbers(builder, place, group)
            else:
                weights = _int4_numbers(builder, place, group, factors)
            sums = list(loop.now)
            for n, numbers in enumerate(weights):
                begin = builder.add(loop.index, i64_constant(n * group))
                inner = list(sums) if bits == 4 else [ZEROS] * len(sums)
                for j, weight in enumerate(numbers):
                    column = [builder.add(begin, i64_constant(j * LANES))]
                    for i, line in enumerate(lines):
                        x = load_floats(builder, builder.gep(line, column), types.int8, LANES)
                        k = j % chains * rows + i
                        inner[k] = fma(builder, weight, x, inner[k])
                if bits == 8:  # the scale is applied once to the sum of its group
                    (scale,) = factors[n]
                    inner = [fma(builder, x, scale, y) for x, y in zip(inner, sums, strict=True)]
                sums = inner
            totals = loop.close(sums)
            while len(totals) > rows:
                half = len(totals) // 2
                totals = [builder.fadd(totals[i], totals[half + i]) for i in range(half)]
            store(
                builder,
                lane_sums(builder, totals),
                array_data(context, builder, out_type, results),
                rows,
            )
            return context.get_dummy_value()

        return types.void(
            codes_type,
            start_type,
            scales_type,
            scale_type,
            distance_type,
            vectors_type,
            first_type,
            out_type,
        ), code

    return intrinsic(product)


_int8_32_1, _int8_64_1, _int8_128_1 = (_make_group_dot(8, group, 1) for group in GROUPS)
_int8_32_4, _int8_64_4, _int8_128_4 = (_make_group_dot(8, group, 4) for group in GROUPS)
_int4_32_1, _int4_64_1, _int4_128_1 = (_make_group_dot(4, group, 1) for group in GROUPS)
_int4_32_4, _int4_64_4, _int4_128_4 = (_make_group_dot(4, group, 4) for group in GROUPS)
_plain_1, _plain_4 = make_row_dot(1), make_row_dot(ROWS_PER_STEP)


@njit_strict
def plain_rows(first, last, R, vectors, codes, scales, width, group, tag, sums):
    """Compute rows of W x for a matrix of fp32, fp16 or bf16 numbers; see the module."""
    out = np.empty(ROWS_PER_STEP, np.float32)
    for i in range(first, last):
        for r in range(0, R, ROWS_PER_STEP):
            if R == 1:
                _plain_1(codes, i * width, vectors, r, tag, out)
            else:
                _plain_4(codes, i * width, vectors, r, tag, out)
            for j in range(min(ROWS_PER_STEP, R - r)):
                sums[r + j, i] = out[j]


@njit_strict
def int8_rows(first, last, R, vectors, codes, scales, width, group, tag, sums):
    """Compute rows of W x for a matrix of 8-bit codes, w = scale code; see the module."""
    out, groups = np.empty(ROWS_PER_STEP, np.float32), width // group
    wide = np.empty(SCALED_ROWS * groups, np.float32)
    places = np.empty(SCALED_ROWS * groups, np.int32)
    for i in range(first, last):
        n = (i - first) % SCALED_ROWS * groups
        if n == 0:
            count = min(SCALED_ROWS, last - i) * groups
            widen_scales(scales, i * groups, count, tag, wide, places)
        for r in range(0, R, ROWS_PER_STEP):
            if R == 1:
                if group == 32:
                    _int8_32_1(codes, i * width, wide, n, 0, vectors, r, out)
                elif group == 64:
                    _int8_64_1(codes, i * width, wide, n, 0, vectors, r, out)
                else:
                    _int8_128_1(codes, i * width, wide, n, 0, vectors, r, out)
            elif group == 32:
                _int8_32_4(codes, i * width, wide, n, 0, vectors, r, out)
            elif group == 64:
                _int8_64_4(codes, i * width, wide, n, 0, vectors, r, out)
            else:
                _int8_128_4(codes, i * width, wide, n, 0, vectors, r, out)
            for j in range(min(ROWS_PER_STEP, R - r)):
                sums[r + j, i] = out[j]


@njit_strict
def int4_rows(first, last, R, vectors, codes, scales, width, group, tag, sums):
    """Compute rows of W x for a matrix of 4-bit codes, w = scale (code - zero); see the module.

    The scales of a row are followed by its zeros.
    """
    out, groups = np.empty(ROWS_PER_STEP, np.float32), width // group
    wide = np.empty(SCALED_ROWS * 2 * groups, np.float32)
    places = np.empty(SCALED_ROWS * 2 * groups, np.int32)
    for i in range(first, last):
        n, start = (i - first) % SCALED_ROWS * 2 * groups, i * (width // 2)
        if n == 0:
            count = min(SCALED_ROWS, last - i) * 2 * groups
            widen_scales(scales, i * 2 * groups, count, tag, wide, places)
        for r in range(0, R, ROWS_PER_STEP):
            if R == 1:
                if group == 32:
                    _int4_32_1(codes, start, wide, n, groups, vectors, r, out)
                elif group == 64:
                    _int4_64_1(codes, start, wide, n, groups, vectors, r, out)
                else:
                    _int4_128_1(codes, start, wide, n, groups, vectors, r, out)
            elif group == 32:
                _int4_32_4(codes, start, wide, n, groups, vectors, r, out)
            elif group == 64:
                _int4_64_4(codes, start, wide, n, groups, vectors, r, out)
            else:
                _int4_128_4(codes, start, wide, n, groups, vectors, r, out)
            for j in range(min(ROWS_PER_STEP, R - r)):
                sums[r + j, i] = out[j]


@njit_strict
def widen_vectors(x, R, M, width, tag):
    """Return R vectors `[R, M]` of flat memory as fp32 `[P, width]`; see the module."""
    padded = 1 if R == 1 else (R + ROWS_PER_STEP - 1) // ROWS_PER_STEP * ROWS_PER_STEP
    vectors = np.zeros((padded, width), np.float32)
    for r in range(R):
        for i in range(M):
            vectors[r, i] = to_float32(x[r * M + i], tag)
    return vectors


@njit_strict
def make_call(R, width):
    """Return int64 memory for a STORED_ROWS_STRUCT, followed by its scratch memory for R vectors of
    at most `width` numbers.
    """
    P = (R + ROWS_PER_STEP - 1) // ROWS_PER_STEP * ROWS_PER_STEP
    scales = SCALED_ROWS * 2 * (width // GROUPS[0])
    blocks = (width + INT8_BLOCK - 1) // INT8_BLOCK
    words = 2 * LANES + ROWS_PER_STEP + 2 * scales + P * (blocks * (WORDS_PER_BLOCK + 1) + 2)
    return np.zeros(CALL_NUMBERS + words // 2 + 1, np.int64)


@njit_strict
def mark_changed(call):
    """Note that the next vectors are others than in the last call of `multiply_stored`."""
    struct_at(np.int64(call.ctypes.data), ROWS).packed = 0


@njit_strict
def multiply_stored(matrix, first, last, R, vectors, call, sums):
    """Compute rows first <= i < last of W x, for the matrix of the STORED_MATRIX_STRUCT at an
    address, by the entry of its form. `sums[r, i - first]` is written.

    vectors: see the module; its rows may lie apart. call: from `make_call`; the caller has called
    `mark_changed`, if the vectors have changed.
    """
    place = np.int64(call.ctypes.data)
    arguments = struct_at(place, ROWS)
    arguments.scratch = place + 8 * CALL_NUMBERS
    arguments.matrix, arguments.first, arguments.last, arguments.R = matrix, first, last, R
    arguments.vectors = np.int64(vectors.ctypes.data)
    arguments.distance = vectors.strides[0] // vectors.itemsize
    arguments.sums = np.int64(sums.ctypes.data)
    arguments.sums_distance = sums.strides[0] // sums.itemsize
    call_entry(struct_at(matrix, MATRIX).multiply, place)


@njit_strict
def _rows_at(arguments, matrix):
    """Return the vectors `[P, >= width]` of a STORED_ROWS_STRUCT, its sums `[R, >= n]`, and n."""
    R, n = arguments.R, arguments.last - arguments.first
    padded = 1 if R == 1 else (R + ROWS_PER_STEP - 1) // ROWS_PER_STEP * ROWS_PER_STEP
    vectors = carray(int_to_pointer(arguments.vectors), (padded, arguments.distance), np.float32)
    sums = carray(int_to_pointer(arguments.sums), (R, arguments.sums_distance), np.float32)
    return vectors, sums, n


# Each entry calls its loop by name, in code of its own: Numba stores no code on disk that gets a
# function as an argument.


def _make_plain_rows(stored: Any, tag: Any) -> Callable[[int], None]:
    """Return the Python function of the entry for rows of numbers, to be compiled."""

    def entry(address: int) -> None:
        arguments = struct_at(address, ROWS)
        matrix = struct_at(arguments.matrix, MATRIX)
        vectors, sums, n = _rows_at(arguments, matrix)
        w = memory_at(matrix.codes + arguments.first * matrix.row_bytes, stored)
        vectors = vectors[:, : matrix.width]
        plain_rows(0, n, arguments.R, vectors, w, w, matrix.width, 0, tag, sums)

    return entry


def _make_int8_rows(stored: Any, tag: Any) -> Callable[[int], None]:
    """Return the Python function of the entry for rows of 8-bit codes, to be compiled."""

    def entry(address: int) -> None:
        arguments = struct_at(address, ROWS)
        matrix = struct_at(arguments.matrix, MATRIX)
        vectors, sums, n = _rows_at(arguments, matrix)
        w = memory_at(matrix.codes + arguments.first * matrix.row_bytes, np.int8)
        s = memory_at(matrix.scales, stored)[arguments.first * matrix.row_scales :]
        vectors = vectors[:, : matrix.width]
        int8_rows(0, n, arguments.R, vectors, w, s, matrix.width, matrix.group, tag, sums)

    return entry


def _make_int4_rows(stored: Any, tag: Any) -> Callable[[int], None]:
    """Return the Python function of the entry for rows of 4-bit codes, to be compiled."""

    def entry(address: int) -> None:
        arguments = struct_at(address, ROWS)
        matrix = struct_at(arguments.matrix, MATRIX)
        vectors, sums, n = _rows_at(arguments, matrix)
        w = memory_at(matrix.codes + arguments.first * matrix.row_bytes, np.uint8)
        s = memory_at(matrix.scales, stored)[arguments.first * matrix.row_scales :]
        vectors = vectors[:, : matrix.width]
        int4_rows(0, n, arguments.R, vectors, w, s, matrix.width, matrix.group, tag, sums)

    return entry


@njit_strict
def _digits_at(arguments, P, blocks, words):
    """Return where the digits of P vectors are, at the beginning of the scratch memory of an entry:
    (`[P, blocks words]`, factors `[P, blocks]`, `[P]`); and the address behind them.

    Their place must depend on nothing but `packed`.
    """
    start = (arguments.scratch + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE
    factors = start + 4 * P * blocks * words
    spread = (factors + 4 * P * blocks + 7) // 8 * 8
    return (
        carray(int_to_pointer(start), (P, blocks * words), np.int32),
        carray(int_to_pointer(factors), (P, blocks), np.float32),
        carray(int_to_pointer(spread), (P,), np.int64),
    ), spread + 8 * P


@njit_strict
def _room_at(address, matrix):
    """Return scratch memory: (the sums of a step, the scales and zeros of `SCALED_ROWS` rows in
    fp32, and the same as integers).
    """
    wide = address + 4 * ROWS_PER_STEP
    return (
        memory_at(address, np.float32),
        memory_at(wide, np.float32),
        memory_at(wide + 4 * SCALED_ROWS * matrix.row_scales, np.int32),
    )


_INT8_64_WORDS, _INT8_128_WORDS = block_words(8, 64), block_words(8, 128)
_INT4_WORDS = block_words(4, INT4_BLOCK)


def _make_int8_digit_rows(stored: Any, tag: Any) -> Callable[[int], None]:
    """Return the Python function of the entry for rows of 8-bit codes and vectors of 16-bit
    numbers, to be compiled.
    """

    def entry(address: int) -> None:
        arguments = struct_at(address, ROWS)
        matrix = struct_at(arguments.matrix, MATRIX)
        vectors, sums, n = _rows_at(arguments, matrix)
        w = memory_at(matrix.codes + arguments.first * matrix.row_bytes, np.int8)
        s = memory_at(matrix.scales, stored)[arguments.first * matrix.row_scales :]
        width, group = matrix.width, matrix.group
        columns, words = INT8_BLOCK, _INT8_64_WORDS
        if group == INT4_BLOCK:
            columns, words = INT4_BLOCK, _INT8_128_WORDS
        digits, behind = _digits_at(arguments, len(vectors), width // columns, words)
        packed = -2 * width - (columns == INT4_BLOCK)
        if arguments.packed != packed:
            pack_int8_digits(vectors, columns, digits)
            arguments.packed = packed
        room = _room_at(behind, matrix)
        int8_digit_rows(0, n, arguments.R, w, s, width, group, tag, room, digits, sums)
        for r in range(arguments.R):
            if digits[2][r]:
                int8_rows(0, n, 1, vectors[r:, :width], w, s, width, group, tag, sums[r:])

    return entry


def _make_int4_digit_rows(stored: Any, tag: Any) -> Callable[[int], None]:
    """Return the Python function of the entry for rows of 4-bit codes and vectors of 16-bit
    numbers, to be compiled.
    """

    def entry(address: int) -> None:
        arguments = struct_at(address, ROWS)
        matrix = struct_at(arguments.matrix, MATRIX)
        vectors, sums, n = _rows_at(arguments, matrix)
        w = memory_at(matrix.codes + arguments.first * matrix.row_bytes, np.uint8)
        s = memory_at(matrix.scales, stored)[arguments.first * matrix.row_scales :]
        width, group = matrix.width, matrix.group
        digits, behind = _digits_at(arguments, len(vectors), width // INT4_BLOCK, _INT4_WORDS)
        if arguments.packed != width:
            pack_int4_digits(vectors, digits)
            arguments.packed = width
        room = _room_at(behind, matrix)
        int4_digit_rows(0, n, arguments.R, w, s, width, tag, room, digits, sums)
        for r in range(arguments.R):
            if digits[2][r]:
                int4_rows(0, n, 1, vectors[r:, :width], w, s, width, group, tag, sums[r:])

    return entry


_MAKE_ROWS = {
    "half": _make_plain_rows,
    "int8": _make_int8_rows,
    "int8-digits": _make_int8_digit_rows,
    "int4": _make_int4_rows,
    "int4-digits": _make_int4_digit_rows,
}


def supported_form(form: str) -> str:
    """Return the name of the loops for a form on this processor: those of digits need an
    instruction that some processors lack.
    """
    return form if HAS_BYTE_DOT else form.removesuffix("-digits")


@entry_point
def rows_address(form: str, stored: torch.dtype) -> Callable[[int], None]:
    """Return the address of the compiled entry for some rows of a storage form, whose argument is a
    STORED_ROWS_STRUCT.

    Args:
        form: "half" (a matrix of 16-bit or fp32 numbers), "int8", "int4", or one of these with
            "-digits", as `regard.ops.stored_weights.fitting_form` chooses it.
        stored: the dtype of the scales; for "half", of the matrix.
    """
    return _MAKE_ROWS[supported_form(form)](*STORAGE[stored])


@njit_strict
def _write_rows(arguments, first, n, sums, x, tag):
    """Add the bias to `sums[:, :n]`, the rows first to first + n of the result, and write them to y
    in the dtype of x.
    """
    b, y = memory_at(arguments.b, x.dtype), memory_at(arguments.y, x.dtype)
    for r in range(arguments.R):
        for i in range(n):
            bias = to_float32(b[first + i], tag) if arguments.b else np.float32(0)
            y[r * arguments.N + first + i] = from_float32(sums[r, i] + bias, tag, y)


@njit_strict
def run_tasks(address, x, tag):
    """Take tasks, blocks of rows of W, until none is left, and write their results."""
    arguments = struct_at(address, ARGUMENTS)
    matrix = struct_at(arguments.matrix, MATRIX)
    R, N = arguments.R, arguments.N
    vectors = widen_vectors(x, R, arguments.M, matrix.width, tag)
    step = max(1, TASK_BYTES // max(1, matrix.row_bytes))
    sums, call = np.empty((R, step), np.float32), make_call(R, matrix.width)
    mark_changed(call)
    tasks, team = (N + step - 1) // step, (take_task(address), arguments.runs)
    task = take_next(address, tasks, team)
    while task < tasks:
        first = task * step
        last = min(N, first + step)
        multiply_stored(arguments.matrix, first, last, R, vectors, call, sums)
        _write_rows(arguments, first, last - first, sums, x, tag)
        task = take_next(address, tasks, team)


def _make_entry(dtype: Any, tag: Any) -> Callable[[int], None]:
    """Return the Python function of the entry for vectors of a dtype, to be compiled."""

    def entry(address: int) -> None:
        arguments = struct_at(address, ARGUMENTS)
        run_tasks(address, memory_at(arguments.x, dtype), tag)

    return entry


@entry_point
def entry_address(dtype: torch.dtype) -> Callable[[int], None]:
    """Return the address of the compiled entry for vectors of a dtype and a matrix of any form."""
    return _make_entry(*STORAGE[dtype])
