"""Plain math in the dtype of its inputs, as somebody would type it: what a kernel's rounding is measured against."""

from __future__ import annotations

import math

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
) -> tuple[Tensor, Tensor]:
    """(out, lse) by matmul and exp, every step rounded to the dtype of q; visible and bias broadcast to [B,H,T,S].

    Differentiable. A row that sees nothing gives 0 and -inf, with gradient 0.
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
    if sink is None:
        return torch.exp(s - top) / total @ v, lse
    sink = sink.to(s.dtype)[:, None, None]
    top = torch.maximum(top, sink.detach())
    weights = torch.exp(s - top)
    return weights / (weights.sum(-1, keepdim=True) + torch.exp(sink - top)) @ v, lse
