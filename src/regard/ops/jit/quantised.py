"""Decoding over keys and values in codes of few bits, which are read as they are: no copy of them
is widened.

As in `decode`, whose masks, scores' extras and parts these are. Keys have a scale per channel for
each group of tokens, values one per token for each group of channels. Codes are finite whatever
stood at a masked slot, so that a weight of 0 may multiply them.

keys, values: (bytes of the codes, their steps [B, G, rows, lines]; scales, zeros, their steps [B,
    G, rows, lines], tag of their bits; columns of a group, bits; tokens S). A row is a group of
    tokens for keys, where a line is a channel; and a token for values, where a line is one of its
    groups of channels.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from regard.ops.jit.decode import adjust, covers, finish, join, see
from regard.ops.jit.tasks import done, take
from regard.ops.jit.tile import NONE, soften
from regard.ops.jit.tile_quantised import sum_lines

BUILT_UPON = "bece963a813fb612"
"""Of what it compiles in: Numba keeps compiled code until this very file changes
(tests/ops/test_jit.py).
"""

LENGTH = 128
"""Tokens of a tile, at least: a call for each group of channels pays for itself."""

exact = njit(nogil=True, cache=True, error_model="numpy")


@exact
def _lines(rows, columns):
    """An array of zeros of which a row of 16 k columns begins where a line of the cache does."""
    flat = np.zeros(rows * columns + 16, np.float32)
    first = -(flat.ctypes.data // 4) % 16
    return flat[first : first + rows * columns].reshape(rows, columns)


@exact
def _score(q, rows, keys, b, g, tile, s, scratch):
    """Scores of all rows of q [R,D] with the keys of a tile, a whole number of groups."""
    codes, steps, scale, zero, scale_steps, tag, group, bits, _ = keys
    memory = (codes, steps[3], (scale, zero, scale_steps[3], tag), group, bits, q.shape[1])
    for j in range(tile[0], tile[1], group):
        n = j // group
        at = b * steps[0] + g * steps[1] + n * steps[2]
        at_scale = b * scale_steps[0] + g * scale_steps[1] + n * scale_steps[2]
        later = at + (tile[1] - tile[0]) // group * steps[2]
        sum_lines(rows, memory, (at, at_scale, later), q, scratch, (s, j - tile[0], True))


@exact
def _mix(s, rows, values, b, g, tile, acc, scratch):
    """acc [R,E] += weights times the values of a tile."""
    codes, steps, scale, zero, scale_steps, tag, group, bits, _ = values
    scales = (scale, zero, scale_steps[2], tag)
    memory = (codes, steps[2], scales, group, bits, tile[1] - tile[0])
    at = b * steps[0] + g * steps[1] + tile[0] * steps[2]
    at_scale = b * scale_steps[0] + g * scale_steps[1] + tile[0] * scale_steps[2]
    groups = acc.shape[1] // group
    whole = (tile[1] - tile[0]) * steps[2]
    for i in range(groups):
        later = at + whole + whole // groups * i  # a share of the next tile
        where = (at + i * steps[3], at_scale + i * scale_steps[3], later)
        sum_lines(rows, memory, where, s, scratch, (acc, i * group, False))


@exact
def _look(b, g, tile, rows, T, mask, seen):
    """Which keys of a tile each row sees; whether any sees any."""
    heads, some = rows // T, False
    for r in range(rows):
        see(b, g * heads + r // T, r % T, tile, mask, seen[r])
        for c in range(tile[1] - tile[0]):
            some |= seen[r, c]
    return some


@exact
def run_tasks(given, call, keys, values):
    """As `regard.ops.jit.decode.run_tasks`, of keys and values in codes."""
    q_all, scale, T, mask, extra, out, lse = call
    B, G, P, R, E = out.shape
    D, group, S = q_all.shape[3], keys[6], keys[8]
    length = group * max(1, LENGTH // group)
    padded = R if R % 4 < 2 else (R + 3) // 4 * 4
    q, acc = _lines(padded, D), _lines(padded, E)
    top, total = np.empty(padded, np.float32), np.empty(padded, np.float64)
    s, seen = _lines(padded, length), np.empty((R, length), np.bool_)
    n = (max(D, length) + 15) // 16 * 16
    short = (
        np.empty((padded, n), np.int16),
        np.empty(padded, np.float32),
        np.empty(padded, np.int32),
    )
    line, more, added = _lines(1, n)[0], _lines(1, n)[0], np.zeros(padded, np.float32)
    scratch = (_lines(padded, n), line, more, added, short, keys[2].itemsize == 2)
    index = np.empty(length, np.int64)
    tiles = (S + length - 1) // length
    share = (tiles + P - 1) // P
    contiguous = mask[0].shape[1] == 0 and mask[4].shape[3] == 0
    plain = extra[0] == 0 and extra[2].shape[0] == 0 and extra[3].shape[3] == 0
    while True:
        task = take(given)
        if task >= B * G * P:
            break
        b, g, p = task // (G * P), task // P % G, task % P
        q[:R] = q_all[b, g] * scale
        acc[:] = 0
        top[:] = NONE
        total[:] = 0
        for number in range(p * share, min(tiles, (p + 1) * share)):
            tile = (number * length, min(S, (number + 1) * length))
            cover = covers(b, g, tile, R, T, mask) if contiguous else 1
            if cover == 0 or (cover == 1 and not _look(b, g, tile, R, T, mask, seen)):
                continue
            n = tile[1] - tile[0]
            _score(q, R, keys, b, g, tile, s, scratch)
            if not plain:
                for c in range(n):
                    index[c] = tile[0] + c
                adjust(s, b, g, R, T, n, index, mask, extra)
            for r in range(R):
                for c in range(n if cover == 1 else 0):
                    if not seen[r, c]:
                        s[r, c] = NONE
            soften(s, R, n, acc, top, total)
            _mix(s, R, values, b, g, tile, acc, scratch)
        finish(acc, top, total, out[b, g, p], lse[b, g, p])
        if done(given) == B * G * P - 1 and P > 1:
            join(out, lse)
