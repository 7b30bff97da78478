"""The definition of softmax attention, in the order in which DESIGN.md pins it. It runs every call.

    s = softcap(scale q k^T) + bias, -inf where masked        p = exp(s - lse), or exp(s - logaddexp(lse, sink))
    lse_i = ln sum_j exp(s_ij)                                 out = dropout(p) v

A row that may see nothing: p = 0, out = 0, lse = -inf, gradient 0.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.ops.softmax.call import Call, Result, Work
from regard.ops.softmax.scores import ALL, mix, scores
from regard.tap import tap

BLOCK_BYTES = 2**28  # scores held at once, unless somebody wants to see them all
MAX_BYTES = 2**32  # what a listener to scores or pattern may make it hold


class Reference:
    """Attention as it is written down; memory O(T S) where it is traced or trained, else bounded."""

    name = "reference"

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
        outs, lses = zip(*parts, strict=True)
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
    lse = logsumexp(s)
    pattern = tap("pattern", normalise(s, lse, call.sink))
    kept = F.dropout(pattern, call.dropout) if call.dropout else pattern
    finite = not torch.compiler.is_compiling() and call.finite
    return Result(mix(kept, visible, call.v, finite).to(call.q.dtype), lse)


def normalise(s: Tensor, lse: Tensor, sink: Tensor | None) -> Tensor:
    """Scores [B,H,t,s] to weights: exp(s - lse), with the sink's exp in the denominator as well."""
    total = lse if sink is None else torch.logaddexp(lse, sink.to(lse.dtype)[:, None])
    empty = total.isneginf()[
        ..., None
    ]  # select, never clean up: a NaN that is visible must stay one
    return torch.exp(s.masked_fill(empty, -math.inf) - total[..., None].masked_fill(empty, 0))


def logsumexp(s: Tensor) -> Tensor:
    """ln sum_j exp(s_ij) over the last dimension; -inf with gradient 0 for a row without a visible key."""
    if s.shape[-1] == 0:
        return s.new_full(s.shape[:-1], -math.inf)
    top = s.amax(-1, keepdim=True).detach()
    top = top.masked_fill(top.isneginf(), 0)
    total = torch.exp(s - top).sum(-1)
    empty = total == 0
    return (top[..., 0] + total.masked_fill(empty, 1).log()).masked_fill(empty, -math.inf)
