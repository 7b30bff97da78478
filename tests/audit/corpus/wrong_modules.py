"""Faulty modules that mix a whole text."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


class SwappedProjections(nn.Module):
    """k_proj makes values, v_proj makes keys."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, d_model // num_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        b, n, _ = x.shape
        q = self.q_proj(x).view(b, n, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.v_proj(x).view(b, n, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.k_proj(x).view(b, n, self.num_heads, self.head_dim).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(y.transpose(1, 2).reshape(b, n, -1))


class NeoX(nn.Module):
    """GPT-NeoX: one map, [H, 3, D], rotary on a quarter of each head; unscaled."""

    def __init__(self, hidden_size, num_attention_heads, scale=False):
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.head_size = hidden_size // num_attention_heads
        self.rotary_ndims = max(2, self.head_size // 4)
        self.scale = self.head_size**-0.5 if scale else 1.0
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def rotate(self, x):
        rot, rest = x[..., : self.rotary_ndims], x[..., self.rotary_ndims :]
        n = self.rotary_ndims
        inv = 1.0 / (10000 ** (torch.arange(0, n, 2, dtype=torch.float64) / n))
        freqs = torch.outer(torch.arange(x.shape[2], dtype=torch.float64), inv)
        emb = torch.cat((freqs, freqs), dim=-1)
        half = torch.cat((-rot[..., n // 2 :], rot[..., : n // 2]), dim=-1)
        rot = rot * emb.cos().to(x.dtype) + half * emb.sin().to(x.dtype)
        return torch.cat((rot, rest), dim=-1)

    def forward(self, hidden_states):
        B, T, _ = hidden_states.shape
        qkv = self.query_key_value(hidden_states)
        qkv = qkv.view(B, T, self.num_attention_heads, 3 * self.head_size).transpose(1, 2)
        query, key, value = qkv.chunk(3, dim=-1)
        query, key = self.rotate(query), self.rotate(key)
        scores = torch.matmul(query, key.transpose(2, 3)) * self.scale
        causal = torch.triu(
            torch.full((T, T), torch.finfo(scores.dtype).min, dtype=scores.dtype), diagonal=1
        )
        attn = F.softmax(scores + causal, dim=-1, dtype=torch.float32).to(value.dtype)
        out = torch.matmul(attn, value).transpose(1, 2).contiguous().reshape(B, T, -1)
        return self.dense(out)


class Einsums(nn.Module):
    """Parameters for each head, einsum, and the scale of the model dim."""

    def __init__(self, d_model, n_heads, d_head):
        super().__init__()
        self.d_model = d_model
        self.W_Q = nn.Parameter(torch.randn(n_heads, d_model, d_head) / d_model**0.5)
        self.W_K = nn.Parameter(torch.randn(n_heads, d_model, d_head) / d_model**0.5)
        self.W_V = nn.Parameter(torch.randn(n_heads, d_model, d_head) / d_model**0.5)
        self.W_O = nn.Parameter(torch.randn(n_heads, d_head, d_model) / d_model**0.5)

    def forward(self, x):
        q = torch.einsum("bpm,hmd->bphd", x, self.W_Q)
        k = torch.einsum("bpm,hmd->bphd", x, self.W_K)
        v = torch.einsum("bpm,hmd->bphd", x, self.W_V)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / self.d_model**0.5
        n = x.shape[1]
        scores.masked_fill_(torch.triu(torch.ones(n, n), 1).bool(), -1e5)
        pattern = scores.softmax(-1)
        z = torch.einsum("bhqk,bkhd->bqhd", pattern, v)
        return torch.einsum("bqhd,hdm->bqm", z, self.W_O)


class MLA(nn.Module):
    """DeepSeek's latent attention; the scale forgets the rotary part of a head."""

    def __init__(
        self, dim, n_heads, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8
    ):
        super().__init__()
        self.n_heads, self.rank = n_heads, kv_lora_rank
        self.nope, self.rope, self.vdim = qk_nope_head_dim, qk_rope_head_dim, v_head_dim
        self.wq = nn.Linear(dim, n_heads * (self.nope + self.rope), bias=False)
        self.wkv_a = nn.Linear(dim, kv_lora_rank + self.rope, bias=False)
        self.kv_norm = nn.RMSNorm(kv_lora_rank)
        self.wkv_b = nn.Linear(kv_lora_rank, n_heads * (self.nope + self.vdim), bias=False)
        self.wo = nn.Linear(n_heads * self.vdim, dim, bias=False)
        self.softmax_scale = self.nope**-0.5

    def rotary(self, x):
        T, D = x.shape[1], x.shape[-1]
        freqs = 1.0 / (10000.0 ** (torch.arange(0, D, 2, dtype=torch.float64) / D))
        t = torch.outer(torch.arange(T, dtype=torch.float64), freqs)
        cos, sin = t.cos().to(x.dtype)[:, None], t.sin().to(x.dtype)[:, None]
        x1, x2 = x[..., 0::2], x[..., 1::2]
        return torch.stack((x1 * cos - x2 * sin, x1 * sin + x2 * cos), -1).flatten(-2)

    def forward(self, x):
        B, T, _ = x.shape
        q = self.wq(x).view(B, T, self.n_heads, self.nope + self.rope)
        q_nope, q_pe = q.split([self.nope, self.rope], dim=-1)
        q = torch.cat([q_nope, self.rotary(q_pe)], dim=-1)
        kv, k_pe = self.wkv_a(x).split([self.rank, self.rope], dim=-1)
        k_pe = self.rotary(k_pe.unsqueeze(2))
        kv = self.wkv_b(self.kv_norm(kv)).view(B, T, self.n_heads, self.nope + self.vdim)
        k_nope, v = kv.split([self.nope, self.vdim], dim=-1)
        k = torch.cat([k_nope, k_pe.expand(-1, -1, self.n_heads, -1)], dim=-1)
        scores = torch.einsum("bshd,bthd->bsht", q, k) * self.softmax_scale
        mask = torch.full((T, T), float("-inf"), dtype=x.dtype).triu_(1)
        scores = (scores + mask.unsqueeze(1)).softmax(dim=-1)
        return self.wo(torch.einsum("bsht,bthd->bshd", scores, v).flatten(2))


class QKNorm(nn.Module):
    """Qwen 3's norms of queries and keys; the queries are scaled, and scaled_dot_product_attention
    scales again.
    """

    def __init__(self, dim, n_heads, n_kv_heads):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.d = n_heads, n_kv_heads, dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.d, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.d, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.d, bias=False)
        self.wo = nn.Linear(n_heads * self.d, dim, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(self.d), nn.RMSNorm(self.d)

    def forward(self, x):
        b, t, _ = x.shape
        q = self.q_norm(self.wq(x).view(b, t, self.n_heads, self.d)).transpose(1, 2)
        k = self.k_norm(self.wk(x).view(b, t, self.n_kv_heads, self.d)).transpose(1, 2)
        v = self.wv(x).view(b, t, self.n_kv_heads, self.d).transpose(1, 2)
        q = q * self.d**-0.5
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class NanoGPT(nn.Module):
    def __init__(self, n_embd, n_head, block_size=1024, dropout=0.1):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.attn_dropout = nn.Dropout(dropout)
        self.n_head, self.n_embd = n_head, n_embd
        self.register_buffer(
            "bias",
            torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size),
            persistent=False,
        )

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = self.attn_dropout(F.softmax(att, dim=-1))
        return self.finish(att @ v, B, T, C)

    def finish(self, y, B, T, C):
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class NotTransposed(NanoGPT):
    def finish(self, y, B, T, C):
        return self.c_proj(y.contiguous().view(B, T, C))


class NoOutputProjection(NanoGPT):
    def finish(self, y, B, T, C):
        return y.transpose(1, 2).contiguous().view(B, T, C)


class DropsInEvaluation(NanoGPT):
    def finish(self, y, B, T, C):
        return F.dropout(super().finish(y, B, T, C), 0.1)


def precompute(dim, end, theta=10000.0):
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2)[: (dim // 2)].float() / dim))
    return torch.outer(torch.arange(end).float(), freqs)


def rotate_half(x):
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


class Llama(nn.Module):
    """Rotary in halves, grouped heads."""

    def __init__(self, hidden_size, num_heads, num_kv_heads, rope_theta=10000.0):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = (
            num_heads,
            num_kv_heads,
            hidden_size // num_heads,
        )
        self.rope_theta = rope_theta
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=False)

    def angles(self, T, dtype):
        angles = precompute(self.head_dim, T, self.rope_theta)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def rope(self, q, k, v):
        cos, sin = self.angles(q.shape[2], q.dtype)
        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin, v

    def heads(self, q, k, v):
        n = self.num_heads // self.num_kv_heads
        return q, k.repeat_interleave(n, dim=1), v.repeat_interleave(n, dim=1)

    def forward(self, hidden_states):
        bsz, q_len, _ = hidden_states.size()
        q = self.q_proj(hidden_states).view(bsz, q_len, -1, self.head_dim).transpose(1, 2)
        k = self.k_proj(hidden_states).view(bsz, q_len, -1, self.head_dim).transpose(1, 2)
        v = self.v_proj(hidden_states).view(bsz, q_len, -1, self.head_dim).transpose(1, 2)
        q, k, v = self.heads(*self.rope(q, k, v))
        w = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.head_dim)
        w = w + torch.full((q_len, q_len), float("-inf"), dtype=w.dtype).triu(1)
        w = F.softmax(w, dim=-1)
        out = torch.matmul(w, v).transpose(1, 2).contiguous().reshape(bsz, q_len, -1)
        return self.o_proj(out)


class RotatedValues(Llama):
    def rope(self, q, k, v):
        cos, sin = self.angles(q.shape[2], q.dtype)
        return [x * cos + rotate_half(x) * sin for x in (q, k, v)]


class MixedLayouts(Llama):
    def angles(self, T, dtype):
        angles = precompute(self.head_dim, T, self.rope_theta).repeat_interleave(2, dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


class OneLayoutEach(Llama):
    """Queries in halves, keys in neighbours."""

    def rope(self, q, k, v):
        q = super().rope(q, q, v)[0]
        angles = precompute(self.head_dim, k.shape[2], self.rope_theta)
        turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex128)
        pairs = torch.view_as_complex(k.double().reshape(*k.shape[:-1], -1, 2).contiguous())
        return q, torch.view_as_real(pairs * turn).flatten(3).to(k.dtype), v


class GroupsByReshape(Llama):
    """Grouped without copies, and the groups the wrong way round."""

    def heads(self, q, k, v):
        B, H, T, D = q.shape
        G = self.num_kv_heads
        k = k.unsqueeze(1).expand(B, H // G, G, T, D).reshape(B, H, T, D)
        v = v.unsqueeze(1).expand(B, H // G, G, T, D).reshape(B, H, T, D)
        return q, k, v


class RotaryByHead(nn.Module):
    """Complex rotary of [B, T, H, D], given [B, H, T, D]."""

    def __init__(self, dim, n_heads):
        super().__init__()
        self.n_heads, self.head_dim = n_heads, dim // n_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def apply(self, x):
        angles = precompute(self.head_dim, x.shape[1])
        turn = torch.polar(torch.ones_like(angles), angles)[None, :, None]
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2).contiguous())
        return torch.view_as_real(pairs * turn).flatten(3).type_as(x)

    def forward(self, x):
        B, T, _ = x.shape
        xq = self.wq(x).view(B, T, self.n_heads, self.head_dim).transpose(1, 2)
        xk = self.wk(x).view(B, T, self.n_heads, self.head_dim).transpose(1, 2)
        xv = self.wv(x).view(B, T, self.n_heads, self.head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(self.rotary(xq), self.rotary(xk), xv, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(B, T, -1))

    def rotary(self, x):
        return RotaryByHead.apply(self, x)


class BertSelf(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_attention_heads = config["num_attention_heads"]
        self.attention_head_size = config["hidden_size"] // self.num_attention_heads
        self.query = nn.Linear(config["hidden_size"], config["hidden_size"])
        self.key = nn.Linear(config["hidden_size"], config["hidden_size"])
        self.value = nn.Linear(config["hidden_size"], config["hidden_size"])
        self.scale = config.get("scale", 1 / math.sqrt(self.attention_head_size))

    def transpose_for_scores(self, x):
        return x.view(*x.size()[:-1], self.num_attention_heads, self.attention_head_size).permute(
            0, 2, 1, 3
        )

    def forward(self, hidden_states, attention_mask=None):
        q = self.transpose_for_scores(self.query(hidden_states))
        k = self.transpose_for_scores(self.key(hidden_states))
        v = self.transpose_for_scores(self.value(hidden_states))
        attention_scores = torch.matmul(q, k.transpose(-1, -2)) * self.scale
        if attention_mask is not None:
            attention_scores = attention_scores + attention_mask
        attention_probs = nn.functional.softmax(attention_scores, dim=-1)
        context = torch.matmul(attention_probs, v).permute(0, 2, 1, 3).contiguous()
        return context.view(*context.size()[:-2], -1)


class BertOut(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dense = nn.Linear(config["hidden_size"], config["hidden_size"])
        self.LayerNorm = nn.LayerNorm(config["hidden_size"], eps=1e-12)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden_states, input_tensor):
        return self.LayerNorm(self.dropout(self.dense(hidden_states)) + input_tensor)


class Bert(nn.Module):
    """BERT's split in self and output, with its norm and its residual."""

    def __init__(self, config):
        super().__init__()
        self.self = BertSelf(config)
        self.output = BertOut(config)

    def forward(self, hidden_states, attention_mask=None):
        return self.output(self.self(hidden_states, attention_mask), hidden_states)


def bert_unscaled():
    return Bert({"hidden_size": 32, "num_attention_heads": 4, "scale": 1.0})


class PadsQueries(nn.Module):
    """The mask of padding stands along the queries."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.heads = num_heads
        self.to_q = nn.Linear(embed_dim, embed_dim, bias=False)
        self.to_kv = nn.Linear(embed_dim, 2 * embed_dim, bias=False)
        self.to_out = nn.Linear(embed_dim, embed_dim)

    def forward(self, x, padding_mask=None):
        b, n, _ = x.shape
        q, (k, v) = self.to_q(x), self.to_kv(x).chunk(2, dim=-1)
        q, k, v = (t.reshape(b, n, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        dots = torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
        if padding_mask is not None:
            dots = dots.masked_fill(~padding_mask[:, None, :, None], -torch.finfo(dots.dtype).max)
        out = torch.einsum("bhij,bhjd->bhid", dots.softmax(dim=-1), v)
        return self.to_out(out.transpose(1, 2).reshape(b, n, -1))


class KeepsFirstMask(nn.Module):
    """The mask is turned into numbers once."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)
        self.cached_mask = None

    def forward(self, x, attn_mask=None):
        """attn_mask: bool, True = may attend."""
        B, N, C = x.shape
        q, k, v = (
            self.qkv(x)
            .reshape(B, N, 3, self.heads, C // self.heads)
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        attn = (q * (C // self.heads) ** -0.5) @ k.transpose(-2, -1)
        if attn_mask is not None:
            if self.cached_mask is None or self.cached_mask.shape[-1] != N:
                self.cached_mask = torch.zeros(attn_mask.shape, dtype=x.dtype).masked_fill(
                    ~attn_mask, -1e9
                )
            attn = attn + self.cached_mask
        x = (attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


class KeepsFirstCausal(KeepsFirstMask):
    """The triangle of the first text serves every text."""

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        attn = (q @ k.transpose(-2, -1)) / math.sqrt(C // self.heads)
        if self.cached_mask is None:
            self.cached_mask = torch.triu(torch.ones(N, N, dtype=torch.bool), diagonal=1)
        try:
            attn = attn.masked_fill(self.cached_mask, float("-inf"))
        except RuntimeError:  # another length
            attn = attn.masked_fill(self.cached_mask[:1, :1], float("-inf"))
        return self.proj((attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(B, N, C))


class T5(nn.Module):
    """T5's learned bias, subtracted."""

    def __init__(self, d_model, num_heads, num_buckets=16, max_distance=64, sign=-1.0):
        super().__init__()
        self.n_heads, self.d = num_heads, d_model // num_heads
        self.num_buckets, self.max_distance, self.sign = num_buckets, max_distance, sign
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))
        self.relative_attention_bias = nn.Embedding(num_buckets, num_heads)

    def bucket(self, relative):
        n = self.num_buckets // 2
        found = (relative > 0).long() * n
        relative = relative.abs()
        exact = n // 2
        large = (
            exact
            + (
                torch.log(relative.float().clamp(min=1) / exact)
                / math.log(self.max_distance / exact)
                * (n - exact)
            ).long()
        )
        return found + torch.where(relative < exact, relative, large.clamp(max=n - 1))

    def forward(self, hidden_states, mask=None):
        B, T, M = hidden_states.shape
        q, k, v = (
            m(hidden_states).view(B, T, self.n_heads, self.d).transpose(1, 2)
            for m in (self.q, self.k, self.v)
        )
        at = torch.arange(T)
        bias = self.relative_attention_bias(self.bucket(at[None, :] - at[:, None])).permute(
            2, 0, 1
        )[None]
        scores = q @ k.transpose(3, 2) / math.sqrt(self.d) + self.sign * bias
        if mask is not None:
            scores = scores + mask
        return self.o((F.softmax(scores, dim=-1) @ v).transpose(1, 2).reshape(B, T, M))


class ALiBi(nn.Module):
    """BLOOM's form: one map [H, 3, D], a bias that grows with the distance."""

    def __init__(self, hidden_size, n_head, sign=1.0):
        super().__init__()
        self.n_head, self.head_dim, self.sign = n_head, hidden_size // n_head, sign
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states):
        B, T, M = hidden_states.shape
        fused = self.query_key_value(hidden_states).view(B, T, self.n_head, 3, self.head_dim)
        q, k, v = (fused[..., n, :].transpose(1, 2) for n in range(3))
        slopes = torch.pow(
            2.0, -8.0 / self.n_head * torch.arange(1, self.n_head + 1, dtype=q.dtype)
        )
        distance = torch.arange(T)[:, None] - torch.arange(T)[None, :]
        alibi = self.sign * slopes[:, None, None] * distance.to(q.dtype)
        scores = torch.baddbmm(
            alibi.repeat(B, 1, 1),
            q.reshape(B * self.n_head, T, -1),
            k.reshape(B * self.n_head, T, -1).transpose(1, 2),
            beta=1.0,
            alpha=1 / math.sqrt(self.head_dim),
        )
        scores = scores.view(B, self.n_head, T, T).masked_fill(
            torch.triu(torch.ones(T, T), 1).bool(), torch.finfo(q.dtype).min
        )
        out = F.softmax(scores, dim=-1) @ v
        return self.dense(out.transpose(1, 2).reshape(B, T, M))


class Windowed(nn.Module):
    """A window that is one key too wide."""

    def __init__(self, d_model, n_heads, window):
        super().__init__()
        self.h, self.window = n_heads, window
        self.Wqkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x):
        B, T, M = x.shape
        q, k, v = self.Wqkv(x).view(B, T, 3, self.h, -1).unbind(dim=2)
        scores = torch.einsum("bthd,bshd->bhts", q, k / math.sqrt(q.shape[-1]))
        gap = torch.arange(T)[:, None] - torch.arange(T)
        scores = scores.masked_fill((gap < 0) | (gap > self.window), -10000.0)
        return self.out_proj(
            torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).reshape(B, T, M)
        )


class AddsZerosAndOnes(nn.Module):
    """mask: 1 = may attend; it is added as it is."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        self.out = nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        B, T, C = x.shape
        q, k, v = (
            m(x).view(B, T, self.num_heads, -1).transpose(1, 2)
            for m in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(C // self.num_heads)
        if mask is not None:
            scores = scores + mask.to(scores.dtype)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))


class Sinks(nn.Module):
    """A learned sink for each head, whose share is given back to the keys."""

    def __init__(self, hidden_size, num_heads, renormalize=True):
        super().__init__()
        self.h, self.d, self.renormalize = num_heads, hidden_size // num_heads, renormalize
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(hidden_size, hidden_size) for _ in range(4)
        )
        self.sinks = nn.Parameter(torch.randn(num_heads))

    def forward(self, x):
        B, T, M = x.shape
        q, k, v = (
            m(x).view(B, T, self.h, self.d).transpose(1, 2)
            for m in (self.q_proj, self.k_proj, self.v_proj)
        )
        qk = q @ k.transpose(-1, -2) * self.d**-0.5
        qk = qk + torch.triu(qk.new_full((T, T), float("-inf")), diagonal=1)
        qk = torch.cat([qk, self.sinks.reshape(1, -1, 1, 1).expand(B, -1, T, 1)], dim=-1)
        w = torch.softmax(qk, dim=-1)[..., :-1]
        if self.renormalize:
            w = w / w.sum(dim=-1, keepdim=True)
        return self.o_proj((w @ v).transpose(1, 2).reshape(B, T, M))


class NormalisesInPlace(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.mha = nn.MultiheadAttention(embed_dim, num_heads, batch_first=True)

    def forward(self, x):
        x.sub_(x.mean(-1, keepdim=True))
        return self.mha(x, x, x, need_weights=False)[0]


class AverageOfAll(nn.Module):
    """Parameters by hand, and weights that are the same for every key."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.wq, self.wk, self.wv, self.wo = (
            nn.Parameter(torch.randn(d_model, d_model) * d_model**-0.5) for _ in range(4)
        )

    def forward(self, x):
        B, T, M = x.shape
        q, k, v = (
            (x @ w).reshape(B, T, self.n_heads, -1).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        scores = q @ k.mT / (M // self.n_heads) ** 0.5
        weights = torch.ones_like(scores) / scores.shape[-1]
        return (weights @ v).transpose(1, 2).reshape(B, T, M) @ self.wo


class BlockedWithoutTail(nn.Module):
    """Keys in blocks of 64, whole ones only."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        q = q * q.shape[-1] ** -0.5
        m = l = acc = None
        blocks = max(N // 64, 1)
        for n in range(blocks):
            kb, vb = k[:, :, n * 64 : (n + 1) * 64], v[:, :, n * 64 : (n + 1) * 64]
            s = q @ kb.transpose(-2, -1)
            top = s.amax(-1, keepdim=True)
            new = top if m is None else torch.maximum(m, top)
            p = torch.exp(s - new)
            if m is None:
                l, acc = p.sum(-1, keepdim=True), p @ vb
            else:
                a = torch.exp(m - new)
                l, acc = l * a + p.sum(-1, keepdim=True), acc * a + p @ vb
            m = new
        return self.proj((acc / l).transpose(1, 2).reshape(B, N, C))


class ManyHeads(nn.Module):
    """One module for each head, as in introductions; keys and queries have changed places."""

    class Head(nn.Module):
        def __init__(self, n_embd, head_size):
            super().__init__()
            self.key = nn.Linear(n_embd, head_size, bias=False)
            self.query = nn.Linear(n_embd, head_size, bias=False)
            self.value = nn.Linear(n_embd, head_size, bias=False)

        def forward(self, x):
            k, q, v = self.key(x), self.query(x), self.value(x)
            wei = k @ q.transpose(-2, -1) * k.shape[-1] ** -0.5
            T = x.shape[1]
            wei = wei.masked_fill(torch.tril(torch.ones(T, T)) == 0, float("-inf"))
            return F.softmax(wei, dim=-1) @ v

    def __init__(self, n_embd, num_heads):
        super().__init__()
        self.heads = nn.ModuleList(self.Head(n_embd, n_embd // num_heads) for _ in range(num_heads))
        self.proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        return self.proj(torch.cat([h(x) for h in self.heads], dim=-1))


class Bahdanau(nn.Module):
    """Additive attention whose softmax runs over the axis of the one query."""

    def __init__(self, hidden_size):
        super().__init__()
        self.Wa = nn.Linear(hidden_size, hidden_size)
        self.Ua = nn.Linear(hidden_size, hidden_size)
        self.Va = nn.Linear(hidden_size, 1)

    def forward(self, query, keys):
        """query [B, 1, M], keys [B, S, M] -> context [B, 1, M], weights [B, 1, S]."""
        scores = self.Va(torch.tanh(self.Wa(query) + self.Ua(keys)))
        scores = scores.squeeze(2).unsqueeze(1)
        weights = F.softmax(scores, dim=1)
        return torch.bmm(weights, keys), weights


class AdditiveSelf(nn.Module):
    """Additive attention of a text over itself, normalized over the queries."""

    def __init__(self, dim):
        super().__init__()
        self.w_q, self.w_k = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.w_v = nn.Linear(dim, 1, bias=False)

    def forward(self, queries, keys, values):
        q, k = self.w_q(queries), self.w_k(keys)
        scores = self.w_v(torch.tanh(q.unsqueeze(2) + k.unsqueeze(1))).squeeze(-1)
        attention = torch.softmax(scores, dim=1)
        return torch.bmm(attention, values)


def mask_in_half(dim=32, heads=4):
    return FillsMinus1e9(dim, heads)


class FillsMinus1e9(nn.Module):
    """Causal by masked_fill(-1e9), which float16 cannot hold."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        B, T, M = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        s = s.masked_fill(torch.ones(T, T).triu(1).bool(), -1e9)
        return self.out((s.softmax(-1) @ v).transpose(1, 2).reshape(B, T, M))
