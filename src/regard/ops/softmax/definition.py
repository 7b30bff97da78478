"""The definition of softmax attention as differentiable operations of torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard import units
from regard.errors import KernelRefusal
from regard.ops.softmax.call import Call, Partial
from regard.ops.softmax.kernel import KernelResult, gradients_or_none
from regard.ops.softmax.lowering import change_pattern, score_block
from regard.process_state import is_exporting, is_exporting_onnx
from regard.scores.base import change_scores
from regard.tracing import is_edited, tap

MAX_SCORE_BYTES = 2**32
"""The most bytes of scores that a traced or trained call may hold in memory."""

EVERYTHING = slice(None)


def scores(
    call: Call, rows: slice = EVERYTHING, columns: slice = EVERYTHING
) -> tuple[Tensor, Tensor]:
    """Compute the scores `[B, H, t, s]`, -inf where masked, and where a key is visible.

    s_ij = softcap(scale * q_i . k_j) + bias_ij, then the score rule of the call

    It is in fp32 or fp64; the query is scaled first, so that no half-precision product overflows.
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
    if call.score is not None:
        s = change_scores(call.score, s, score_block(call, rows, columns, visible))
    return s.masked_fill(~visible, -math.inf), visible


def scaled_dot(call: Call, rows: slice = EVERYTHING, columns: slice = EVERYTHING) -> Tensor:
    """Compute scale * q k^T `[B, H, t, s]`, head h with key head h // (H/G), without copies."""
    q = call.q[:, :, rows].to(call.score_dtype) * call.scale
    k = call.k[:, :, columns].to(call.score_dtype)
    s = _grouped_matmul(q, k.transpose(2, 3))
    if not call.has_gradient or not call.readable or call.finite:
        return s
    # The gradient of a masked score is 0, but 0 times a NaN in q or k is NaN: so the gradient is
    # that of the product of the finite entries, and the value is that of all entries.
    clean = _grouped_matmul(_zero_non_finite(q), _zero_non_finite(k).transpose(2, 3))
    return torch.where(s.isfinite(), clean, s.detach())


def weighted_values(pattern: Tensor, visible: Tensor, v: Tensor, *, finite: bool) -> Tensor:
    """Compute the weighted sum of the values `[B, H, t, E]`, without masked NaNs."""
    v = v.to(pattern.dtype)
    # masked weights are 0 already; this also sets their gradient to 0, which may be infinite for a
    # very large masked value
    pattern = pattern.masked_fill(~visible, 0)
    if finite:
        return _grouped_matmul(pattern, v)
    out = _grouped_matmul(pattern, _zero_non_finite(v))
    # 0 x NaN is NaN, so the product above leaves out non-finite values. Here each query that sees
    # one gets it: products of 0 and 1 count the non-finite values that it sees.
    visible_weights = visible.expand(pattern.shape).to(pattern.dtype)
    sees_nan, sees_inf, sees_minus_inf = (
        _grouped_matmul(visible_weights, is_bad.to(v.dtype)) > 0
        for is_bad in (v.isnan(), v.isposinf(), v.isneginf())
    )
    out = out.masked_fill(sees_inf, math.inf).masked_fill(sees_minus_inf, -math.inf)
    return out.masked_fill(sees_nan | (sees_inf & sees_minus_inf), math.nan)


def _grouped_matmul(x: Tensor, y: Tensor) -> Tensor:
    """Multiply x `[B, H, t, a]` by y `[B, G, a, b]` to `[B, H, t, b]`, groups as rows."""
    H, t, G = x.shape[1], x.shape[2], y.shape[1]
    if is_exporting():
        # Flattening (H/G)t makes torch guard an exported program on the length of t (LOG.md), so
        # the keys are repeated instead.
        return x @ y[:, :, None].expand(-1, -1, H // G, -1, -1).flatten(1, 2)
    x = torch.unflatten(x, 1, (G, H // G)).flatten(2, 3)  # [B,G,(H/G)t,a]
    return torch.unflatten(x @ y, 2, (H // G, t)).flatten(1, 2)


def _zero_non_finite(x: Tensor) -> Tensor:
    """Return x with 0 in place of NaN and infinities."""
    return torch.where(x.isfinite(), x, 0)


class SoftmaxSum(NamedTuple):
    """The sum of exp(score) of each row, stored without overflow as scaled_sum * e^max_score.

    Both are `[..., t]`: max_score without gradient; they are 0 for a row that sees nothing.
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
    max_score = max_score.masked_fill(max_score == -math.inf, 0)
    return SoftmaxSum(max_score, torch.exp(s - max_score[..., None]).sum(-1))


def join_sums(parts: Sequence[SoftmaxSum]) -> SoftmaxSum:
    """Return the sums over the union of several disjoint sets of keys; at least one is given."""
    max_scores, scaled_sums = (torch.stack(x) for x in zip(*parts, strict=True))
    # a part that sees nothing has the placeholder 0, which is not a score
    max_scores = max_scores.masked_fill(scaled_sums == 0, -math.inf)
    max_score = max_scores.amax(0)
    max_score = max_score.masked_fill(max_score == -math.inf, 0)
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
    """Compute exp(s_ij) divided by the sum of its row; 0 for a row that sees nothing."""
    divisor = sums.scaled_sum.masked_fill(sums.scaled_sum == 0, 1)
    return torch.exp(s - sums.max_score[..., None]) / divisor[..., None]


def attend_rows(call: Call, rows: slice) -> KernelResult:
    """Compute the attention of a block of queries by its definition."""
    s, visible = scores(call, rows)
    s = tap("scores", s)
    sums = softmax_sum(s)
    pattern = tap("pattern", weights_of_rows(call, rows, s, visible, sums))
    dropped = F.dropout(pattern, call.dropout) if call.dropout else pattern
    # An ONNX file takes finite numbers: the products that find others are not worth their time.
    finite = is_exporting_onnx() or (call.readable and call.finite)
    out = weighted_values(dropped, visible, call.v, finite=finite).to(call.result_dtype)
    by_rule = call.score is not None and bool(call.needs)
    return KernelResult(
        out,
        sums.lse,
        s if by_rule or is_edited("scores") else None,
        pattern if by_rule or is_edited("pattern") else None,
    )


def weights_of_rows(
    call: Call, rows: slice, s: Tensor, visible: Tensor, sums: SoftmaxSum
) -> Tensor:
    """Compute the weights `[B, H, t, S]` of a block of queries, with the call's score rule."""
    rule = call.score
    if rule is None:
        return softmax_weights(s, add_sink(sums, call.sink))
    block = score_block(call, rows, EVERYTHING, visible)
    if rule.normalizer is None:
        pattern = softmax_weights(s, add_sink(sums, call.sink))
    else:
        pattern = rule.normalizer.normalize(s, block)
    return change_pattern(rule, pattern, block)


def describe_second_derivatives(call: Call) -> str:
    """Return how second derivatives are computed, and the memory of their scores."""
    if reason := _why_no_second_derivative(call):
        return f"second derivatives are refused with {reason}"
    return (
        "second derivatives are computed by the definition, which holds all scores in memory "
        f"({units.size(_score_bytes(call))})"
    )


def _why_no_second_derivative(call: Call) -> str | None:
    """Return with what no second derivative is computed, or None if it is."""
    if call.dropout:
        return "dropout, whose random numbers cannot be repeated"
    size = _score_bytes(call)
    if size > MAX_SCORE_BYTES:
        return f"{units.size(size)} of scores; the limit is {units.size(MAX_SCORE_BYTES)}"
    return None


def _score_bytes(call: Call) -> int:
    """Return the bytes of all scores of a call."""
    return call.B * call.H * call.T * call.S * call.score_dtype.itemsize


def differentiable_gradients(
    call: Call, inputs: Sequence[Tensor], d_out: Tensor | None, d_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of an attention call as differentiable functions of its inputs.

    A caller that asks for it (`create_graph=True`) gets them with all scores in memory.
    """
    if reason := _why_no_second_derivative(call):
        raise KernelRefusal(
            f"no second derivative of attention with {reason}: use backend='reference', or fewer "
            "queries at a time"
        )
    # views, so that a tensor that is passed as q and as k gets a gradient for each
    q, k, v, *others = (x.view_as(x) for x in inputs)
    bias, score, n = call.bias, call.score, 0
    if bias is not None and others:
        n = len(bias.tensors())
        bias = bias.with_tensors(others[:n])
    if score is not None:
        score = score.with_tensors(others[n:])
    with torch.enable_grad():
        same = replace(call, q=q, k=k, v=v, bias=bias, score=score, sink=None)
        result = attend_rows(same, EVERYTHING)
        return gradients_or_none(
            (result.out, result.lse), (q, k, v, *others), (d_out, d_lse), create_graph=True
        )


def part_gradients_by_definition(
    call: Call, whole: Partial, d_out: Tensor, d_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of some of the keys, given the output and the lse over all keys.

    With constant lse they are those of sum_j p_ij v_j with dO, and of sum_j p_ij with d_lse - dO .
    O.
    """
    inputs = (call.q, call.k, call.v, *call.bias_tensors)
    d_sum = -(d_out.to(whole.out.dtype) * whole.out).sum(-1)
    with torch.enable_grad():
        # in the dtype of the scores, so that the gradients are not rounded
        wide = [x.detach().to(call.score_dtype).requires_grad_(x.requires_grad) for x in inputs]
        bias = None if call.bias is None else call.bias.with_tensors(wide[3:])
        same = replace(call, q=wide[0], k=wide[1], v=wide[2], bias=bias)
        s, visible = scores(same)
        p = torch.exp(s - whole.lse.masked_fill(whole.lse.isneginf(), 0)[..., None])
        out = weighted_values(p, visible, wide[2], finite=same.finite)
        d_sum = d_sum if d_lse is None else d_sum + d_lse
        return gradients_or_none((out, p.sum(-1)), wide, (d_out.to(out.dtype), d_sum))
