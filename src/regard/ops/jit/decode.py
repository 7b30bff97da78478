"""Decoding, compiled: few queries, many keys, each key and value read once.

For a row of the batch and a key/value head, all queries that share it are the rows of one block: R
= H/G * T, row r being query r % T of head g H/G + r // T. Keys are visited tile by tile; a tile's
scores, their maximum and sum, and the weighted values follow at once (online softmax, Milakov and
Gimelshein 2018, arXiv 1805.02867). Ranges of tiles are tasks, and their results are joined by lse.

What the functions pass on:
    mask: (positions of the keys [b,S] or none, the position of key 0, starts and stops of the
        ranges of positions that a query sees [b,h,t,n], or its visibility key by key [b,h,t,S], or
        none)
    extra: (softcap or 0, whether ALiBi is symmetric, its slopes [H] or none, another bias [b,h,t,S]
        or none, positions of the queries [b,T])
b, h and t are B, H and T, or 1.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from regard.ops.jit.tasks import done, take
from regard.ops.jit.tile import NONE, TILE, ZERO, mix, mix_seen, score, soften, upper_halves

BUILT_UPON = "fdf31044f3d91618"
"""Of what it compiles in: Numba keeps compiled code until this very file changes
(tests/ops/test_jit.py).
"""

exact = njit(nogil=True, cache=True, error_model="numpy")


@exact
def _of(x, b, h, t):
    """The line of an array [b,h,t,n] that serves a row of the batch, a head and a query."""
    return x[min(b, x.shape[0] - 1), min(h, x.shape[1] - 1), min(t, x.shape[2] - 1)]


@exact
def covers(b, g, tile, rows, T, mask):
    """For contiguous keys: 2 if every row sees all of a tile, 0 if none sees any of it, else 1."""
    _, origin, starts, stops, _ = mask
    heads = rows // T
    every, some = True, False
    p0, p1 = origin + tile[0], origin + tile[1]
    for r in range(rows):
        lo, hi = _of(starts, b, g * heads + r // T, r % T), _of(stops, b, g * heads + r // T, r % T)
        whole = False
        for i in range(lo.shape[0]):
            whole |= lo[i] <= p0 and p1 <= hi[i]
            some |= lo[i] < p1 and p0 < hi[i]
        every &= whole
    return 2 if every else 1 if some else 0


@exact
def see(b, h, t, tile, mask, seen):
    """Which keys of a tile a query sees."""
    where, origin, starts, stops, dense = mask
    j0, j1 = tile
    if dense.shape[3]:
        line = _of(dense, b, h, t)
        for j in range(j0, j1):
            seen[j - j0] = line[j]
        return
    lo, hi = _of(starts, b, h, t), _of(stops, b, h, t)
    for j in range(j0, j1):
        p = origin + j if where.shape[1] == 0 else where[min(b, where.shape[0] - 1), j]
        inside = False
        for i in range(lo.shape[0]):
            inside |= lo[i] <= p < hi[i]
        seen[j - j0] = inside and p >= 0


@exact
def _look(b, g, tile, rows, T, mask, vis, index):
    """The keys of a tile that some row sees: how many, and whether every row sees each. Their
    numbers go to index.
    """
    heads = rows // T
    for r in range(rows):
        see(b, g * heads + r // T, r % T, tile, mask, vis[r])
    n, full = 0, True
    for c in range(tile[1] - tile[0]):
        some, every = False, True
        for r in range(rows):
            some |= vis[r, c]
            every &= vis[r, c]
        if some:
            for r in range(rows):
                vis[r, n] = vis[r, c]
            index[n] = tile[0] + c
            n += 1
            full &= every
    return n, full


@exact
def adjust(s, b, g, rows, T, n, index, mask, extra):
    """Softcap, then bias, on the scores of a tile."""
    where, origin = mask[0], mask[1]
    cap, symmetric, slopes, bias, q_where = extra
    heads = rows // T
    for r in range(rows):
        h, t = g * heads + r // T, r % T
        if cap > 0:
            for c in range(n):
                s[r, c] = cap * np.float32(math.tanh(s[r, c] / cap))
        if slopes.shape[0]:
            q = q_where[min(b, q_where.shape[0] - 1), t]
            for c in range(n):
                j = index[c]
                p = origin + j if where.shape[1] == 0 else where[min(b, where.shape[0] - 1), j]
                s[r, c] -= slopes[h] * np.float32(abs(q - p) if symmetric else q - p)
        if bias.shape[3]:
            line = _of(bias, b, h, t)
            for c in range(n):
                s[r, c] += line[index[c]]


@exact
def finish(acc, top, total, out, lse):
    """Weighted sums of a task's rows become its part of the output [R,E], and its lse [R]."""
    for r in range(out.shape[0]):
        some = total[r] != 0
        lse[r] = (
            np.float64(top[r]) + math.log(np.float64(total[r])) if some else NONE
        )  # rounded once
        for e in range(out.shape[1]):
            out[r, e] = acc[r, e] / total[r] if some else ZERO


@exact
def _join(out, lse):
    """One row: out [P,E] and lse [P], joined into part 0."""
    top = NONE
    for x in lse:
        top = x if x > top or x != x else top
    if top == NONE:
        return
    total = 0.0
    for x in lse:
        total += math.exp(x - top)
    for e in range(out.shape[1]):
        z = 0.0
        for p in range(out.shape[0]):
            weight = math.exp(lse[p] - top)
            if weight != 0:
                z += weight * out[p, e]
        out[0, e] = z / total
    lse[0] = top + math.log(total)


@exact
def join(out, lse):
    """Parts [B,G,P,R,E] joined by lse [B,G,P,R], into part 0 of both."""
    B, G, _, R, _ = out.shape
    for b in range(B):
        for g in range(G):
            for r in range(R):
                _join(out[b, g, :, r], lse[b, g, :, r])


@exact
def run_tasks(given, call, keys, values):
    """Tasks of the B G P of a call, while there are any: out [B,G,P,R,E] and lse [B,G,P,R] are
    theirs to write.

    call: (q [B,G,R,D]; the scale; T; mask; extra; out; lse). keys, values: (flat memory, steps of
        B, G and the tokens, tag, tokens S).
    """
    q_all, scale, T, mask, extra, out, lse = call
    B, G, P, R, E = out.shape
    padded = R if R % 4 < 2 else (R + 3) // 4 * 4
    q, acc = np.zeros((padded, q_all.shape[3]), np.float32), np.empty((padded, E), np.float32)
    words = np.zeros(q.shape, np.int16)
    top, total = np.empty(padded, np.float32), np.empty(padded, np.float64)
    s, vis = np.zeros((padded, TILE), np.float32), np.empty((R, TILE), np.bool_)
    index = np.empty(TILE, np.int64)
    S = keys[5]
    tiles = (S + TILE - 1) // TILE
    share = (tiles + P - 1) // P
    contiguous = mask[0].shape[1] == 0 and mask[4].shape[3] == 0
    plain = extra[0] == 0 and extra[2].shape[0] == 0 and extra[3].shape[3] == 0
    while True:
        task = take(given)
        if task >= B * G * P:
            break
        b, g, p = task // (G * P), task // P % G, task % P
        q[:R] = q_all[b, g]
        upper_halves(q, words)
        acc[:] = 0
        top[:] = NONE
        total[:] = 0
        head_k = (keys[0], b * keys[1] + g * keys[2], keys[3], keys[4])
        head_v = (values[0], b * values[1] + g * values[2], values[3], values[4])
        for number in range(p * share, min(tiles, (p + 1) * share)):
            tile = (number * TILE, min(S, (number + 1) * TILE))
            cover = covers(b, g, tile, R, T, mask) if contiguous else 1
            n, full = tile[1] - tile[0], True
            if cover == 2:
                for c in range(n):
                    index[c] = tile[0] + c
            elif cover == 1:
                n, full = _look(b, g, tile, R, T, mask, vis, index)
            if cover == 0 or n == 0:
                continue
            score((q, words, scale), R, head_k, index, n, s)
            if not plain:
                adjust(s, b, g, R, T, n, index, mask, extra)
            for r in range(R):
                for c in range(0 if full else n):
                    if not vis[r, c]:
                        s[r, c] = NONE
            soften(s, R, n, acc, top, total)
            if full:
                mix(s, R, head_v, index, n, acc)
            else:
                mix_seen(s, R, head_v, index, n, acc)
        finish(acc, top, total, out[b, g, p], lse[b, g, p])
        if done(given) == B * G * P - 1 and P > 1:
            join(out, lse)
