"""The compiled loops over the scores of one row: what is added to them, what is hidden, and how
they become weights.

Arrays are slices that begin where the work begins: an index that runs from 0 needs no look at its
sign, and the loop is SIMD. `mask` and `extra` are those of `regard.ops.jit.prefill`.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from regard.ops.jit.bits import exp
from regard.ops.jit.pack import compiled, narrow
from regard.ops.jit.product import PANEL

BUILT_UPON = "dd119707da86f448"
"""Of what it compiles in: Numba keeps compiled code until this very file changes
(tests/ops/test_jit.py).
"""

ZERO, ONE, NONE = np.float32(0), np.float32(1), np.float32(-np.inf)
exact = njit(nogil=True, cache=True, error_model="numpy")


@exact
def line(x, b, h, t):
    """The line of an array [b,h,t,n] that serves a row of the batch, a head and a query."""
    return x[min(b, x.shape[0] - 1), min(h, x.shape[1] - 1), min(t, x.shape[2] - 1)]


@exact
def hide(s, b, h, t, keys, mask):
    """Scores of one row with some keys become -inf where it may not see."""
    where, _, starts, stops = mask
    lo, hi = line(starts, b, h, t), line(stops, b, h, t)
    at = where[min(b, where.shape[0] - 1), keys[0] : keys[1]]
    for c in range(at.shape[0]):
        inside = False
        for i in range(lo.shape[0]):
            inside |= (lo[i] <= at[c]) & (at[c] < hi[i])
        s[c] = s[c] if inside else NONE


@compiled
def tanh(x):
    """tanh to a few roundings: near 0 by the odd polynomial of Cephes' tanhf, else by the
    exponential.
    """
    a = abs(x)
    z = x * x
    p = (
        (
            (np.float32(-5.70498872745e-3) * z + np.float32(2.06390887954e-2)) * z
            - np.float32(5.37397155531e-2)
        )
        * z
        + np.float32(1.33314422036e-1)
    ) * z - np.float32(3.33332819422e-1)
    e = exp(np.float32(-2) * a)
    far = (ONE - e) / (ONE + e)
    return x + x * z * p if a < np.float32(0.625) else math.copysign(far, x)


@compiled
def adjust(s, first, b, h, t, where, extra):
    """The scale, then the softcap, then ALiBi, on the scores of one row with the keys from `first`
    on.
    """
    scale, cap, symmetric, slopes, q_where = extra
    for c in range(s.shape[0]):
        s[c] *= scale
    if cap > 0:
        for c in range(s.shape[0]):
            s[c] = cap * tanh(s[c] / cap)
    if slopes.shape[0]:
        at, slope = where[min(b, where.shape[0] - 1), first : first + s.shape[0]], slopes[h]
        q = q_where[min(b, q_where.shape[0] - 1), t]
        for c in range(s.shape[0]):
            far = q - at[c]
            s[c] -= slope * np.float32(abs(far) if symmetric else far)


@compiled
def _largest(s, lanes):
    """The largest score of a row of whole panels; NaN counts for nothing. Lane by lane, so that the
    loop is SIMD.
    """
    for i in range(PANEL):
        lanes[i] = NONE
    for at in range(0, s.shape[0], PANEL):
        panel = s[at : at + PANEL]
        for i in range(PANEL):
            # not max: Numba's looks for NaN as well
            lanes[i] = panel[i] if panel[i] > lanes[i] else lanes[i]  # noqa: FURB136
    largest = NONE
    for i in range(PANEL):
        largest = lanes[i] if lanes[i] > largest else largest  # noqa: FURB136
    return largest


@compiled
def soften(s, p, acc, top, total, r, tag, lanes):
    """Scores of a row become weights p relative to its maximum so far; what was summed before is
    scaled to it.
    """
    largest = _largest(s, lanes)
    if largest > top[r]:
        shrink = exp(top[r] - largest)
        total[r] *= shrink
        for e in range(acc.shape[0]):
            acc[e] *= shrink
        top[r] = largest
    base = top[r] if top[r] > NONE else ZERO
    added = ZERO
    for c in range(s.shape[0]):
        weight = exp(s[c] - base)
        added += weight
        s[c] = weight
    total[r] += added
    if p.itemsize < s.itemsize:  # else p is s
        for c in range(s.shape[0]):
            p[c] = narrow(s[c], tag, p)
