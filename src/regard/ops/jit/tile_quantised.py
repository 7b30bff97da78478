"""The compiled loops over numbers kept as codes of few bits: weighted sums of lines, widened in
registers.

A line is a run of numbers that share a scale and a zero: x = zero + code * scale. Keys with a scale
per channel are lines of one channel over tokens, values with a scale per token are lines of one
token over channels; so that scores and the weighted values are one loop:

    out[r, :] (+)= sum_i w[r, i] (zero[i] + code[i, :] scale[i])
               = sum_i (w[r, i] scale[i]) (code[i, :] - half) + sum_i w[r, i] (zero[i] + half
               scale[i])

Each code is read once for four rows, and weighed as it is: its scale is in the weight. Codes count
from the middle of their
range: from its lower end the two sums would be larger than what they add up to, and fp32 off by
    several times as much.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from regard.ops.jit.bits import widen
from regard.ops.jit.tile_words import MOST, THERE, sum_words
from regard.ops.jit.vectors import (
    FLOAT,
    Loop,
    data,
    everywhere,
    fetch_bytes,
    fma,
    leaf,
    line,
    number,
)

BUILT_UPON = "1c431604cba98af8"
"""Of what it compiles in: Numba keeps compiled code until this very file changes
(tests/ops/test_jit.py).
"""

WIDE = 32
"""Numbers of a line that are summed together: their sums for four rows stay in registers."""

_I8, _I32 = ir.IntType(8), ir.IntType(32)


def _codes(builder: Any, flat: Any, at: Any, columns: int, bits: int) -> list[Any]:
    """Codes as vectors of floats: vector v * per + i has every per-th number of the v-th run of
    bytes, from i on.
    """
    per, size = 8 // bits, columns * bits // 8
    lanes = min(16, size)
    found = []
    for first in range(0, size, lanes):
        place = builder.gep(flat, [builder.add(at, number(first))])
        line = builder.load(builder.bitcast(place, ir.VectorType(_I8, lanes).as_pointer()), align=1)
        wide = builder.zext(line, ir.VectorType(_I32, lanes))
        for i in range(per):
            code = wide
            if i:
                code = builder.lshr(code, ir.Constant(code.type, [bits * i] * lanes))
            if i < per - 1:
                code = builder.and_(code, ir.Constant(code.type, [2**bits - 1] * lanes))
            code = builder.sub(code, ir.Constant(code.type, [2 ** (bits - 1)] * lanes))
            found.append(builder.sitofp(code, ir.VectorType(FLOAT, lanes)))
    return found


def _in_order(builder: Any, parts: list[Any]) -> list[Any]:
    """Vectors of every n-th number -> the numbers in order, as one vector."""
    while len(parts) > 1:
        half, lanes = len(parts) // 2, parts[0].type.count
        turns = [i for j in range(lanes) for i in (j, lanes + j)]
        order = ir.Constant(ir.VectorType(_I32, 2 * lanes), turns)
        pairs = zip(parts[:half], parts[half:], strict=True)
        parts = [builder.shuffle_vector(a, b, order) for a, b in pairs]
    return parts


@intrinsic
def _sum(context: Any, variant: Any, lines: Any, weights: Any, out: Any) -> Any:
    """`sum_lines` for rows and columns of a variant: one loop for each, chosen when it runs.

    variant: (rows, columns, bits). lines: (bytes of the codes, byte of the first line, step to the
        next, how many).
    weights: (array [R,n], from column 0; what is added to every number of a row [R]). out: (array
        [R,n], first row here and of the weights, first column, whether it is written anew).
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        flat, at, step, count = cgutils.unpack_tuple(builder, args[1])
        array, row, column, fresh = cgutils.unpack_tuple(builder, args[3])
        weigh, more = cgutils.unpack_tuple(builder, args[2])
        codes, added = (
            data(context, builder, kind, x) for kind, x in ((lines[0], flat), (weights[1], more))
        )
        end, none = builder.append_basic_block("end"), builder.append_basic_block("none")
        choice = builder.switch(_key(builder, cgutils.unpack_tuple(builder, args[0])), none)
        builder.position_at_end(none)
        builder.unreachable()
        for rows, columns, bits in VARIANTS:
            block = builder.append_basic_block("variant")
            choice.add_case(number(_number(rows, columns, bits)), block)
            builder.position_at_end(block)
            where = [builder.add(row, number(r)) for r in range(rows)]
            w = [line(context, builder, weights[0], weigh, r) for r in where]
            sums = _loop(builder, (columns, bits), (codes, at, step, count), w)
            for r, found in zip(where, sums, strict=True):
                place = builder.gep(line(context, builder, out[0], array, r), [column])
                plus = builder.load(builder.gep(added, [r]))
                _put(builder, found, place, 8 // bits, fresh, plus)
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(variant, lines, weights, out), code


VARIANTS = (*product((4, 1), (WIDE,), (8, 4, 2)), *((1, 8 // bits, bits) for bits in (8, 4, 2)))
"""Rows, columns, bits: four rows or one; and what is left of a line byte by byte."""


def _number(rows: int, columns: int, bits: int) -> int:
    """The number of a variant."""
    return (rows * 64 + columns) * 16 + bits


def _key(builder: Any, variant: list[Any]) -> Any:
    """`_number`, when it runs."""
    key = builder.add(builder.mul(variant[0], number(64)), variant[1])
    return builder.add(builder.mul(key, number(16)), variant[2])


def _loop(builder: Any, form: tuple[int, int], lines: tuple[Any, ...], w: list[Any]) -> list[Any]:
    """The loop over lines; the sums of each row, vector by vector."""
    (columns, bits), (codes, start, step, count) = form, lines
    lanes = min(16, columns * bits // 8)
    n = columns // lanes
    nothing = ir.Constant(ir.VectorType(FLOAT, lanes), [0.0] * lanes)
    loop = Loop(builder, number(0), count, 1, [nothing] * (n * len(w)))
    at = builder.add(start, builder.mul(loop.i, step))
    x = _codes(builder, codes, at, columns, bits)
    weights = [builder.load(builder.gep(place, [loop.i])) for place in w]
    terms = [(y, everywhere(builder, weight, lanes)) for weight in weights for y in x]
    found = loop.close([fma(builder, *pair, z) for pair, z in zip(terms, loop.now, strict=True)])
    return [found[i : i + n] for i in range(0, len(found), n)]


def _put(builder: Any, sums: list[Any], place: Any, per: int, fresh: Any, plus: Any) -> None:
    """Sums of a row and one more number, added to what is there, or in its place."""
    fresh = builder.trunc(fresh, ir.IntType(1))
    for v in range(0, len(sums), per):
        (whole,) = _in_order(builder, sums[v : v + per])
        whole = builder.fadd(whole, everywhere(builder, plus, whole.type.count))
        at = builder.gep(place, [number(v * sums[0].type.count)])
        at = builder.bitcast(at, whole.type.as_pointer())
        nothing = ir.Constant(whole.type, [0.0] * whole.type.count)
        before = builder.select(fresh, nothing, builder.load(at, align=4))
        builder.store(builder.fadd(before, whole), at, align=4)


compiled = leaf(fastmath={"contract", "reassoc", "nsz"})


@compiled
def _weigh(scales, at, count, w, rows, half, scratch):
    """Weights [R,n] with the scales of their lines in them, and what each row has of the middles of
    all lines [R].
    """
    scale, zero, step, tag = scales
    weighed, wide, middle, added, _, _ = scratch
    if step == 1:
        near, zeros = scale[at : at + count], zero[at : at + count]
        for i in range(count):
            wide[i] = widen(near[i], tag)
        for i in range(count):
            middle[i] = widen(zeros[i], tag) + half * wide[i]
    else:
        for i in range(count):
            wide[i] = widen(scale[at + i * step], tag)
            middle[i] = widen(zero[at + i * step], tag) + half * wide[i]
    for r in range(rows):
        line, given, total = weighed[r], w[r], np.float32(0)
        for i in range(count):
            line[i] = given[i] * wide[i]
            total += given[i] * middle[i]
        added[r] = total


@compiled
def sum_lines(rows, memory, at, w, scratch, out):
    """out[r, c] (+)= sum_i w[r, i] x[i, c] for the lines i of a group, all its columns c and all
    rows r.

    memory: (codes, step of the lines in bytes, (scales, zeros, step from one line to the next, tag
        of their bits), columns, bits, lines). at: (byte of the first line, number of its scale,
        byte from which as much is read next). w: [R,n]. scratch: (weights [R,n], two lines [n],
        [R], (int16 [R,n], [R]), whether weights may be rounded to 16 bits). out: (array [R,n],
        first column, whether it is written anew). Rows beyond those that are asked for, up to a
        multiple of four, may be written, too.
    """
    codes, step, scales, group, bits, count = memory
    z, first, fresh = out
    padded = rows if rows % 4 < 2 else z.shape[0]
    _weigh(scales, at[1], count, w, padded, np.float32(1 << (bits - 1)), scratch)
    if (
        THERE
        and scratch[5]
        and bits == 8
        and padded % 4 == 0
        and group % 32 == 0
        and count % 2 == 0
        and count <= MOST
    ):
        lines = (codes, at[0], step, count, at[2])
        sum_words(padded, lines, group, scratch[0], scratch[3], scratch[4], out)
        return
    fetch_bytes(codes, at[2], count * group * bits // 8)
    weights = (scratch[0], scratch[3])
    wide, c = group // WIDE * WIDE, 0
    while c < group:
        columns, r = WIDE if c < wide else 8 // bits, 0
        lines = (codes, at[0] + c * bits // 8, step, count)
        while r < padded:
            together = 4 if c < wide and r + 4 <= padded else 1
            _sum((together, columns, bits), lines, weights, (z, r, first + c, fresh))
            r += together
        c += columns
