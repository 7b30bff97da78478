"""Right implementations in ten styles of public repositories, which `variants` edits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


class VisionAttention(nn.Module):
    """As timm writes it: one map, [3, H, D], no mask."""

    def __init__(self, dim, num_heads=8, qkv_bias=True, attn_drop=0.1, proj_drop=0.0):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q = q * self.scale
        attn = q @ k.transpose(-2, -1)
        attn = attn.softmax(dim=-1)
        attn = self.attn_drop(attn)
        x = attn @ v
        x = x.transpose(1, 2).reshape(B, N, C)
        return self.proj_drop(self.proj(x))


def precompute_freqs_cis(dim, end, theta=10000.0):
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2)[: dim // 2].double() / dim))
    return torch.polar(torch.ones(end, dim // 2).double(), torch.outer(torch.arange(end), freqs))


def apply_rotary_emb(x, freqs_cis):
    x_ = torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(x_ * freqs_cis[None, :, None]).flatten(3).type_as(x)


def repeat_kv(x, n_rep):
    bs, slen, n_kv_heads, head_dim = x.shape
    x = x[:, :, :, None, :].expand(bs, slen, n_kv_heads, n_rep, head_dim)
    return x.reshape(bs, slen, n_kv_heads * n_rep, head_dim)


class MetaAttention(nn.Module):
    """As Meta's Llama: complex rotary, start_pos, caches in attributes."""

    def __init__(self, dim, n_heads, n_kv_heads):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)
        self.freqs_cis = precompute_freqs_cis(self.head_dim, 2048)
        shape = (4, 512, n_kv_heads, self.head_dim)
        self.cache_k, self.cache_v = torch.zeros(shape), torch.zeros(shape)

    def forward(self, x, start_pos: int = 0, use_cache: bool = False):
        bsz, seqlen, _ = x.shape
        xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)
        xq = xq.view(bsz, seqlen, self.n_heads, self.head_dim)
        xk = xk.view(bsz, seqlen, self.n_kv_heads, self.head_dim)
        xv = xv.view(bsz, seqlen, self.n_kv_heads, self.head_dim)
        freqs_cis = self.freqs_cis[start_pos : start_pos + seqlen]
        xq, xk = apply_rotary_emb(xq, freqs_cis), apply_rotary_emb(xk, freqs_cis)
        past = 0
        if use_cache:
            end = start_pos + seqlen
            self.cache_k, self.cache_v = self.cache_k.to(xq), self.cache_v.to(xq)
            self.cache_k[:bsz, start_pos:end] = xk
            self.cache_v[:bsz, start_pos:end] = xv
            xk, xv = self.cache_k[:bsz, :end], self.cache_v[:bsz, :end]
            past = start_pos
        keys = repeat_kv(xk, self.n_heads // self.n_kv_heads)
        values = repeat_kv(xv, self.n_heads // self.n_kv_heads)
        xq, keys, values = (t.transpose(1, 2) for t in (xq, keys, values))
        scores = torch.matmul(xq, keys.transpose(2, 3)) / math.sqrt(self.head_dim)
        mask = torch.full((seqlen, seqlen), float("-inf"))
        mask = torch.triu(mask, diagonal=1)
        mask = torch.hstack([torch.zeros((seqlen, past)), mask]).type_as(xq)
        scores = scores + mask
        scores = F.softmax(scores.float(), dim=-1).type_as(xq)
        output = torch.matmul(scores, values)
        output = output.transpose(1, 2).contiguous().view(bsz, seqlen, -1)
        return self.wo(output)


class WhisperAttention(nn.Module):
    """As Whisper's: half of the scale on either side, an additive mask, weights returned."""

    def __init__(self, n_state: int, n_head: int):
        super().__init__()
        self.n_head = n_head
        self.query = nn.Linear(n_state, n_state)
        self.key = nn.Linear(n_state, n_state, bias=False)
        self.value = nn.Linear(n_state, n_state)
        self.out = nn.Linear(n_state, n_state)

    def forward(self, x, mask=None):
        q, k, v = self.query(x), self.key(x), self.value(x)
        wv, qk = self.qkv_attention(q, k, v, mask)
        return self.out(wv), qk

    def qkv_attention(self, q, k, v, mask=None):
        scale = (q.shape[-1] // self.n_head) ** -0.25
        q = q.view(*q.shape[:2], self.n_head, -1).permute(0, 2, 1, 3) * scale
        k = k.view(*k.shape[:2], self.n_head, -1).permute(0, 2, 3, 1) * scale
        v = v.view(*v.shape[:2], self.n_head, -1).permute(0, 2, 1, 3)
        qk = q @ k
        if mask is not None:
            qk = qk + mask
        w = F.softmax(qk, dim=-1).to(q.dtype)
        return (w @ v).permute(0, 2, 1, 3).flatten(start_dim=2), w


class FlatAttention(nn.Module):
    """As OPT's and CLIP's: heads in the batch, bmm, an additive mask [B, 1, T, S]."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def _shape(self, tensor, seq_len, bsz):
        tensor = tensor.view(bsz, seq_len, self.num_heads, self.head_dim)
        return tensor.transpose(1, 2).contiguous()

    def forward(self, hidden_states, attention_mask=None, output_attentions=False):
        bsz, tgt_len, _ = hidden_states.size()
        query_states = self.q_proj(hidden_states) * self.scaling
        key_states = self._shape(self.k_proj(hidden_states), -1, bsz)
        value_states = self._shape(self.v_proj(hidden_states), -1, bsz)
        proj_shape = (bsz * self.num_heads, -1, self.head_dim)
        query_states = self._shape(query_states, tgt_len, bsz).view(*proj_shape)
        key_states = key_states.view(*proj_shape)
        value_states = value_states.view(*proj_shape)
        src_len = key_states.size(1)
        attn_weights = torch.bmm(query_states, key_states.transpose(1, 2))
        if attention_mask is not None:
            attn_weights = attn_weights.view(bsz, self.num_heads, tgt_len, src_len) + attention_mask
            attn_weights = attn_weights.view(bsz * self.num_heads, tgt_len, src_len)
        attn_weights = nn.functional.softmax(attn_weights, dim=-1)
        shaped = attn_weights.view(bsz, self.num_heads, tgt_len, src_len)
        attn_output = torch.bmm(attn_weights, value_states)
        attn_output = attn_output.view(bsz, self.num_heads, tgt_len, self.head_dim)
        attn_output = attn_output.transpose(1, 2).reshape(bsz, tgt_len, self.embed_dim)
        attn_output = self.out_proj(attn_output)
        return attn_output, (shaped if output_attentions else None)


class FairseqAttention(nn.Module):
    """As fairseq: keys and values of earlier steps in a dictionary, under names of its own."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.in_proj = nn.Linear(embed_dim, 3 * embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x, incremental_state=None):
        B, T, M = x.shape
        q, k, v = self.in_proj(x).chunk(3, dim=-1)
        q, k, v = (t.view(B, T, self.num_heads, self.head_dim).transpose(1, 2) for t in (q, k, v))
        past = 0
        if incremental_state is not None:
            if "prev_key" in incremental_state:
                past = incremental_state["prev_key"].shape[2]
                k = torch.cat([incremental_state["prev_key"], k], dim=2)
                v = torch.cat([incremental_state["prev_value"], v], dim=2)
            incremental_state["prev_key"] = k
            incremental_state["prev_value"] = v
        scores = q @ k.transpose(-2, -1) * self.head_dim**-0.5
        rows = torch.arange(T)[:, None] + past
        cols = torch.arange(k.shape[2])[None]
        scores = scores.masked_fill(cols > rows, float("-inf"))
        probs = scores.softmax(-1)
        return self.out_proj((probs @ v).transpose(1, 2).reshape(B, T, M))


class SlidingAttention(nn.Module):
    """As Mistral's: grouped heads, half-split rotary, a window, a cache that is cut."""

    def __init__(self, hidden_size, num_heads, num_kv_heads, sliding_window):
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim, self.sliding_window = hidden_size // num_heads, sliding_window
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=False)

    def rope(self, x, positions):
        half = self.head_dim // 2
        inv_freq = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = positions.double()[:, None] * inv_freq
        cos, sin = angles.cos().to(x), angles.sin().to(x)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def forward(self, x, kv_cache=None):
        B, T, _ = x.shape
        seen = 0 if not kv_cache else kv_cache["seen"]
        positions = torch.arange(seen, seen + T)
        q = self.q_proj(x).view(B, T, self.num_heads, -1).transpose(1, 2)
        k = self.k_proj(x).view(B, T, self.num_kv_heads, -1).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.num_kv_heads, -1).transpose(1, 2)
        q, k = self.rope(q, positions), self.rope(k, positions)
        if kv_cache:
            k = torch.cat([kv_cache["k"], k], 2)
            v = torch.cat([kv_cache["v"], v], 2)
        if kv_cache is not None:
            keep = self.sliding_window - 1
            kv_cache.update(k=k[:, :, -keep:], v=v[:, :, -keep:], seen=seen + T)
        columns = torch.arange(seen + T - k.shape[2], seen + T)
        distance = positions[:, None] - columns[None]
        visible = (distance >= 0) & (distance < self.sliding_window)
        groups = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        weights = q @ k.mT / self.head_dim**0.5
        weights = weights.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))


class KeywordAttention(nn.Module):
    """Keyword-only, as encoders of repositories without transformers: padding True = hidden."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.to_q = nn.Linear(d_model, d_model, bias=False)
        self.to_k = nn.Linear(d_model, d_model, bias=False)
        self.to_v = nn.Linear(d_model, d_model, bias=False)
        self.to_out = nn.Linear(d_model, d_model)

    def forward(self, *, x, key_padding_mask=None):
        b, t, m = x.shape
        d = m // self.n_heads
        q = self.to_q(x).view(b, t, self.n_heads, d)
        k = self.to_k(x).view(b, t, self.n_heads, d)
        v = self.to_v(x).view(b, t, self.n_heads, d)
        logits = torch.einsum("bihd,bjhd->bhij", q, k) * d**-0.5
        if key_padding_mask is not None:
            logits = logits.masked_fill(key_padding_mask[:, None, None, :], -1e30)
        attn = torch.softmax(logits, dim=-1)
        out = torch.einsum("bhij,bjhd->bihd", attn, v)
        return self.to_out(out.reshape(b, t, m))


@dataclass
class AttentionOutput:
    hidden: torch.Tensor
    attn: torch.Tensor | None
    scores: torch.Tensor
    entropy: torch.Tensor


class ManyOutputs(nn.Module):
    """Four results in a dataclass: the states, the weights, raw scores and entropies."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.wq, self.wk = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.wv, self.wo = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x, output_attentions=False):
        b, t, m = x.shape
        q, k, v = (w(x).view(b, t, self.heads, -1).transpose(1, 2) for w in self.maps())
        scores = q @ k.mT * (m // self.heads) ** -0.5
        future = torch.ones(t, t).triu(1).bool()
        scores = scores.masked_fill(future, torch.finfo(scores.dtype).min)
        p = scores.softmax(-1)
        entropy = -(p * p.clamp(min=1e-12).log()).sum(-1)
        z = (p @ v).transpose(1, 2).reshape(b, t, m)
        return AttentionOutput(self.wo(z), p if output_attentions else None, scores, entropy)

    def maps(self):
        return self.wq, self.wk, self.wv


def dense_attention(*, query, key, value, bias=None, mask=None):
    """Keyword-only function: an additive bias by distance, mask True = may attend."""
    depth = query.shape[-1]
    logits = torch.einsum("bhqd,bhkd->bhqk", query / math.sqrt(depth), key)
    if bias is not None:
        logits = logits + bias
    if mask is not None:
        logits = torch.where(mask, logits, torch.finfo(logits.dtype).min)
    logits = logits - logits.amax(-1, keepdim=True)
    unnormalized = torch.exp(logits)
    weights = unnormalized / unnormalized.sum(-1, keepdim=True)
    return torch.einsum("bhqk,bhkd->bhqd", weights, value)


def online_attention(q, k, v, causal=False, block=16):
    """FlashAttention-2's loop over blocks of keys, in torch."""
    *_, T, d = q.shape
    S = k.shape[-2]
    m = torch.full(q.shape[:-1], float("-inf"), dtype=q.dtype)
    l = torch.zeros(q.shape[:-1], dtype=q.dtype)
    acc = torch.zeros_like(q)
    for start in range(0, S, block):
        kj, vj = k[..., start : start + block, :], v[..., start : start + block, :]
        s = q @ kj.mT / math.sqrt(d)
        if causal:
            cols = torch.arange(start, start + kj.shape[-2])
            s = s.masked_fill(cols > torch.arange(T)[:, None] + S - T, float("-inf"))
        m_new = torch.maximum(m, s.amax(-1))
        m_safe = torch.where(m_new.isinf(), 0.0, m_new)
        p = torch.exp(s - m_safe[..., None])
        alpha = torch.exp(m - m_safe)
        l = l * alpha + p.sum(-1)
        acc = acc * alpha[..., None] + p @ vj
        m = m_new
    return acc / l[..., None]
