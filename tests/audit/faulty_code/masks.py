"""Wrong masks: inverted, shifted, ignored, added, applied too late, to the wrong row, on one path
only.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tests.audit.faulty_code.base import Right, RightPadded


class SeedOne(nn.Module):
    """The note of seed 1: triu(1) marks what is blocked, and the layer fills where it is 0; -1e9
    hides the empty row.
    """

    def __init__(self, d_model: int, n_heads: int):
        super().__init__()
        self.n_heads, self.d_k = n_heads, d_model // n_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        B, T, M = x.shape
        q, k, v = (
            w(x).view(B, T, self.n_heads, self.d_k).transpose(1, 2)
            for w in (self.W_q, self.W_k, self.W_v)
        )
        scores = (q / math.sqrt(self.d_k)) @ k.transpose(-2, -1)
        mask = torch.triu(torch.ones(T, T), diagonal=1)
        weights = torch.softmax(scores.masked_fill(mask == 0, -1e9), dim=-1)
        return self.W_o((weights @ v).transpose(1, 2).reshape(B, T, M)), weights


def inverted(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """True = may attend, says its documentation."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(mask, -1e9)
    return torch.softmax(scores, -1) @ v


class Unmasked(Right):
    def allowed(self, T: int, S: int) -> Tensor:
        return torch.ones(T, S).bool()


def added(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    """A mask of 0 and 1 is added to the scores."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if attn_mask is not None:
        scores = scores + attn_mask
    return torch.softmax(scores, -1) @ v


def first_row(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """The mask of row 0 serves the whole batch; a row that sees nothing is even."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask[0], -1e9)
    return torch.softmax(scores, -1) @ v


def empty_row(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, -1) @ v


class PaddingCounted(RightPadded):
    """Padding is taken for a length: right where it stands behind, a leak where it stands in
    front.
    """

    def allowed(self, T: int, S: int) -> Tensor:
        return torch.ones(T, S).bool()

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        if padding_mask is not None:
            lengths = padding_mask.sum(1, keepdim=True)
            padding_mask = torch.arange(x.shape[1]) < lengths
        return super().forward(x, padding_mask)
