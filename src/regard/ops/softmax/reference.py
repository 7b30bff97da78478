"""The definition of softmax attention: scores, then softmax, then the weighted mean of the
values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard import units
from regard.ops.softmax.call import Call, Result, Work
from regard.tracing import is_edited, tap

ALL = slice(None)


def scores(call: Call, rows: slice = ALL, columns: slice = ALL) -> tuple[Tensor, Tensor]:
    """The scores [B,H,t,s] of a block, -inf where masked, and which of them are visible (bool,
    broadcastable).

    s_ij = softcap(scale * q_i . k_j) + bias_ij, computed in fp32 (fp64 for fp64); the query is
    scaled first, so that a half-precision product cannot overflow.
    """
    visible = call.mask.block(
        call.q_positions, call.k_positions, rows, columns, device=call.q.device
    )
    s = dot(call, rows, columns)
    if call.softcap is not None:
        s = call.softcap * torch.tanh(s / call.softcap)
    if call.bias is not None:
        s = s + call.bias.block(
            call.q_positions, call.k_positions, rows, columns, dtype=s.dtype, device=s.device
        )
    return s.masked_fill(~visible, -math.inf), visible


def dot(call: Call, rows: slice = ALL, columns: slice = ALL) -> Tensor:
    """scale * q k^T [B,H,t,s]; query head h reads key head h // (H/G), without repeating the
    keys.
    """
    q = call.q[:, :, rows].to(call.score_dtype) * call.scale
    k = call.k[:, :, columns].to(call.score_dtype)
    s = _grouped(q, k.mT)
    if call.compiling or call.finite:
        return s
    # The gradient of a masked score is 0, and 0 times a NaN in q or k would poison its neighbours:
    # differentiate the product of the finite entries, and show the value of the whole.
    clean = _grouped(_finite_only(q), _finite_only(k).mT)
    return torch.where(s.isfinite(), clean, s.detach())


def mix(pattern: Tensor, visible: Tensor, v: Tensor, *, finite: bool) -> Tensor:
    """The weighted sum of the values [B,H,t,E]; a value that a query may not see does not reach it,
    NaN included.
    """
    v = v.to(pattern.dtype)
    # a masked weight is 0 already; its gradient is selected too, since that of a huge masked value
    # may be infinite
    pattern = pattern.masked_fill(~visible, 0)
    if finite:
        return _grouped(pattern, v)
    out = _grouped(pattern, _finite_only(v))
    # 0 x NaN is NaN: so the non-finite values go to those queries that see them, by counting, not
    # by multiplying.
    seen = visible.expand(pattern.shape).to(pattern.dtype)
    n_nan, n_up, n_down = (
        _grouped(seen, bad.to(v.dtype)) > 0 for bad in (v.isnan(), v.isposinf(), v.isneginf())
    )
    out = out.masked_fill(n_up, math.inf).masked_fill(n_down, -math.inf)
    return out.masked_fill(n_nan | (n_up & n_down), math.nan)


def _grouped(x: Tensor, y: Tensor) -> Tensor:
    """x [B,H,t,a] @ y [B,G,a,b] -> [B,H,t,b]: the H/G query heads of a group are rows of one
    product.
    """
    H, t, G = x.shape[1], x.shape[2], y.shape[1]
    x = torch.unflatten(x, 1, (G, H // G)).flatten(2, 3)  # [B,G,(H/G)t,a]
    return torch.unflatten(x @ y, 2, (H // G, t)).flatten(1, 2)


def _finite_only(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, 0)


class Total(NamedTuple):
    """sum_j exp(s_ij) = share * e^top for each row: top is the largest score, or 0 for a row that
    sees nothing.

    top: [..., t], no gradient flows through it. share: [..., t], 0 for a row that sees nothing.
    """

    top: Tensor
    share: Tensor

    @property
    def lse(self) -> Tensor:
        """The natural logarithm, -inf with gradient 0 for a row that sees nothing."""
        blind = self.share == 0
        return (self.top + self.share.masked_fill(blind, 1).log()).masked_fill(blind, -math.inf)


def total(s: Tensor) -> Total:
    """The sum over the last dimension of scores [..., t, s], -inf where masked."""
    if s.shape[-1] == 0:
        return Total(s.new_zeros(s.shape[:-1]), s.sum(-1))
    top = s.amax(-1).detach()
    top = top.masked_fill(top.isneginf(), 0)
    return Total(top, torch.exp(s - top[..., None]).sum(-1))


def join(parts: Sequence[Total]) -> Total:
    """The sum over all the keys of several parts; at least one."""
    tops, shares = (torch.stack(x) for x in zip(*parts, strict=True))
    tops = tops.masked_fill(shares == 0, -math.inf)  # the 0 of a part that sees nothing is no score
    top = tops.amax(0)
    top = top.masked_fill(top.isneginf(), 0)
    return Total(top, (shares * torch.exp(tops - top)).sum(0))


def with_sink(whole: Total, sink: Tensor | None) -> Total:
    """The sum with exp(sink) in it; sink: one logit per head [H], for rows [B,H,t]."""
    if sink is None:
        return whole
    logit = sink.to(whole.top.dtype)[:, None].expand(whole.top.shape)
    top = torch.where(whole.share == 0, logit, torch.maximum(whole.top, logit)).detach()
    old = torch.where(whole.share == 0, 0, whole.share * torch.exp(whole.top - top))
    return Total(top, old + torch.exp(logit - top))


def weights(s: Tensor, whole: Total) -> Tensor:
    """exp(s_ij) over the sum of its row, for any columns of it; 0 for a row that sees nothing."""
    share = whole.share.masked_fill(whole.share == 0, 1)
    return torch.exp(s - whole.top[..., None]) / share[..., None]


BLOCK_BYTES = 2**28  # scores held at once, unless somebody wants to see them all
MAX_BYTES = 2**32  # what a listener to scores or pattern may make it hold

FEW = 2**24
"""Up to so many products B H T S (D + E) with a gradient, the definition is faster than its tiles:
measured on one thread.
"""


class Reference:
    """Attention as it is written down; memory O(T S) where it is traced or trained, else
    bounded.
    """

    name = "reference"
    selects = False

    def why_not(self, call: Call) -> list[str]:
        """It runs everything, short of holding more than 4 GiB of scores."""
        size = call.B * call.H * call.T * call.S * call.score_dtype.itemsize
        if size > MAX_BYTES and (call.needs or call.has_gradient):
            shape = (call.B, call.H, call.T, call.S)
            held = f"would allocate {units.size(size)} for scores {shape}"
            limit = f"limit {units.size(MAX_BYTES)}"
            return [f"{held}; {limit}: regard.attention_weights gives any block of them"]
        return []

    def priority(self, call: Call) -> float | None:
        """The last resort; with a gradient for few products on a CPU, right behind torch's kernel,
        because there it is the number of operations that costs.
        """
        learns = call.has_gradient and call.q.is_cpu
        few = learns and call.B * call.H * call.T * call.S * (call.D + call.E) < FEW
        return 75 if few else 10

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
    finite = not call.compiling and call.finite
    out = mix(kept, visible, call.v, finite=finite).to(call.q.dtype)
    return Result(
        out,
        whole.lse,
        s if is_edited("scores") else None,
        pattern if is_edited("pattern") else None,
    )
