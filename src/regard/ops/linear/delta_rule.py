"""The delta rule, with and without a decay: the public functions, the definition, and the chunked
form.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from regard.argument_checks import check_finite
from regard.ops.linear.call import (
    check_call,
    check_shape,
    chunk_of,
    emptied,
    empty_slots,
    first_state,
)
from regard.ops.linear.decays import between, fold, reads, since_start, until_end
from regard.span import Positions


def recurrent(
    q: Float[Tensor, "B G R T D"],
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B G T E"],
    beta: Float[Tensor, "B G T 1"],
    log_decay: Float[Tensor, "B G T #D"] | None,
    state: Float[Tensor, "B G D E"],
) -> tuple[Float[Tensor, "B G R T E"], Float[Tensor, "B G D E"]]:
    """Decay the state, read what it holds under the key, write the difference, answer the queries.

    S <- diag(exp(g_t)) S;  u = beta_t (v_t - S^T k_t);  S <- S + k_t u^T;  o_t = S^T q_t

    Args:
        q: the R queries of each key/value head, scaled; all tensors in the dtype of the state.
        k, v, beta: keys, values and writing strengths.
        log_decay: g, one number per key channel, or one for all of them; None is 0 everywhere.
        state: S in front of the first token; it is not changed.

    >>> k = torch.eye(2)[None, None]
    >>> v = torch.tensor([[3.0], [5.0]])[None, None]
    >>> strength, nothing = torch.ones(1, 1, 2, 1), torch.zeros(1, 1, 2, 1)
    >>> out, state = recurrent(k[:, :, None], k, v, strength, None, nothing)
    >>> state.flatten().tolist()  # two orthogonal keys: both values are held exactly
    [3.0, 5.0]

    Source: Yang et al. 2024 (arXiv 2406.06484), equation 2; with decay: Yang et al. 2024 (arXiv
    2412.06464), equation 10; a decay per channel: Kimi Team 2025 (arXiv 2510.26692), equation 1.
    """
    S, answers = state.clone(), []
    for t in range(k.shape[2]):
        key = k[:, :, t, :, None]  # [B,G,D,1]
        if log_decay is not None:
            S = S * log_decay[:, :, t, :, None].exp()
        held = key.transpose(-1, -2) @ S  # [B,G,1,E]
        S = S + key * (beta[:, :, t, None] * (v[:, :, t, None] - held))
        answers.append(q[:, :, :, t] @ S)  # [B,G,R,E]
    return (torch.stack(answers, 3) if answers else q @ S[:, :, None]), S


def chunked(
    q: Float[Tensor, "B G R T D"],
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B G T E"],
    beta: Float[Tensor, "B G T 1"],
    log_decay: Float[Tensor, "B G T #D"] | None,
    state: Float[Tensor, "B G D E"],
    size: int,
) -> tuple[Float[Tensor, "B G R T E"], Float[Tensor, "B G D E"]]:
    """What `recurrent` computes, with matrix products over chunks of `size` tokens (the last one
    may be shorter).

    With c_i the sum of g over the chunk up to token i, and L_ij = exp(c_i - c_j) for j <= i, the
    tokens' updates u solve
    (I + strict(diag(beta) K K^T * L)) U = diag(beta) (V - diag(exp(c)) K S);  then
    O = diag(exp(c)) Q S + (Q K^T * L) U  and  S <- exp(c_C) S + K^T diag(exp(c_C - c)) U.

    With a decay per channel c_i has D numbers, and (X K^T * L)_ij is sum_d x_id k_jd exp(c_id -
    c_jd): `reads`.

    The system is solved for all chunks at once; only the state passes from chunk to chunk. No
    exponent is a difference of two sums: each is summed by itself, so that it is as exact as the g
    inside it, and exp(-inf) = 0 resets the state. Where strengths are near 2 and keys much alike,
    the system is ill-conditioned: longer chunks then round worse.

    Args:
        q, k, v, beta, log_decay, state: as for `recurrent`.
        size: C, at least 1. With a decay per channel it is rounded up to a power of 2.

    >>> k = torch.eye(2)[None, None]
    >>> v = torch.tensor([[3.0], [5.0]])[None, None]
    >>> strength, nothing = torch.ones(1, 1, 2, 1), torch.zeros(1, 1, 2, 1)
    >>> out, state = chunked(k[:, :, None], k, v, strength, None, nothing, 2)
    >>> state.flatten().tolist()
    [3.0, 5.0]

    Source: Yang et al. 2024 (arXiv 2406.06484), section 3.2 and equations 8 to 11; with decay:
    arXiv 2412.06464, section 3.3; a decay per channel: Kimi Team 2025 (arXiv 2510.26692), section
    3.
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
    out = torch.unflatten(torch.stack(answers, 2), 3, (R, size))
    out = out.movedim(3, 2).flatten(3, 4)[..., :T, :]
    return out + own + lost[:, :, None], state + lost[:, :, -1:]


def _solve(
    k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, start: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Updates u = write - erase S, for any state S in front of the chunk: write [B,G,n,C,E], erase
    [B,G,n,C,D].
    """
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

    A product of matrices multiplies what is masked by 0, so that a NaN would reach the tokens in
    front of it. Here it goes round the products: in a key, a strength or a decay it spoils the
    whole state from there on, in a value's channel that column.
    """
    bad = 0 * k.detach().sum(-1, keepdim=True) + 0 * beta.detach()
    if log_decay is not None:
        bad = bad.masked_fill(~(log_decay.detach() < torch.inf).all(-1, keepdim=True), torch.nan)
    return (bad + 0 * v.detach()).cumsum(2)


def delta_rule(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B G T E"],
    beta: Float[Tensor, "B G T"] | Float[Tensor, "B G T 1"],
    *,
    scale: float | None = None,
    state: tuple[Float[Tensor, "B G D E"], ...] | None = None,
    k_positions: Positions | None = None,
    form: str = "auto",
    chunk: int = 64,
) -> tuple[Float[Tensor, "B H T E"], tuple[Float[Tensor, "B G D E"]]]:
    """The delta rule: each token corrects what the state holds under its key, instead of adding to
    it.

    S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T;  o_t = scale S_t^T q_t

    Query head h reads the state of key/value head h // (H/G). With beta 1 and |k| = 1 the value
    under k is replaced, with beta 0 nothing is written. **Keys must be of a length with 0 <= beta
    |k|^2 <= 2**, else the state grows without
    bound: a step multiplies what stands under k by 1 - beta |k|^2. Models normalise k (and q) to
        length 1; this function does not.

    Args:
        q, k, v: queries, keys and values of the same T tokens; G divides H.
        beta: how much of the correction is written, of any floating dtype; [B,G,T] or [B,G,T,1].
        scale: on the queries; None is 1/sqrt(D).
        state: (S,), what a call before this one returned, fp32 (fp64 for fp64); None is 0. It is
            not changed.
        k_positions: slots at -1 are no tokens: they write nothing, and their outputs are 0.
        form: "recurrent" is the definition, "chunk" solves a triangular system per chunk,
            "parallel" is one chunk of length T, "auto" takes "recurrent" for a few tokens, else
            "chunk".
        chunk: tokens in a chunk, at least 1; T need not be a multiple.

    Returns:
        The output in the dtype of q, and the state behind the last token. Sums are in fp32 (fp64
        for fp64).

    Raises:
        ArgumentError, ArgumentTypeError: an argument does not fit; raised before anything is
            computed.

    >>> k = torch.eye(2)[[0, 1, 0]][None, None]  # the third token has the key of the first
    >>> v = torch.tensor([[3.0], [5.0], [7.0]])[None, None]
    >>> out, (state,) = delta_rule(k, k, v, torch.ones(1, 1, 3), scale=1.0)
    >>> out.flatten().tolist(), state.flatten().tolist()
    ([3.0, 5.0, 7.0], [7.0, 5.0])

    Source: Schlag et al. 2021 (arXiv 2102.11174), section 4.2; in chunks: Yang et al. 2024 (arXiv
    2406.06484).
    """
    check_call(q, k, v, scale, k_positions, form, chunk)
    return _run(q, k, v, {"beta": beta}, scale, state, k_positions, form, chunk)


def gated_delta_rule(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B G T E"],
    beta: Float[Tensor, "B G T"] | Float[Tensor, "B G T 1"],
    log_decay: Float[Tensor, "B G T"] | Float[Tensor, "B G T D"],
    *,
    scale: float | None = None,
    state: tuple[Float[Tensor, "B G D E"], ...] | None = None,
    k_positions: Positions | None = None,
    form: str = "auto",
    chunk: int = 64,
) -> tuple[Float[Tensor, "B H T E"], tuple[Float[Tensor, "B G D E"]]]:
    """The gated delta rule: the state decays, then the token corrects what is left under its key.

    S' = diag(exp(g_t)) S_{t-1};  S_t = S' + beta_t k_t (v_t - S'^T k_t)^T;  o_t = scale S_t^T q_t

    With one decay per head this is Gated DeltaNet; with one per key channel it is Kimi Delta
    Attention, and the update rule "gated_delta" of ONNX's LinearAttention, which has both.

    Args:
        log_decay: g, of any floating dtype: [B,G,T], one number per head, or [B,G,T,D], one per key
            channel. At most 0 if the state is to stay bounded; 0 is the delta rule, -inf empties
            the state, or the channel, in front of the token.
        chunk: as for `delta_rule`; with a decay per channel it is rounded up to a power of 2.

    All else, and what is raised, is as for `delta_rule`; padding does not decay the state.

    >>> k = torch.eye(2)[None, None]
    >>> v = torch.tensor([[3.0], [5.0]])[None, None]
    >>> half = torch.full((1, 1, 2), 0.5).log()
    >>> gated_delta_rule(k, k, v, torch.ones(1, 1, 2), half, scale=1.0)[1][0].flatten().tolist()
    [1.5, 5.0]
    >>> second_channel = torch.tensor([0.0, float("-inf")]).expand(1, 1, 2, 2)  # keeps the first
    >>> gated_delta_rule(k, k, v, torch.ones(1, 1, 2, 1), second_channel)[1][0].flatten().tolist()
    [3.0, 5.0]

    Source: Yang et al. 2024 (arXiv 2412.06464), equation 10; a decay per channel: Kimi Team 2025
    (arXiv 2510.26692), equation 1; ONNX operator LinearAttention, version 27.
    """
    check_call(q, k, v, scale, k_positions, form, chunk)
    gates = {"beta": beta, "log_decay": log_decay}
    return _run(q, k, v, gates, scale, state, k_positions, form, chunk)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: dict[str, Tensor],
    scale: float | None,
    state: tuple[Tensor, ...] | None,
    positions: Positions | None,
    form: str,
    chunk: int,
) -> tuple[Tensor, tuple[Tensor]]:
    """Both rules; the caller has held q, k, v and the options against one another."""
    (B, G, T, D), E = k.shape, v.shape[3]
    wide = {"beta": 1, "log_decay": D}
    for name, gate in gates.items():
        meaning = "one number per key/value head and token"
        meaning += ", or one per key channel as well" * (name == "log_decay")
        check_shape(name, gate, ((B, G, T), (B, G, T, wide[name])), meaning, k)
    (S,) = first_state(state, {"S": (B, G, D, E)}, k)
    empty = empty_slots(positions, q)
    q, k, v = (emptied(x, empty) for x in (q, k, v))
    check_finite(query=q, key=k, value=v)
    columns = (x if x.ndim == 4 else x[..., None] for x in gates.values())
    beta, *decay = (emptied(x, empty).to(S.dtype) for x in columns)
    g = decay[0] if decay else None  # [B,G,T,1 or D]
    queries = torch.unflatten(q.to(S.dtype) * (D**-0.5 if scale is None else scale), 1, (G, -1))
    k, v, size = k.to(S.dtype), v.to(S.dtype), chunk_of(form, chunk, T)
    with torch.autocast(q.device.type, enabled=False):
        if size is None:
            out, S = recurrent(queries, k, v, beta, g, S)
        else:
            out, S = chunked(queries, k, v, beta, g, S, size)
    return emptied(out.flatten(1, 2).to(q.dtype), empty), (S,)
