"""More styles, each right, and wrong by an argument: `fault` names the step that is wrong."""

from __future__ import annotations

import copy
import math
from functools import lru_cache

import torch
import torch.nn as nn
import torch.nn.functional as F


def merged(q, k, v, num_heads, fault=None):
    """[B, T, H * D] and a number of heads."""
    B, T, M = q.shape
    d = M // num_heads
    q, k, v = (t.view(B, -1, num_heads, d).transpose(1, 2) for t in (q, k, v))
    s = q @ k.transpose(2, 3) / math.sqrt(M if fault == "scale" else d)
    return (s.softmax(-1) @ v).transpose(1, 2).reshape(B, T, M)


def merged_wrong(q, k, v, num_heads):
    return merged(q, k, v, num_heads, "scale")


def clones(module, n):
    return nn.ModuleList([copy.deepcopy(module) for _ in range(n)])


class MultiHeadedAttention(nn.Module):
    """The Annotated Transformer's: four maps in a list, a mask [B, 1, S] or [B, T, S]."""

    def __init__(self, h, d_model, dropout=0.1, fault=None):
        super().__init__()
        self.d_k, self.h, self.fault = d_model // h, h, fault
        self.linears = clones(nn.Linear(d_model, d_model), 4)
        for p in self.parameters():
            nn.init.normal_(p, std=0.3)
        self.attn, self.dropout = None, nn.Dropout(p=dropout)

    def forward(self, query, key, value, mask=None):
        if mask is not None:
            mask = mask.unsqueeze(1)
        n = query.size(0)
        query, key, value = [
            lin(x).view(n, -1, self.h, self.d_k).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value), strict=False)
        ]
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(self.d_k)
        if self.fault == "scale":
            scores = scores * math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        self.attn = self.dropout(scores.softmax(dim=-1))
        x = torch.matmul(self.attn, value)
        x = (
            x.view(n, -1, self.h * self.d_k)
            if self.fault == "join"
            else x.transpose(1, 2).contiguous().view(n, -1, self.h * self.d_k)
        )
        return self.linears[-1](x)


class HeadByHead(nn.Module):
    """A loop over heads, and slices of one matrix."""

    def __init__(self, embed_size, heads, fault=None):
        super().__init__()
        self.embed_size, self.heads, self.head_dim, self.fault = (
            embed_size,
            heads,
            embed_size // heads,
            fault,
        )
        self.queries, self.keys, self.values = (
            nn.Linear(embed_size, embed_size, bias=False) for _ in range(3)
        )
        self.fc_out = nn.Linear(embed_size, embed_size)

    def forward(self, x):
        Q, K, V = self.queries(x), self.keys(x), self.values(x)
        outs = []
        for h in range(self.heads):
            sl = slice(h * self.head_dim, (h + 1) * self.head_dim)
            energy = torch.bmm(Q[:, :, sl], K[:, :, sl].permute(0, 2, 1))
            energy = energy / (
                self.embed_size**0.5 if self.fault == "scale" else self.head_dim**0.5
            )
            attention = torch.softmax(energy, dim=1 if self.fault == "axis" else 2)
            outs.append(torch.bmm(attention, V[:, :, sl]))
        return self.fc_out(torch.cat(outs, dim=2))


class RowByRow(nn.Module):
    """A loop over queries, as pseudo code is written."""

    def __init__(self, dim, heads, fault=None):
        super().__init__()
        self.heads, self.fault = heads, fault
        self.to_qkv, self.to_out = (
            nn.Linear(dim, 3 * dim, bias=False),
            nn.Linear(dim, dim, bias=False),
        )

    def forward(self, x):
        B, T, M = x.shape
        q, k, v = self.to_qkv(x).chunk(3, -1)
        q, k, v = (t.reshape(B, T, self.heads, -1) for t in (q, k, v))
        rows = []
        for t in range(T):
            end = t + 1 if self.fault != "strict" else max(t, 1)
            s = torch.einsum("bhd,bshd->bhs", q[:, t], k[:, :end]) / math.sqrt(M // self.heads)
            rows.append(torch.einsum("bhs,bshd->bhd", s.softmax(-1), v[:, :end]).flatten(1))
        return self.to_out(torch.stack(rows, 1))


class Cosine(nn.Module):
    """Swin 2's: cosines and a learned temperature."""

    def __init__(self, dim, num_heads, fault=None):
        super().__init__()
        self.num_heads, self.fault = num_heads, fault
        self.logit_scale = nn.Parameter(torch.log(10 * torch.ones(num_heads, 1, 1)))
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        attn = attn * torch.clamp(self.logit_scale, max=math.log(100.0)).exp()
        attn = attn.softmax(dim=-2 if self.fault else -1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))


class Gated(nn.Module):
    """An output gate, as Qwen 3 Next has it."""

    def __init__(self, hidden_size, num_heads, fault=None):
        super().__init__()
        self.h, self.d, self.fault = num_heads, hidden_size // num_heads, fault
        self.q_proj = nn.Linear(hidden_size, 2 * hidden_size, bias=False)
        self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(3)
        )

    def forward(self, x):
        B, T, M = x.shape
        q, gate = self.q_proj(x).view(B, T, self.h, 2 * self.d).chunk(2, dim=-1)
        k, v = (m(x).view(B, T, self.h, self.d).transpose(1, 2) for m in (self.k_proj, self.v_proj))
        scale = 1.0 if self.fault else None
        z = F.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, is_causal=True, scale=scale
        ).transpose(1, 2)
        return self.o_proj((z * torch.sigmoid(gate)).reshape(B, T, M))


class Falcon(nn.Module):
    """Multi-query, [H + 2, D] in one map."""

    def __init__(self, hidden_size, num_heads, fault=None):
        super().__init__()
        self.num_heads, self.head_dim, self.fault = num_heads, hidden_size // num_heads, fault
        self.query_key_value = nn.Linear(hidden_size, hidden_size + 2 * self.head_dim)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states):
        B, T, M = hidden_states.shape
        fused = self.query_key_value(hidden_states).view(B, T, self.num_heads + 2, self.head_dim)
        q, k, v = fused[..., :-2, :], fused[..., [-2], :], fused[..., [-1], :]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)
        if self.fault:
            scores = scores / math.sqrt(self.head_dim)
        scores = scores.masked_fill(~torch.ones(T, T).tril().bool(), float("-inf"))
        return self.dense((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, M))


class AbsorbedMLA(nn.Module):
    """Latents attended to directly: the map of keys is absorbed in the queries."""

    def __init__(self, dim, n_heads, rank=12, nope=8, rope=4, fault=None):
        super().__init__()
        self.h, self.rank, self.nope, self.rope, self.fault = n_heads, rank, nope, rope, fault
        self.wq = nn.Linear(dim, n_heads * (nope + rope), bias=False)
        self.wkv_a = nn.Linear(dim, rank + rope, bias=False)
        self.w_uk = nn.Parameter(torch.randn(n_heads, nope, rank) * rank**-0.5)
        self.w_uv = nn.Parameter(torch.randn(n_heads, rank, nope) * rank**-0.5)
        self.wo = nn.Linear(n_heads * nope, dim, bias=False)

    def turn(self, x):
        T, D = x.shape[1], x.shape[-1]
        angle = torch.outer(
            torch.arange(T).double(), 10000.0 ** (-torch.arange(0, D, 2).double() / D)
        )
        cos, sin = angle.cos().to(x.dtype)[:, None], angle.sin().to(x.dtype)[:, None]
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def forward(self, x):
        B, T, _ = x.shape
        q_nope, q_pe = self.wq(x).view(B, T, self.h, -1).split([self.nope, self.rope], -1)
        c, k_pe = self.wkv_a(x).split([self.rank, self.rope], -1)
        q_lat = torch.einsum("bthd,hdc->bthc", q_nope, self.w_uk)
        k_pe = k_pe if self.fault == "one-sided" else self.turn(k_pe[:, :, None])[:, :, 0]
        scores = torch.einsum("bthc,bsc->bhts", q_lat, c) + torch.einsum(
            "bthr,bsr->bhts", self.turn(q_pe), k_pe
        )
        scores = scores * (1.0 if self.fault == "scale" else (self.nope + self.rope) ** -0.5)
        scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), float("-inf"))
        z = torch.einsum("bhts,bsc->bthc", scores.softmax(-1), c)
        return self.wo(torch.einsum("bthc,hcd->bthd", z, self.w_uv).flatten(2))


class FourMaps(nn.Module):
    """Four maps, and scores that a subclass changes before or after a causal mask."""

    def __init__(self, dim, n_heads):
        super().__init__()
        self.h = n_heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def heads(self, *tokens):
        maps = zip((self.q, self.k, self.v), tokens, strict=True)
        return [m(x).unflatten(-1, (self.h, -1)).transpose(1, 2) for m, x in maps]

    def attend(self, scores, v):
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def causal(self, scores):
        T = scores.shape[-1]
        return scores.masked_fill(torch.ones(T, T).triu(1).bool(), float("-inf"))

    def forward(self, x):
        q, k, v = self.heads(x, x, x)
        return self.attend(self.causal(q @ k.mT / math.sqrt(q.shape[-1])), v)


class CapBeforeMask(FourMaps):
    def forward(self, x):
        q, k, v = self.heads(x, x, x)
        return self.attend(self.causal(5 * torch.tanh(q @ k.mT / math.sqrt(q.shape[-1]) / 5)), v)


class CapAfterMask(FourMaps):
    def forward(self, x):
        q, k, v = self.heads(x, x, x)
        return self.attend(5 * torch.tanh(self.causal(q @ k.mT / math.sqrt(q.shape[-1])) / 5), v)


class MaskToZero(FourMaps):
    hidden = 1e-9

    def forward(self, x, mask=None):
        q, k, v = self.heads(x, x, x)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        return self.attend(scores if mask is None else self.fill(scores, mask), v)

    def fill(self, scores, mask):
        return scores.masked_fill(mask == 0, self.hidden)


class MaskOfQueries(MaskToZero):
    def fill(self, scores, mask):
        return scores.masked_fill(mask[:, None, :, None] == 0, -1e9)


class PaddingToZero(MaskToZero):
    def forward(self, x, padding_mask=None):
        return super().forward(x, None if padding_mask is None else padding_mask[:, None, None])


class MaskFilled(MaskToZero):
    hidden = -1e9


class ScoresReturned(FourMaps):
    def forward(self, x):
        q, k, v = self.heads(x, x, x)
        scores = self.causal(q @ k.mT / math.sqrt(q.shape[-1]))
        return self.attend(scores, v), scores


class SavedNumbers(FourMaps):
    """Buffers named as masks and caches, and a square one of 0 and 1, which are neither."""

    def __init__(self, dim, n_heads):
        super().__init__(dim, n_heads)
        self.register_buffer("mask_value", torch.tensor(-1e9))
        self.register_buffer("cache_scale", torch.ones(1))
        self.register_buffer("order", torch.eye(dim))

    def forward(self, x):
        return super().forward(x @ self.order) * self.cache_scale


class ByNameOnly(FourMaps):
    def forward(self, *, query, key, value):
        q, k, v = self.heads(query, key, value)
        return self.attend(q @ k.mT / math.sqrt(q.shape[-1]), v)


def key_first(k, q, v):
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


class ShortNames(FourMaps):
    """A cache in buffers `ck` and `cv`, addressed by start_pos; queries begin at position 0."""

    restart = True

    def __init__(self, dim, n_heads):
        super().__init__(dim, n_heads)
        for name in ("ck", "cv"):
            room = torch.zeros(4, n_heads, 64, dim // n_heads)
            self.register_buffer(name, room, persistent=False)

    def forward(self, x, start_pos=0):
        q, k, v = self.heads(x, x, x)
        B, T = x.shape[:2]
        S = start_pos + T
        self.ck[:B, :, start_pos:S], self.cv[:B, :, start_pos:S] = k, v
        first = 0 if self.restart else start_pos
        hidden = torch.arange(S) > torch.arange(first, first + T)[:, None]
        scores = q @ self.ck[:B, :, :S].mT / math.sqrt(q.shape[-1])
        return self.attend(scores.masked_fill(hidden, float("-inf")), self.cv[:B, :, :S])


class ShortNamesRight(ShortNames):
    restart = False


@lru_cache(8)
def triangle(n):
    return torch.ones(n, n).tril().bool()


class MinGPT(nn.Module):
    """key, query and value apart; rotary in numbers of its own base."""

    def __init__(self, n_embd, n_head, fault=None):
        super().__init__()
        self.key, self.query, self.value, self.proj = (nn.Linear(n_embd, n_embd) for _ in range(4))
        self.n_head, self.fault = n_head, fault
        inv = 1.0 / 500000.0 ** (torch.arange(0, n_embd // n_head, 2).float() / (n_embd // n_head))
        self.register_buffer("inv_freq", inv, persistent=False)

    def rope(self, x, start=0):
        t = torch.arange(start, start + x.shape[2], dtype=torch.float32)
        angle = torch.cat([torch.outer(t, self.inv_freq.float())] * 2, -1)
        h = x.shape[-1] // 2
        return x * angle.cos().to(x.dtype) + torch.cat(
            [-x[..., h:], x[..., :h]], -1
        ) * angle.sin().to(x.dtype)

    def forward(self, x):
        B, T, C = x.size()
        k, q, v = (
            m(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            for m in (self.key, self.query, self.value)
        )
        q, k = self.rope(q), self.rope(k)
        if self.fault == "roll":
            v = torch.cat([v[:, :, :1], v[:, :, :-1]], 2)
        if self.fault == "double":
            q = q / math.sqrt(C // self.n_head)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=triangle(T))
        return self.proj(y.transpose(1, 2).contiguous().view(B, T, C))


class KVCache(nn.Module):
    def __init__(self, n_heads, head_dim, size=512):
        super().__init__()
        self.register_buffer("k_cache", torch.zeros(4, n_heads, size, head_dim), persistent=False)
        self.register_buffer("v_cache", torch.zeros(4, n_heads, size, head_dim), persistent=False)

    def update(self, pos, k, v):
        self.k_cache[: len(k), :, pos] = k
        self.v_cache[: len(v), :, pos] = v
        return self.k_cache[: len(k)], self.v_cache[: len(v)]


class GptFast(nn.Module):
    """A cache module addressed by input_pos; unwritten slots are masked."""

    def __init__(self, dim, n_head, fault=None):
        super().__init__()
        self.n_head, self.fault = n_head, fault
        self.wqkv, self.wo = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.kv_cache = KVCache(n_head, dim // n_head)

    def forward(self, x, input_pos=None):
        B, T, M = x.shape
        q, k, v = (
            t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.wqkv(x).split(M, dim=-1)
        )
        pos = torch.arange(T) if input_pos is None else input_pos.reshape(-1)[-T:]
        if input_pos is not None:
            k, v = self.kv_cache.update(pos, k, v)
        at = torch.arange(k.shape[2])
        keep = at <= pos[:, None] + (1 if self.fault else 0)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        return self.wo(y.transpose(1, 2).reshape(B, T, M))


class TupleCache(nn.Module):
    """layer_past and presents, as GPT-2's; the past is put behind what is new."""

    def __init__(self, n_embd, n_head, fault=None):
        super().__init__()
        self.n_head, self.fault = n_head, fault
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)

    def forward(self, x, layer_past=None):
        B, T, C = x.shape
        q, k, v = (
            t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.c_attn(x).split(C, 2)
        )
        if layer_past is not None:
            pairs = [(layer_past[0], k), (layer_past[1], v)]
            k, v = (torch.cat(p[::-1] if self.fault else p, dim=-2) for p in pairs)
        w = q @ k.transpose(-1, -2) / math.sqrt(v.size(-1))
        nd, ns = w.size(-2), w.size(-1)
        w = w.masked_fill(~triangle(ns)[ns - nd : ns], float("-inf"))
        y = (w.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C)
        return self.c_proj(y), (k, v)


class Chunked(nn.Module):
    """Chunks of queries; each sees the chunk before and its own part, which loses what is further
    away.
    """

    def __init__(self, dim, num_heads, size=128, fault=True):
        super().__init__()
        self.num_heads, self.size, self.fault = num_heads, size, fault
        self.q, self.kv, self.out = (
            nn.Linear(dim, dim),
            nn.Linear(dim, 2 * dim),
            nn.Linear(dim, dim),
        )

    def forward(self, x):
        B, T, M = x.shape
        q = self.q(x).view(B, T, self.num_heads, -1).transpose(1, 2)
        k, v = (t.view(B, T, self.num_heads, -1).transpose(1, 2) for t in self.kv(x).chunk(2, -1))
        outs = []
        for a in range(0, T, self.size):
            b = min(a + self.size, T)
            first = max(a - self.size, 0) if self.fault else 0
            keep = torch.arange(first, b) <= torch.arange(a, b)[:, None]
            outs.append(
                F.scaled_dot_product_attention(
                    q[:, :, a:b], k[:, :, first:b], v[:, :, first:b], attn_mask=keep
                )
            )
        return self.out(torch.cat(outs, 2).transpose(1, 2).reshape(B, T, M))


class Luong(nn.Module):
    """General attention of a decoder state over an encoder, [B, M] and [B, S, M]."""

    def __init__(self, hidden_dim, axis=1):
        super().__init__()
        self.W, self.axis = nn.Linear(hidden_dim, hidden_dim, bias=False), axis

    def forward(self, decoder_hidden, encoder_outputs):
        scores = torch.bmm(self.W(encoder_outputs), decoder_hidden.unsqueeze(2)).squeeze(2)
        weights = F.softmax(scores, dim=self.axis)
        return (weights.unsqueeze(1) @ encoder_outputs).squeeze(1), weights


class Pool(nn.Module):
    """Bahdanau's energies, repeated over the source, as the tutorials write it."""

    def __init__(self, hidden_dim, axis=1):
        super().__init__()
        self.attn, self.v, self.axis = (
            nn.Linear(2 * hidden_dim, hidden_dim),
            nn.Linear(hidden_dim, 1, bias=False),
            axis,
        )

    def forward(self, hidden, encoder_outputs):
        S = encoder_outputs.shape[1]
        hidden = hidden.unsqueeze(1).repeat(1, S, 1)
        energy = torch.tanh(self.attn(torch.cat((hidden, encoder_outputs), dim=2)))
        attention = F.softmax(self.v(energy), dim=self.axis)
        return (attention * encoder_outputs).sum(1), attention


def manual(q, k, v, attn_mask=None):
    """exp and sums by hand, 0 and -inf added."""
    s = (q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1) * q.size(-1) ** -0.5
    if attn_mask is not None:
        s = s + attn_mask
    e = (s - s.max(-1, keepdim=True)[0]).exp()
    return (e / e.sum(-1, keepdim=True)).matmul(v)


def manual_wrong(q, k, v, attn_mask=None):
    s = (q.unsqueeze(-2) * k.unsqueeze(-3)).mean(-1)
    if attn_mask is not None:
        s = s + attn_mask
    return s.softmax(-1).matmul(v)


def bshd(q, k, v, causal=False):
    """flash_attn's layout, [B, T, H, D]."""
    s = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1])
    if causal:
        T, S = s.shape[-2:]
        s = s.masked_fill(torch.ones(T, S).triu(S - T + 1).bool(), float("-inf"))
    return torch.einsum("bhts,bshd->bthd", s.softmax(-1), v)


def bshd_late(q, k, v, causal=False):
    s = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1])
    if causal:
        T, S = s.shape[-2:]
        s = s.masked_fill(torch.ones(T, S).triu(S - T + 2).bool(), float("-inf"))
    return torch.einsum("bhts,bshd->bthd", s.softmax(-1), v)


def split_softmax(q, k, v):
    """Two halves of the keys, each with a softmax of its own, averaged."""
    half = (k.shape[2] + 1) // 2
    parts = [
        F.scaled_dot_product_attention(q, k[:, :, a:b], v[:, :, a:b])
        for a, b in ((0, half), (half, k.shape[2]))
        if b > a
    ]
    return sum(parts) / len(parts)


def lse_merged(q, k, v):
    """The same, merged by the logarithms of their sums."""
    half = (k.shape[2] + 1) // 2
    outs, lses = [], []
    for a, b in ((0, half), (half, k.shape[2])):
        s = q @ k[:, :, a:b].mT / math.sqrt(q.shape[-1])
        if b > a:
            lses.append(torch.logsumexp(s, -1))
            outs.append(torch.softmax(s, -1) @ v[:, :, a:b])
    w = torch.softmax(torch.stack(lses), 0)[..., None]
    return (torch.stack(outs) * w).sum(0)


def dropped_head(q, k, v):
    out = F.scaled_dot_product_attention(q, k, v)
    out[:, -1] = out[:, 0]
    return out


def value_scaled(q, k, v):
    return F.scaled_dot_product_attention(q, k, v) * q.shape[-1] ** 0.5
