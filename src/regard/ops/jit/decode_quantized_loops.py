"""The compiled loops of decoding over keys and values that are stored as codes of 8, 4 or 2 bits.
The loops read the codes directly; they are never converted to a copy in memory.

Keys have one scale per channel for each group of tokens, values have one scale per token for each
group of channels. A line is a run of numbers that share a scale and a zero, x = zero + code *
scale: for keys the tokens of a group in one channel, for values a group of channels of one token.
One function, `weighted_line_sums`, therefore computes both scores and weighted values:

    out[r, :] (+)= sum_i w[r, i] (zero[i] + code[i, :] scale[i])
               = sum_i (w[r, i] scale[i]) (code[i, :] - half)
                 + sum_i w[r, i] (zero[i] + half scale[i])

Each code is read once for four rows, and is multiplied as an integer converted to float, because
its scale is part of the weight. Codes are counted from the middle of their range, `half`: counted
from 0, the two sums would be larger than their total, and the total in fp32 several times less
accurate. Codes of 8 bits are summed by `int_dot` where the processor supports it. Codes are always
finite, so that a masked one may be multiplied by a weight of 0.

Masks, the terms that are added to scores, and tasks are those of `decode_loops`. The module
`decode` calls `entry_address`. Arguments that the functions of the second half share:
    keys, values: (bytes of the codes, their strides [B, G, rows, lines]; scales, zeros, their
        strides [B, G, rows, lines], tag of their encoding; columns of a group, bits; number of
        tokens S). For keys a row is a group of tokens and a line is a channel; for values a row is
        a token and a line is one of its groups of channels.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from regard.ops.jit.argument_structs import DECODE_QUANTIZED_STRUCT
from regard.ops.jit.compile import njit_fastmath_no_arrays, njit_strict
from regard.ops.jit.decode_loops import (
    NEG_INF,
    apply_softcap_and_bias,
    decode_arguments,
    join_splits,
    online_softmax,
    query_visibility,
    tile_coverage,
    write_output,
)
from regard.ops.jit.entry_points import (
    STORAGE,
    entry_point,
    finish_task,
    memory_at,
    struct_at,
    take_task,
)
from regard.ops.jit.half_precision import to_float32
from regard.ops.jit.int_dot import HAS_INT_DOT, MAX_LINES, int_weighted_sums
from regard.ops.jit.llvm_vectors import (
    FLOAT,
    LLVMLoop,
    array_data,
    broadcast,
    fma,
    i64_constant,
    prefetch_array,
    row_pointer,
)

BLOCK_COLUMNS = 32
"""The number of columns of a line that are summed together; their sums for four rows stay in
registers.
"""

_I8, _I32 = ir.IntType(8), ir.IntType(32)


def _load_codes(builder: Any, flat: Any, start: Any, columns: int, bits: int) -> list[Any]:
    """Load `columns` codes as vectors of floats, minus the middle of their range.

    A byte holds per = 8 / bits codes. Vector v * per + i holds the i-th code of each byte of the
    v-th run of bytes, so that the codes are not in the order of the columns; `_interleave` restores
    this order.
    """
    per, size = 8 // bits, columns * bits // 8
    lanes = min(16, size)
    vectors = []
    for first in range(0, size, lanes):
        place = builder.gep(flat, [builder.add(start, i64_constant(first))])
        line = builder.load(builder.bitcast(place, ir.VectorType(_I8, lanes).as_pointer()), align=1)
        wide = builder.zext(line, ir.VectorType(_I32, lanes))
        for i in range(per):
            code = wide
            if i:
                code = builder.lshr(code, ir.Constant(code.type, [bits * i] * lanes))
            if i < per - 1:
                code = builder.and_(code, ir.Constant(code.type, [2**bits - 1] * lanes))
            code = builder.sub(code, ir.Constant(code.type, [2 ** (bits - 1)] * lanes))
            vectors.append(builder.sitofp(code, ir.VectorType(FLOAT, lanes)))
    return vectors


def _interleave(builder: Any, parts: list[Any]) -> list[Any]:
    """Interleave n vectors, of which vector i holds the numbers i, n + i, 2 n + i, ..., into one
    vector of the numbers in order; n is a power of 2.
    """
    while len(parts) > 1:
        half, lanes = len(parts) // 2, parts[0].type.count
        turns = [i for j in range(lanes) for i in (j, lanes + j)]
        order = ir.Constant(ir.VectorType(_I32, 2 * lanes), turns)
        pairs = zip(parts[:half], parts[half:], strict=True)
        parts = [builder.shuffle_vector(a, b, order) for a, b in pairs]
    return parts


@intrinsic
def _sum_variant(context: Any, variant: Any, lines: Any, weights: Any, out: Any) -> Any:
    """Compute the sums of `weighted_line_sums` for a few rows and columns. Each of the `VARIANTS`
    has its own loop in the compiled code, which is chosen at run time.

    variant: (rows, columns, bits). lines: (bytes of the codes, index of the first byte of the first
    line, stride to the next line, number of lines). weights: (array `[R, n]`; the term added to
    every number of a row `[R]`). out: (array `[R, n]`, first row of it and of the weights, first
    column, whether the numbers are overwritten rather than added to).
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        flat, first_byte, step, count = cgutils.unpack_tuple(builder, args[1])
        array, row, column, overwrite = cgutils.unpack_tuple(builder, args[3])
        weight_array, added_array = cgutils.unpack_tuple(builder, args[2])
        codes, added = (
            array_data(context, builder, kind, x)
            for kind, x in ((lines[0], flat), (weights[1], added_array))
        )
        end_block, no_variant = (
            builder.append_basic_block("end"),
            builder.append_basic_block("none"),
        )
        choice = builder.switch(
            _variant_key(builder, cgutils.unpack_tuple(builder, args[0])), no_variant
        )
        builder.position_at_end(no_variant)
        builder.unreachable()
        for rows, columns, bits in VARIANTS:
            block = builder.append_basic_block("variant")
            choice.add_case(i64_constant(_variant_number(rows, columns, bits)), block)
            builder.position_at_end(block)
            where = [builder.add(row, i64_constant(r)) for r in range(rows)]
            w = [row_pointer(context, builder, weights[0], weight_array, r) for r in where]
            sums = _line_loop(builder, (columns, bits), (codes, first_byte, step, count), w)
            for r, row_sums in zip(where, sums, strict=True):
                place = builder.gep(row_pointer(context, builder, out[0], array, r), [column])
                row_term = builder.load(builder.gep(added, [r]))
                _store_sums(builder, row_sums, place, 8 // bits, overwrite, row_term)
            builder.branch(end_block)
        builder.position_at_end(end_block)
        return context.get_dummy_value()

    return types.void(variant, lines, weights, out), code


VARIANTS = (
    *product((4, 1), (BLOCK_COLUMNS,), (8, 4, 2)),
    *((1, 8 // bits, bits) for bits in (8, 4, 2)),
)
"""The rows, columns and bits of each variant: four rows or one row of BLOCK_COLUMNS columns, and
one row of the columns of one byte, for the end of a line.
"""


def _variant_number(rows: int, columns: int, bits: int) -> int:
    """Return a number that identifies a variant."""
    return (rows * 64 + columns) * 16 + bits


def _variant_key(builder: Any, variant: list[Any]) -> Any:
    """Emit the code that computes `_variant_number` at run time."""
    key = builder.add(builder.mul(variant[0], i64_constant(64)), variant[1])
    return builder.add(builder.mul(key, i64_constant(16)), variant[2])


def _line_loop(
    builder: Any, form: tuple[int, int], lines: tuple[Any, ...], w: list[Any]
) -> list[Any]:
    """Emit the loop over lines, and return for each row the list of its sum vectors, in the order
    of `_load_codes`.
    """
    (columns, bits), (codes, start, step, count) = form, lines
    lanes = min(16, columns * bits // 8)
    n = columns // lanes
    nothing = ir.Constant(ir.VectorType(FLOAT, lanes), [0.0] * lanes)
    loop = LLVMLoop(builder, i64_constant(0), count, 1, [nothing] * (n * len(w)))
    position = builder.add(start, builder.mul(loop.index, step))
    x = _load_codes(builder, codes, position, columns, bits)
    weights = [builder.load(builder.gep(place, [loop.index])) for place in w]
    terms = [(y, broadcast(builder, weight, lanes)) for weight in weights for y in x]
    final = loop.close([fma(builder, *pair, z) for pair, z in zip(terms, loop.now, strict=True)])
    return [final[i : i + n] for i in range(0, len(final), n)]


def _store_sums(
    builder: Any, sums: list[Any], place: Any, per: int, overwrite: Any, row_term: Any
) -> None:
    """Store the sums of a row plus `row_term`, or add them to the stored numbers."""
    overwrite = builder.trunc(overwrite, ir.IntType(1))
    for v in range(0, len(sums), per):
        (whole,) = _interleave(builder, sums[v : v + per])
        whole = builder.fadd(whole, broadcast(builder, row_term, whole.type.count))
        target = builder.gep(place, [i64_constant(v * sums[0].type.count)])
        target = builder.bitcast(target, whole.type.as_pointer())
        nothing = ir.Constant(whole.type, [0.0] * whole.type.count)
        before = builder.select(overwrite, nothing, builder.load(target, align=4))
        builder.store(builder.fadd(before, whole), target, align=4)


@njit_fastmath_no_arrays
def _scale_weights(scales, first, count, w, rows, half, scratch):
    """Compute w[r, i] scale[i] `[R, n]`, and for each row sum_i w[r, i] (zero[i] + half scale[i])
    `[R]`; both are written to `scratch`.
    """
    scale, zero, step, tag = scales
    weighed, wide, middle, added, _, _ = scratch
    if step == 1:
        scale_line, zeros = scale[first : first + count], zero[first : first + count]
        for i in range(count):
            wide[i] = to_float32(scale_line[i], tag)
        for i in range(count):
            middle[i] = to_float32(zeros[i], tag) + half * wide[i]
    else:
        for i in range(count):
            wide[i] = to_float32(scale[first + i * step], tag)
            middle[i] = to_float32(zero[first + i * step], tag) + half * wide[i]
    for r in range(rows):
        line, row_weights, total = weighed[r], w[r], np.float32(0)
        for i in range(count):
            line[i] = row_weights[i] * wide[i]
            total += row_weights[i] * middle[i]
        added[r] = total


@njit_fastmath_no_arrays
def weighted_line_sums(rows, memory, offsets, w, scratch, out):
    """Compute out[r, c] (+)= sum_i w[r, i] x[i, c] over the lines i of a group, for all its columns
    c and all rows r.

    memory: (bytes of the codes, stride of the lines in bytes, (scales, zeros, stride from one line
    to the next, tag of their encoding), number of columns, bits, number of lines). offsets: (index
    of the first byte of the first line, index of its scale, index of the first byte to prefetch;
    as many bytes are prefetched as are read). w: `[R, n]`. scratch: (weights `[R, n]`, two lines
    `[n]`, `[R]`, (int16 `[R, n]`, `[R]`, int32 `[R]`), whether weights may be rounded to 16 bits).
    out: (array `[R, n]`, first column, whether the numbers are overwritten rather than added to).
    Rows after the requested ones, up to a multiple of four, may be written too.
    """
    codes, step, scales, group, bits, count = memory
    z, first, overwrite = out
    padded = rows if rows % 4 < 2 else z.shape[0]
    _scale_weights(scales, offsets[1], count, w, padded, np.float32(1 << (bits - 1)), scratch)
    if (
        HAS_INT_DOT
        and scratch[5]
        and bits == 8
        and padded % 4 == 0
        and group % 32 == 0
        and count % 2 == 0
        and count <= MAX_LINES
    ):
        lines = (codes, offsets[0], step, count, offsets[2])
        int_weighted_sums(padded, lines, group, scratch[0], scratch[3], scratch[4], out)
        return
    prefetch_array(codes, offsets[2], count * group * bits // 8)
    weights = (scratch[0], scratch[3])
    wide, c = group // BLOCK_COLUMNS * BLOCK_COLUMNS, 0
    while c < group:
        columns, r = BLOCK_COLUMNS if c < wide else 8 // bits, 0
        lines = (codes, offsets[0] + c * bits // 8, step, count)
        while r < padded:
            together = 4 if c < wide and r + 4 <= padded else 1
            _sum_variant((together, columns, bits), lines, weights, (z, r, first + c, overwrite))
            r += together
        c += columns


MIN_TILE_TOKENS = 128
"""The smallest number of tokens in a tile, which keeps the cost of the calls for each group of
channels low.
"""


@njit_strict
def _aligned_rows(rows, columns):
    """Return an array of zeros `[rows, columns]` that begins at a cache line; if `columns` is a
    multiple of 16, so does each row.
    """
    flat = np.zeros(rows * columns + 16, np.float32)
    first = -(flat.ctypes.data // 4) % 16
    return flat[first : first + rows * columns].reshape(rows, columns)


@njit_strict
def _tile_scores(q, rows, keys, b, g, tile, s, scratch):
    """Compute the scores s `[R, n]` of all rows of q `[R, D]` with the keys of a tile, which
    contains a whole number of groups of tokens.
    """
    codes, steps, scale, zero, scale_steps, tag, group, bits, _ = keys
    memory = (codes, steps[3], (scale, zero, scale_steps[3], tag), group, bits, q.shape[1])
    for j in range(tile[0], tile[1], group):
        n = j // group
        code_offset = b * steps[0] + g * steps[1] + n * steps[2]
        scale_offset = b * scale_steps[0] + g * scale_steps[1] + n * scale_steps[2]
        prefetch_start = code_offset + (tile[1] - tile[0]) // group * steps[2]
        weighted_line_sums(
            rows,
            memory,
            (code_offset, scale_offset, prefetch_start),
            q,
            scratch,
            (s, j - tile[0], True),
        )


@njit_strict
def _add_tile_values(s, rows, values, b, g, tile, acc, scratch):
    """Compute acc `[R, E]` += weights times the values of a tile."""
    codes, steps, scale, zero, scale_steps, tag, group, bits, _ = values
    scales = (scale, zero, scale_steps[2], tag)
    memory = (codes, steps[2], scales, group, bits, tile[1] - tile[0])
    code_offset = b * steps[0] + g * steps[1] + tile[0] * steps[2]
    scale_offset = b * scale_steps[0] + g * scale_steps[1] + tile[0] * scale_steps[2]
    groups = acc.shape[1] // group
    whole = (tile[1] - tile[0]) * steps[2]
    for i in range(groups):
        prefetch_start = code_offset + whole + whole // groups * i  # part of the next tile
        offsets = (code_offset + i * steps[3], scale_offset + i * scale_steps[3], prefetch_start)
        weighted_line_sums(rows, memory, offsets, s, scratch, (acc, i * group, False))


@njit_strict
def _tile_visibility(b, g, tile, rows, T, mask, visible):
    """Set visible[r, c] to whether row r sees key c of a tile, and return whether any row sees any
    of these keys.
    """
    heads, some = rows // T, False
    for r in range(rows):
        query_visibility(b, g * heads + r // T, r % T, tile, mask, visible[r])
        for c in range(tile[1] - tile[0]):
            some |= visible[r, c]
    return some


@njit_strict
def run_tasks(address, call, keys, values):
    """Take tasks until none is left, as `decode_loops.run_tasks` does, for keys and values that are
    stored as codes.
    """
    q_all, scale, T, mask, extra, out, lse = call
    B, G, P, R, E = out.shape
    D, group, S = q_all.shape[3], keys[6], keys[8]
    length = group * max(1, MIN_TILE_TOKENS // group)
    padded = R if R % 4 < 2 else (R + 3) // 4 * 4
    q, acc = _aligned_rows(padded, D), _aligned_rows(padded, E)
    top, total = np.empty(padded, np.float32), np.empty(padded, np.float64)
    s, visible = _aligned_rows(padded, length), np.empty((R, length), np.bool_)
    n = (max(D, length) + 15) // 16 * 16
    short = (
        np.empty((padded, n), np.int16),
        np.empty(padded, np.float32),
        np.empty(padded, np.int32),
    )
    line, more, added = _aligned_rows(1, n)[0], _aligned_rows(1, n)[0], np.zeros(padded, np.float32)
    scratch = (_aligned_rows(padded, n), line, more, added, short, keys[2].itemsize == 2)
    index = np.empty(length, np.int64)
    tiles = (S + length - 1) // length
    share = (tiles + P - 1) // P
    contiguous = mask[0].shape[1] == 0 and mask[4].shape[3] == 0
    plain = extra[0] == 0 and extra[2].shape[0] == 0 and extra[3].shape[3] == 0
    while True:
        task = take_task(address)
        if task >= B * G * P:
            break
        b, g, p = task // (G * P), task // P % G, task % P
        for r in range(R):  # Numba takes two seconds to compile the assignment of an array
            for d in range(q_all.shape[3]):
                q[r, d] = q_all[b, g, r, d] * scale
        acc[:] = 0
        top[:] = NEG_INF
        total[:] = 0
        for i in range(p * share, min(tiles, (p + 1) * share)):
            tile = (i * length, min(S, (i + 1) * length))
            cover = tile_coverage(b, g, tile, R, T, mask) if contiguous else 1
            if cover == 0 or (cover == 1 and not _tile_visibility(b, g, tile, R, T, mask, visible)):
                continue
            n = tile[1] - tile[0]
            _tile_scores(q, R, keys, b, g, tile, s, scratch)
            if not plain:
                for c in range(n):
                    index[c] = tile[0] + c
                apply_softcap_and_bias(s, b, g, R, T, n, index, mask, extra)
            for r in range(R):
                for c in range(n if cover == 1 else 0):
                    if not visible[r, c]:
                        s[r, c] = NEG_INF
            online_softmax(s, R, n, acc, top, total)
            _add_tile_values(s, R, values, b, g, tile, acc, scratch)
        write_output(acc, top, total, out[b, g, p], lse[b, g, p])
        if finish_task(address) == B * G * P - 1 and P > 1:
            join_splits(out, lse)
            finish_task(address)


@njit_strict
def _four_strides(x):
    """Return the four strides of a struct field as a tuple."""
    return x[0], x[1], x[2], x[3]


ARGUMENTS = DECODE_QUANTIZED_STRUCT.dtype


def _make_entry(dtype: Any, tag: Any) -> Callable[[int], None]:
    """Return the Python function of the entry for one storage dtype and tag of the scales, to be
    compiled.
    """

    def entry(address: int) -> None:
        arguments = struct_at(address, ARGUMENTS)
        S = arguments.S
        keys = (
            memory_at(arguments.k, np.uint8),
            _four_strides(arguments.k_steps),
            memory_at(arguments.k_scale, dtype),
            memory_at(arguments.k_zero, dtype),
            _four_strides(arguments.k_scale_steps),
            tag,
            arguments.k_group,
            arguments.k_bits,
            S,
        )
        values = (
            memory_at(arguments.v, np.uint8),
            _four_strides(arguments.v_steps),
            memory_at(arguments.v_scale, dtype),
            memory_at(arguments.v_zero, dtype),
            _four_strides(arguments.v_scale_steps),
            tag,
            arguments.v_group,
            arguments.v_bits,
            S,
        )
        run_tasks(address, decode_arguments(arguments), keys, values)

    return entry


@entry_point
def entry_address(dtype: torch.dtype) -> Callable[[int], None]:
    """Return the address of the compiled entry for codes with scales of a dtype."""
    return _make_entry(*STORAGE[dtype])
