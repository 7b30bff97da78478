"""Plain math in the dtype of its inputs, as somebody would type it: what a kernel's rounding is
measured against.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visible: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    by_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """(out, lse) by matmul and exp, every step rounded to the dtype of q; visible and bias
    broadcast to [B,H,T,S].

    The weights are exp(s - max) over their sum with exp(sink - max), or exp(s - lse) with
    sigmoid(lse - sink) behind: both are what people type. Differentiable. A row that sees nothing
    gives 0 and -inf, with gradient 0.
    """
    n = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(n, 1), v.repeat_interleave(n, 1)
    s = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.transpose(-1, -2)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + bias.to(s.dtype)
    if visible is None:
        visible = torch.ones(s.shape[-2:], dtype=torch.bool)
    visible = visible.expand(s.shape)
    s = torch.where(visible, s, -math.inf)
    blind = ~visible.any(-1, keepdim=True)
    top = torch.where(blind, 0, s.detach().amax(-1, keepdim=True))
    total = torch.where(blind, 1, torch.exp(s - top).sum(-1, keepdim=True))
    lse = torch.where(blind, -math.inf, top + total.log())[..., 0]
    sink = None if sink is None else sink.to(s.dtype)[:, None, None]
    if by_lse:
        whole = torch.where(blind, 0, lse[..., None])
        keep = 1 if sink is None else torch.sigmoid(whole - sink)
        return torch.exp(s - whole) @ v * keep, lse
    if sink is None:
        return torch.exp(s - top) / total @ v, lse
    top = torch.maximum(top, sink.detach())
    weights = torch.exp(s - top)
    return weights / (weights.sum(-1, keepdim=True) + torch.exp(sink - top)) @ v, lse


def several_plains(
    q: Tensor, k: Tensor, v: Tensor, *, n: int = 4, **options: Any
) -> list[tuple[Tensor, Tensor]]:
    """Plain math n times: the same sums, each time over queries, keys and dimensions in another
    order.

    Every second one goes by the lse; not in half precision, where an lse is too coarse to be
    anybody's plain math.
    """
    results = []
    visible, bias = options.pop("visible", None), options.pop("bias", None)
    for seed in range(n):
        draw = torch.Generator().manual_seed(seed)
        rows, keys, dims = (
            torch.randperm(size, generator=draw) if seed else torch.arange(size)
            for size in (q.shape[2], k.shape[2], q.shape[3])
        )

        def shuffled(x: Tensor | None, rows: Tensor = rows, keys: Tensor = keys) -> Tensor | None:
            if x is None:
                return None
            return x.expand(*x.shape[:-2], len(rows), len(keys))[..., rows, :][..., keys]

        out, lse = plain_attention(
            q[:, :, rows][..., dims],
            k[:, :, keys][..., dims],
            v[:, :, keys],
            visible=shuffled(visible),
            bias=shuffled(bias),
            by_lse=seed % 2 == 1 and q.dtype.itemsize >= 4,
            **options,
        )
        back = rows.argsort()
        results.append((out[:, :, back], lse[:, :, back]))
    return results
