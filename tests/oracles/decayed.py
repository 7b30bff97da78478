"""Recurrences with decayed sums as sums over pairs of tokens, in float64: no state, no chunk,
nothing of regard. One row of the batch and one head at a time.

Each function takes tensors of one head, [T, d], and the tokens that are real; what the others
contain is never read. It returns the outputs [T, E], 0 where a slot is no token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def _between(g: Tensor, tokens: Sequence[int], j: int, i: int) -> Tensor:
    """The sum of g over the tokens behind j up to i."""
    return sum((g[t] for t in tokens if j < t <= i), torch.zeros_like(g[0]))


def kernel(
    q: Tensor, k: Tensor, v: Tensor, tokens: Sequence[int], f: Callable[[float, int, int], float]
) -> Tensor:
    """o_i = sum_j f(q_i . k_j, i, j) v_j / sum_j f(q_i . k_j, i, j)."""
    out = torch.zeros(q.shape[0], v.shape[1], dtype=torch.float64)
    for i in tokens:
        past = [j for j in tokens if j <= i]
        weights = [f(float(q[i] @ k[j]), i, j) for j in past]
        total = math.fsum(weights)
        if total:
            out[i] = sum(w * v[j] for w, j in zip(weights, past, strict=True)) / total
    return out


def rwkv6(q: Tensor, k: Tensor, v: Tensor, g: Tensor, u: Tensor, tokens: Sequence[int]) -> Tensor:
    """The last token before i has not decayed at all, and i itself has the weight u."""
    out = torch.zeros(q.shape[0], v.shape[1], dtype=torch.float64)
    for n, i in enumerate(tokens):
        out[i] = (q[i] * u * k[i]).sum() * v[i]
        for j in tokens[:n]:
            out[i] += (q[i] * k[j] * _between(g, tokens, j, tokens[n - 1]).exp()).sum() * v[j]
    return out


def rwkv4(k: Tensor, v: Tensor, g: Tensor, u: Tensor, tokens: Sequence[int]) -> Tensor:
    """A softmax in each channel: over k_j and the decays of the tokens between, and u + k_i."""
    out = torch.zeros_like(v)
    for n, i in enumerate(tokens):
        logits = [k[j] + (n - 1 - m) * g for m, j in enumerate(tokens[:n])] + [u + k[i]]
        weights = torch.stack(logits).softmax(0)
        out[i] = (weights * v[list(tokens[: n + 1])]).sum(0)
    return out


def mlstm(
    q: Tensor, k: Tensor, v: Tensor, write: Tensor, forget: Tensor, tokens: Sequence[int]
) -> Tensor:
    """Weights exp(log i_j + sum of log f), times q . k / sqrt(D); the sum of the weights bounds.

    Divided by the largest exponential, so that none overflows: the bound 1 becomes exp(-largest).
    """
    out = torch.zeros(q.shape[0], v.shape[1], dtype=torch.float64)
    for i in tokens:
        past = [j for j in tokens if j <= i]
        logs = [float(write[j] + _between(forget[:, None], tokens, j, i)[0]) for j in past]
        largest = max(*logs, 0.0)
        weights = [
            math.exp(log - largest) * float(q[i] @ k[j]) / math.sqrt(q.shape[1])
            for log, j in zip(logs, past, strict=True)
        ]
        below = max(abs(math.fsum(weights)), math.exp(-largest))
        out[i] = sum(w * v[j] for w, j in zip(weights, past, strict=True)) / below
    return out


def slots(q: Tensor, k: Tensor, v: Tensor, g: Tensor, tokens: Sequence[int]) -> Tensor:
    """The share of token j in slot m is (1 - a_jm) times the decays behind it."""
    out = torch.zeros(q.shape[0], v.shape[1], dtype=torch.float64)
    for i in tokens:
        past = [j for j in tokens if j <= i]
        shares = torch.stack([-torch.expm1(g[j]) * _between(g, tokens, j, i).exp() for j in past])
        keys, values = shares.mT @ k[past], shares.mT @ v[past]  # [m, D], [m, E]
        out[i] = (keys @ q[i] / math.sqrt(q.shape[1])).softmax(0) @ values
    return out


def shares_of_softmax(z: Tensor, tokens: Sequence[int]) -> Tensor:
    """exp(z_i) / sum_{j <= i} exp(z_j): what a slot of ABC, or a channel of LightNet, takes up."""
    out = torch.zeros_like(z)
    for i in tokens:
        out[i] = torch.stack([z[j] for j in tokens if j <= i]).softmax(0)[-1]
    return out


def mamba2(
    q: Tensor, k: Tensor, v: Tensor, step: Tensor, rate: float, skip: float, tokens: Sequence[int]
) -> Tensor:
    """o_i = sum_j (q_i . k_j) exp(-rate (s_{j+1} + ... + s_i)) s_j v_j + skip v_i."""
    out = torch.zeros(q.shape[0], v.shape[1], dtype=torch.float64)
    for i in tokens:
        out[i] = skip * v[i]
        for j in tokens:
            if j <= i:
                decay = math.exp(-rate * float(_between(step[:, None], tokens, j, i)[0]))
                out[i] += float(q[i] @ k[j]) * decay * float(step[j]) * v[j]
    return out


def fenwick_levels(t: int) -> list[int]:
    """The levels of the tokens 0 to t for token t: it cuts off the bucket of the lowest bit of what
    is left, from the newest tokens to the oldest.
    """
    levels, left = [0], t
    while left:
        size = 1
        while left % (2 * size) == 0:
            size *= 2
        levels = [1 + int(math.log2(size))] * size + levels
        left -= size
    return levels


def log_linear(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, weights: Tensor, tokens: Sequence[int]
) -> Tensor:
    """o_i = sum_j lambda_i[level of j] exp(g_{j+1} + ... + g_i) (q_i . k_j) v_j / sqrt(D).

    The last level has all that is older.
    """
    out, last = torch.zeros(q.shape[0], v.shape[1], dtype=torch.float64), weights.shape[1] - 1
    for n, i in enumerate(tokens):
        for j, level in zip(tokens[: n + 1], fenwick_levels(n), strict=True):
            weight = weights[i, min(level, last)] * _between(g, tokens, j, i)[0].exp()
            out[i] += weight * (q[i] @ k[j]) / math.sqrt(q.shape[1]) * v[j]
    return out
