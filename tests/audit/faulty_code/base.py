"""Right attention, written by hand as people write it: each step is a method, so that a wrong one
differs in one step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class Right(nn.Module):
    """Causal grouped-query attention with named projections."""

    def __init__(
        self, dim: int, heads: int, kv_heads: int | None = None, window: int | None = None
    ):
        super().__init__()
        self.heads, self.kv_heads, self.window = heads, kv_heads or heads, window
        self.head_dim = dim // heads
        self.q_proj = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(dim, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(dim, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        return self.answer(q, k, v)

    def project(self, x: Tensor, start: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (
            self.split(t, n) for t, n in ((q, self.heads), (k, self.kv_heads), (v, self.kv_heads))
        )
        return self.rotate(q, k, v, start)

    def answer(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = self.spread(k), self.spread(v)
        weights = self.weigh(self.score(q, k), self.allowed(q.shape[2], k.shape[2]))
        return self.o_proj(self.join(weights @ v))

    def split(self, x: Tensor, heads: int) -> Tensor:
        B, T, _ = x.shape
        return x.view(B, T, heads, self.head_dim).transpose(1, 2)

    def rotate(self, q: Tensor, k: Tensor, v: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
        return q, k, v

    def spread(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.heads // self.kv_heads, dim=1)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)

    def allowed(self, T: int, S: int) -> Tensor:
        i, j = torch.arange(S - T, S)[:, None], torch.arange(S)
        keep = j <= i
        return keep if self.window is None else keep & (i - j < self.window)

    def weigh(self, scores: Tensor, keep: Tensor) -> Tensor:
        return torch.softmax(scores.masked_fill(~keep, float("-inf")), dim=-1)

    def join(self, z: Tensor) -> Tensor:
        B, H, T, D = z.shape
        return z.transpose(1, 2).reshape(B, T, H * D)


def angles(T: int, D: int, start: int = 0) -> Tensor:
    inv = 10000.0 ** (-torch.arange(0, D, 2).double() / D)
    return torch.arange(start, start + T).double()[:, None] * inv


def halves(x: Tensor, start: int = 0) -> Tensor:
    """Rotary in the half-split layout, x [B,H,T,D]."""
    D = x.shape[-1]
    turn = angles(x.shape[2], D, start)
    turn = torch.cat([turn, turn], -1)
    rotated = torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1)
    return x * turn.cos().to(x.dtype) + rotated * turn.sin().to(x.dtype)


class RightRotary(Right):
    def rotate(self, q: Tensor, k: Tensor, v: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
        return halves(q, start), halves(k, start), v


class RightCached(RightRotary):
    """With a cache that is passed and returned, trimmed behind the window after it was used."""

    def forward(self, x: Tensor, cache: tuple | None = None) -> tuple[Tensor, tuple]:
        start = 0 if cache is None else cache[2]
        q, k, v = self.project(x, start)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        out = self.answer(q, k, v)
        return out, (*self.keep(k, v), start + x.shape[1])

    def keep(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.window is None:
            return k, v
        return k[:, :, -self.window :], v[:, :, -self.window :]


class RightPadded(RightRotary):
    """With a mask of tokens, [B,S], and rows that see nothing set to 0."""

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x)
        keep = self.allowed(x.shape[1], x.shape[1])[None, None]
        if padding_mask is not None:
            keep = keep & padding_mask[:, None, None, :]
        scores = self.score(q, self.spread(k)).masked_fill(~keep, float("-inf"))
        weights = torch.softmax(scores, -1).masked_fill(~keep.any(-1, keepdim=True), 0.0)
        return self.o_proj(self.join(weights @ self.spread(v)))


class RightGPT(nn.Module):
    """GPT-2's way: one fused map, a mask in a buffer that is not saved, SDPA's own dropout only in
    training.
    """

    def __init__(self, n_embd: int, n_head: int, block_size: int, dropout: float):
        super().__init__()
        self.n_head, self.dropout = n_head, nn.Dropout(dropout)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.register_buffer(
            "bias", torch.ones(block_size, block_size).tril().bool(), persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = self.dropout(
            torch.softmax(att.masked_fill(~self.bias[:T, :T], float("-inf")), dim=-1)
        )
        return self.c_proj((att @ v).transpose(1, 2).contiguous().view(B, T, C))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A right function that returns its weights; a row that sees nothing gives 0."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = torch.softmax(scores, -1)
    if mask is not None:
        weights = torch.where(mask.any(-1, keepdim=True), weights, 0.0)
    return weights @ v, weights
