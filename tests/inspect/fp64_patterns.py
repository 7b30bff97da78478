"""Patterns computed from the definition: loops in fp64 over positions, with masks of their own.

They share no code with the package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.oracles.oracle import softmax_attention

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

    def pattern(self, b: int, h: int, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """(scores, weights) [T,S] of some queries, fp64."""
        group, q_at, k_at = h * self.k.shape[1] // self.q.shape[1], self.q_at[b][rows], self.k_at[b]
        k = self.k[b : b + 1, group : group + 1]
        add = self.penalty
        found = softmax_attention(
            self.q[b : b + 1, h : h + 1, rows],
            k,
            k,
            visible=lambda _b, _h, i, j: k_at[j] >= 0 and self.sees(q_at[i], k_at[j]),
            bias=lambda _b, _h, i, j: 0.0 if add is None else add(h, q_at[i], k_at[j]),
            scale=self.scale,
            softcap=self.softcap,
            sink=None if self.sink is None else self.sink[h : h + 1],
        )
        return found.scores[0, 0], found.pattern[0, 0]


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
