"""The reference kernel: the definition of softmax attention in plain torch, and the functions for
scores, softmax sums and weights that other code shares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard import units
from regard.ops.softmax.call import Call, KernelResult, WorkEstimate
from regard.tracing import is_edited, tap

EVERYTHING = slice(None)


def scores(
    call: Call, rows: slice = EVERYTHING, columns: slice = EVERYTHING
) -> tuple[Tensor, Tensor]:
    """Compute the scores `[B, H, t, s]` of a block, -inf where masked, and which of them are
    visible (bool, broadcastable to that shape).

    s_ij = softcap(scale * q_i . k_j) + bias_ij

    The computation is in fp32 (fp64 for fp64 inputs). The query is scaled before the product, so
    that a product in half precision cannot overflow.

    Args:
        call: the checked call.
        rows: the queries of the block.
        columns: the keys of the block.
    """
    visible = call.mask.block(
        call.q_positions, call.k_positions, rows, columns, device=call.q.device
    )
    s = scaled_dot(call, rows, columns)
    if call.softcap is not None:
        s = call.softcap * torch.tanh(s / call.softcap)
    if call.bias is not None:
        s = s + call.bias.block(
            call.q_positions, call.k_positions, rows, columns, dtype=s.dtype, device=s.device
        )
    return s.masked_fill(~visible, -math.inf), visible


def scaled_dot(call: Call, rows: slice = EVERYTHING, columns: slice = EVERYTHING) -> Tensor:
    """Compute scale * q k^T `[B, H, t, s]`; query head h uses key head h // (H/G), without copies
    of the keys.
    """
    q = call.q[:, :, rows].to(call.score_dtype) * call.scale
    k = call.k[:, :, columns].to(call.score_dtype)
    s = _grouped_matmul(q, k.mT)
    if not call.readable or call.finite:
        return s
    # The gradient of a masked score is 0, but 0 times a NaN in q or k is NaN: so the gradient is
    # that of the product of the finite entries, and the value is that of all entries.
    clean = _grouped_matmul(_zero_non_finite(q), _zero_non_finite(k).mT)
    return torch.where(s.isfinite(), clean, s.detach())


def weighted_values(pattern: Tensor, visible: Tensor, v: Tensor, *, finite: bool) -> Tensor:
    """Compute the weighted sum of the values `[B, H, t, E]`; a masked value has no effect, even if
    it is NaN.

    Args:
        pattern: weights `[B, H, t, s]`.
        visible: which keys each query sees, broadcastable to the weights.
        v: values `[B, G, s, E]`.
        finite: whether q, k and v are known to be finite, so that a plain product is correct.
    """
    v = v.to(pattern.dtype)
    # masked weights are 0 already; this also sets their gradient to 0, which may be infinite for a
    # very large masked value
    pattern = pattern.masked_fill(~visible, 0)
    if finite:
        return _grouped_matmul(pattern, v)
    out = _grouped_matmul(pattern, _zero_non_finite(v))
    # 0 x NaN is NaN, so non-finite values are excluded from the product above; each query that
    # sees one gets it here, by counting the visible ones.
    visible_weights = visible.expand(pattern.shape).to(pattern.dtype)
    sees_nan, sees_inf, sees_minus_inf = (
        _grouped_matmul(visible_weights, is_bad.to(v.dtype)) > 0
        for is_bad in (v.isnan(), v.isposinf(), v.isneginf())
    )
    out = out.masked_fill(sees_inf, math.inf).masked_fill(sees_minus_inf, -math.inf)
    return out.masked_fill(sees_nan | (sees_inf & sees_minus_inf), math.nan)


def _grouped_matmul(x: Tensor, y: Tensor) -> Tensor:
    """Multiply x `[B, H, t, a]` by y `[B, G, a, b]` to `[B, H, t, b]`; the H/G query heads of a
    group are rows of one product.
    """
    H, t, G = x.shape[1], x.shape[2], y.shape[1]
    x = torch.unflatten(x, 1, (G, H // G)).flatten(2, 3)  # [B,G,(H/G)t,a]
    return torch.unflatten(x @ y, 2, (H // G, t)).flatten(1, 2)


def _zero_non_finite(x: Tensor) -> Tensor:
    """Return x with 0 in place of NaN and infinities."""
    return torch.where(x.isfinite(), x, 0)


class SoftmaxSum(NamedTuple):
    """The sum of exp(score) of each row, stored without overflow as scaled_sum * e^max_score.

    Args:
        max_score: `[..., t]`, the largest score of the row, or 0 for a row that sees nothing;
            without gradient.
        scaled_sum: `[..., t]`, sum_j exp(s_ij - max_score), 0 for a row that sees nothing.
    """

    max_score: Tensor
    scaled_sum: Tensor

    @property
    def lse(self) -> Tensor:
        """The natural logarithm of the sum; -inf, with gradient 0, for a row that sees nothing."""
        sees_nothing = self.scaled_sum == 0
        log = self.scaled_sum.masked_fill(sees_nothing, 1).log()
        return (self.max_score + log).masked_fill(sees_nothing, -math.inf)


def softmax_sum(s: Tensor) -> SoftmaxSum:
    """Sum exp(score) over the last dimension of scores `[..., t, s]` that are -inf where masked."""
    if s.shape[-1] == 0:
        return SoftmaxSum(s.new_zeros(s.shape[:-1]), s.sum(-1))
    max_score = s.amax(-1).detach()
    max_score = max_score.masked_fill(max_score.isneginf(), 0)
    return SoftmaxSum(max_score, torch.exp(s - max_score[..., None]).sum(-1))


def join_sums(parts: Sequence[SoftmaxSum]) -> SoftmaxSum:
    """Return the sums over the union of several disjoint sets of keys; at least one is given."""
    max_scores, scaled_sums = (torch.stack(x) for x in zip(*parts, strict=True))
    # a part that sees nothing has the placeholder 0, which is not a score
    max_scores = max_scores.masked_fill(scaled_sums == 0, -math.inf)
    max_score = max_scores.amax(0)
    max_score = max_score.masked_fill(max_score.isneginf(), 0)
    return SoftmaxSum(max_score, (scaled_sums * torch.exp(max_scores - max_score)).sum(0))


def add_sink(sums: SoftmaxSum, sink: Tensor | None) -> SoftmaxSum:
    """Add exp(sink) to the sums of rows `[B, H, t]`; sink: one logit per head `[H]`, or None."""
    if sink is None:
        return sums
    logit = sink.to(sums.max_score.dtype)[:, None].expand(sums.max_score.shape)
    max_score = torch.where(
        sums.scaled_sum == 0, logit, torch.maximum(sums.max_score, logit)
    ).detach()
    rescaled = torch.where(
        sums.scaled_sum == 0, 0, sums.scaled_sum * torch.exp(sums.max_score - max_score)
    )
    return SoftmaxSum(max_score, rescaled + torch.exp(logit - max_score))


def softmax_weights(s: Tensor, sums: SoftmaxSum) -> Tensor:
    """Compute exp(s_ij) divided by the sum of its row, for any columns of the row; 0 for a row that
    sees nothing.
    """
    divisor = sums.scaled_sum.masked_fill(sums.scaled_sum == 0, 1)
    return torch.exp(s - sums.max_score[..., None]) / divisor[..., None]


BLOCK_BYTES = 2**28
"""The bytes of scores in memory at a time, unless a trace or autograd needs all of them."""
MAX_SCORE_BYTES = 2**32
"""The most bytes of scores that a traced or trained call may hold in memory."""

MAX_TRAINING_PRODUCTS = 2**24
"""Up to this many products B H T S (D + E), training with the reference is faster than with the
tiled kernel, measured on one thread.
"""


class ReferenceKernel:
    """Attention as it is defined. Memory is O(T S) for a traced or trained call, and bounded
    otherwise.
    """

    name = "reference"
    selects = False

    def why_not(self, call: Call) -> list[str]:
        """Refuse only calls that would need more than 4 GiB of scores in memory at once."""
        if call.compiling or not (call.needs or call.has_gradient):
            return []
        size = call.B * call.H * call.T * call.S * call.score_dtype.itemsize
        if size > MAX_SCORE_BYTES:
            shape = (call.B, call.H, call.T, call.S)
            need = f"would allocate {units.size(size)} for scores {shape}"
            limit = f"limit {units.size(MAX_SCORE_BYTES)}"
            return [f"{need}; {limit}: regard.attention_weights gives any block of them"]
        return []

    def priority(self, call: Call) -> float | None:
        """Return 10, the last choice; 75, next to torch's kernel, for small training calls on a
        CPU, where the number of operations dominates the time.
        """
        trains_on_cpu = call.has_gradient and call.q.is_cpu and not call.compiling
        few = (
            trains_on_cpu
            and call.B * call.H * call.T * call.S * (call.D + call.E) < MAX_TRAINING_PRODUCTS
        )
        return 75 if few else 10

    def run(self, call: Call) -> KernelResult:
        """Compute all rows at once for a traced or trained call, else one block of rows after
        another.
        """
        row_bytes = max(1, call.B * call.H * call.S * call.score_dtype.itemsize)
        block = max(1, BLOCK_BYTES // row_bytes)
        if call.needs or call.has_gradient or block >= call.T:
            return attend_rows(call, EVERYTHING)
        parts = [attend_rows(call, slice(i, i + block)) for i in range(0, call.T, block)]
        outs, lses, *_ = zip(*parts, strict=True)
        return KernelResult(torch.cat(outs, 2), torch.cat(lses, 2))

    def work(self, call: Call) -> WorkEstimate:
        """Return every query-key pair, masked or not, and the scores and weights of a block of
        rows.
        """
        pairs = call.B * call.H * call.T * call.S
        all_bytes = 2 * pairs * call.score_dtype.itemsize
        bounded = all_bytes if call.needs or call.has_gradient else min(all_bytes, 2 * BLOCK_BYTES)
        return WorkEstimate(pairs, bounded)


def attend_rows(call: Call, rows: slice) -> KernelResult:
    """Compute the definition for a block of queries."""
    s, visible = scores(call, rows)
    s = tap("scores", s)
    sums = softmax_sum(s)
    pattern = tap("pattern", softmax_weights(s, add_sink(sums, call.sink)))
    dropped = F.dropout(pattern, call.dropout) if call.dropout else pattern
    finite = call.readable and call.finite
    out = weighted_values(dropped, visible, call.v, finite=finite).to(call.q.dtype)
    return KernelResult(
        out, sums.lse, s if is_edited("scores") else None, pattern if is_edited("pattern") else None
    )
