"""What a softmax is: exp(s_ij) over its sum, which is kept as a product so that nothing overflows or loses digits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Total(NamedTuple):
    """sum_j exp(s_ij) = share * e^top for each row: top is the largest score, or 0 for a row that sees nothing.

    top: [..., t], no gradient flows through it. share: [..., t], 0 for a row that sees nothing.
    """

    top: Tensor
    share: Tensor

    @property
    def lse(self) -> Tensor:
        """The natural logarithm, -inf with gradient 0 for a row that sees nothing."""
        blind = self.share == 0
        return (self.top + self.share.masked_fill(blind, 1).log()).masked_fill(blind, -math.inf)


def total(s: Tensor) -> Total:
    """The sum over the last dimension of scores [..., t, s], -inf where masked."""
    if s.shape[-1] == 0:
        return Total(s.new_zeros(s.shape[:-1]), s.sum(-1))
    top = s.amax(-1).detach()
    top = top.masked_fill(top.isneginf(), 0)
    return Total(top, torch.exp(s - top[..., None]).sum(-1))


def join(parts: Sequence[Total]) -> Total:
    """The sum over all the keys of several parts; at least one."""
    tops, shares = (torch.stack(x) for x in zip(*parts, strict=True))
    tops = tops.masked_fill(shares == 0, -math.inf)  # the 0 of a part that sees nothing is no score
    top = tops.amax(0)
    top = top.masked_fill(top.isneginf(), 0)
    return Total(top, (shares * torch.exp(tops - top)).sum(0))


def with_sink(whole: Total, sink: Tensor | None) -> Total:
    """The sum with exp(sink) in it; sink: one logit per head [H], for rows [B,H,t]."""
    if sink is None:
        return whole
    logit = sink.to(whole.top.dtype)[:, None].expand(whole.top.shape)
    top = torch.where(whole.share == 0, logit, torch.maximum(whole.top, logit)).detach()
    old = torch.where(whole.share == 0, 0, whole.share * torch.exp(whole.top - top))
    return Total(top, old + torch.exp(logit - top))


def weights(s: Tensor, whole: Total) -> Tensor:
    """exp(s_ij) over the sum of its row, for any columns of it; 0 for a row that sees nothing."""
    share = whole.share.masked_fill(whole.share == 0, 1)
    return torch.exp(s - whole.top[..., None]) / share[..., None]
