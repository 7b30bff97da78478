"""A matrix with a few vectors, compiled: y = W x + b, each weight read once, in the order in which
it lies in memory.

One row of W at a time: a core that reads four at once reads at half the memory's speed (LOG.md).
`entry` at the end is what `regard.ops.gemv` calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from regard.ops.jit.compile import exact
from regard.ops.jit.entries import KINDS, address_of, memory_at, record_at, take
from regard.ops.jit.half_precision import narrow, widen
from regard.ops.jit.records import GEMV
from regard.ops.jit.vectors import LANES, NOTHING, Loop, ask, data, line, number, put, size_of, sums
from regard.ops.jit.vectors import fma as multiply_add
from regard.ops.jit.vectors import numbers as load

TOGETHER = 4
"""Vectors that a weight is multiplied with once it is in a register."""

AHEAD = 2048
"""Bytes ahead of a weight that are asked for."""

BLOCK = 1 << 17
"""Bytes of weights that make a task."""


RECORD = GEMV.dtype


def _dot(rows: int) -> Any:
    """The products of one row of W with so many vectors, to out[:rows]."""

    def product(context: Any, w: Any, at: Any, x: Any, first: Any, tag: Any, out: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            flat, start, vectors, r, _, found = args
            row = builder.gep(data(context, builder, w, flat), [start])
            given = [
                line(context, builder, x, vectors, builder.add(r, number(i))) for i in range(rows)
            ]
            made = context.make_array(x)(context, builder, value=vectors)
            M = cgutils.unpack_tuple(builder, made.shape)[1]
            wide = TOGETHER // rows * LANES
            ends = [number(0), *(builder.and_(M, number(-step)) for step in (wide, LANES)), M]
            total = [NOTHING] * rows
            for begin, end, step in zip(ends, ends[1:], (wide, LANES, 1), strict=False):
                total = _dims(builder, (begin, end, step), row, given, tag, total)
            put(builder, sums(builder, total), data(context, builder, out, found), rows)
            return context.get_dummy_value()

        return types.void(w, at, x, first, tag, out), code

    return intrinsic(product)


def _dims(
    builder: Any, run: tuple[Any, Any, int], row: Any, given: list[Any], tag: Any, total: list[Any]
) -> list[Any]:
    """A run of dims, so many to a turn of the loop, each vector of them with a sum of its own."""
    begin, end, step = run
    many, lanes, rows = max(1, step // LANES), min(step, LANES), len(given)
    loop = Loop(builder, begin, end, step, [*total, *[NOTHING] * (rows * (many - 1))])
    here = builder.gep(row, [loop.i])
    if step > 1:
        ask(builder, here, AHEAD, step * size_of(here))
    after = list(loop.now)
    for j in range(many):
        place = [builder.add(loop.i, number(j * LANES))]
        k = load(builder, builder.gep(row, place), tag, lanes)
        for i, x in enumerate(given):
            v, n = load(builder, builder.gep(x, place), tag, lanes), j * rows + i
            after[n] = multiply_add(builder, k, v, after[n])
    done = loop.close(after)
    found = done[:rows]
    for j in range(1, many):
        more = done[j * rows : (j + 1) * rows]
        found = [builder.fadd(a, b) for a, b in zip(found, more, strict=True)]
    return found


_dot_4, _dot_1 = _dot(TOGETHER), _dot(1)


@exact
def multiply(address, given, x, w, b, y, tag):
    """Blocks of rows of W, while there are any; flat memory. Vectors are widened once, to a
    multiple of four or one.
    """
    R, M, N = given.R, given.M, given.N
    vectors = np.zeros((1 if R == 1 else (R + TOGETHER - 1) // TOGETHER * TOGETHER, M), np.float32)
    for r in range(R):
        for i in range(M):
            vectors[r, i] = widen(x[r * M + i], tag)
    step, found = max(1, BLOCK // (M * w.itemsize)), np.empty(TOGETHER, np.float32)
    while True:
        n = take(address) * step
        if n >= N:
            break
        for i in range(n, min(N, n + step)):
            bias = widen(b[i], tag) if given.b else np.float32(0)
            for r in range(0, R, TOGETHER):
                if R == 1:
                    _dot_1(w, i * M, vectors, r, tag, found)
                else:
                    _dot_4(w, i * M, vectors, r, tag, found)
                for j in range(min(TOGETHER, R - r)):
                    y[(r + j) * N + i] = narrow(found[j] + bias, tag, y)


def _entry(dtype: Any, tag: Any) -> Callable[[int], None]:
    def entry(address: int) -> None:
        given = record_at(address, RECORD)
        x, w = memory_at(given.x, dtype), memory_at(given.w, dtype)
        b, y = memory_at(given.b, dtype), memory_at(given.y, dtype)
        multiply(address, given, x, w, b, y, tag)

    return entry


@cache
def entry(dtype: torch.dtype) -> int:
    """The address of the entry for weights of a dtype."""
    return address_of(_entry(*KINDS[dtype]))
