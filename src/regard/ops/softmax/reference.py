"""The definition of softmax attention, in the order in which DESIGN.md pins it. It runs every call.

    s = softcap(scale q k^T) + bias, -inf where masked        p_ij = exp(s_ij) / (sum_j exp(s_ij) + exp(sink))
    lse_i = ln sum_j exp(s_ij)                                 out = dropout(p) v

A row that may see nothing: p = 0, out = 0, lse = -inf, gradient 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from regard.ops.softmax.call import Call, Result, Work
from regard.ops.softmax.normalise import total, weights, with_sink
from regard.ops.softmax.scores import ALL, mix, scores
from regard.process import is_compiling
from regard.tap import edited, tap

BLOCK_BYTES = 2**28  # scores held at once, unless somebody wants to see them all
MAX_BYTES = 2**32  # what a listener to scores or pattern may make it hold


class Reference:
    """Attention as it is written down; memory O(T S) where it is traced or trained, else bounded."""

    name = "reference"
    selects = False

    def why_not(self, call: Call) -> list[str]:
        """It runs everything, short of holding more than 4 GiB of scores."""
        size = call.B * call.H * call.T * call.S * call.score_dtype.itemsize
        if size > MAX_BYTES and (call.needs or call.has_gradient):
            shape = (call.B, call.H, call.T, call.S)
            held = f"would allocate {size / 2**30:.1f} GiB for scores {shape}"
            limit = f"limit {MAX_BYTES / 2**30:.0f} GiB"
            return [f"{held}; {limit}: regard.attention_weights gives any block of them"]
        return []

    def run(self, call: Call) -> Result:
        """All rows at once if somebody listens or learns, else a block of rows at a time."""
        row_bytes = max(1, call.B * call.H * call.S * call.score_dtype.itemsize)
        block = max(1, BLOCK_BYTES // row_bytes)
        if call.needs or call.has_gradient or block >= call.T:
            return attend_rows(call, ALL)
        parts = [attend_rows(call, slice(i, i + block)) for i in range(0, call.T, block)]
        outs, lses, *_ = zip(*parts, strict=True)
        return Result(torch.cat(outs, 2), torch.cat(lses, 2))

    def work(self, call: Call) -> Work:
        """Every pair, masked or not; scores and weights of a block of rows."""
        pairs = call.B * call.H * call.T * call.S
        whole = 2 * pairs * call.score_dtype.itemsize
        bounded = whole if call.needs or call.has_gradient else min(whole, 2 * BLOCK_BYTES)
        return Work(pairs, bounded)


def attend_rows(call: Call, rows: slice) -> Result:
    """The definition, for a block of queries."""
    s, visible = scores(call, rows)
    s = tap("scores", s)
    whole = total(s)
    pattern = tap("pattern", weights(s, with_sink(whole, call.sink)))
    kept = F.dropout(pattern, call.dropout) if call.dropout else pattern
    finite = not is_compiling() and call.finite
    out = mix(kept, visible, call.v, finite=finite).to(call.q.dtype)
    return Result(
        out, whole.lse, s if edited("scores") else None, pattern if edited("pattern") else None
    )
