"""The compiled loops over rows of a gradient: scores become weights, and gradients of weights those
of scores.

What the functions pass on:
    rows: (m, 1/l, what is taken off dp, the gradient of the lse) of each row of a block
    scores: (s, dp and the slopes of a softcap), the first two [rows,PANEL]
`block`, `mask` and `extra` are those of `prefill`.
"""

from __future__ import annotations

import numpy as np

from regard.ops.jit.bits import exp
from regard.ops.jit.pack import compiled, narrow
from regard.ops.jit.prefill import place
from regard.ops.jit.product import PANEL, STEP
from regard.ops.jit.rows import ONE, ZERO, adjust, hide

BUILT_UPON = "2d17343db3f0310a"
"""Of what it compiles in: Numba keeps compiled code until this very file changes
(tests/ops/test_jit.py).
"""


@compiled
def turn(x, rows, step, D, out):
    """[step, depth] -> [D, step]; rows from `rows` on are 0."""
    depth = x.size // step
    for d in range(D):
        line = out[d * step : (d + 1) * step]
        for r in range(rows):
            line[r] = x[r * depth + d]
        for r in range(rows, step):
            line[r] = 0


@compiled
def _soften(s, d, top, share, shift, alone):
    """Scores of a row become weights p, and gradients dp those of scores, p (dp - shift).

    A weight of exactly 1 means that the other weights of its row are lost in rounding. There dp and
    the output's part of `shift` are the same number, but they were summed in another order: the
    difference is set to 0, so that only the gradient of the lse is left.
    """
    for c in range(s.shape[0]):
        p, change = exp(s[c] - top) * share, d[c] - shift
        # selected: what is hidden has p = 0, whatever dp is there; a NaN stays
        d[c] = ZERO if p == ZERO else (alone if p == ONE and change == change else p * change)
        s[c] = p


@compiled
def _slopes(s, scale, cap, out):
    """The slope 1 - tanh^2 of the softcap at scores that are not scaled yet: 4e / (1 + e)^2, e =
    exp(-2|x|).

    So no digit is lost where tanh is near 1.
    """
    for c in range(s.shape[0]):
        e = exp(np.float32(-2) * abs(s[c] * scale / cap))
        out[c] = np.float32(4) * e / ((ONE + e) * (ONE + e))


@compiled
def weigh(block, panel, group, hidden, rows, scores, mask, extra):
    """A group of rows against a panel of keys, some of which are hidden or not; missing rows are
    0.
    """
    s, d, slopes = scores
    for r in range(group * STEP, (group + 1) * STEP):
        here, change = s[r * PANEL : (r + 1) * PANEL], d[r * PANEL : (r + 1) * PANEL]
        if r >= block[3]:
            here[:], change[:] = ZERO, ZERO
            continue
        h, t = place(block, r)
        if extra[1] > 0:
            _slopes(here, extra[0], extra[1], slopes)
        adjust(here, panel * PANEL, block[0], h, t, mask[0], extra)
        if hidden:
            hide(here, block[0], h, t, (panel * PANEL, (panel + 1) * PANEL), mask)
        _soften(here, change, rows[0][r], rows[1][r], rows[2][r], rows[3][r])
        if extra[1] > 0:
            for c in range(PANEL):
                change[c] *= slopes[c]


@compiled
def in_words(x, group, tag, like, words):
    """The rows of a group, two in a word: bfloat16s that are neighbours along a sum over rows."""
    for r in range(group * STEP, (group + 1) * STEP, 2):
        even, odd = x[r * PANEL : (r + 1) * PANEL], x[(r + 1) * PANEL : (r + 2) * PANEL]
        out = words[r // 2 * PANEL : (r // 2 + 1) * PANEL]
        for c in range(PANEL):
            low, high = narrow(even[c], tag, like), narrow(odd[c], tag, like)
            out[c] = np.uint32(low) | (np.uint32(high) << np.uint32(16))


@compiled
def in_rows(x, group, tag, out):
    """The rows of a group as bfloat16s, neighbours along a sum over keys."""
    first, last = group * STEP * PANEL, (group + 1) * STEP * PANEL
    numbers, to = x[first:last], out[first:last]
    for c in range(numbers.shape[0]):
        to[c] = narrow(numbers[c], tag, out)
