"""The delta rule chunk by chunk: inside a chunk one triangular system, between chunks the state."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from regard.ops.linear.decays import between, fold, reads, since_start, until_end


def chunked(
    q: Float[Tensor, "B G R T D"],
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B G T E"],
    beta: Float[Tensor, "B G T 1"],
    log_decay: Float[Tensor, "B G T #D"] | None,
    state: Float[Tensor, "B G D E"],
    size: int,
) -> tuple[Float[Tensor, "B G R T E"], Float[Tensor, "B G D E"]]:
    """What `recurrent` computes, with matrix products over chunks of `size` tokens (the last one may be shorter).

    With c_i the sum of g over the chunk up to token i, and L_ij = exp(c_i - c_j) for j <= i, the tokens' updates u solve
    (I + strict(diag(beta) K K^T * L)) U = diag(beta) (V - diag(exp(c)) K S);  then
    O = diag(exp(c)) Q S + (Q K^T * L) U  and  S <- exp(c_C) S + K^T diag(exp(c_C - c)) U.

    With a decay per channel c_i has D numbers, and (X K^T * L)_ij is sum_d x_id k_jd exp(c_id - c_jd): `reads`.

    The system is solved for all chunks at once; only the state passes from chunk to chunk. No exponent is a difference
    of two sums: each is summed by itself, so that it is as exact as the g inside it, and exp(-inf) = 0 resets the state.
    Where strengths are near 2 and keys much alike, the system is ill-conditioned: longer chunks then round worse.

    Args:
        q, k, v, beta, log_decay, state: as for `recurrent`.
        size: C, at least 1. With a decay per channel it is rounded up to a power of 2.

    >>> k = torch.eye(2)[None, None]
    >>> v = torch.tensor([[3.0], [5.0]])[None, None]
    >>> out, state = chunked(k[:, :, None], k, v, torch.ones(1, 1, 2, 1), None, torch.zeros(1, 1, 2, 1), 2)
    >>> state.flatten().tolist()
    [3.0, 5.0]

    Source: Yang et al. 2024 (arXiv 2406.06484), section 3.2 and equations 8 to 11; with decay: arXiv 2412.06464, section 3.3;
    a decay per channel: Kimi Team 2025 (arXiv 2510.26692), section 3.
    """
    T, R = k.shape[2], q.shape[2]
    if T == 0:
        return q @ state[:, :, None], state.clone()
    lost, size = _not_finite(k, v, beta, log_decay), min(size, T)
    if log_decay is not None and log_decay.shape[-1] > 1:
        size = 1 << (size - 1).bit_length()
    own = 0 * q.detach().sum(-1, keepdim=True)
    q, k, v, beta = (fold(x.masked_fill(~x.isfinite(), 0), size) for x in (q, k, v, beta))
    g = None
    if log_decay is not None:
        g = fold(log_decay.masked_fill(~(log_decay < torch.inf), 0), size)
    start = None if g is None else since_start(g)
    write, erase = _solve(k, v, beta, g, start)
    q = q.movedim(2, 3)  # [B,G,n,R,C,D]
    weights = _decayed(q, k[:, :, :, None], None if g is None else g[:, :, :, None]).flatten(3, 4)
    q = (q if start is None else q * start[:, :, :, None]).flatten(3, 4)  # [B,G,n,R*C,D]
    k = k if g is None else k * until_end(g)  # as much as is left of it at the end
    answers = []
    for i in range(k.shape[2]):
        u = write[:, :, i] - erase[:, :, i] @ state
        answers.append(q[:, :, i] @ state + weights[:, :, i] @ u)
        state = state if start is None else state * start[:, :, i, -1, :, None]
        state = state + k[:, :, i].mT @ u
    out = torch.stack(answers, 2).unflatten(3, (R, size)).movedim(3, 2).flatten(3, 4)[..., :T, :]
    return out + own + lost[:, :, None], state + lost[:, :, -1:]


def _solve(
    k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, start: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Updates u = write - erase S, for any state S in front of the chunk: write [B,G,n,C,E], erase [B,G,n,C,D]."""
    system = beta * _decayed(k, k, g)
    seen = k if start is None else k * start
    # the diagonal is taken to be 1, whatever stands there
    solved = torch.linalg.solve_triangular(
        system.tril(-1), torch.cat([beta * v, beta * seen], -1), upper=False, unitriangular=True
    )
    write, erase = solved.split([v.shape[-1], k.shape[-1]], -1)
    return write, erase


def _decayed(x: Tensor, k: Tensor, g: Tensor | None) -> Tensor:
    """x_i . (k_j decayed from j to i) for j <= i, else 0: [*L,C,C]."""
    if g is None:
        return (x @ k.mT).tril()
    return (x @ k.mT) * between(g) if g.shape[-1] == 1 else reads(x, k, g)


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
        bad = bad.masked_fill(~(log_decay.detach() < torch.inf).all(-1, keepdim=True), torch.nan)
    return (bad + 0 * v.detach()).cumsum(2)
