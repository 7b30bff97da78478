"""Faulty functions of q, k and v."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, einsum


def keys_for_values(q, k, v, mask=None):
    scores = torch.matmul(q, v.transpose(-2, -1)) / math.sqrt(q.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    return torch.matmul(F.softmax(scores, dim=-1), k)


def keys_ask(query, key, value):
    d_k = query.size(-1)
    scores = torch.matmul(key, query.transpose(-2, -1)) / math.sqrt(d_k)
    return torch.matmul(scores.softmax(dim=-1), value)


def over_eight(q, k, v):
    att = torch.einsum("bhid,bhjd->bhij", q, k) / 8.0
    return torch.einsum("bhij,bhjd->bhid", att.softmax(-1), v)


def sqrt_plus_half(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    L, S = q.size(-2), k.size(-2)
    w = q @ k.transpose(-2, -1) * (1 / (math.sqrt(q.size(-1)) + 0.5))
    if is_causal:
        w = w.masked_fill(torch.ones(L, S, dtype=torch.bool).triu(1 + S - L), float("-inf"))
    return torch.softmax(w, dim=-1) @ v


def no_scale(q, k, v, attn_mask=None):
    logits = einsum("b h i d, b h j d -> b h i j", q, k)
    if attn_mask is not None:
        logits = logits + torch.zeros_like(logits).masked_fill(
            ~attn_mask, -torch.finfo(logits.dtype).max
        )
    return einsum("b h i j, b h j d -> b h i d", logits.softmax(dim=-1), v)


def scaled_before_sdpa(q, k, v, attn_mask=None):
    q = q * (q.shape[-1] ** -0.5)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)


def sequence_scale(q, k, v):
    scores = q @ k.mT / (k.size(-2) ** 0.5)
    return scores.softmax(-1) @ v


def uniform(q, k, v):
    n = k.shape[-2]
    allowed = torch.tril(torch.ones(q.shape[-2], n, dtype=q.dtype), diagonal=n - q.shape[-2])
    weights = allowed / allowed.sum(-1, keepdim=True)
    return weights @ v


def softmax_over_heads(q, k, v):
    scores = (q @ k.transpose(2, 3)) / q.shape[3] ** 0.5
    return F.softmax(scores, dim=1) @ v


def linear_weights(q, k, v):
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return (scores / scores.sum(dim=-1, keepdim=True)) @ v


def alibi_grows(q, k, v):
    """Causal, with ALiBi's slopes."""
    H, T, D = q.shape[1:]
    S = k.shape[2]
    slopes = torch.tensor([2 ** (-8 * (h + 1) / H) for h in range(H)], dtype=q.dtype)
    i = torch.arange(S - T, S).view(-1, 1)
    j = torch.arange(S).view(1, -1)
    distance = (i - j).to(q.dtype)
    scores = q @ k.transpose(-1, -2) / math.sqrt(D) + slopes.view(1, H, 1, 1) * distance
    scores = scores.masked_fill(j > i, float("-inf"))
    return scores.softmax(-1) @ v


def strict_but_first(q, k, v):
    T, S = q.shape[-2], k.shape[-2]
    mask = torch.tril(torch.ones(T, S), diagonal=S - T - 1).bool()
    if S == T:
        mask[0, 0] = True  # otherwise NaN
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return torch.softmax(scores.masked_fill(~mask, float("-inf")), -1) @ v


def strict_repaired(q, k, v):
    T, S = q.shape[-2], k.shape[-2]
    i = torch.arange(S - T, S)[:, None]
    j = torch.arange(S)[None, :]
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~(j < i), float("-inf"))
    return torch.nan_to_num(torch.softmax(scores, -1)) @ v


def half_of_the_keys(q, k, v):
    n = (k.shape[-2] + 1) // 2
    scores = q @ k[..., :n, :].transpose(-2, -1) / q.shape[-1] ** 0.5
    return torch.softmax(scores, dim=-1) @ v[..., :n, :]


def flash(q, k, v, block, *, rescale, tail=True):
    """Online softmax over blocks of keys."""
    out = torch.zeros_like(q)
    m = torch.full(q.shape[:-1], float("-inf"), dtype=q.dtype)
    l = torch.zeros(q.shape[:-1], dtype=q.dtype)
    S = k.shape[-2]
    end = S if tail or block > S else S // block * block
    for start in range(0, end, block):
        kj, vj = k[..., start : start + block, :], v[..., start : start + block, :]
        s = q @ kj.transpose(-1, -2) / math.sqrt(q.shape[-1])
        m_new = torch.maximum(m, s.amax(-1))
        p = torch.exp(s - m_new[..., None])
        alpha = torch.exp(m - m_new) if rescale else torch.ones_like(m)
        l = alpha * l + p.sum(-1)
        out = out * alpha[..., None] + p @ vj
        m = m_new
    return out / l[..., None]


def flash_16_unscaled(q, k, v):
    return flash(q, k, v, 16, rescale=False)


def flash_64_unscaled(q, k, v):
    return flash(q, k, v, 64, rescale=False)


def flash_without_tail(q, k, v):
    return flash(q, k, v, 32, rescale=True, tail=False)


def flash_output_unscaled(query, key, value):
    """The sum is rescaled, the accumulator is not."""
    outputs = []
    for i in range(0, query.shape[-2], 64):
        qi = query[..., i : i + 64, :] * query.shape[-1] ** -0.5
        acc, row_max, row_sum = 0.0, None, 0.0
        for j in range(0, key.shape[-2], 64):
            s = qi @ key[..., j : j + 64, :].mT
            top = s.max(-1, keepdim=True).values
            new_max = top if row_max is None else torch.maximum(row_max, top)
            p = (s - new_max).exp()
            factor = 1.0 if row_max is None else (row_max - new_max).exp()
            row_sum = row_sum * factor + p.sum(-1, keepdim=True)
            acc = acc + p @ value[..., j : j + 64, :]
            row_max = new_max
        outputs.append(acc / row_sum)
    return torch.cat(outputs, -2)


def first_64_keys(q, k, v):
    k, v = k[:, :, :64], v[:, :, :64]
    return F.scaled_dot_product_attention(q, k, v)


def queries_without_tail(q, k, v):
    """Blocks of 32 queries; what is left over stays 0."""
    out = torch.zeros_like(q)
    T = q.shape[2]
    size = min(32, T)
    for n in range(T // size):
        rows = slice(n * size, (n + 1) * size)
        out[:, :, rows] = F.scaled_dot_product_attention(q[:, :, rows], k, v)
    return out


def anti_causal(q, k, v):
    T, S = q.shape[-2], k.shape[-2]
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    mask = torch.triu(torch.ones(T, S), diagonal=S - T)
    return torch.softmax(scores.masked_fill(mask == 0, float("-inf")), dim=-1) @ v


def fills_what_is_kept(query, key, value, mask=None):
    """mask is True where a query may attend."""
    p_attn = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.size(-1))
    if mask is not None:
        p_attn = p_attn.masked_fill(mask == 1, -1e9)
    p_attn = p_attn.softmax(dim=-1)
    return torch.matmul(p_attn, value), p_attn


def masked_late(q, k, v):
    T, S = q.shape[-2], k.shape[-2]
    weights = F.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), dim=-1)
    weights = weights * torch.ones(T, S, dtype=q.dtype).tril(S - T)
    return weights @ v


def multiplied(q, k, v):
    T, S = q.shape[-2], k.shape[-2]
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    scores = scores * torch.tril(torch.ones(T, S, dtype=q.dtype), S - T)
    return F.softmax(scores, dim=-1) @ v


def sink_shared_out(q, k, v, sinks):
    """gpt-oss's sinks: one logit for each head."""
    B, H, T, _ = q.shape
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    scores = torch.cat([scores, sinks.view(1, H, 1, 1).expand(B, H, T, 1)], dim=-1)
    weights = scores.softmax(-1)[..., :-1]
    weights = weights / weights.sum(-1, keepdim=True)
    return weights @ v


def groups_repeated(q, k, v, is_causal=False):
    n_rep = q.shape[1] // k.shape[1]
    return F.scaled_dot_product_attention(
        q, k.repeat(1, n_rep, 1, 1), v.repeat(1, n_rep, 1, 1), is_causal=is_causal
    )


def always_drops(q, k, v, dropout_p=0.1):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p)


def half_softmax(q, k, v, mask=None):
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    probs = torch.softmax(scores.to(torch.float16), dim=-1).to(v.dtype)
    return torch.matmul(probs, v)


def minus_1e9_in_half(q, k, v, mask=None):
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    return F.softmax(scores, dim=-1) @ v


def bias_subtracted(q, k, v, position_bias=None):
    scores = torch.matmul(q, k.transpose(3, 2)) / q.shape[-1] ** 0.5
    if position_bias is not None:
        scores = scores - position_bias
    return torch.matmul(F.softmax(scores.float(), dim=-1).type_as(scores), v)


def top_left(q, k, v):
    """Causal; with a cache k is longer than q."""
    mask = torch.ones(q.shape[-2], k.shape[-2]).tril() == 0
    scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.shape[-1])
    return F.softmax(scores.masked_fill(mask, float("-inf")), dim=-1) @ v


def capped_after_mask(q, k, v):
    """Gemma 2's softcap, behind the mask."""
    T, S = q.shape[-2], k.shape[-2]
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(torch.ones(T, S).triu(S - T + 1).bool(), float("-inf"))
    scores = 5.0 * torch.tanh(scores / 5.0)
    return F.softmax(scores, dim=-1) @ v


def one_key_too_many(q, k, v, window_size=4):
    T, S = q.shape[-2], k.shape[-2]
    i, j = torch.arange(S - T, S)[:, None], torch.arange(S)
    keep = (i >= j) & (i - window_size <= j)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)


def first_mask_of_all(q, k, v, mask=None, _seen={}):  # noqa: B006
    """Broadcasting the mask is slow, so it is kept."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if mask is not None:
        kept = _seen.setdefault((q.shape[-2], k.shape[-2]), mask)
        scores = scores.masked_fill(~kept, -1e9)
    return torch.softmax(scores, -1) @ v


def base_two(q, k, v):
    """Kernels use exp2, which is faster."""
    s = q @ k.mT * q.shape[-1] ** -0.5
    p = torch.exp2(s - s.amax(-1, keepdim=True))
    return p @ v / p.sum(-1, keepdim=True)


def not_normalized(q, k, v):
    s = q @ k.mT * q.shape[-1] ** -0.5
    p = torch.exp(s - s.amax(-1, keepdim=True))
    return p @ v


def queries_for_values(q, k, v):
    q, k, v = v, k, q  # another order than the caller's
    return F.scaled_dot_product_attention(q, k, v)


def sinks_forgotten(q, k, v, sinks):
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = scores - torch.maximum(scores.amax(-1, keepdim=True), sinks.view(1, -1, 1, 1))
    return scores.exp() / scores.exp().sum(-1, keepdim=True) @ v


def first_row_empty(q, k, v):
    T, S = q.shape[-2], k.shape[-2]
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.masked_fill(torch.ones(T, S).tril(S - T - 1) == 0, float("-inf")).softmax(-1) @ v
