"""Faulty caches, as people write them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.audit.corpus.wrong_modules import precompute, rotate_half


class Appended(nn.Module):
    """past_key_value, appended; rotary positions begin again at 0."""

    restart = True

    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.h, self.d = num_heads, hidden_size // num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(4)
        )

    def forward(self, hidden_states, past_key_value=None, use_cache=False):
        B, T, _ = hidden_states.shape
        q, k, v = (
            m(hidden_states).view(B, T, self.h, self.d).transpose(1, 2)
            for m in (self.q_proj, self.k_proj, self.v_proj)
        )
        past = 0 if past_key_value is None else past_key_value[0].shape[2]
        angles = precompute(self.d, past + T)[0 if self.restart else past :][:T]
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        if past_key_value is not None:
            k = torch.cat([past_key_value[0], k], dim=2)
            v = torch.cat([past_key_value[1], v], dim=2)
        S = k.shape[2]
        keep = torch.ones(T, S, dtype=torch.bool).tril(S - T)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        out = self.o_proj(out.transpose(1, 2).reshape(B, T, -1))
        return (out, (k, v)) if use_cache else out


class Preallocated(nn.Module):
    """Llama 2's cache in the module, addressed by start_pos."""

    def __init__(self, dim, n_heads, max_batch_size=4, max_seq_len=512):
        super().__init__()
        self.n_heads, self.head_dim = n_heads, dim // n_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.cache_k = torch.zeros(max_batch_size, max_seq_len, n_heads, self.head_dim)
        self.cache_v = torch.zeros(max_batch_size, max_seq_len, n_heads, self.head_dim)

    def seen(self, start_pos, seqlen):
        return start_pos + seqlen

    def forward(self, x, start_pos):
        bsz, seqlen, _ = x.shape
        xq = self.wq(x).view(bsz, seqlen, self.n_heads, self.head_dim)
        xk = self.wk(x).view(bsz, seqlen, self.n_heads, self.head_dim)
        xv = self.wv(x).view(bsz, seqlen, self.n_heads, self.head_dim)
        self.cache_k, self.cache_v = self.cache_k.to(xq), self.cache_v.to(xq)
        self.write(xk, xv, bsz, start_pos, seqlen)
        end = self.seen(start_pos, seqlen)
        keys, values = (
            self.cache_k[:bsz, :end].transpose(1, 2),
            self.cache_v[:bsz, :end].transpose(1, 2),
        )
        scores = torch.matmul(xq.transpose(1, 2), keys.transpose(2, 3)) / math.sqrt(self.head_dim)
        i = torch.arange(start_pos, start_pos + seqlen)[:, None]
        scores = scores.masked_fill(torch.arange(end) > i, float("-inf"))
        out = torch.matmul(F.softmax(scores.float(), dim=-1).type_as(xq), values)
        return self.wo(out.transpose(1, 2).contiguous().view(bsz, seqlen, -1))

    def write(self, xk, xv, bsz, start_pos, seqlen):
        self.cache_k[:bsz, start_pos : start_pos + seqlen] = xk
        self.cache_v[:bsz, start_pos : start_pos + seqlen] = xv


class WritesLate(Preallocated):
    """One slot late: the first slot stays empty, and what is new is not seen."""

    def write(self, xk, xv, bsz, start_pos, seqlen):
        if start_pos == 0:
            super().write(xk, xv, bsz, start_pos, seqlen)
        else:
            super().write(xk, xv, bsz, start_pos + 1, seqlen)


class OneShort(Preallocated):
    """When it decodes, the newest key is left out."""

    def seen(self, start_pos, seqlen):
        return start_pos + seqlen if start_pos == 0 else start_pos + seqlen - 1


class StaleKeys(Preallocated):
    """Values are written, keys only with the prompt."""

    def write(self, xk, xv, bsz, start_pos, seqlen):
        self.cache_v[:bsz, start_pos : start_pos + seqlen] = xv
        if start_pos == 0:
            self.cache_k[:bsz, :seqlen] = xk


class Rolling(nn.Module):
    """A window whose cache is cut before the new keys are counted."""

    def __init__(self, dim, n_heads, sliding_window):
        super().__init__()
        self.h, self.w = n_heads, sliding_window
        self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def cut(self, t):
        return t[:, :, -(self.w - 2) :]

    def forward(self, x, layer_past=None):
        B, T, C = x.shape
        q, k, v = (
            t.view(B, T, self.h, C // self.h).transpose(1, 2)
            for t in self.c_attn(x).chunk(3, dim=-1)
        )
        if layer_past is not None:
            k, v = torch.cat((layer_past[0], k), 2), torch.cat((layer_past[1], v), 2)
        S = k.shape[2]
        gap = torch.arange(S - T, S)[:, None] - torch.arange(S)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=(gap >= 0) & (gap < self.w))
        return self.c_proj(out.transpose(1, 2).reshape(B, T, C)), (self.cut(k), self.cut(v))
