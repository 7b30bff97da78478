"""The decayed sum chunk by chunk: inside a chunk products of matrices, between chunks the state."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from regard.ops.linear.decayed_sum.within import within
from regard.ops.linear.decays import fold, since_start, until_end


def chunked(
    q: Float[Tensor, "B G R T D"],
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B G T E"],
    log_decay: Float[Tensor, "#B G T #D"] | None,
    state: Float[Tensor, "B G D E"],
    size: int,
) -> tuple[Float[Tensor, "B G R T E"], Float[Tensor, "B G D E"]]:
    """What `recurrent` computes, with products of matrices over chunks of `size` tokens (the last one may be shorter).

    With c_i the sum of g over the chunk up to token i:
    O = (Q * exp(c)) S + within(Q, K, V);  S <- diag(exp(c_C)) S + (K * exp(c_C - c))^T V

    All chunks are computed at once, only the state passes from one to the next.

    Args:
        q, k, v, log_decay, state: as for `recurrent`.
        size: C, at least 1. With a decay per channel it is rounded up to a power of 2.

    >>> k, v = torch.tensor([[1.0], [1.0]])[None, None], torch.tensor([[3.0], [5.0]])[None, None]
    >>> half = torch.full((1, 1, 2, 1), 0.5).log()
    >>> chunked(k[:, :, None], k, v, half, torch.zeros(1, 1, 1, 1), 2)[0].flatten().tolist()
    [3.0, 6.5]

    Source: Sun et al. 2023 (arXiv 2307.08621), equation 7; Yang et al. 2023 (arXiv 2312.06635), section 4.1.
    """
    (R, T, D), size = q.shape[2:], min(size, k.shape[2])
    if T == 0:
        return q @ state[:, :, None], state.clone()
    if log_decay is not None and log_decay.shape[-1] > 1:
        size = 1 << (size - 1).bit_length()
    lost, spoilt = _not_finite(q, k, v, log_decay)
    q, k, v = (torch.where(x.isfinite(), x, 0) for x in (q, k, v))
    q = fold(q.movedim(2, 3).flatten(3), size).unflatten(-1, (R, D))  # [B,G,n,C,R,D]
    k, v, g = fold(k, size), fold(v, size), None
    if log_decay is not None:
        g = fold(log_decay.masked_fill(~(log_decay < torch.inf), 0), size)
    out = within(q, k, v, g)  # [B,G,n,C,R,E]
    before, state = _states(k, v, g, state)
    q = q if g is None else q * since_start(g)[..., None, :]
    out = out + (q.flatten(3, 4) @ before).unflatten(3, (size, R))
    out = out.flatten(2, 3)[:, :, :T].movedim(3, 2)  # [B,G,R,T,E]
    return out + lost, state + spoilt


def _states(
    k: Tensor, v: Tensor, g: Tensor | None, state: Tensor
) -> tuple[Float[Tensor, "B G n D E"], Float[Tensor, "B G D E"]]:
    """The states in front of each chunk, and the one behind the last."""
    writes = (k if g is None else k * until_end(g)).mT @ v
    left = None if g is None else since_start(g)[..., -1, :, None]  # [B,G,n,D or 1,1]
    before = []
    for i in range(writes.shape[2]):
        before.append(state)
        state = (state if left is None else state * left[:, :, i]) + writes[:, :, i]
    return torch.stack(before, 2), state


def _not_finite(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None
) -> tuple[Float[Tensor, "B G R T E"], Float[Tensor, "B G D E"]]:
    """NaN in the outputs and in the state that the recurrence spoils, 0 elsewhere; an infinity counts as NaN.

    A product of matrices multiplies what is masked by 0, so that a NaN would reach the tokens in front of it. Here it goes
    round the products: in a key's or a decay's channel it spoils that row of the state, in a value's channel that column,
    and every output that reads them; in a query its own output.
    """
    rows, columns = 0 * k.detach(), 0 * v.detach()
    if g is not None:
        rows = rows.masked_fill(~(g.detach() < torch.inf), torch.nan)
    outputs = (rows.sum(-1, keepdim=True) + columns).cumsum(2)[:, :, None]
    own = (0 * q.detach()).sum(-1, keepdim=True)
    return outputs + own, rows.sum(2)[..., None] + columns.sum(2)[..., None, :]
