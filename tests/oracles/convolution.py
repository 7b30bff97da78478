"""The short causal convolution from its definition: Python floats and loops, nothing of regard."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    silu: bool = False,
) -> Tensor:
    """x [B,T,c], weight [c,n], its last column for the present token -> [B,T,c] in float64."""
    (B, T, c), n = x.shape, weight.shape[1]
    rows, filters = x.detach().double().tolist(), weight.detach().double().tolist()
    out = torch.zeros(B, T, c, dtype=torch.float64)
    for b in range(B):
        seen: list[list[float]] = []
        for t in range(T):
            seen.append(rows[b][t])
            for d in range(c):
                terms = [filters[d][n - 1 - i] * seen[-1 - i][d] for i in range(min(n, len(seen)))]
                y = math.fsum(terms) + (0.0 if bias is None else float(bias[d].detach()))
                out[b, t, d] = y / (1 + math.exp(-y)) if silu else y
    return out


def convolution_plain(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, silu: bool = False, reverse: bool
) -> Tensor:
    """The sum over the tokens of a filter, from the oldest or (`reverse`) from the newest, in the
    dtype of its inputs.
    """
    n, T = weight.shape[1], x.shape[1]
    padded = torch.cat([x.new_zeros(x.shape[0], n - 1, x.shape[2]), x], 1)
    order = range(n - 1, -1, -1) if reverse else range(n)
    y = torch.zeros_like(x)
    for i in order:
        y = y + padded[:, i : i + T] * weight[:, i]
    y = y if bias is None else y + bias
    return y * torch.sigmoid(y) if silu else y
