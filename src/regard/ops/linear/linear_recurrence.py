"""The recurrence shared by linear attention, retention and gated linear attention, S <-
diag(exp(g)) S + k v^T: its definition and its chunked form.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from regard.ops.linear.chunk_decays import (
    decay_since_start,
    decay_until_end,
    pairwise_decay,
    split_into_chunks,
)
from regard.ops.linear.validation import chunk_size


def recurrent(
    q: Float[Tensor, "B G R T D"],
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B G T E"],
    log_decay: Float[Tensor, "#B G T #D"] | None,
    state: Float[Tensor, "B G D E"],
) -> tuple[Float[Tensor, "B G R T E"], Float[Tensor, "B G D E"]]:
    """Compute the recurrence token by token: decay the state, add the token, read the output.

    S <- diag(exp(g_t)) S + k_t v_t^T;  o_t = S^T q_t

    Args:
        q: the scaled queries `[B, G, R, T, D]`, with R = H/G query heads per key/value head; all
            tensors have the dtype of the state.
        k: keys `[B, G, T, D]`.
        v: values `[B, G, T, E]`.
        log_decay: g, the logarithm of the decay factor, with one number per key channel or one for
            all channels; None: no decay.
        state: S `[B, G, D, E]` before the first token; it is not changed.

    Returns:
        The outputs `[B, G, R, T, E]`, and the state after the last token.

    >>> k, v = torch.tensor([[1.0], [1.0]])[None, None], torch.tensor([[3.0], [5.0]])[None, None]
    >>> half = torch.full((1, 1, 2, 1), 0.5).log()
    >>> recurrent(k[:, :, None], k, v, half, torch.zeros(1, 1, 1, 1))[0].flatten().tolist()
    [3.0, 6.5]

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), equations 18 to 20; with decay: Yang et
    al. 2023 (arXiv 2312.06635), equation 3.
    """
    S, outputs = state.clone(), []
    for t in range(k.shape[2]):
        if log_decay is not None:
            S = S * log_decay[:, :, t, :, None].exp()
        S = S + k[:, :, t, :, None] * v[:, :, t, None]
        outputs.append(q[:, :, :, t] @ S)  # [B,G,R,E]
    return (torch.stack(outputs, 3) if outputs else q @ S[:, :, None]), S


def within_chunks(
    q: Float[Tensor, "B G n C R D"],
    k: Float[Tensor, "B G n C D"],
    v: Float[Tensor, "B G n C E"],
    g: Float[Tensor, "#B G n C #D"] | None,
) -> Float[Tensor, "B G n C R E"]:
    """Compute o_i = sum_{j <= i} sum_d q_id k_jd exp(g_{j+1,d} + ... + g_{i,d}) v_j in each of n
    chunks of C tokens.

    Args:
        q: queries `[B, G, n, C, R, D]`.
        k: keys `[B, G, n, C, D]`.
        v: values `[B, G, n, C, E]`.
        g: the logarithms of the decay factors, `[B, G, n, C, D]`, `[B, G, n, C, 1]` for one per
            token, or None. With one per channel, C must be a power of 2.

    Returns:
        The outputs without the contribution of earlier chunks, `[B, G, n, C, R, E]`.

    >>> one = torch.ones(1, 1, 1, 2, 1)
    >>> within_chunks(one[..., None], one, one, None).flatten().tolist()
    [1.0, 2.0]
    """
    if g is not None and g.shape[-1] > 1:
        return _within_chunks_by_halves(q, k, v, g)
    C, R = q.shape[3:5]
    weights = torch.unflatten(q.flatten(3, 4) @ k.mT, 3, (C, R))  # [B,G,n,C,R,C]
    if g is not None:
        weights = weights * pairwise_decay(g)[..., None, :]
    later = weights.new_ones(C, C, dtype=torch.bool).triu(1)
    weights = weights.masked_fill(later[:, None], 0)
    return torch.unflatten(weights.flatten(3, 4) @ v, 3, (C, R))


def _within_chunks_by_halves(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Compute `within_chunks` with a decay per channel, by pairs of neighbouring blocks of 1, 2, 4,
    ... tokens.

    A token attends to itself without a decay. In each pair of blocks, the queries of the second
    block attend to the keys of the first: the decay from j to i is the product of the decay from j
    to the border of the blocks and the decay from the border to i. The weights of a pair are
    therefore one matrix product, and both exponents are sums of g alone, which cannot overflow
    where g <= 0.
    """
    R = q.shape[4]
    out = (q * k[..., None, :]).sum(-1, keepdim=True) * v[..., None, :]  # a token and itself
    size = 1
    while size < k.shape[3]:
        (first_k, _), (first_v, _) = _block_halves(k, size), _block_halves(v, size)
        first_g, second_g = _block_halves(g, size)  # [B,G,n,p,s,D]
        queries = (
            _block_halves(q, size)[1] * decay_since_start(second_g)[..., None, :]
        )  # [B,G,n,p,s,R,D]
        weights = queries.flatten(4, 5) @ (first_k * decay_until_end(first_g)).mT  # [B,G,n,p,s*R,s]
        across = torch.unflatten(weights @ first_v, 4, (size, R))
        out = out + torch.stack([torch.zeros_like(across), across], 4).flatten(3, 5)
        size *= 2
    return out


def _block_halves(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the first and the second block of each pair of blocks of `size` tokens:
    `[B, G, n, C, ...]` -> two tensors `[B, G, n, C/(2 size), size, ...]`.
    """
    first, second = torch.unflatten(x, 3, (-1, 2, size)).unbind(4)
    return first, second


def chunked(
    q: Float[Tensor, "B G R T D"],
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B G T E"],
    log_decay: Float[Tensor, "#B G T #D"] | None,
    state: Float[Tensor, "B G D E"],
    size: int,
) -> tuple[Float[Tensor, "B G R T E"], Float[Tensor, "B G D E"]]:
    """Compute the recurrence with matrix products over chunks of `size` tokens (the last one may be
    shorter).

    With c_i the sum of g over the chunk up to token i:
    O = (Q * exp(c)) S + within_chunks(Q, K, V);  S <- diag(exp(c_C)) S + (K * exp(c_C - c))^T V

    All chunks are computed at once; only the state passes from one to the next.

    Args:
        q: the scaled queries `[B, G, R, T, D]`; q and all following tensors are as in `recurrent`.
        k: keys `[B, G, T, D]`.
        v: values `[B, G, T, E]`.
        log_decay: g, or None.
        state: S `[B, G, D, E]` before the first token.
        size: C, at least 1. With a decay per channel it is rounded up to a power of 2.

    Returns:
        The outputs `[B, G, R, T, E]`, and the state after the last token.

    >>> k, v = torch.tensor([[1.0], [1.0]])[None, None], torch.tensor([[3.0], [5.0]])[None, None]
    >>> half = torch.full((1, 1, 2, 1), 0.5).log()
    >>> chunked(k[:, :, None], k, v, half, torch.zeros(1, 1, 1, 1), 2)[0].flatten().tolist()
    [3.0, 6.5]

    Source: Sun et al. 2023 (arXiv 2307.08621), equation 7; Yang et al. 2023 (arXiv 2312.06635),
    section 4.1.
    """
    (R, T, D), size = q.shape[2:], min(size, k.shape[2])
    if T == 0:
        return q @ state[:, :, None], state.clone()
    if log_decay is not None and log_decay.shape[-1] > 1:
        size = 1 << (size - 1).bit_length()
    output_nans, state_nans = _nan_markers(q, k, v, log_decay)
    q, k, v = (torch.where(x.isfinite(), x, 0) for x in (q, k, v))
    q = torch.unflatten(
        split_into_chunks(q.movedim(2, 3).flatten(3), size), -1, (R, D)
    )  # [B,G,n,C,R,D]
    k, v, g = split_into_chunks(k, size), split_into_chunks(v, size), None
    if log_decay is not None:
        g = split_into_chunks(log_decay.masked_fill(~(log_decay < torch.inf), 0), size)
    out = within_chunks(q, k, v, g)  # [B,G,n,C,R,E]
    chunk_states, state = _chunk_states(k, v, g, state)
    q = q if g is None else q * decay_since_start(g)[..., None, :]
    out = out + torch.unflatten(q.flatten(3, 4) @ chunk_states, 3, (size, R))
    out = out.flatten(2, 3)[:, :, :T].movedim(3, 2)  # [B,G,R,T,E]
    return out + output_nans, state + state_nans


def _chunk_states(
    k: Tensor, v: Tensor, g: Tensor | None, state: Tensor
) -> tuple[Float[Tensor, "B G n D E"], Float[Tensor, "B G D E"]]:
    """Return the state before each of the n chunks, and the state after the last chunk."""
    writes = (k if g is None else k * decay_until_end(g)).mT @ v
    remaining = None if g is None else decay_since_start(g)[..., -1, :, None]  # [B,G,n,D or 1,1]
    states = []
    for i in range(writes.shape[2]):
        states.append(state)
        state = (state if remaining is None else state * remaining[:, :, i]) + writes[:, :, i]
    return torch.stack(states, 2), state


def _nan_markers(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None
) -> tuple[Float[Tensor, "B G R T E"], Float[Tensor, "B G D E"]]:
    """Return NaN for each output and each entry of the state that a non-finite input would affect
    in the recurrence, and 0 for all others; an infinity counts as NaN.

    A matrix product multiplies masked entries by 0, so that a NaN would also reach earlier tokens.
    `chunked` therefore replaces non-finite inputs by 0 and adds these markers to the results. A NaN
    in one channel of a key or a decay affects this row of the state, a NaN in one channel of a
    value this column; both affect the outputs from their token on. A NaN in a query affects only
    the output of this query.
    """
    rows, columns = 0 * k.detach(), 0 * v.detach()
    if g is not None:
        rows = rows.masked_fill(~(g.detach() < torch.inf), torch.nan)
    outputs = (rows.sum(-1, keepdim=True) + columns).cumsum(2)[:, :, None]
    query_nans = (0 * q.detach()).sum(-1, keepdim=True)
    return outputs + query_nans, rows.sum(2)[..., None] + columns.sum(2)[..., None, :]


def linear_recurrence(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B G T E"],
    log_decay: Float[Tensor, "#B G T #D"] | None,
    state: Float[Tensor, "B G D E"],
    *,
    form: str,
    chunk: int,
) -> tuple[Float[Tensor, "B H T E"], Float[Tensor, "B G D E"]]:
    """Compute S <- diag(exp(g)) S + k v^T, o = S^T q in the dtype of the state; query head h uses
    state h // (H/G).

    Args:
        q: queries `[B, H, T, D]`.
        k: keys `[B, G, T, D]`.
        v: values `[B, G, T, E]`.
        log_decay: g, the logarithm of the decay factor, with one number per key channel or one for
            all channels, or None.
        state: S `[B, G, D, E]` before the first token.
        form: "auto", "recurrent", "chunk" or "parallel".
        chunk: the number of tokens in a chunk.

    Returns:
        The outputs `[B, H, T, E]`, and the state after the last token.

    >>> k = torch.ones(1, 1, 3, 1)
    >>> zeros = torch.zeros(1, 1, 1, 1)
    >>> out, state = linear_recurrence(k, k, k, None, zeros, form="auto", chunk=64)
    >>> out.flatten().tolist()
    [1.0, 2.0, 3.0]
    """
    G, T = k.shape[1:3]
    queries = torch.unflatten(q, 1, (G, -1)).to(state.dtype)
    k, v = k.to(state.dtype), v.to(state.dtype)
    g = None if log_decay is None else log_decay.to(state.dtype)
    size = chunk_size(form, chunk, T)
    with torch.autocast(q.device.type, enabled=False):
        if size is None:
            out, state = recurrent(queries, k, v, g, state)
        else:
            out, state = chunked(queries, k, v, g, state, size)
    return out.flatten(1, 2), state
