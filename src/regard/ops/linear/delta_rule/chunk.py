"""The delta rule chunk by chunk: inside a chunk one triangular system, between chunks the state."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from regard.ops.linear.decays import between, fold, since_start


def chunked(
    q: Float[Tensor, "B G R T D"],
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B G T E"],
    beta: Float[Tensor, "B G T 1"],
    log_decay: Float[Tensor, "B G T 1"] | None,
    state: Float[Tensor, "B G D E"],
    size: int,
) -> tuple[Float[Tensor, "B G R T E"], Float[Tensor, "B G D E"]]:
    """What `recurrent` computes, with matrix products over chunks of `size` tokens (the last one may be shorter).

    With c_i the sum of g over the chunk up to token i, and L_ij = exp(c_i - c_j) for j <= i, the tokens' updates u solve
    (I + strict(diag(beta) K K^T * L)) U = diag(beta) (V - diag(exp(c)) K S);  then
    O = diag(exp(c)) Q S + (Q K^T * L) U  and  S <- exp(c_C) S + K^T diag(exp(c_C - c)) U.

    The system is solved for all chunks at once; only the state passes from chunk to chunk. No exponent is a difference
    of two sums: each is summed by itself, so that it is as exact as the g inside it, and exp(-inf) = 0 resets the state.
    Where strengths are near 2 and keys much alike, the system is ill-conditioned: longer chunks then round worse.

    Args:
        q, k, v, beta, log_decay, state: as for `recurrent`.
        size: C, at least 1.

    >>> k = torch.eye(2)[None, None]
    >>> v = torch.tensor([[3.0], [5.0]])[None, None]
    >>> out, state = chunked(k[:, :, None], k, v, torch.ones(1, 1, 2, 1), None, torch.zeros(1, 1, 2, 1), 2)
    >>> state.flatten().tolist()
    [3.0, 5.0]

    Source: Yang et al. 2024 (arXiv 2406.06484), section 3.2 and equations 8 to 11; with decay: arXiv 2412.06464, section 3.3.
    """
    T, R = k.shape[2], q.shape[2]
    if T == 0:
        return q @ state[:, :, None], state.clone()
    lost, size = _not_finite(k, v, beta, log_decay), min(size, T)
    own = 0 * q.detach().sum(-1, keepdim=True)
    q, k, v, beta = (fold(x.masked_fill(~x.isfinite(), 0), size) for x in (q, k, v, beta))
    L, start = None, None
    if log_decay is not None:
        g = fold(log_decay.masked_fill(~(log_decay < torch.inf), 0), size)
        L, start = between(g), since_start(g)
    write, erase = _solve(k, v, beta, L, start)
    q = q.movedim(2, 3)  # [B,G,n,R,C,D]
    weights = q @ k[:, :, :, None].mT
    weights = (weights if L is None else weights * L[:, :, :, None]).tril().flatten(3, 4)
    q = (q if start is None else q * start[:, :, :, None]).flatten(3, 4)  # [B,G,n,R*C,D]
    k = k if L is None else k * L[..., -1, :, None]  # as much as is left of it at the end
    answers = []
    for i in range(k.shape[2]):
        u = write[:, :, i] - erase[:, :, i] @ state
        answers.append(q[:, :, i] @ state + weights[:, :, i] @ u)
        state = state if start is None else state * start[:, :, i, -1:]
        state = state + k[:, :, i].mT @ u
    out = torch.stack(answers, 2).unflatten(3, (R, size)).movedim(3, 2).flatten(3, 4)[..., :T, :]
    return out + own + lost[:, :, None], state + lost[:, :, -1:]


def _solve(
    k: Tensor, v: Tensor, beta: Tensor, L: Tensor | None, start: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Updates u = write - erase S, for any state S in front of the chunk: write [B,G,n,C,E], erase [B,G,n,C,D]."""
    system = beta * (k @ k.mT)
    system = system if L is None else system * L
    seen = k if start is None else k * start
    # the diagonal is taken to be 1, whatever stands there
    solved = torch.linalg.solve_triangular(
        system.tril(-1), torch.cat([beta * v, beta * seen], -1), upper=False, unitriangular=True
    )
    write, erase = solved.split([v.shape[-1], k.shape[-1]], -1)
    return write, erase


def _not_finite(
    k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None
) -> Float[Tensor, "B G T E"]:
    """NaN in what the recurrence spoils, 0 elsewhere, at each token; an infinity counts as NaN.

    A product of matrices multiplies what is masked by 0, so that a NaN would reach the tokens in front of it. Here it goes
    round the products: in a key, a strength or a decay it spoils the whole state from there on, in a value's channel that
    column.
    """
    bad = 0 * k.detach().sum(-1, keepdim=True) + 0 * beta.detach()
    if log_decay is not None:
        bad = bad.masked_fill(~(log_decay.detach() < torch.inf), torch.nan)
    return (bad + 0 * v.detach()).cumsum(2)
