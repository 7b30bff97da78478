"""The generalized delta rule and its relatives from their definitions: Python floats and loops."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Answer(NamedTuple):
    """out [B,O,T,E] and the state behind the last token [B,N,D,E]; float64."""

    out: Tensor
    state: Tensor


def generalized_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    c: Tensor,
    log_decay: Tensor | None,
    a: Tensor | None = None,
    *,
    scale: float | None = None,
    state: Tensor | None = None,
) -> Answer:
    """q [B,H,T,D], k [B,G,T,D], v [B,N,T,E], c and a [B,N,T,D], log_decay [B,N,T] or [B,N,T,D].
    Without `a`, it is -k.
    """
    (B, H, T, D), G, (N, E) = q.shape, k.shape[1], v.shape[1::2]
    scale = 1 / math.sqrt(D) if scale is None else scale
    O = max(H, N)
    ql, kl, vl, cl = (x.detach().double().tolist() for x in (q, k, v, c))
    al = None if a is None else a.detach().double().tolist()
    gl = None if log_decay is None else log_decay.detach().double().tolist()
    out = torch.zeros(B, O, T, E, dtype=torch.float64)
    last = torch.zeros(B, N, D, E, dtype=torch.float64)
    for b in range(B):
        for n in range(N):
            S = [[0.0] * E for _ in range(D)] if state is None else state[b, n].double().tolist()
            for t in range(T):
                key, value, read = kl[b][n // (N // G)][t], vl[b][n][t], cl[b][n][t]
                back = [-x for x in key] if al is None else al[b][n][t]
                logs = [0.0] * D
                if gl is not None:
                    given = gl[b][n][t]
                    logs = given if isinstance(given, list) else [given] * D
                u = [math.fsum(S[d][e] * read[d] for d in range(D)) for e in range(E)]
                S = [
                    [
                        math.exp(logs[d]) * S[d][e] + back[d] * u[e] + key[d] * value[e]
                        for e in range(E)
                    ]
                    for d in range(D)
                ]
                for o in range(O):
                    if o // (O // N) == n:
                        query = ql[b][o // (O // H)][t]
                        for e in range(E):
                            terms = (S[d][e] * query[d] for d in range(D))
                            out[b, o, t, e] = scale * math.fsum(terms)
            last[b, n] = torch.tensor(S, dtype=torch.float64)
    return Answer(out, last)


def generalized_delta_plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    c: Tensor,
    log_decay: Tensor,
    a: Tensor | None = None,
    *,
    matrix: bool,
) -> tuple[Tensor, Tensor]:
    """The loop as somebody would type it, in the dtype of its inputs; H = G = N. With `matrix`, the
    transition is a whole matrix, which rounds elsewhere.
    """
    B, H, T, D = q.shape
    S, eye, rows = torch.zeros(B, H, D, v.shape[-1], dtype=q.dtype), torch.eye(D, dtype=q.dtype), []
    for t in range(T):
        g = log_decay[:, :, t].exp()
        left = g[..., None] if g.ndim == 3 else g[..., None, None]
        key = k[:, :, t, :, None]
        back = -key if a is None else a[:, :, t, :, None]
        if matrix:
            S = (eye * left + back @ c[:, :, t, None, :]) @ S + key * v[:, :, t, None]
        else:
            u = (S * c[:, :, t, :, None]).sum(-2, keepdim=True)
            S = S * left + back * u + key * v[:, :, t, None]
        rows.append((S * q[:, :, t, :, None]).sum(-2) / math.sqrt(D))
    return torch.stack(rows, 2), S


class Solved(NamedTuple):
    """out [B,H,T,E] and the two states behind the last token; float64."""

    out: Tensor
    first: Tensor
    second: Tensor


def mesa_loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    ridge: Tensor,
    *,
    solve: bool = True,
) -> Solved:
    """Mesa in the dtype of its inputs, by a solver for general matrices or by the inverse."""
    (B, H, T, D), E = q.shape, v.shape[-1]
    out = q.new_zeros(B, H, T, E)
    firsts, seconds = q.new_zeros(B, H, D, E), q.new_zeros(B, H, D, D)
    for b in range(B):
        for h in range(H):
            A, C = q.new_zeros(D, D), q.new_zeros(D, E)
            for t in range(T):
                key, left = k[b, h, t], g[b, h, t].exp()
                A = left * A + beta[b, h, t] * torch.outer(key, key)
                C = left * C + beta[b, h, t] * torch.outer(key, v[b, h, t])
                matrix, query = A + torch.diag(ridge[h]), q[b, h, t]
                x = torch.linalg.solve(matrix, query) if solve else matrix.inverse() @ query
                out[b, h, t] = C.T @ x
            firsts[b, h], seconds[b, h] = C, A
    return Solved(out, firsts, seconds)


def titans_loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Tensor,
    g: Tensor,
    e: Tensor,
    *,
    scale: float | None = None,
    by_gradient: bool = True,
) -> Solved:
    """Titans' linear memory in the dtype of its inputs; the gradient by torch, or written out."""
    (B, H, T, D), E = q.shape, v.shape[-1]
    scale = 1 / math.sqrt(D) if scale is None else scale
    out = q.new_zeros(B, H, T, E)
    firsts, seconds = q.new_zeros(B, H, D, E), q.new_zeros(B, H, D, E)
    for b in range(B):
        for h in range(H):
            M, N = q.new_zeros(D, E), q.new_zeros(D, E)
            for t in range(T):
                key, value = k[b, h, t], v[b, h, t]

                def loss(M: Tensor, key: Tensor = key, value: Tensor = value) -> Tensor:
                    return 0.5 * (M.T @ key - value).square().sum()

                if by_gradient:
                    slope = torch.func.grad(loss)(M)
                else:
                    slope = torch.outer(key, M.T @ key - value)
                N = e[b, h, t].exp() * N - step[b, h, t] * slope
                M = g[b, h, t].exp() * M + N
                out[b, h, t] = scale * (M.T @ q[b, h, t])
            firsts[b, h], seconds[b, h] = M, N
    return Solved(out, firsts, seconds)


def generalized_delta_plain_system(
    q: Tensor, k: Tensor, v: Tensor, c: Tensor, log_decay: Tensor
) -> Tensor:
    """The output as one system of equations for all tokens, with `a` = -k and a decay per channel,
    as somebody would type it in the dtype of its inputs; H = G = N.
    """
    T = q.shape[2]
    read, weights = (q.new_zeros(*q.shape[:2], T, T) for _ in "rw")
    for i in range(T):
        for j in range(i + 1):
            left = log_decay[:, :, j + 1 : i + 1].sum(2).exp()
            weights[:, :, i, j] = (q[:, :, i] * left * k[:, :, j]).sum(-1)
            if j < i:
                before = log_decay[:, :, j + 1 : i].sum(2).exp()
                read[:, :, i, j] = (c[:, :, i] * before * k[:, :, j]).sum(-1)
    u = torch.linalg.solve(torch.eye(T, dtype=q.dtype) + read, v)
    return weights @ u / math.sqrt(q.shape[-1])
