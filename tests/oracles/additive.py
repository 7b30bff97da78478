"""Additive attention, and recurrent steps, from their definitions: Python floats and loops, and
nothing of regard.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def additive(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    weight: Tensor,
    visible: Callable[[int, int, int, int], bool] = lambda b, h, i, j: True,
) -> tuple[Tensor, Tensor]:
    """(context [B,H,T,E], weights [B,H,T,S]) in float64; visible is asked for (row, query head,
    query, key).
    """
    (B, H, T, A), (_, G, S, E) = query.shape, values.shape
    q, k, v, w = (x.detach().double().tolist() for x in (query, keys, values, weight))
    context = torch.zeros(B, H, T, E, dtype=torch.float64)
    pattern = torch.zeros(B, H, T, S, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            g = h // (H // G)
            for i in range(T):
                e = {
                    j: math.fsum(
                        w[h][a] * math.tanh(q[b][h][i][a] + k[b][g][j][a]) for a in range(A)
                    )
                    for j in range(S)
                    if visible(b, h, i, j)
                }
                if not e:
                    continue
                top = max(e.values())
                total = math.fsum(math.exp(x - top) for x in e.values())
                for j, x in e.items():
                    pattern[b, h, i, j] = math.exp(x - top) / total
                for n in range(E):
                    context[b, h, i, n] = math.fsum(
                        math.exp(x - top) / total * v[b][g][j][n] for j, x in e.items()
                    )
    return context, pattern
