"""Right implementations, in as many styles."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.audit.corpus import wrong_caches, wrong_functions, wrong_modules


def annotated(query, key, value, mask=None, dropout=None):
    d_k = query.size(-1)
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_k)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    p_attn = scores.softmax(dim=-1)
    if dropout is not None:
        p_attn = dropout(p_attn)
    return torch.matmul(p_attn, value), p_attn


def minus_infinity(q, k, v, mask=None):
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.einsum("bhqk,bhkd->bhqd", torch.softmax(scores, dim=-1), v)


def torch_s_own(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    """The equivalent that torch's documentation gives."""
    L, S = query.size(-2), key.size(-2)
    scale_factor = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    attn_bias = torch.zeros(L, S, dtype=query.dtype)
    if is_causal:
        assert attn_mask is None
        attn_bias.masked_fill_(
            torch.ones(L, S, dtype=torch.bool).tril(diagonal=0).logical_not(), float("-inf")
        )
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_bias = attn_bias.masked_fill(attn_mask.logical_not(), float("-inf"))
        else:
            attn_bias = attn_mask + attn_bias
    attn_weight = torch.softmax(query @ key.transpose(-2, -1) * scale_factor + attn_bias, dim=-1)
    return torch.dropout(attn_weight, dropout_p, train=True) @ value


def flash_16(q, k, v):
    return wrong_functions.flash(q, k, v, 16, rescale=True)


def flash_causal(q, k, v):
    """Blocks of queries and keys, of 32, causal."""
    out = torch.empty_like(q)
    T, S = q.shape[2], k.shape[2]
    for a in range(0, T, 32):
        qi = q[:, :, a : a + 32] / math.sqrt(q.shape[-1])
        acc = torch.zeros_like(qi)
        m = torch.full_like(qi[..., :1], float("-inf"))
        l = torch.zeros_like(m)
        i = torch.arange(a, min(a + 32, T))[:, None] + S - T
        for b in range(0, int(i[-1]) + 1, 32):
            j = torch.arange(b, min(b + 32, S))
            s = (qi @ k[:, :, b : b + 32].transpose(2, 3)).masked_fill(j > i, -1e30)
            new = torch.maximum(m, s.amax(-1, keepdim=True))
            p = (s - new).exp().masked_fill(j > i, 0.0)
            alpha = (m - new).exp()
            l = l * alpha + p.sum(-1, keepdim=True)
            acc = acc * alpha + p @ v[:, :, b : b + 32]
            m = new
        out[:, :, a : a + 32] = acc / l
    return out


def alibi(q, k, v):
    H, T, D = q.shape[1:]
    S = k.shape[2]
    slopes = torch.tensor([2 ** (-8 * (h + 1) / H) for h in range(H)], dtype=q.dtype)
    i, j = torch.arange(S - T, S).view(-1, 1), torch.arange(S).view(1, -1)
    bias = -slopes.view(1, H, 1, 1) * (i - j).to(q.dtype)
    scores = q @ k.transpose(-1, -2) / math.sqrt(D) + bias
    return scores.masked_fill(j > i, float("-inf")).softmax(-1) @ v


def with_sinks(q, k, v, sinks):
    B, H, T, _ = q.shape
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    joined = torch.cat([scores, sinks.view(1, H, 1, 1).expand(B, H, T, 1)], dim=-1)
    return joined.softmax(-1)[..., :-1] @ v


def with_bias(q, k, v, bias=None):
    scores = torch.matmul(q, k.transpose(3, 2)) / q.shape[-1] ** 0.5
    if bias is not None:
        scores = scores + bias
    return torch.matmul(F.softmax(scores, dim=-1), v)


def grouped_by_reshape(q, k, v, mask=None):
    B, H, T, D = q.shape
    G = k.shape[1]
    q = q.view(B, G, H // G, T, D) * D**-0.5
    scores = torch.einsum("bgrtd,bgsd->bgrts", q, k)
    if mask is not None:
        scores = scores.masked_fill(
            ~mask.unsqueeze(1) if mask.ndim == 4 else ~mask, torch.finfo(q.dtype).min
        )
    return torch.einsum("bgrts,bgsd->bgrtd", scores.softmax(-1), v).reshape(B, H, T, D)


def softcapped(q, k, v, softcap=50.0):
    """Gemma 2."""
    T, S = q.shape[-2], k.shape[-2]
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(torch.ones(T, S).triu(S - T + 1).bool(), float("-inf"))
    return F.softmax(scores, dim=-1) @ v


def windowed(q, k, v, window_size=4):
    T, S = q.shape[-2], k.shape[-2]
    i, j = torch.arange(S - T, S)[:, None], torch.arange(S)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(i >= j) & (i - j < window_size))


class NeoX(wrong_modules.NeoX):
    def __init__(self, hidden_size, num_attention_heads):
        super().__init__(hidden_size, num_attention_heads, scale=True)


class Einsums(wrong_modules.Einsums):
    def __init__(self, d_model, n_heads, d_head):
        super().__init__(d_model, n_heads, d_head)
        self.d_model = d_head


class MLA(wrong_modules.MLA):
    def __init__(self, dim, n_heads):
        super().__init__(dim, n_heads)
        self.softmax_scale = (self.nope + self.rope) ** -0.5


class QKNorm(wrong_modules.QKNorm):
    def forward(self, x):
        b, t, _ = x.shape
        q = self.q_norm(self.wq(x).view(b, t, self.n_heads, self.d)).transpose(1, 2)
        k = self.k_norm(self.wk(x).view(b, t, self.n_kv_heads, self.d)).transpose(1, 2)
        v = self.wv(x).view(b, t, self.n_kv_heads, self.d).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class Complex(wrong_modules.RotaryByHead):
    """Llama's own rotary, by complex numbers."""

    def rotary(self, x):
        return super().apply(x.transpose(1, 2)).transpose(1, 2)


class T5(wrong_modules.T5):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads, sign=1.0)


class ALiBi(wrong_modules.ALiBi):
    def __init__(self, hidden_size, n_head):
        super().__init__(hidden_size, n_head, sign=-1.0)


class Sinks(wrong_modules.Sinks):
    def __init__(self, hidden_size, num_heads):
        super().__init__(hidden_size, num_heads, renormalize=False)


def bert():
    return wrong_modules.Bert({"hidden_size": 32, "num_attention_heads": 4})


class Raschka(nn.Module):
    """W_query, W_key, W_value, a mask in a buffer."""

    def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):
        super().__init__()
        self.d_out, self.num_heads, self.head_dim = d_out, num_heads, d_out // num_heads
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj = nn.Linear(d_out, d_out)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer(
            "mask",
            torch.triu(torch.ones(context_length, context_length), diagonal=1),
            persistent=False,
        )

    def forward(self, x):
        b, num_tokens, _ = x.shape
        keys = self.W_key(x).view(b, num_tokens, self.num_heads, self.head_dim).transpose(1, 2)
        queries = self.W_query(x).view(b, num_tokens, self.num_heads, self.head_dim).transpose(1, 2)
        values = self.W_value(x).view(b, num_tokens, self.num_heads, self.head_dim).transpose(1, 2)
        attn_scores = queries @ keys.transpose(2, 3)
        mask_bool = self.mask.bool()[:num_tokens, :num_tokens]
        attn_scores.masked_fill_(mask_bool, -torch.inf)
        attn_weights = self.dropout(torch.softmax(attn_scores / keys.shape[-1] ** 0.5, dim=-1))
        context_vec = (
            (attn_weights @ values).transpose(1, 2).contiguous().view(b, num_tokens, self.d_out)
        )
        return self.out_proj(context_vec)


class Lucidrains(nn.Module):
    """to_q, to_kv, to_out in a Sequential, a boolean mask [B, S]."""

    def __init__(self, dim, heads=8, dim_head=64, dropout=0.0):
        super().__init__()
        inner = dim_head * heads
        self.heads, self.scale = heads, dim_head**-0.5
        self.to_q = nn.Linear(dim, inner, bias=False)
        self.to_kv = nn.Linear(dim, inner * 2, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner, dim), nn.Dropout(dropout))

    def forward(self, x, mask=None):
        b, n, _ = x.shape
        q, k, v = (self.to_q(x), *self.to_kv(x).chunk(2, dim=-1))
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        sim = torch.einsum("b h i d, b h j d -> b h i j", q * self.scale, k)
        if mask is not None:
            sim = sim.masked_fill(~mask[:, None, None, :], -torch.finfo(sim.dtype).max)
        out = torch.einsum("b h i j, b h j d -> b h i d", sim.softmax(dim=-1), v)
        return self.to_out(out.transpose(1, 2).reshape(b, n, -1))


class ManyHeads(wrong_modules.ManyHeads):
    class Head(wrong_modules.ManyHeads.Head):
        def forward(self, x):
            k, q, v = self.key(x), self.query(x), self.value(x)
            wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
            T = x.shape[1]
            wei = wei.masked_fill(torch.tril(torch.ones(T, T)) == 0, float("-inf"))
            return F.softmax(wei, dim=-1) @ v


class Appended(wrong_caches.Appended):
    restart = False


class Rolling(wrong_caches.Rolling):
    def cut(self, t):
        return t[:, :, -self.w :]


class Bahdanau(wrong_modules.Bahdanau):
    def forward(self, query, keys):
        scores = self.Va(torch.tanh(self.Wa(query) + self.Ua(keys)))
        weights = F.softmax(scores.squeeze(2).unsqueeze(1), dim=-1)
        return torch.bmm(weights, keys), weights


class AdditiveSelf(wrong_modules.AdditiveSelf):
    def forward(self, queries, keys, values):
        q, k = self.w_q(queries), self.w_k(keys)
        scores = self.w_v(torch.tanh(q.unsqueeze(2) + k.unsqueeze(1))).squeeze(-1)
        return torch.bmm(torch.softmax(scores, dim=-1), values)


class PaddedCausal(nn.Module):
    """Causal itself, and told what is padding; rows of padding are NaN, and nobody reads them."""

    def __init__(self, d_model, nhead):
        super().__init__()
        self.nhead = nhead
        self.in_proj, self.out_proj = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x, key_padding_mask=None):
        B, T, M = x.shape
        q, k, v = self.in_proj(x).view(B, T, 3, self.nhead, -1).permute(2, 0, 3, 1, 4)
        s = (q @ k.transpose(-1, -2)) / math.sqrt(M // self.nhead)
        s = s + torch.full((T, T), float("-inf"), dtype=s.dtype).triu(1)
        if key_padding_mask is not None:
            s = s.masked_fill(key_padding_mask[:, None, None], float("-inf"))
        return self.out_proj((s.softmax(-1) @ v).transpose(1, 2).reshape(B, T, M))


class Interleaved(nn.Module):
    """Rotary of neighbours, positions given; grouped heads by expand."""

    def __init__(self, dim, n_heads, n_kv_heads):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.d = n_heads, n_kv_heads, dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.d, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.d, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.d, bias=False)
        self.wo = nn.Linear(n_heads * self.d, dim, bias=False)

    def rope(self, x, positions):
        inv = 10000.0 ** (-torch.arange(0, self.d, 2, dtype=torch.float64) / self.d)
        angle = (positions[..., None].double() * inv)[:, None]
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)

    def forward(self, x, positions=None):
        B, T, _ = x.shape
        positions = torch.arange(T).expand(B, T) if positions is None else positions
        q = self.rope(self.wq(x).view(B, T, self.n_heads, self.d).transpose(1, 2), positions)
        k = self.rope(self.wk(x).view(B, T, self.n_kv_heads, self.d).transpose(1, 2), positions)
        v = self.wv(x).view(B, T, self.n_kv_heads, self.d).transpose(1, 2)
        n = self.n_heads // self.n_kv_heads
        k, v = (
            t[:, :, None].expand(-1, -1, n, -1, -1).reshape(B, self.n_heads, T, self.d)
            for t in (k, v)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(B, T, -1))


# -- transformers' own modules, fed as transformers feeds them


def transformers_bert():
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertAttention

    config = BertConfig(hidden_size=32, num_attention_heads=4, attn_implementation="eager")
    return BertAttention(config, layer_idx=0)


def transformers_gpt2():
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

    return GPT2Attention(GPT2Config(n_embd=32, n_head=4, attn_implementation="eager"), layer_idx=0)


def transformers_llama():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention

    config = LlamaConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, attn_implementation="eager"
    )
    return LlamaAttention(config, 0)


def feed_llama(module, x, keep=None):
    """position_embeddings, and a mask of 0 and finfo.min, as LlamaModel makes them."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    T = x.shape[1]
    rotary = LlamaRotaryEmbedding(module.config)
    shown = torch.ones(1, T, T).bool().tril() if keep is None else keep
    added = torch.zeros(shown[:, None].shape, dtype=x.dtype).masked_fill(
        ~shown[:, None], torch.finfo(x.dtype).min
    )
    embeddings = rotary(x, torch.arange(T)[None])
    return module(x, position_embeddings=embeddings, attention_mask=added)[0]
