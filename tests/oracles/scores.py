"""Attention with score rules from its definition: loops over single numbers, and nothing of regard.

The numbers are 0-d tensors, so that autograd gives the gradients of the loops, and so that the same
loops in another dtype are plain math of that dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

Row: TypeAlias = dict[int, Tensor]
"""The number of each key that a query sees."""


@dataclass
class Steps:
    """What happens between scores and weights; None and empty leave a step out.

    Args:
        pairs: functions (score, b, h, position of the query, position of the key), in order.
        before: mixes scores of heads, [H, H].
        cope: vectors per number, [N, D] or [H, N, D].
        top: keys that are kept.
        sigmoid: its bias, from (head, keys that the query sees); instead of the softmax.
        scalable: the factor of each head, multiplied by the logarithm of the number of keys.
        normalize: weights of a row of scores, from nearest key to farthest; instead of the softmax.
        after: mixes weights of heads, [H, H].
    """

    pairs: tuple[Callable[..., Tensor], ...] = ()
    before: Tensor | None = None
    cope: Tensor | None = None
    top: int | None = None
    sigmoid: Callable[[int, int], Tensor | float] | None = None
    scalable: Callable[[int], Tensor | float] | None = None
    normalize: Callable[[list[Tensor]], list[Tensor]] | None = None
    after: Tensor | None = None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    steps: Steps,
    *,
    visible: Tensor,
    q_at: list[list[int]],
    k_at: list[list[int]],
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    order: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return out [B,H,T,E] and pattern [B,H,T,S] of q [B,H,T,D], k [B,G,S,D], v [B,G,S,E].

    Each `order` sums in another one, because a single one may be accurate by chance.

    visible is bool [B or 1, H or 1, T, S], bias broadcasts to [B,H,T,S]; q_at and k_at are the
    positions of queries and keys in each row of the batch.
    """
    (B, H, T, D), (_, G, S, _) = q.shape, v.shape
    scale = 1 / math.sqrt(D) if scale is None else scale
    visible = visible.expand(B, H, T, S).tolist()
    bias = None if bias is None else bias.expand(B, H, T, S)
    queries, keys = _numbers(q, 3), _numbers(k, 3)
    biases = None if bias is None else _numbers(bias, 4)
    draw = torch.Generator().manual_seed(order)
    turn = [torch.randperm(n, generator=draw) if order else torch.arange(n) for n in (S, D, H)]
    columns, back, heads = turn[0].tolist(), turn[0].argsort(), turn[2].tolist()
    out, pattern, zero = [], [], q.new_zeros(())

    def score(b: int, h: int, i: int, j: int) -> Tensor:
        s = scale * (queries[b][h][i] * keys[b][h // (H // G)][j])[turn[1]].sum()
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        if biases is not None:
            s = s + biases[b][h][i][j]
        for f in steps.pairs:
            s = f(s, b, h, q_at[b][i], k_at[b][j])
        return s

    for b in range(B):
        for i in range(T):
            rows: list[Row] = [
                {j: score(b, h, i, j) for j in columns if visible[b][h][i][j]} for h in range(H)
            ]
            rows = _changed(rows, steps, q[b, :, i], k_at[b], heads)
            rows = [_weights(row, steps, h, sink, k_at[b]) for h, row in enumerate(rows)]
            if steps.after is not None:
                rows = _mixed(steps.after, rows, heads)
            for h, row in enumerate(rows):
                weights = torch.stack([row.get(j, zero) for j in columns])
                out.append((weights[:, None] * v[b, h // (H // G)][columns]).sum(0))
                pattern.append(weights[back])
    shape = (B, T, H, -1)
    return tuple(torch.stack(x).view(shape).transpose(1, 2) for x in (out, pattern))  # type: ignore[return-value]


def _numbers(x: Tensor, depth: int) -> Any:
    """Nested lists of the parts of a tensor."""
    return [_numbers(y, depth - 1) for y in x.unbind()] if depth else x


def _changed(
    rows: list[Row], steps: Steps, queries: Tensor, at: list[int], heads: list[int]
) -> list[Row]:
    """The scores of all heads of a query after the steps that need more than one of them."""
    if steps.scalable is not None:
        rows = [
            {j: s * steps.scalable(h) * math.log(len(row)) for j, s in row.items()}
            for h, row in enumerate(rows)
        ]
    if steps.before is not None:
        rows = _mixed(steps.before, rows, heads)
    if steps.cope is not None:
        rows = [_cope(row, queries[h], steps.cope, h, at) for h, row in enumerate(rows)]
    if steps.top is not None:
        rows = [_kept(row, steps.top, at) for row in rows]
    return rows


def _mixed(matrix: Tensor, rows: list[Row], heads: list[int]) -> list[Row]:
    """Row h of the matrix sums the heads that see the key."""
    result: list[Row] = []
    for h, row in enumerate(rows):
        terms = {j: [matrix[h, g] * rows[g][j] for g in heads if j in rows[g]] for j in row}
        result.append({j: torch.stack(x).sum() for j, x in terms.items()})
    return result


def _cope(row: Row, query: Tensor, table: Tensor, h: int, at: list[int]) -> Row:
    """Add the interpolated embedding of the number of gates from each key on."""
    vectors = table if table.ndim == 2 else table[h]
    gates = {j: 1 / (1 + torch.exp(-s)) for j, s in row.items()}
    result = {}
    for j, s in row.items():
        later = [gates[m] for m in row if (at[m], m) >= (at[j], j)]
        number = torch.stack(later).sum()
        last = len(vectors) - 1
        number = number if number < last else torch.full_like(number, last)
        low = math.floor(number.item())
        share = number - low
        vector = vectors[low] * (1 - share) + vectors[min(low + 1, last)] * share
        result[j] = s + (query * vector).sum()
    return result


def _kept(row: Row, top: int, at: list[int]) -> Row:
    """The largest scores; of equal ones that at the smaller position."""
    order = sorted(row, key=lambda j: (-row[j].item(), at[j], j))
    return {j: row[j] for j in row if j in order[:top]}


def _weights(row: Row, steps: Steps, h: int, sink: Tensor | None, at: list[int]) -> Row:
    if not row:
        return {}
    if steps.normalize is not None:
        nearest = sorted(row, key=lambda j: (-at[j], -j))
        return dict(zip(nearest, steps.normalize([row[j] for j in nearest]), strict=True))
    if steps.sigmoid is not None:
        bias = steps.sigmoid(h, len(row))
        return {j: 1 / (1 + torch.exp(-(s + bias))) for j, s in row.items()}
    highest = max(s.item() for s in row.values())
    highest = highest if sink is None else max(highest, sink[h].item())
    exps = {j: torch.exp(s - highest) for j, s in row.items()}
    total = torch.stack([*exps.values()]).sum()
    total = total if sink is None else total + torch.exp(sink[h] - highest)
    return {j: e / total for j, e in exps.items()}
