"""Products of fp16 matrices by tiles of bfloat16 numbers, y = W x + b for many vectors x, on
processors with AMX.

AMX multiplies bfloat16 numbers, and has no such instruction for fp16. But an fp16 number, of 11
bits, is exactly the sum of two bfloat16 numbers, of 8 bits each: its 8 leading bits, and the rest.

    w = w_hi + w_lo     x = x_hi + x_lo
    w x = w_hi x_hi + w_hi x_lo + w_lo x_hi + w_lo x_lo

The exponents of bfloat16 numbers reach further than those of fp16 numbers, so that this holds for
subnormal numbers, too. Each of the four products is exact in fp32, and their sums are in fp32, as
in a product of fp32 matrices. Where every w_lo of a panel is 0, as in weights that were trained in
bfloat16, two products are enough. The rest of an infinity or of a NaN is NaN, which reaches the
result: a result that is not finite is reported, so that the caller computes it in another way.

A task is a block of outputs of a block of vectors. For a part of the numbers of a vector (`depth`),
it splits the weights once into panels of PANEL_COLUMNS outputs, which stay in the L2 cache. Then it
splits groups of TILE_PRODUCT_ROWS vectors and multiplies them with all panels, INNER_DEPTH numbers
at a time, for which the group stays in the L1 cache. Every row of a tile begins at a cache line;
otherwise the products take twice as long (LOG.md). `regard.ops.fp16_linear` calls `entry_address`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from regard.ops.jit.amx import (
    CONFIGURATION_BYTES,
    TILE_PRODUCT_ROWS,
    TILE_ROWS,
    TileRows,
    configure_tiles,
    multiply_tiles,
    restore_tiles,
)
from regard.ops.jit.argument_structs import FP16_LINEAR_STRUCT
from regard.ops.jit.compile import njit_strict, njit_strict_no_arrays
from regard.ops.jit.entry_points import entry_point, memory_at, struct_at, take_task
from regard.ops.jit.half_precision import FP16, from_float32, to_float32
from regard.ops.jit.llvm_vectors import (
    CACHE_LINE,
    I64,
    LANES,
    LLVMLoop,
    array_data,
    shuffle_mask,
)
from regard.ops.jit.matmul import PANEL_COLUMNS

ARGUMENTS = FP16_LINEAR_STRUCT.dtype

INNER_DEPTH = 128
"""How many numbers of each vector of a group are multiplied at a time: in two parts, those of a
group fill a third of an L1 cache of 48 KiB.
"""

_I8, _I16, _I32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)
_WORDS, _SHORTS = ir.VectorType(_I32, LANES), ir.VectorType(_I16, LANES)
_HALVES, _FLOATS = ir.VectorType(ir.HalfType(), LANES), ir.VectorType(ir.FloatType(), LANES)
_HI_MASK = ir.Constant(_WORDS, [-(1 << 16)] * LANES)
_SIXTEEN = ir.Constant(_WORDS, [16] * LANES)


def _split(builder: Any, words: Any) -> list[Any]:
    """Return the two parts of 32 fp16 numbers, which are pairs in words, as pairs of bfloat16
    numbers.
    """
    parts: tuple[list[Any], list[Any]] = ([], [])
    for pair in (words, builder.lshr(words, _SIXTEEN)):
        halves = builder.bitcast(builder.trunc(pair, _SHORTS), _HALVES)
        x = builder.fpext(halves, _FLOATS)
        hi = builder.and_(builder.bitcast(x, _WORDS), _HI_MASK)
        rest = builder.fsub(x, builder.bitcast(hi, _FLOATS))
        parts[0].append(hi)
        parts[1].append(builder.bitcast(rest, _WORDS))
    return [
        builder.or_(builder.lshr(even, _SIXTEEN), builder.and_(odd, _HI_MASK))
        for even, odd in parts
    ]


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Return the columns of a matrix of 16 x 16 words, given by its rows: at each step, blocks of
    twice the size are exchanged across the diagonal.
    """
    size = 1
    while size < LANES:
        low = [i for i in range(LANES) if not i & size]
        first = shuffle_mask([i if not i & size else LANES + i - size for i in range(LANES)])
        second = shuffle_mask([i + size if not i & size else LANES + i for i in range(LANES)])
        after = list(rows)
        for i in low:
            after[i] = builder.shuffle_vector(rows[i], rows[i + size], first)
            after[i + size] = builder.shuffle_vector(rows[i], rows[i + size], second)
        rows, size = after, 2 * size
    return rows


def _words_at(builder: Any, start: Any, index: Any) -> Any:
    """Return a pointer to the 16 words that begin at an index of an array of 16-bit numbers."""
    return builder.bitcast(builder.gep(start, [index]), _WORDS.as_pointer())


@intrinsic
def _split_row(context, x, begin, out, to, distance, count):
    """Split `count` numbers x[begin], ... into out[to], ... and out[to + distance], ...; count is a
    multiple of 32.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = array_data(context, builder, signature.args[0], args[0])
        target = array_data(context, builder, signature.args[2], args[2])
        _, first, _, to, distance, count = args
        loop = cgutils.for_range_slice(builder, I64(0), count, I64(2 * LANES), intp=I64)
        with loop as (i, _):
            words = builder.load(_words_at(builder, source, builder.add(first, i)), align=2)
            place = builder.add(to, i)
            for part in _split(builder, words):
                builder.store(part, _words_at(builder, target, place), align=2)
                place = builder.add(place, distance)
        return context.get_dummy_value()

    i = types.int64
    return types.none(x, i, out, i, i, i), code


@intrinsic
def _split_columns(context, w, begin, step, last, out, to, distance, count):
    """Split 16 rows of a matrix into 16 columns of two panels.

    Row i begins at w[begin + min(i, last) step]. The panel `[count / 2, PANEL_COLUMNS, 2]` begins
    at out[to], that of the rests at out[to + distance]. count is a multiple of 32.

    Returns:
        All words of the rests, joined by "or".
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = array_data(context, builder, signature.args[0], args[0])
        target = array_data(context, builder, signature.args[4], args[4])
        _, first, step, last, _, to, distance, count = args
        starts = []
        for i in range(LANES):
            row = builder.select(builder.icmp_signed("<", I64(i), last), I64(i), last)
            starts.append(builder.add(first, builder.mul(row, step)))
        zeros = ir.Constant(_WORDS, [0] * LANES)
        loop = LLVMLoop(builder, I64(0), count, 2 * LANES, [zeros])
        rows = []
        for start in starts:
            place = _words_at(builder, source, builder.add(start, loop.index))
            rows.append(_split(builder, builder.load(place, align=2)))
        here = builder.add(to, builder.mul(loop.index, I64(PANEL_COLUMNS)))
        for part in zip(*rows, strict=True):
            for i, words in enumerate(_transposed(builder, list(part))):
                index = builder.add(here, I64(i * PANEL_COLUMNS * 2))
                builder.store(words, _words_at(builder, target, index), align=2)
            here = builder.add(here, distance)
        (joined,) = loop.now
        for _, rest in rows:
            joined = builder.or_(joined, rest)
        (joined,) = loop.close([joined])
        total = builder.extract_element(joined, _I32(0))
        for i in range(1, LANES):
            total = builder.or_(total, builder.extract_element(joined, _I32(i)))
        return total

    i = types.int64
    return types.int32(w, i, i, i, out, i, i, i), code


def _make_product(weight_parts: int) -> Any:
    """Return the compiled function that adds the products of a group of vectors and a panel to
    sums, where the panel has one part, or two.
    """

    def product(context, a, a_at, a_next, b, b_at, b_next, k, c, c_at, c_step):
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _, a_at, a_next, _, b_at, b_next, k, _, c_at, c_step = args

            def start(i: int, begin: Any) -> Any:
                data = array_data(context, builder, signature.args[i], args[i])
                return builder.bitcast(builder.gep(data, [begin]), _I8.as_pointer())

            def parts(distance: Any) -> tuple[Any, ...]:
                return I64(0), builder.mul(distance, I64(2))

            left = TileRows(start(0, a_at), builder.mul(k, I64(2)), parts(a_next))
            row_bytes = I64(PANEL_COLUMNS * 4)
            right = TileRows(start(3, b_at), row_bytes, parts(b_next)[:weight_parts])
            sums = TileRows(start(7, c_at), builder.mul(c_step, I64(4)))
            multiply_tiles(builder, left, right, k, sums, PANEL_COLUMNS, adds=True)
            return context.get_dummy_value()

        i = types.int64
        return types.none(a, i, i, b, i, i, i, c, i, i), code

    return intrinsic(product)


_add_product, _add_product_without_rest = _make_product(2), _make_product(1)


@njit_strict_no_arrays
def _split_weight(w, M, block, depth, panels, has_rest):
    """Split the numbers depth[0] to depth[1] - 1 of the rows block[0] to block[1] - 1 of W into
    panels, and note for each panel whether any rest is not 0.
    """
    count = depth[1] - depth[0]
    size = count * PANEL_COLUMNS
    for p in range(has_rest.shape[0]):
        joined = np.int32(0)
        for column in range(0, PANEL_COLUMNS, TILE_ROWS):
            # the columns after the last row repeat it; their results are not written
            n = min(block[0] + p * PANEL_COLUMNS + column, block[1] - 1)
            to = 2 * p * size + 2 * column
            joined |= _split_columns(
                w, n * M + depth[0], M, block[1] - 1 - n, panels, to, size, count
            )
        has_rest[p] = joined != 0


@njit_strict_no_arrays
def _split_group(x, M, first, R, depth, group):
    """Split the numbers depth[0] to depth[1] - 1 of a group of vectors into blocks
    `[TILE_PRODUCT_ROWS, INNER_DEPTH]`, the last of which may be smaller; the vectors after the last
    one repeat it.
    """
    size = TILE_PRODUCT_ROWS * (depth[1] - depth[0])
    for i in range(TILE_PRODUCT_ROWS):
        start = min(first + i, R - 1) * M
        for d in range(depth[0], depth[1], INNER_DEPTH):
            k = min(INNER_DEPTH, depth[1] - d)
            to = (d - depth[0]) * TILE_PRODUCT_ROWS + i * k
            _split_row(x, start + d, group, to, size, k)


@njit_strict_no_arrays
def _multiply_group(group, panels, has_rest, count, sums, place, step):
    """Multiply a group of vectors with all panels, and add the products to the sums from `place`
    on, whose rows are `step` numbers apart.
    """
    size, next_part = count * PANEL_COLUMNS, TILE_PRODUCT_ROWS * count
    for d in range(0, count, INNER_DEPTH):
        a, k = d * TILE_PRODUCT_ROWS, min(INNER_DEPTH, count - d)
        for p in range(has_rest.shape[0]):
            b, c = 2 * p * size + d * PANEL_COLUMNS, place + p * PANEL_COLUMNS
            if has_rest[p]:
                _add_product(group, a, next_part, panels, b, size, k, sums, c, step)
            else:
                _add_product_without_rest(group, a, next_part, panels, b, size, k, sums, c, step)


@intrinsic
def _round_sums(context, sums, begin, bias, out, to, count, largest):
    """Add bias[0], ... to the first `count` sums from sums[begin] on, a multiple of LANES, round
    them to fp16, and write their bits from out[to] on; largest[i] becomes the largest of these bits
    without signs in lane i, if they are more.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, added, target, most = (
            array_data(context, builder, signature.args[i], args[i]) for i in (0, 2, 3, 6)
        )
        _, begin, _, _, to, count, _ = args

        def place(start: Any, index: Any, kind: Any) -> Any:
            return builder.bitcast(builder.gep(start, [index]), kind.as_pointer())

        most = place(most, I64(0), _SHORTS)
        loop = LLVMLoop(builder, I64(0), count, LANES, [builder.load(most, align=2)])
        z = builder.load(place(source, builder.add(begin, loop.index), _FLOATS), align=4)
        b = builder.load(place(added, loop.index, _FLOATS), align=4)
        bits = builder.bitcast(builder.fptrunc(builder.fadd(z, b), _HALVES), _SHORTS)
        builder.store(bits, place(target, builder.add(to, loop.index), _SHORTS), align=2)
        size = builder.and_(bits, ir.Constant(_SHORTS, [0x7FFF] * LANES))
        (largest_size,) = loop.now
        largest_size = builder.select(
            builder.icmp_unsigned(">", size, largest_size), size, largest_size
        )
        (largest_size,) = loop.close([largest_size])
        builder.store(largest_size, most, align=2)
        return context.get_dummy_value()

    i = types.int64
    return types.none(sums, i, bias, out, i, i, largest), code


@njit_strict_no_arrays
def _write_rows(sums, place, step, bias, block, rows, y, N, largest):
    """Add the bias to the sums of some vectors, from `place` on and `step` numbers apart, round
    them, and write them; note the largest bits of an exponent and a mantissa.
    """
    count = block[1] - block[0]
    whole = count // LANES * LANES
    for r in range(rows[0], rows[1]):
        begin, to = place + (r - rows[0]) * step, r * N + block[0]
        _round_sums(sums, begin, bias, y, to, whole, largest)
        for i in range(whole, count):
            bits = from_float32(sums[begin + i] + bias[i], FP16, y)
            y[to + i] = bits
            largest[0] = max(largest[0], bits & np.uint16(0x7FFF))


@njit_strict_no_arrays
def _load_bias(b, has_bias, block, bias):
    """Convert the biases of a block of outputs; without them use -0, which changes no sum."""
    for i in range(block[1] - block[0]):
        bias[i] = to_float32(b[block[0] + i], FP16) if has_bias else np.float32(-0.0)


@njit_strict
def _from_cache_line(memory):
    """Return the part of an array from the first cache line on that begins in it."""
    return memory[-memory.ctypes.data % CACHE_LINE // memory.itemsize :]


@njit_strict
def run_tasks(address, arguments):
    """Take tasks until none is left; set `wrong` of the struct if some result is not finite."""
    R, M, N, G = arguments.R, arguments.M, arguments.N, TILE_PRODUCT_ROWS
    x, w = memory_at(arguments.x, np.uint16), memory_at(arguments.w, np.uint16)
    b, y = memory_at(arguments.b, np.uint16), memory_at(arguments.y, np.uint16)
    wrong = memory_at(arguments.wrong, np.int64)
    columns, rows, depth = arguments.columns, arguments.rows, arguments.depth
    column_blocks = (N + columns - 1) // columns
    tasks = column_blocks * ((R + rows - 1) // rows)
    # the sums of one group are enough where its vectors are multiplied as a whole
    kept_groups = 1 if depth >= M else (min(R, rows) + G - 1) // G
    panels = _from_cache_line(np.empty(2 * columns * depth + CACHE_LINE, np.int16))
    group = _from_cache_line(np.empty(2 * G * depth + CACHE_LINE, np.int16))
    sums = _from_cache_line(np.empty(kept_groups * G * columns + CACHE_LINE, np.float32))
    has_rest, bias = np.empty(columns // PANEL_COLUMNS, np.bool_), np.empty(columns, np.float32)
    configuration, largest = np.empty(2 * CONFIGURATION_BYTES, np.uint8), np.zeros(LANES, np.uint16)
    configure_tiles(group, configuration)
    while True:
        task = take_task(address)
        if task >= tasks:
            break
        n, r = task % column_blocks * columns, task // column_blocks * rows
        block, end = (n, min(N, n + columns)), min(R, r + rows)
        some = has_rest[: (block[1] - n + PANEL_COLUMNS - 1) // PANEL_COLUMNS]
        _load_bias(b, arguments.b != 0, block, bias)
        for k in range(0, M, depth):
            part = (k, min(M, k + depth))
            _split_weight(w, M, block, part, panels, some)
            for first in range(r, end, G):
                place = (first - r) // G % kept_groups * G * columns
                if k == 0:
                    sums[place : place + G * columns] = 0
                _split_group(x, M, first, R, part, group)
                _multiply_group(group, panels, some, part[1] - k, sums, place, columns)
                if part[1] == M:
                    vectors = (first, min(end, first + G))
                    _write_rows(sums, place, columns, bias, block, vectors, y, N, largest)
    restore_tiles(group, configuration)
    if largest.max() >= np.uint16(0x7C00):
        wrong[0] = 1


def _entry(address: int) -> None:
    """Run the tasks of the struct at an address."""
    run_tasks(address, struct_at(address, ARGUMENTS))


@entry_point
def entry_address() -> Callable[[int], None]:
    """Return the address of the compiled entry."""
    return _entry
