"""Softmax attention from its definition: Python floats and loops, and nothing of regard."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Answer(NamedTuple):
    """out [B,H,T,E], lse [B,H,T] without the sink, pattern and scores [B,H,T,S]; float64."""

    out: Tensor
    lse: Tensor
    pattern: Tensor
    scores: Tensor


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visible: Callable[[int, int, int, int], bool] = lambda b, h, i, j: True,
    bias: Callable[[int, int, int, int], float] = lambda b, h, i, j: 0.0,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> Answer:
    """q [B,H,T,D], k [B,G,S,D], v [B,G,S,E]; visible and bias are asked for (row, query head,
    query, key).
    """
    (B, H, T, D), (_, G, S, E) = q.shape, v.shape
    ql, kl, vl = (x.detach().double().tolist() for x in (q, k, v))
    sinks = None if sink is None else sink.detach().double().tolist()
    scale = 1 / math.sqrt(D) if scale is None else scale
    out = torch.zeros(B, H, T, E, dtype=torch.float64)
    lse = torch.full((B, H, T), -math.inf, dtype=torch.float64)
    pattern = torch.zeros(B, H, T, S, dtype=torch.float64)
    masked = torch.full_like(pattern, -math.inf)
    for b in range(B):
        for h in range(H):
            g = h // (H // G)
            for i in range(T):
                scores = {}
                for j in range(S):
                    if not visible(b, h, i, j):
                        continue
                    s = scale * math.fsum(
                        x * y for x, y in zip(ql[b][h][i], kl[b][g][j], strict=True)
                    )
                    if softcap is not None:
                        s = softcap * math.tanh(s / softcap)
                    scores[j] = s + bias(b, h, i, j)
                if not scores:
                    continue
                top = max(scores.values())
                lse[b, h, i] = top + math.log(math.fsum(math.exp(s - top) for s in scores.values()))
                if sinks is not None:
                    top = max(top, sinks[h])
                total = math.fsum(math.exp(s - top) for s in scores.values())
                total += 0.0 if sinks is None else math.exp(sinks[h] - top)
                for j, s in scores.items():
                    masked[b, h, i, j] = s
                    pattern[b, h, i, j] = math.exp(s - top) / total
                for e in range(E):
                    out[b, h, i, e] = math.fsum(
                        pattern[b, h, i, j].item() * vl[b][g][j][e] for j in scores
                    )
    return Answer(out, lse, pattern, masked)
