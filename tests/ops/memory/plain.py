"""Infini-attention as somebody would type it: every step in the dtype of its inputs, segment after
segment.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def plain_infini(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    segment: int,
    *,
    update: str = "linear",
    empty: str = "zero",
    draw: torch.Generator | None = None,
) -> Tensor:
    """q [B,H,T,D]; with `draw`, the sums over the keys of a segment run in another order."""
    n = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(n, 1), v.repeat_interleave(n, 1)
    M = torch.zeros(*q.shape[:2], q.shape[3], v.shape[3], dtype=q.dtype)
    z = torch.zeros(*q.shape[:2], q.shape[3], dtype=q.dtype)
    share = torch.sigmoid(gate.to(q.dtype))[:, None, None]
    outs = []
    for start in range(0, q.shape[2], segment):
        a, b, c = (x[:, :, start : start + segment] for x in (q, k, v))
        L = a.shape[2]
        s = (a @ b.transpose(-1, -2)) / math.sqrt(q.shape[3])
        s = s.masked_fill(torch.ones(L, L, dtype=torch.bool).triu(1), -math.inf)
        local = torch.softmax(s, -1) @ c
        if start == 0:
            outs.append(local if empty == "skip" else (1 - share) * local)
        else:
            f = F.elu(a) + 1
            outs.append(share * (f @ M / (f @ z[..., None])) + (1 - share) * local)
        order = torch.randperm(L, generator=draw) if draw else torch.arange(L)
        b, c = b[:, :, order], c[:, :, order]
        f = F.elu(b) + 1
        if update == "delta" and start:
            c = c - f @ M / (f @ z[..., None])
        M, z = M + f.transpose(-1, -2) @ c, z + f.sum(2)
    return torch.cat(outs, 2)


def several(*args: Tensor | int, **options: str) -> list[Tensor]:
    """The same sums in four orders."""
    draws = [None, *(torch.Generator().manual_seed(seed) for seed in range(3))]
    return [plain_infini(*args, draw=draw, **options) for draw in draws]  # type: ignore[arg-type]
