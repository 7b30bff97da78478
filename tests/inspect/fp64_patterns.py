"""Patterns computed from the definition: loops in fp64 over positions, with masks of their own.

They share no code with the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Sees = Callable[[int, int], bool]


@dataclass
class Case:
    """One call: q [B,H,T,D] and k [B,G,S,D] at positions [B][.], and the rule written a second
    time.

    sees(p_i, p_j): the mask; penalty(h, p_i, p_j): the bias; -1 = a slot that holds nothing.
    """

    q: Tensor
    k: Tensor
    q_at: list[list[int]]
    k_at: list[list[int]]
    sees: Sees
    penalty: Callable[[int, int, int], float] | None = None
    scale: float | None = None
    softcap: float | None = None
    sink: Tensor | None = None

    def row(self, b: int, h: int, i: int) -> tuple[list[float], list[float]]:
        """(scores, weights) of a query."""
        H, G, D = self.q.shape[1], self.k.shape[1], self.q.shape[3]
        scale = 1 / math.sqrt(D) if self.scale is None else self.scale
        scores = []
        for j, at in enumerate(self.k_at[b]):
            if at < 0 or not self.sees(self.q_at[b][i], at):
                scores.append(-math.inf)
                continue
            x, y = self.q[b, h, i].double().tolist(), self.k[b, h // (H // G), j].double().tolist()
            s = scale * math.fsum(a * c for a, c in zip(x, y, strict=True))
            s = s if self.softcap is None else self.softcap * math.tanh(s / self.softcap)
            scores.append(s if self.penalty is None else s + self.penalty(h, self.q_at[b][i], at))
        if all(s == -math.inf for s in scores):
            return scores, [0.0] * len(scores)
        extra = [] if self.sink is None else [float(self.sink[h])]
        top = max(*scores, *extra, -math.inf)
        total = math.fsum(math.exp(s - top) for s in scores + extra)
        return scores, [math.exp(s - top) / total for s in scores]

    def pattern(self, b: int, h: int) -> tuple[Tensor, Tensor]:
        """(scores, weights) [T,S], fp64."""
        rows = [self.row(b, h, i) for i in range(self.q.shape[2])]
        scores, weights = ([x[n] for x in rows] for n in (0, 1))
        return torch.tensor(scores, dtype=torch.float64), torch.tensor(weights, dtype=torch.float64)


def plain_lses(q: Tensor, k: Tensor, scores: Tensor, scale: float) -> list[Tensor]:
    """ln sum_j exp(s_ij) in the dtype of q [T,D], by matmul, exp and log, for what is visible in
    scores; in four orders.
    """
    found = []
    for seed in range(4):
        dims = torch.randperm(q.shape[1], generator=torch.Generator().manual_seed(seed))
        dot = (q[:, dims] * scale) @ k[:, dims].T
        # what is behind the products (softcap, bias) is given: it is added exactly, and rounded
        # once
        exact = (q.double() * scale) @ k.double().T
        s = torch.where(scores.isneginf(), scores, dot.double() + (scores - exact)).to(q.dtype)
        found.append(s.logsumexp(1))
    return found


def tokens(*sizes: int, seed: int = 0, spread: float = 1.0, dtype: Any = torch.float32) -> Tensor:
    """Random normal numbers of their own seed."""
    return (spread * torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))).to(dtype)
