"""The compiled loops over one tile of keys: scores, the softmax so far, and the weighted values.

`keys` and `values` are (flat memory, where the head begins in it, step from one token to the next,
tag of its bits); `index[:n]` are the numbers of the tokens that take part, with room up to a
multiple of eight. Nothing here knows of masks: a score of -inf is one. While a tile is computed,
the lines of the next are asked for in the order in which they lie: a core that waits for every line
reads at half the memory's speed (LOG.md).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from regard.ops.jit.bits import bits_of, exp, widen
from regard.ops.jit.largest import largest
from regard.ops.jit.vectors import (
    LANES,
    NOTHING,
    PAIRED,
    Loop,
    add_pairs,
    data,
    everywhere,
    fetch,
    fma,
    leaf,
    line,
    number,
    numbers,
    pairs,
    parts,
    put,
    sums,
)

BUILT_UPON = "37c7f72002086d8c"
"""Of what it compiles in: Numba keeps compiled code until this very file changes
(tests/ops/test_jit.py).
"""

TILE = 64
"""Keys that are scored together: with their values they fit the first cache."""

TOGETHER = {4: 4, 1: 8}
"""Rows that are scored together -> keys that are scored with them: their sums stay in registers."""

ZERO, NONE = np.float32(0), np.float32(-np.inf)
_FAST = {"contract", "reassoc", "nsz", "arcp"}
compiled = leaf(fastmath=_FAST)
plain = leaf()


def _score(rows: int) -> Any:
    """The loop over keys for so many rows of q: scale times their products, summed over D."""

    def loop(context: Any, q: Any, r: Any, keys: Any, index: Any, n: Any, s: Any) -> Any:
        paired = PAIRED and keys[0].dtype != types.float32 and keys[3] == types.int8

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            (queries, words, scale), first, (flat, base, step, _), listed, count, s_array = (
                cgutils.unpack_tuple(builder, x) if i in (0, 2) else x for i, x in enumerate(args)
            )
            where = [builder.add(first, number(r)) for r in range(rows)]
            wide = [line(context, builder, q[0], queries, r) for r in where]
            short = [line(context, builder, q[1], words, r) for r in where]
            found = [line(context, builder, s, s_array, r) for r in where]
            memory, chosen = (
                data(context, builder, keys[0], flat),
                data(context, builder, index, listed),
            )
            made = context.make_array(q[0])(context, builder, value=queries)
            D, tag = cgutils.unpack_tuple(builder, made.shape)[1], keys[3]
            tile = Loop(builder, number(0), count, TOGETHER[rows])
            places = []
            for j in range(TOGETHER[rows]):
                token = builder.load(builder.gep(chosen, [builder.add(tile.i, number(j))]))
                places.append(builder.gep(memory, [builder.add(base, builder.mul(token, step))]))
                later = builder.gep(places[-1], [builder.mul(step, number(TILE))])
                fetch(builder, later, D)
            total = _dims(builder, D, places, (wide, short if paired else None), tag)
            dots = sums(builder, total)
            dots = builder.fmul(dots, everywhere(builder, scale, dots.type.count))
            for row, x in zip(found, parts(builder, dots, len(places)), strict=True):
                put(builder, x, builder.gep(row, [tile.i]), len(places))
            tile.close()
            return context.get_dummy_value()

        return types.void(q, r, keys, index, n, s), code

    return intrinsic(loop)


def _dims(builder: Any, D: Any, keys: list[Any], queries: tuple[Any, Any], tag: Any) -> list[Any]:
    """Sums over D of each row with each key: of pairs of bfloat16 first, where queries stand in it
    too.
    """
    wide, short = queries
    sizes = (*((2 * LANES,) if short else ()), LANES, 1)
    ends = [number(0), *(builder.and_(D, number(-x)) for x in sizes)]
    total = [NOTHING] * (len(wide) * len(keys))
    for start, stop, lanes in zip(ends, ends[1:], sizes, strict=False):
        dims = Loop(builder, start, stop, lanes, total)
        k = [builder.gep(x, [dims.i]) for x in keys]
        x = [builder.gep(y, [dims.i]) for y in (short if lanes > LANES else wide)]
        if lanes > LANES:
            k, x = ([pairs(builder, y) for y in z] for z in (k, x))
        else:
            k, x = ([numbers(builder, y, tag, lanes) for y in z] for z in (k, x))
        add = add_pairs if lanes > LANES else fma
        terms = zip([(a, b) for a in x for b in k], dims.now, strict=True)
        total = dims.close([add(builder, a, b, z) for (a, b), z in terms])
    return total


def _mix(rows: int, columns: int) -> Any:
    """The loop over values for so many rows of weights, and columns of the sums."""
    lanes, steps = min(LANES, columns), [number(i) for i in range(0, columns, LANES)]

    def loop(context: Any, s: Any, r: Any, values: Any, index: Any, n: Any, out: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            s_array, first, (flat, base, step, _), listed, count, (acc, column, ahead) = (
                cgutils.unpack_tuple(builder, x) if i in (2, 5) else x for i, x in enumerate(args)
            )
            where = [builder.add(first, number(r)) for r in range(rows)]
            weights = [line(context, builder, s, s_array, r) for r in where]
            memory, chosen = (
                data(context, builder, values[0], flat),
                data(context, builder, index, listed),
            )
            sums_of = [builder.gep(line(context, builder, out[0], acc, r), [column]) for r in where]
            kept = [builder.gep(x, [i]) for x in sums_of for i in steps]
            so_far = [numbers(builder, x, types.none, lanes) for x in kept]
            tile = Loop(builder, number(0), count, 1, so_far)
            token = builder.load(builder.gep(chosen, [tile.i]))
            value = builder.gep(memory, [builder.add(base, builder.mul(token, step))])
            fetch(builder, builder.gep(value, [builder.mul(step, number(TILE))]), ahead)
            value = builder.gep(value, [column])
            v = [numbers(builder, builder.gep(value, [i]), values[3], lanes) for i in steps]
            w = [everywhere(builder, builder.load(builder.gep(x, [tile.i]))) for x in weights]
            terms = zip([(a, b) for a in w for b in v], tile.now, strict=True)
            after = tile.close([fma(builder, a, b, z) for (a, b), z in terms])
            for x, place in zip(after, kept, strict=True):
                put(builder, x, place, lanes)
            return context.get_dummy_value()

        return types.void(s, r, values, index, n, out), code

    return intrinsic(loop)


_score_4, _score_1 = _score(4), _score(1)
_mix_4_64, _mix_4_16, _mix_4_1 = _mix(4, 64), _mix(4, 16), _mix(4, 1)
_mix_1_128, _mix_1_16, _mix_1_1 = _mix(1, 128), _mix(1, 16), _mix(1, 1)


@plain
def upper_halves(x, words):
    """Numbers [R,D] as bfloat16, which numbers that came as such are exactly."""
    for r in range(x.shape[0]):
        for d in range(x.shape[1]):
            words[r, d] = np.int16(bits_of(x[r, d]) >> np.int32(16))


@plain
def score(q, rows, keys, index, n, s):
    """Rows of q with n keys, by fours; a single one that is left by itself. q: ([R,D], as bfloat16
    [R,D], the scale).
    """
    for c in range(n, (n + 7) // 8 * 8):
        index[c] = index[n - 1]
    fours = rows // 4 * 4 if rows % 4 < 2 else q[0].shape[0]
    for r in range(0, fours, 4):
        _score_4(q, r, keys, index, n, s)
    if fours < rows:
        _score_1(q, rows - 1, keys, index, n, s)


@plain
def mix(s, rows, values, index, n, acc):
    """acc [R,E] += weights times values, by fours; a single one that is left by itself."""
    E, r, e = acc.shape[1], 0, 0
    while r < rows:
        four = rows - r > 1
        ahead = E if r == 0 and e == 0 else 0  # the next tile's lines are asked for once
        left, out = E - e, (acc, e, ahead)
        if four and left >= 64:
            _mix_4_64(s, r, values, index, n, out)
            e += 64
        elif four and left >= 16:
            _mix_4_16(s, r, values, index, n, out)
            e += 16
        elif four:
            _mix_4_1(s, r, values, index, n, out)
            e += 1
        elif left >= 128:
            _mix_1_128(s, r, values, index, n, out)
            e += 128
        elif left >= 16:
            _mix_1_16(s, r, values, index, n, out)
            e += 16
        else:
            _mix_1_1(s, r, values, index, n, out)
            e += 1
        if e == E:
            r, e = r + (4 if four else 1), 0


@compiled
def mix_seen(s, rows, values, index, n, acc):
    """As `mix`, row by row. A weight of 0 leaves its value alone: behind a mask it may be NaN."""
    flat, base, step, tag = values
    E = acc.shape[1]
    for r in range(rows):
        row = acc[r]
        for c in range(n):
            weight = s[r, c]
            if weight == ZERO:
                continue
            at = base + index[c] * step
            value = flat[at : at + E]
            for e in range(E):
                row[e] += weight * widen(value[e], tag)


@compiled
def soften(s, rows, n, acc, top, total):
    """Scores of all rows become weights relative to each row's maximum so far; what was summed
    before is scaled to it.
    """
    for r in range(rows):
        line = s[r, :n]
        most = max(top[r], largest(s, r * s.shape[1], n))
        if most > top[r]:
            shrink, row = exp(top[r] - most), acc[r]
            total[r] *= shrink
            for e in range(row.shape[0]):
                row[e] *= shrink
            top[r] = most
        added = ZERO
        if most == NONE:  # nothing was visible yet
            for c in range(n):
                line[c] = line[c] * ZERO if line[c] != line[c] else ZERO
                added += line[c]
        else:
            for c in range(n):
                weight = exp(line[c] - most)
                line[c] = weight
                added += weight
        total[r] += added
