"""The compiled loops over one tile of keys: scores, the softmax so far, and the weighted values.

`keys` and `values` are (flat memory, where the head begins in it, step from one token to the next, tag of its bits);
`index[:n]` are the numbers of the tokens that take part. Nothing here knows of masks: a score of -inf is one.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from regard.ops.jit.bits import exp, widen

BUILT_UPON = "4caf7994b9dfd79a"
"""Of what it compiles in: Numba keeps compiled code until this very file changes (tests/ops/test_jit.py)."""

TILE = 64
"""Keys that are scored together: with their values they fit the first cache."""

ZERO, NONE = np.float32(0), np.float32(-np.inf)
_FAST = {"contract", "reassoc", "nsz", "arcp"}
compiled = njit(nogil=True, cache=True, error_model="numpy", fastmath=_FAST)


@compiled
def scores_4(q, r, keys, index, n, s):
    """Rows r to r + 3 of q [R,D] with n keys, two at a time, so that a number of q is loaded for two keys."""
    flat, base, step, tag = keys
    D = q.shape[1]
    q0, q1, q2, q3 = q[r], q[r + 1], q[r + 2], q[r + 3]
    c = 0
    while c + 2 <= n:
        at, to = base + index[c] * step, base + index[c + 1] * step
        ka, kb = flat[at : at + D], flat[to : to + D]
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = ZERO
        for d in range(D):
            x, y = widen(ka[d], tag), widen(kb[d], tag)
            a0 += q0[d] * x
            a1 += q1[d] * x
            a2 += q2[d] * x
            a3 += q3[d] * x
            b0 += q0[d] * y
            b1 += q1[d] * y
            b2 += q2[d] * y
            b3 += q3[d] * y
        s[r, c], s[r + 1, c], s[r + 2, c], s[r + 3, c] = a0, a1, a2, a3
        s[r, c + 1], s[r + 1, c + 1], s[r + 2, c + 1], s[r + 3, c + 1] = b0, b1, b2, b3
        c += 2
    if c < n:
        at = base + index[c] * step
        ka = flat[at : at + D]
        a0 = a1 = a2 = a3 = ZERO
        for d in range(D):
            x = widen(ka[d], tag)
            a0 += q0[d] * x
            a1 += q1[d] * x
            a2 += q2[d] * x
            a3 += q3[d] * x
        s[r, c], s[r + 1, c], s[r + 2, c], s[r + 3, c] = a0, a1, a2, a3


@compiled
def scores_1(q, r, keys, index, n, s):
    """One row."""
    flat, base, step, tag = keys
    D, row = q.shape[1], q[r]
    for c in range(n):
        at = base + index[c] * step
        key, a = flat[at : at + D], ZERO
        for d in range(D):
            a += row[d] * widen(key[d], tag)
        s[r, c] = a


@compiled
def mix_4(s, r, values, index, n, acc):
    """acc rows r to r + 3 += weights times values, four keys at a time, so that a sum is loaded for four."""
    flat, base, step, tag = values
    E = acc.shape[1]
    z0, z1, z2, z3 = acc[r], acc[r + 1], acc[r + 2], acc[r + 3]
    c = 0
    while c + 4 <= n:
        at0, at1 = base + index[c] * step, base + index[c + 1] * step
        at2, at3 = base + index[c + 2] * step, base + index[c + 3] * step
        v0, v1, v2, v3 = flat[at0 : at0 + E], flat[at1 : at1 + E], flat[at2 : at2 + E], flat[at3 : at3 + E]  # fmt: skip
        a0, a1, a2, a3 = s[r, c], s[r, c + 1], s[r, c + 2], s[r, c + 3]
        b0, b1, b2, b3 = s[r + 1, c], s[r + 1, c + 1], s[r + 1, c + 2], s[r + 1, c + 3]
        c0, c1, c2, c3 = s[r + 2, c], s[r + 2, c + 1], s[r + 2, c + 2], s[r + 2, c + 3]
        d0, d1, d2, d3 = s[r + 3, c], s[r + 3, c + 1], s[r + 3, c + 2], s[r + 3, c + 3]
        for e in range(E):
            w, x, y, z = widen(v0[e], tag), widen(v1[e], tag), widen(v2[e], tag), widen(v3[e], tag)
            z0[e] += a0 * w + a1 * x + a2 * y + a3 * z
            z1[e] += b0 * w + b1 * x + b2 * y + b3 * z
            z2[e] += c0 * w + c1 * x + c2 * y + c3 * z
            z3[e] += d0 * w + d1 * x + d2 * y + d3 * z
        c += 4
    while c < n:
        at = base + index[c] * step
        value = flat[at : at + E]
        a0, b0, c0, d0 = s[r, c], s[r + 1, c], s[r + 2, c], s[r + 3, c]
        for e in range(E):
            x = widen(value[e], tag)
            z0[e] += a0 * x
            z1[e] += b0 * x
            z2[e] += c0 * x
            z3[e] += d0 * x
        c += 1


@compiled
def mix_1(s, r, values, index, n, acc):
    """One row. A weight of 0 leaves its value alone: behind a mask it may be NaN."""
    flat, base, step, tag = values
    E, row = acc.shape[1], acc[r]
    for c in range(n):
        weight = s[r, c]
        if weight == ZERO:
            continue
        at = base + index[c] * step
        value = flat[at : at + E]
        for e in range(E):
            row[e] += weight * widen(value[e], tag)


@compiled
def soften(s, r, n, acc, top, total):
    """Scores of a row become weights relative to its maximum so far; what was summed before is scaled to it."""
    largest = top[r]
    for c in range(n):
        largest = max(largest, s[r, c])
    if largest > top[r]:
        shrink, row = exp(top[r] - largest), acc[r]
        total[r] *= shrink
        for e in range(row.shape[0]):
            row[e] *= shrink
        top[r] = largest
    if largest == NONE:  # nothing was visible yet
        for c in range(n):
            s[r, c] = s[r, c] * ZERO if s[r, c] != s[r, c] else ZERO
            total[r] += s[r, c]
        return
    added = ZERO
    for c in range(n):
        weight = exp(s[r, c] - largest)
        s[r, c] = weight
        added += weight
    total[r] += added
