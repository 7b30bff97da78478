"""The delta rule from its definition: Python floats and loops, and nothing of regard."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Answer(NamedTuple):
    """out [B,H,T,E] and the state behind the last token [B,G,D,E]; float64."""

    out: Tensor
    state: Tensor


def delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    state: Tensor | None = None,
) -> Answer:
    """q [B,H,T,D], k [B,G,T,D], v [B,G,T,E], beta [B,G,T], log_decay [B,G,T] or [B,G,T,D]."""
    (B, H, T, D), (G, E) = q.shape, (v.shape[1], v.shape[3])
    ql, kl, vl, bl = (x.detach().double().tolist() for x in (q, k, v, beta))
    gl = None if log_decay is None else log_decay.detach().double().tolist()
    scale = 1 / math.sqrt(D) if scale is None else scale
    out = torch.zeros(B, H, T, E, dtype=torch.float64)
    last = torch.zeros(B, G, D, E, dtype=torch.float64)
    for b in range(B):
        for g in range(G):
            S = [[0.0] * E for _ in range(D)] if state is None else state[b, g].double().tolist()
            for t in range(T):
                if gl is not None:
                    logs = gl[b][g][t] if isinstance(gl[b][g][t], list) else [gl[b][g][t]] * D
                    S = [[math.exp(log) * x for x in row] for log, row in zip(logs, S, strict=True)]
                key, value, strength = kl[b][g][t], vl[b][g][t], bl[b][g][t]
                for e in range(E):
                    held = math.fsum(S[d][e] * key[d] for d in range(D))
                    for d in range(D):
                        S[d][e] += strength * key[d] * (value[e] - held)
                for h in range(H):
                    if h // (H // G) == g:
                        for e in range(E):
                            read = math.fsum(S[d][e] * ql[b][h][t][d] for d in range(D))
                            out[b, h, t, e] = scale * read
            last[b, g] = torch.tensor(S, dtype=torch.float64)
    return Answer(out, last)


def delta_plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    erase_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """The loop as somebody would type it, in the dtype of its inputs; H = G.

    With `erase_first` the state is (I - beta k k^T) S + beta k v^T, which rounds elsewhere: both
    are what people type.
    """
    B, H, T, D = q.shape
    scale = 1 / math.sqrt(D) if scale is None else scale
    S = torch.zeros(B, H, D, v.shape[-1], dtype=q.dtype)
    eye, rows = torch.eye(D, dtype=q.dtype), []
    for t in range(T):
        if log_decay is not None:
            left = log_decay[:, :, t].exp()  # [B,H] or [B,H,D]
            S = S * (left[..., None] if log_decay.ndim == 4 else left[..., None, None])
        key, strength = k[:, :, t, :, None], beta[:, :, t, None, None]
        if erase_first:
            S = (eye - strength * key @ key.mT) @ S + strength * key * v[:, :, t, None]
        else:
            S = S + strength * key * (v[:, :, t, None] - (S * key).sum(-2, keepdim=True))
        rows.append(((S * q[:, :, t, :, None]).sum(-2)) * scale)
    return torch.stack(rows, 2), S


def delta_plain_matrices(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, *, differences: bool = False
) -> Tensor:
    """The same as one system of equations for all tokens, as somebody would type it, in the dtype
    of its inputs; H = G.

    With `differences`, decays come from differences of one running sum: exact only relative to that
    sum, a known mistake.
    """
    T, total = q.shape[2], log_decay.cumsum(2)
    left = torch.zeros(*q.shape[:2], T, T, dtype=q.dtype)
    for i in range(T):
        for j in range(i + 1):
            between = log_decay[:, :, j + 1 : i + 1].sum(2)
            left[:, :, i, j] = torch.exp(
                total[:, :, i] - total[:, :, j] if differences else between
            )
    system = (beta[..., None] * (k @ k.mT) * left).tril(-1) + torch.eye(T, dtype=q.dtype)
    u = torch.linalg.solve(system, beta[..., None] * v)
    return (q @ k.mT * left) @ u / math.sqrt(q.shape[-1])


def onnx_gated_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    past_state: Tensor,
    *,
    q_num_heads: int,
    kv_num_heads: int,
) -> tuple[Tensor, Tensor]:
    """ONNX's LinearAttention, version 27, update rule "gated_delta", as its page defines it, on
    packed inputs; float64.

        S_t = exp(g_t) * S_{t-1} + beta_t * k_t (x) (v_t - exp(g_t) * S_{t-1}^T k_t)
        o_t = scale * q_t^T S_t

    query [B,T,Hq dk], key [B,T,Hkv dk], value [B,T,Hkv dv], decay [B,T,Hkv] or [B,T,Hkv dk], beta
    [B,T,Hkv] or [B,T,1], past_state [B,Hkv,dk,dv]; scale is 1/sqrt(dk). Source: onnx.ai, operators,
    LinearAttention.
    """
    B, T, width = key.shape
    dk, dv = width // kv_num_heads, value.shape[-1] // kv_num_heads
    S = past_state.double().clone()
    output = torch.zeros(B, T, q_num_heads * dv, dtype=torch.float64)
    for b in range(B):
        for t in range(T):
            for h in range(q_num_heads):
                j = h * kv_num_heads // q_num_heads  # the key/value head that it shares
                if h == j * q_num_heads // kv_num_heads:  # the first that shares it writes
                    k, v = key[b, t, j * dk : j * dk + dk], value[b, t, j * dv : j * dv + dv]
                    n = decay.shape[-1] // kv_num_heads
                    g = decay[b, t, j * n : j * n + n].expand(dk)
                    strength = beta[b, t, j if beta.shape[-1] > 1 else 0]
                    left = g.exp()[:, None] * S[b, j]
                    S[b, j] = left + strength * torch.outer(k, v - left.T @ k)
                q = query[b, t, h * dk : h * dk + dk]
                output[b, t, h * dv : h * dv + dv] = q @ S[b, j] / math.sqrt(dk)
    return output, S
