"""The compiled products of bf16 or fp16 vectors with a matrix of 8-bit or 4-bit codes, in integers.
One instruction (VNNI's `vpdpbusd`) multiplies 64 codes with 64 signed bytes, and adds four
neighbouring products to each of 16 exact sums.

A block of a vector, as long as the columns of a scale or longer, becomes integers of 24 bits with a
common factor, a power of two, and each integer three signed bytes, its digits:

    x_i = f X_i,   X_i = 65536 d2_i + 256 d1_i + d0_i,   -128 <= d_ki <= 127
    sum_i code_i x_i = f (65536 sum_i code_i d2_i + 256 sum_i code_i d1_i + sum_i code_i d0_i)

Nothing is rounded where every number of the block is at least 2^-14 (bf16) or 2^-11 (fp16) of the
largest; a smaller one may change by 2^-22 of the largest. `pack_int8_digits` and `pack_int4_digits`
say which vectors have numbers that are not finite, or blocks with many rounded numbers: the loops
in fp32 multiply those (`stored_weight_loops`). Sums of bytes are exact integers. They are joined in
integers where 32 bits suffice, and otherwise in fp32.

The instruction takes unsigned codes. An 8-bit code c becomes c + 128, as one bit is flipped, and a
4-bit code c is multiplied without its zero z. Corrections that depend on the vector make up for it:

    sum_i c_i X_i = sum_i (c_i + 128) X_i - 128 sum_i X_i
    sum_i (c_i - z) X_i = sum_i c_i X_i - z sum_i X_i

The conversion of scales, which all loops need, is here as well.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2 (VPDPBUSD).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from regard.ops.jit.compile import has_cpu_feature, njit_strict
from regard.ops.jit.llvm_vectors import (
    FLOAT,
    I64,
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
"""The number of 8-bit codes in a register."""

DIGITS = 3
"""The number of signed bytes of an integer."""

PREFETCH_DISTANCE = 8192
"""The distance in bytes from the codes that are read to those that are prefetched."""

SCALED_ROWS = 16
"""The number of rows whose scales are converted to fp32 at a time."""

HAS_BYTE_DOT = has_cpu_feature("avx512vnni") and has_cpu_feature("avx512bw")
"""Whether one instruction multiplies 64 unsigned bytes with 64 signed ones, and adds four
neighbouring products to each of 16 sums.
"""

ROUNDED_SHARE = 4
"""A vector is multiplied in fp32 if, in some block, more than one of this many numbers that are not
0 is rounded. Fewer, together, change a sum by less than the rounding of the result does.
"""

_I8, _I32 = ir.IntType(8), ir.IntType(32)
_I8_VECTOR, _I32_VECTOR = ir.VectorType(_I8, 4 * LANES), ir.VectorType(_I32, LANES)
_NO_SUMS = ir.Constant(_I32_VECTOR, [0] * LANES)

_MANTISSA, _EXPONENTS = 23, 0x7F800000
_MARGIN = 1 << 17
"""What is added to the bits of the largest number before its exponent is read: a mantissa near 2
counts as the next power of two, because 127 is the largest digit.
"""

_LEAST_EXPONENT = _MANTISSA
"""The least biased exponent that counts, with which the factor is the least normal number."""


def _words(n: int) -> Any:
    """Return the constant n in every lane of a vector of 32-bit integers."""
    return ir.Constant(_I32_VECTOR, [n] * LANES)


def block_columns(bits: int, group: int) -> int:
    """Return the number of columns of a block, whose sums are joined: those of a scale, and at
    least those of a register.
    """
    return INT4_BLOCK if bits == 4 else max(group, INT8_BLOCK)


def block_words(bits: int, group: int) -> int:
    """Return the size of a block of digits with its corrections, in 32-bit words: the digits of
    each register of codes, a vector for each of their bytes, and then the corrections, for 8-bit
    codes those of the two lower digits and of the upper one, for 4-bit codes minus the sums.
    """
    registers = 2 if bits == 4 else block_columns(bits, group) // INT8_BLOCK
    return (registers * DIGITS + (1 if bits == 4 else 2)) * LANES


WORDS_PER_BLOCK = block_words(8, INT8_BLOCK)
"""The largest number of words for INT8_BLOCK columns of digits."""


def _load_words(builder: Any, words: Any, place: int) -> Any:
    """Load the vector of 16 words that begins `place` vectors after a pointer to words."""
    start = builder.gep(words, [i64_constant(place * LANES)])
    return builder.load(builder.bitcast(start, _I32_VECTOR.as_pointer()), align=4)


def _store_words(builder: Any, x: Any, words: Any, place: int) -> None:
    """Store a vector of 16 words `place` vectors after a pointer to words."""
    start = builder.gep(words, [i64_constant(place * LANES)])
    builder.store(x, builder.bitcast(start, _I32_VECTOR.as_pointer()), align=4)


def _add_byte_products(builder: Any, sums: Any, codes: Any, digits: Any) -> Any:
    """Return the sums plus the products of unsigned and signed bytes, four for each lane."""
    kind = ir.FunctionType(_I32_VECTOR, [_I32_VECTOR] * 3)
    name = "llvm.x86.avx512.vpdpbusd.512"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, [sums, codes, digits])


def _load_codes(builder: Any, place: Any, bits: int, group: int) -> list[Any]:
    """Load a block of codes as vectors of unsigned bytes: 8-bit codes plus 128, or of 4-bit codes
    the lower halves of the bytes, then the upper ones.
    """
    if bits == 4:
        both = builder.load(builder.bitcast(place, _I32_VECTOR.as_pointer()), align=4)
        low = _words(0x0F0F0F0F)
        return [builder.and_(both, low), builder.and_(builder.lshr(both, _words(4)), low)]
    results = []
    for first in range(0, block_columns(bits, group), INT8_BLOCK):
        codes = builder.bitcast(builder.gep(place, [i64_constant(first)]), _I32_VECTOR.as_pointer())
        results.append(builder.xor(builder.load(codes, align=1), _words(-0x7F7F7F80)))
    return results


def _block_sums(builder: Any, codes: list[Any], words: Any, zero: Any) -> Any:
    """Emit the sums of the products of a block of codes with the integers of a vector, in fp32, of
    which each lane has its columns.

    codes: from `_load_codes`. words: a pointer to the block of the vector. zero: the zero of 4-bit
    codes in every lane; None for 8-bit codes.
    """
    after = len(codes) * DIGITS
    sums = [_NO_SUMS] * DIGITS
    sums[0] = _load_words(builder, words, after)
    if zero is None:
        sums[2] = _load_words(builder, words, after + 1)
    else:
        sums[0] = builder.mul(sums[0], zero)
    for i, code in enumerate(codes):
        for k in range(DIGITS):
            digits = _load_words(builder, words, i * DIGITS + k)
            sums[k] = _add_byte_products(builder, sums[k], code, digits)
    byte = _words(8)
    if zero is None:  # 8 products of 8 and 24 bits in a lane need 34 bits
        low = builder.add(sums[0], builder.shl(sums[1], byte))
        low, high = (builder.sitofp(x, VECTOR) for x in (low, sums[2]))
        return fma(builder, high, ir.Constant(VECTOR, [65536.0] * LANES), low)
    upper = builder.add(sums[1], builder.shl(sums[2], byte))
    return builder.sitofp(builder.add(sums[0], builder.shl(upper, byte)), VECTOR)


def _make_digit_dot(bits: int, group: int, lines: int, count: int) -> Any:
    """Return a compiled function that computes the dot products of `lines` rows of codes with
    `count` vectors, and writes them to out[: lines count].

    Its arguments are the codes, the index of the first byte of the first row, and the size of a row
    in bytes; the scales in fp32 and as integers, the index of the first of the first row, and the
    distance from one row to the next, of which the second half are the zeros of 4-bit codes; the
    digits of the vectors, their factors, and the first of them; and out.
    """
    columns = block_columns(bits, group)
    size_of_block = columns * bits // 8

    def product(
        context: Any,
        codes_type: Any,
        start_type: Any,
        size_type: Any,
        scales_type: Any,
        whole_type: Any,
        first_type: Any,
        distance_type: Any,
        digits_type: Any,
        factors_type: Any,
        vector_type: Any,
        out_type: Any,
    ) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            codes, start, size, scales, whole, first, distance, digits, factors, r, results = args
            codes = builder.gep(array_data(context, builder, codes_type, codes), [start])
            scales = array_data(context, builder, scales_type, scales)
            whole = array_data(context, builder, whole_type, whole)
            places = [builder.add(r, i64_constant(i)) for i in range(count)]
            vectors = [row_pointer(context, builder, digits_type, digits, i) for i in places]
            powers = [row_pointer(context, builder, factors_type, factors, i) for i in places]
            half, sums = builder.lshr(distance, i64_constant(1)), []
            for line in range(lines):
                row = builder.gep(codes, [builder.mul(size, i64_constant(line))])
                here = builder.add(builder.mul(distance, i64_constant(line)), first)
                loop = LLVMLoop(builder, i64_constant(0), size, size_of_block, [ZEROS] * count)
                place = builder.gep(row, [loop.index])
                prefetch_bytes(builder, place, PREFETCH_DISTANCE, size_of_block)
                block = builder.udiv(loop.index, i64_constant(size_of_block))
                number = builder.mul(block, i64_constant(columns // group))
                number = builder.add(here, number)
                scale = _scales_of_block(builder, builder.gep(scales, [number]), group)
                zero = None
                if bits == 4:
                    zero = builder.load(builder.gep(whole, [builder.add(number, half)]))
                    zero = broadcast(builder, zero)
                registers = _load_codes(builder, place, bits, group)
                words = builder.mul(block, i64_constant(block_words(bits, group)))
                after = []
                for now, vector, power in zip(loop.now, vectors, powers, strict=True):
                    sum_of_block = _block_sums(
                        builder, registers, builder.gep(vector, [words]), zero
                    )
                    factor = broadcast(builder, builder.load(builder.gep(power, [block])))
                    after.append(fma(builder, sum_of_block, builder.fmul(scale, factor), now))
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
            whole_type,
            first_type,
            distance_type,
            digits_type,
            factors_type,
            vector_type,
            out_type,
        ), code

    return intrinsic(product)


def _scales_of_block(builder: Any, place: Any, group: int) -> Any:
    """Emit the scale of each lane of the sums of a block of codes. With groups of 32, the lower
    eight lanes have the first 32 codes of the block.
    """
    if group >= INT8_BLOCK:
        return broadcast(builder, builder.load(place))
    kind = ir.VectorType(FLOAT, 2)
    both = builder.load(builder.bitcast(place, kind.as_pointer()), align=4)
    order = shuffle_mask([i // (LANES // 2) for i in range(LANES)])
    return builder.shuffle_vector(both, ir.Constant(kind, ir.Undefined), order)


_int8_32_4_1, _int8_64_4_1, _int8_128_4_1 = (_make_digit_dot(8, x, 4, 1) for x in (32, 64, 128))
_int8_32_1_1, _int8_64_1_1, _int8_128_1_1 = (_make_digit_dot(8, x, 1, 1) for x in (32, 64, 128))
_int8_32_1_4, _int8_64_1_4, _int8_128_1_4 = (_make_digit_dot(8, x, 1, 4) for x in (32, 64, 128))
_int4_4_1, _int4_1_1, _int4_1_4 = (_make_digit_dot(4, 128, *x) for x in ((4, 1), (1, 1), (1, 4)))


def _make_pack(bits: int, group: int) -> Any:
    """Return a compiled function that writes the digits of a vector and their corrections to a row
    of words, and the factors of its blocks to a row of factors. It returns the number of blocks
    that must be multiplied in fp32.

    Its arguments are the fp32 vectors `[P, >= width]`, the number of the vector, the int32 words
    `[P, blocks block_words]`, and the fp32 factors `[P, blocks]`.
    """
    columns = block_columns(bits, group)
    count = columns // LANES

    def pack(
        context: Any, vectors_type: Any, row_type: Any, words_type: Any, factors_type: Any
    ) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            vectors, r, words, factors = args
            array = context.make_array(factors_type)(context, builder, value=factors)
            blocks = cgutils.unpack_tuple(builder, array.shape)[1]
            row = row_pointer(context, builder, vectors_type, vectors, r)
            target = row_pointer(context, builder, words_type, words, r)
            powers = row_pointer(context, builder, factors_type, factors, r)
            loop = LLVMLoop(builder, i64_constant(0), blocks, 1, [i64_constant(0)])
            first = builder.mul(loop.index, i64_constant(columns))
            numbers = [
                load_floats(
                    builder,
                    builder.gep(row, [builder.add(first, i64_constant(i * LANES))]),
                    types.int8,
                    LANES,
                )
                for i in range(count)
            ]
            factor, inverse, finite = _common_factor(builder, numbers)
            builder.store(factor, builder.gep(powers, [loop.index]))
            integers, rounded, others = _round_numbers(builder, numbers, inverse)
            many = builder.mul(rounded, _I32(ROUNDED_SHARE))
            many = builder.icmp_unsigned(">", many, others)
            bad = builder.or_(many, builder.not_(finite))
            words = builder.mul(loop.index, i64_constant(block_words(bits, group)))
            write = _write_int4_digits if bits == 4 else _write_int8_digits
            write(builder, integers, builder.gep(target, [words]))
            (total,) = loop.close([builder.add(loop.now[0], builder.zext(bad, I64))])
            return total

        return types.int64(vectors_type, row_type, words_type, factors_type), code

    return intrinsic(pack)


def _common_factor(builder: Any, numbers: list[Any]) -> tuple[Any, Any, Any]:
    """Emit the factor of a block of numbers, its inverse in every lane, and whether the numbers are
    finite.
    """
    largest = _NO_SUMS
    for x in numbers:
        size = builder.and_(builder.bitcast(x, _I32_VECTOR), _words(0x7FFFFFFF))
        larger = builder.icmp_unsigned(">", size, largest)
        largest = builder.select(larger, size, largest)
    kind = ir.FunctionType(_I32, [_I32_VECTOR])
    name = f"llvm.vector.reduce.umax.v{LANES}i32"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    largest = builder.call(function, [largest])
    finite = builder.icmp_unsigned("<", largest, _I32(_EXPONENTS))
    exponent = builder.lshr(builder.add(largest, _I32(_MARGIN)), _I32(_MANTISSA))
    least = _I32(_LEAST_EXPONENT)
    exponent = builder.select(builder.icmp_unsigned("<", exponent, least), least, exponent)
    # the largest number is below 2^(exponent - 126), and its integer below 2^23
    biased = builder.sub(exponent, _I32(_MANTISSA - 1))
    inverse = builder.sub(_I32(2 * 127), biased)
    factor, inverse = (
        builder.bitcast(builder.shl(x, _I32(_MANTISSA)), FLOAT) for x in (biased, inverse)
    )
    return factor, broadcast(builder, inverse), finite


def _round_numbers(builder: Any, numbers: list[Any], inverse: Any) -> tuple[list[Any], Any, Any]:
    """Emit the integers of a block of numbers, how many numbers are rounded, and how many are not
    0.
    """
    kind = ir.FunctionType(VECTOR, [VECTOR])
    rint = cgutils.get_or_insert_function(builder.module, kind, f"llvm.rint.v{LANES}f32")
    integers, rounded, others = [], _NO_SUMS, _NO_SUMS
    for x in numbers:
        quotient = builder.fmul(x, inverse)
        nearest = builder.call(rint, [quotient])
        differs = builder.fcmp_unordered("!=", nearest, quotient)
        rounded = builder.add(rounded, builder.zext(differs, _I32_VECTOR))
        counts = builder.fcmp_unordered("!=", x, ZEROS)
        others = builder.add(others, builder.zext(counts, _I32_VECTOR))
        integers.append(builder.fptosi(nearest, _I32_VECTOR))
    sum_type = ir.FunctionType(_I32, [_I32_VECTOR])
    name = f"llvm.vector.reduce.add.v{LANES}i32"
    total = cgutils.get_or_insert_function(builder.module, sum_type, name)
    return integers, builder.call(total, [rounded]), builder.call(total, [others])


def _digit_bytes(builder: Any, integers: Any) -> Any:
    """Emit integers of 32 bits whose lower three bytes are the signed digits of other integers."""
    half = _words(0x808080)  # a digit is a byte of the sum less 128
    return builder.xor(builder.add(integers, half), half)


def _write_int8_digits(builder: Any, integers: list[Any], words: Any) -> None:
    """Write the digits of a block in the order of the columns, and the corrections for codes plus
    128.
    """
    registers = len(integers) // 4
    small, corrections = ir.VectorType(_I8, LANES), [_NO_SUMS] * DIGITS
    for i in range(registers):
        quarters = [_digit_bytes(builder, x) for x in integers[4 * i : 4 * i + 4]]
        for k in range(DIGITS):
            parts = [builder.trunc(builder.lshr(x, _words(8 * k)), small) for x in quarters]
            while len(parts) > 1:
                order = shuffle_mask(range(2 * parts[0].type.count))
                parts = [
                    builder.shuffle_vector(x, y, order)
                    for x, y in zip(parts[::2], parts[1::2], strict=True)
                ]
            digits = builder.bitcast(parts[0], _I32_VECTOR)
            _store_words(builder, digits, words, i * DIGITS + k)
            every = _words(-0x7F7F7F80)  # 128 in each byte
            corrections[k] = _add_byte_products(builder, corrections[k], every, digits)
    low = builder.add(corrections[0], builder.shl(corrections[1], _words(8)))
    for i, x in enumerate((low, corrections[2])):
        _store_words(builder, builder.sub(_NO_SUMS, x), words, registers * DIGITS + i)


def _write_int4_digits(builder: Any, integers: list[Any], words: Any) -> None:
    """Write the digits of a block in the order of its 4-bit codes, and minus the sums of its
    integers: byte b of word w has the codes 32 b + w and 32 b + 16 + w.
    """
    for half in range(2):
        quarters = [_digit_bytes(builder, x) for x in integers[half::2]]
        for k in range(DIGITS):
            digits = _NO_SUMS
            for b, x in enumerate(quarters):
                byte = builder.and_(builder.lshr(x, _words(8 * k)), _words(255))
                digits = builder.or_(digits, builder.shl(byte, _words(8 * b)))
            _store_words(builder, digits, words, half * DIGITS + k)
    total = _NO_SUMS
    for x in integers:
        total = builder.sub(total, x)
    _store_words(builder, total, words, 2 * DIGITS)


_pack_int8_64, _pack_int8_128, _pack_int4 = (
    _make_pack(8, 64),
    _make_pack(8, 128),
    _make_pack(4, 128),
)


@intrinsic
def widen_scales(
    context: Any, scales: Any, begin: Any, count: Any, tag: Any, wide: Any, whole: Any
) -> Any:
    """Convert `count` stored scales from `begin` on to fp32, and each of them, which may be a zero,
    to an integer. LLVM alone converts one number at a time.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = builder.gep(array_data(context, builder, scales, args[0]), [args[1]])
        results = array_data(context, builder, wide, args[4])
        integers = array_data(context, builder, whole, args[5])
        bounds = (i64_constant(0), builder.and_(args[2], i64_constant(-LANES)), args[2])
        for lanes, first, last in ((LANES, *bounds[:2]), (1, *bounds[1:])):
            loop = LLVMLoop(builder, first, last, lanes)
            x = load_floats(builder, builder.gep(source, [loop.index]), tag, lanes)
            store(builder, x, builder.gep(results, [loop.index]), lanes)
            zeros = builder.fptosi(x, _I32_VECTOR)
            place = builder.gep(integers, [loop.index])
            if lanes == 1:
                builder.store(builder.extract_element(zeros, ir.Constant(_I32, 0)), place)
            else:
                builder.store(zeros, builder.bitcast(place, zeros.type.as_pointer()), align=4)
            loop.close()
        return context.get_dummy_value()

    return types.void(scales, begin, count, tag, wide, whole), code


@njit_strict
def pack_int8_digits(vectors, group, digits):
    """Write the digits of fp32 vectors `[P, >= width]` for 8-bit codes.

    digits: (words, factors, for each vector how many of its blocks must be multiplied in fp32).
    """
    words, factors, spread = digits
    for r in range(len(vectors)):
        if group == 128:
            spread[r] = _pack_int8_128(vectors, r, words, factors)
        else:
            spread[r] = _pack_int8_64(vectors, r, words, factors)


@njit_strict
def pack_int4_digits(vectors, digits):
    """Write the digits of fp32 vectors `[P, >= width]` for 4-bit codes; see `pack_int8_digits`."""
    words, factors, spread = digits
    for r in range(len(vectors)):
        spread[r] = _pack_int4(vectors, r, words, factors)


@njit_strict
def int4_digit_rows(first, last, R, codes, scales, width, tag, room, digits, sums):
    """Compute rows of W x as `stored_weight_loops.int4_rows` does, for groups of 128 and zeros that
    are integers in 0 ... 15.

    room: (the sums of a step, the scales and zeros of `SCALED_ROWS` rows in fp32 and as integers).
    digits: see `pack_int8_digits`.
    """
    out, wide, whole = room
    words, factors, _ = digits
    size, distance = width // 2, 2 * (width // INT4_BLOCK)
    for begin in range(first, last, SCALED_ROWS):
        end = min(last, begin + SCALED_ROWS)
        widen_scales(scales, begin * distance, (end - begin) * distance, tag, wide, whole)
        i = begin
        while i < end:
            n, start = (i - begin) * distance, i * size
            lines = ROWS_PER_STEP if R == 1 and i + ROWS_PER_STEP <= end else 1
            # the scales are not next to the codes, so that nothing else asks for them in time
            prefetch_array(scales, (i + SCALED_ROWS) * distance, lines * distance)
            for r in range(0, R, ROWS_PER_STEP):
                if lines > 1:
                    _int4_4_1(codes, start, size, wide, whole, n, distance, words, factors, r, out)
                elif R == 1:
                    _int4_1_1(codes, start, size, wide, whole, n, distance, words, factors, r, out)
                else:
                    _int4_1_4(codes, start, size, wide, whole, n, distance, words, factors, r, out)
                _copy_sums(out, lines, R, r, i, sums)
            i += lines


@njit_strict
def _copy_sums(out, lines, R, r, i, sums):
    """Copy the sums of `lines` rows from i on with one vector, or of row i with some vectors from
    vector r on.
    """
    if R == 1:
        for j in range(lines):
            sums[0, i + j] = out[j]
    else:
        for j in range(min(ROWS_PER_STEP, R - r)):
            sums[r + j, i] = out[j]


@njit_strict
def _lines_of_int8(
    lines, R, codes, start, size, wide, whole, n, distance, group, words, factors, r, out
):
    """Multiply 4 rows with one vector, or one row with one vector or with 4 of them."""
    if lines > 1:
        if group == 32:
            _int8_32_4_1(codes, start, size, wide, whole, n, distance, words, factors, r, out)
        elif group == 64:
            _int8_64_4_1(codes, start, size, wide, whole, n, distance, words, factors, r, out)
        else:
            _int8_128_4_1(codes, start, size, wide, whole, n, distance, words, factors, r, out)
    elif R == 1:
        if group == 32:
            _int8_32_1_1(codes, start, size, wide, whole, n, distance, words, factors, r, out)
        elif group == 64:
            _int8_64_1_1(codes, start, size, wide, whole, n, distance, words, factors, r, out)
        else:
            _int8_128_1_1(codes, start, size, wide, whole, n, distance, words, factors, r, out)
    elif group == 32:
        _int8_32_1_4(codes, start, size, wide, whole, n, distance, words, factors, r, out)
    elif group == 64:
        _int8_64_1_4(codes, start, size, wide, whole, n, distance, words, factors, r, out)
    else:
        _int8_128_1_4(codes, start, size, wide, whole, n, distance, words, factors, r, out)


@njit_strict
def int8_digit_rows(first, last, R, codes, scales, width, group, tag, room, digits, sums):
    """Compute rows of W x as `stored_weight_loops.int8_rows` does, for a width that is a multiple
    of 64. room, digits: see `int4_digit_rows`.
    """
    out, wide, whole = room
    words, factors, _ = digits
    distance = width // group
    for begin in range(first, last, SCALED_ROWS):
        end = min(last, begin + SCALED_ROWS)
        widen_scales(scales, begin * distance, (end - begin) * distance, tag, wide, whole)
        i = begin
        while i < end:
            n, start = (i - begin) * distance, i * width
            lines = ROWS_PER_STEP if R == 1 and i + ROWS_PER_STEP <= end else 1
            prefetch_array(scales, (i + SCALED_ROWS) * distance, lines * distance)
            for r in range(0, R, ROWS_PER_STEP):
                _lines_of_int8(
                    lines,
                    R,
                    codes,
                    start,
                    width,
                    wide,
                    whole,
                    n,
                    distance,
                    group,
                    words,
                    factors,
                    r,
                    out,
                )
                _copy_sums(out, lines, R, r, i, sums)
            i += lines
