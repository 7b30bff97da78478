"""Softmax attention read off its definition, in any dtype: what peers, ours too, are held against."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.bench.case import Outputs

if TYPE_CHECKING:
    from regard.bench.problems.attention import AttentionProblem

BLOCK_BYTES = 1 << 27
"""Scores that are held at once."""


def straight(problem: AttentionProblem, dtype: torch.dtype, groups: list[int]) -> Outputs:
    """softmax(q k^T / sqrt(D) + bias, -inf where not seen) v of some key/value heads; in training its gradients too.

    A block of queries at a time; gradients of keys and values are summed in fp32 or better.
    """
    s, ratio = problem.sizes, problem.sizes.H // problem.sizes.G
    found: dict[str, list[Tensor]] = {}
    for g in groups:
        heads = slice(g * ratio, (g + 1) * ratio)
        q = problem.q.detach()[:, heads].to(dtype)
        k, v = (x.detach()[:, g : g + 1].to(dtype) for x in (problem.k, problem.v))
        d_out = None if problem.d_out is None else problem.d_out[:, heads].to(dtype)
        step = max(1, BLOCK_BYTES // (s.B * ratio * s.S * dtype.itemsize))
        for name, x in _blocks(problem, q, k, v, d_out, heads, step).items():
            found.setdefault(name, []).append(x)
    return {name: torch.cat(parts, dim=1) for name, parts in found.items()}


def _blocks(
    problem: AttentionProblem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor | None,
    heads: slice,
    step: int,
) -> dict[str, Tensor]:
    """All queries of some heads, which share one key/value head; gradients too if there is d_out."""
    outs, d_q = [], []
    sums = [torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in (k, v)]
    for start in range(0, q.shape[2], step):
        rows = slice(start, min(start + step, q.shape[2]))
        inputs = [x.detach().requires_grad_(d_out is not None) for x in (q[:, :, rows], k, v)]
        with torch.set_grad_enabled(d_out is not None):
            out = _attend(problem, *inputs, rows=rows, heads=heads)
        outs.append(out.detach())
        if d_out is not None:
            gradient, *others = torch.autograd.grad(out, inputs, d_out[:, :, rows])
            d_q.append(gradient)
            for total, part in zip(sums, others, strict=True):
                total += part
    found = {"out": torch.cat(outs, dim=2)}
    if d_out is not None:
        d_k, d_v = (total.to(k.dtype) for total in sums)
        found |= {"dq": torch.cat(d_q, dim=2), "dk": d_k, "dv": d_v}
    return found


def _attend(
    problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, *, rows: slice, heads: slice
) -> Tensor:
    """A block of queries [B,R,t,D] against one key/value head [B,1,S,D]."""
    scores = (q @ k.mT) * problem.sizes.D**-0.5
    if problem.sizes.alibi:
        scores = scores + problem.bias_rows(rows, q.dtype)[:, heads]
    seen = problem.visible_rows(rows)
    scores = scores.masked_fill(~seen, float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    # a row that sees nothing: 0, not the softmax's NaN
    weights = torch.where(seen.any(dim=-1, keepdim=True), weights, 0)
    return weights @ v
