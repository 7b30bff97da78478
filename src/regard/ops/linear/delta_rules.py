"""The delta rules: a state in which each token corrects what is stored for its key.

DeltaProduct is the delta rule with several keys per token. All are computed token by token
(`recurrent`) or with matrix products over chunks (`chunked`).
"""

from __future__ import annotations

from typing import NamedTuple, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from regard.argument_checks import check_positions, check_sizes
from regard.ops.linear.call import (
    FORMS_WITH_TRITON,
    SHARED_ARGUMENTS,
    SHARED_ARGUMENTS_WITH_TRITON,
    RecurrenceCall,
    ScaledOptions,
    TokenInputs,
    chunk_size,
    group_heads,
    shared_matmul,
    split_value_heads,
    without_autocast,
)
from regard.ops.linear.linear_recurrence import (
    decay_since_start,
    decay_until_end,
    decayed_products,
    finite_part,
    inverse_of_unit_triangle,
    pairwise_decay,
    run_form,
    split_into_chunks,
    valid_decays,
)
from regard.ops.shared_arguments import with_shared_arguments
from regard.span import find_empty_slots


class Correction(NamedTuple):
    """How a token changes the state: S <- S + k (beta (v - u))^T, or S + a u^T + k v^T.

    Args:
        beta: the share that is written, `[B, G, P, T, 1]`, or None.
        c: what is read before the decay, u = S^T c, `[B, G, P, T, D]`; None: the key, after it.
        a: where the read is added, `[B, G, P, T, D]`; None is -k.
    """

    beta: Float[Tensor, "B G P T 1"] | None = None
    c: Float[Tensor, "B G P T D"] | None = None
    a: Float[Tensor, "B G P T D"] | None = None


def recurrent(
    q: Float[Tensor, "B G #P R T D"],
    k: Float[Tensor, "B G 1 T D"],
    v: Float[Tensor, "B G P T E"],
    correction: Correction,
    log_decay: Float[Tensor, "B G P T #D"] | None,
    state: Float[Tensor, "B G P D E"],
) -> tuple[Float[Tensor, "B G P R T E"], Float[Tensor, "B G P D E"]]:
    """Compute a delta rule token by token.

    S <- diag(exp(g_t)) S;  S <- S + beta_t k_t (v_t - S^T k_t)^T;  o_t = S^T q_t
    or with c:  u = S^T c_t;  S <- diag(exp(g_t)) S + a_t u^T + k_t v_t^T;  o_t = S^T q_t
    """
    beta, c, a = correction
    S, outputs = state, []
    for t in range(k.shape[-2]):
        key, value = k[..., t, :, None], v[..., t, None, :]  # [B,G,1,D,1], [B,G,P,1,E]
        u = None if c is None else c[..., t, None, :] @ S
        S = S if log_decay is None else S * log_decay[..., t, :, None].exp()
        u = key.mT @ S if u is None else u  # [B,G,P,1,E]
        if a is not None:
            S = S + (a[..., t, :, None] * u + key * value)
        else:
            error = value - u
            S = S + key * (error if beta is None else beta[..., t, :, None] * error)
        outputs.append(q[..., t, :] @ S)  # [B,G,P,R,E]
    if not outputs:
        return q @ S.unsqueeze(-3), S.clone()
    return torch.stack(outputs, -2), S


def chunked(
    q: Float[Tensor, "B G #P R T D"],
    k: Float[Tensor, "B G 1 T D"],
    v: Float[Tensor, "B G P T E"],
    correction: Correction,
    log_decay: Float[Tensor, "B G P T #D"] | None,
    state: Float[Tensor, "B G P D E"],
    size: int,
) -> tuple[Float[Tensor, "B G P R T E"], Float[Tensor, "B G P D E"]]:
    """Compute a delta rule with matrix products over chunks of `size` tokens.

    With c_i the sum of g over the chunk up to token i, and L_ij = exp(c_i - c_j) for j <= i, the
    updates u of the tokens solve
    (I + strict(diag(beta) K K^T * L)) U = diag(beta) (V - diag(exp(c)) K S);  then
    O = diag(exp(c)) Q S + (Q K^T * L) U  and  S <- exp(c_C) S + K^T diag(exp(c_C - c)) U.

    `Correction.c` takes the place of K and K S, with decays up to the token before; with a,
    (I - A) U = diag(exp(c_{i-1})) C S + B V,  A_ij = L_{i-1,j} c_i . a_j,  B_ij = L_{i-1,j} c_i .
    k_j for j < i, and O and S get V for K and U for A.

    With a decay per channel c_i has D numbers, and (X K^T * L)_ij is sum_d x_id k_jd exp(c_id -
    c_jd): `decayed_products`.

    The system is solved for all chunks at once; it is ill-conditioned, and longer chunks less
    accurate, where beta is close to 2 and keys are similar.

    Source: Yang et al. 2024 (arXiv 2406.06484), equations 8 to 11; arXiv 2412.06464, section 3.3;
    Kimi Team 2025 (arXiv 2510.26692); Peng et al. 2025 (arXiv 2503.14456), appendix.
    """
    T, R = k.shape[-2], q.shape[-3]
    if T == 0:
        return q @ state.unsqueeze(-3), state.clone()
    size = min(size, T)
    by_channel = log_decay is not None and log_decay.shape[-1] > 1
    if by_channel:
        size = 1 << (size - 1).bit_length()
    q, k, v = (split_into_chunks(x, size) for x in (q, k, v))
    q = q.movedim(-4, -3)  # [B,G,P or 1,n,R,C,D]
    (q, bad_q), (k, bad) = map(finite_part, (q, k))
    bad, bad_q, g = bad.sum(-1, keepdim=True), bad_q.sum(-1, keepdim=True), None
    if log_decay is not None:
        g, bad_g = valid_decays(split_into_chunks(log_decay, size))
        bad = bad + bad_g.sum(-1, keepdim=True)
    start, end = (None, None) if g is None else (decay_since_start(g), decay_until_end(g))
    inverse, reads, right, v, a = _triangular_systems(k, v, g, start, bad, correction)
    weights, bad_q = _query_weights(q, k, g, bad_q)  # [B,G,P or 1,n,R*C,C]
    if a is not None:
        read_weights, bad_q = _query_weights(q, a, g, bad_q)
        back = a if end is None else a * end
    if start is not None and end is not None and by_channel:
        q, k = q * start.unsqueeze(-3), k * end
    q = q.flatten(-3, -2)  # [B,G,P or 1,n,R*C,D]
    outputs, bad = [], torch.zeros_like(state[..., :1, :])
    for i in range(k.shape[-3]):
        product = shared_matmul(reads[..., i, :, :], state)
        errors = right[..., i, :, :] - product if a is None else right[..., i, :, :] + product
        errors, bad_errors = finite_part(errors)
        u, bad_updates = finite_part(shared_matmul(inverse[..., i, :, :], errors))
        bad = bad[..., -1:, :] + (bad_errors + bad_updates).cumsum(-2)  # [B,G,P,C,E]
        written = u if a is None else v[..., i, :, :]
        out = shared_matmul(q[..., i, :, :], state)
        at_end = written
        if start is not None and end is not None:
            if not by_channel:  # one factor per token, also where value heads share q and k
                out = out * start[..., i, :, :].repeat(1, 1, 1, R, 1)
                at_end = written * end[..., i, :, :]
            state = state * start[..., i, -1, :, None]
        out = out + shared_matmul(weights[..., i, :, :], written)
        if a is not None:
            out = out + read_weights[..., i, :, :] @ u
            state = state + back[..., i, :, :].mT @ u
        outputs.append(out + (bad if R == 1 else bad.repeat(1, 1, 1, R, 1)))
        state = state + shared_matmul(k[..., i, :, :].mT, at_end)
    out = torch.unflatten(torch.stack(outputs, -3) + bad_q.flatten(-3, -2), -2, (R, size))
    out = out.movedim(-3, -4).flatten(-3, -2)[..., :T, :]  # [B,G,P,R,T,E]
    return out, state + bad[..., -1:, :]


def _triangular_systems(
    k: Tensor, v: Tensor, g: Tensor | None, start: Tensor | None, bad: Tensor, how: Correction
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return inverses, what reads the state, right-hand sides, and finite parts, by chunk."""
    size, (beta, c, a) = k.shape[-2], how
    if beta is None:
        scale = torch.ones_like(v[..., :1])
    else:
        scale, bad_beta = finite_part(split_into_chunks(beta, size))
        bad = bad + bad_beta
    right = v
    if c is None:
        system, bad_system = finite_part((scale * products_after_decay(k, k, g)).tril_(-1))
        reads = k if start is None else k * start
    else:
        c, bad_c = finite_part(split_into_chunks(c, size))
        bad = bad + bad_c.sum(-1, keepdim=True)
        system, bad_system = finite_part(_products_before(c, k, g))
        reads = c if start is None else c * F.pad(start[..., :-1, :], (0, 0, 1, 0), value=1.0)
    if c is not None and a is not None:
        v, bad_v = finite_part(v)
        right = system @ v + (bad_v + bad_system.sum(-1, keepdim=True))
        a, bad_a = finite_part(split_into_chunks(a, size))
        bad = bad + bad_a.sum(-1, keepdim=True)
        system, bad_system = finite_part(-_products_before(c, a, g))
    inverse, overflow = inverse_of_unit_triangle(system, scale)
    return inverse, reads, right + (bad + overflow + bad_system.sum(-1, keepdim=True)), v, a


def products_after_decay(x: Tensor, k: Tensor, g: Tensor | None) -> Tensor:
    """Return the products of x_i and k_j after the decay for j <= i, else 0: `[..., C, C]`."""
    if g is None:
        return (x @ k.mT).tril_()
    if g.shape[-1] > 1:
        return decayed_products(x, k, g)
    # the products are hidden last, because one that overflows times a decay of 0 is NaN
    return ((x @ k.mT) * pairwise_decay(g)).tril_()


def _products_before(c: Tensor, k: Tensor, g: Tensor | None) -> Tensor:
    """Return the products of c_i and k_j after the decay to i - 1 for j < i, else 0."""
    next_c = F.pad(c[..., 1:, :], (0, 0, 0, 1))
    return F.pad(products_after_decay(next_c, k, g)[..., :-1, :], (0, 0, 1, 0))


def _query_weights(q: Tensor, k: Tensor, g: Tensor | None, bad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the finite part of the queries' weights `[B, G, P, n, R*C, C]`, and NaN markers."""
    weights = products_after_decay(q, k.unsqueeze(-3), None if g is None else g.unsqueeze(-3))
    weights, bad_weights = finite_part(weights)
    return weights.flatten(-3, -2), bad + bad_weights.sum(-1, keepdim=True)


@with_shared_arguments(SHARED_ARGUMENTS_WITH_TRITON, ScaledOptions)
def delta_rule(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B N T E"],
    beta: Float[Tensor, "B N T"] | Float[Tensor, "B N T 1"],
    **options: Unpack[ScaledOptions],
) -> tuple[Float[Tensor, "B O T E"], tuple[Float[Tensor, "B N D E"]]]:
    """Compute the delta rule: each token corrects the value that the state stores for its key.

    S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T;  o_t = scale S_t^T q_t

    Each of the N value heads has a state: with N = G, query head h reads that of key/value head h
    // (H/G); else value head h uses key head h // (N/G). With beta = 1 and |k| = 1 the value for k
    is replaced. **Keys must satisfy 0 <= beta |k|^2 <= 2**: outside, the state grows without bound.
    Models normalize k; this function does not.

    >>> k = torch.eye(2)[[0, 1, 0]][None, None]  # the third token has the key of the first
    >>> v = torch.tensor([[3.0], [5.0], [7.0]])[None, None]
    >>> out, (state,) = delta_rule(k, k, v, torch.ones(1, 1, 3), scale=1.0)
    >>> out.flatten().tolist(), state.flatten().tolist()
    ([3.0, 5.0, 7.0], [7.0, 5.0])

    Source: Schlag et al. 2021 (arXiv 2102.11174), section 4.2; Yang et al. 2024 (arXiv 2406.06484).
    """
    tokens = TokenInputs(q, k, v, options, forms=FORMS_WITH_TRITON)
    return _correct(tokens, beta, None)


@with_shared_arguments(SHARED_ARGUMENTS_WITH_TRITON, ScaledOptions)
def gated_delta_rule(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B N T E"],
    beta: Float[Tensor, "B N T"] | Float[Tensor, "B N T 1"],
    log_decay: Float[Tensor, "B N T"] | Float[Tensor, "B N T D"],
    **options: Unpack[ScaledOptions],
) -> tuple[Float[Tensor, "B O T E"], tuple[Float[Tensor, "B N D E"]]]:
    """Compute the gated delta rule: the state decays, then the token corrects it.

    S' = diag(exp(g_t)) S_{t-1};  S_t = S' + beta_t k_t (v_t - S'^T k_t)^T;  o_t = scale S_t^T q_t

    With one decay per value head this is Gated DeltaNet; with one per key channel it is Kimi Delta
    Attention. Heads are as in `delta_rule`.

    Args:
        log_decay: g, the logarithm of the decay, `[B, N, T]` or `[B, N, T, D]`, of any floating
            dtype. Above 0 the state may grow without bound; 0 is the delta rule; -inf clears.

    >>> k = torch.eye(2)[None, None]
    >>> v = torch.tensor([[3.0], [5.0]])[None, None]
    >>> half = torch.full((1, 1, 2), 0.5).log()
    >>> gated_delta_rule(k, k, v, torch.ones(1, 1, 2), half, scale=1.0)[1][0].flatten().tolist()
    [1.5, 5.0]

    Source: Yang et al. 2024 (arXiv 2412.06464), equation 10; Kimi Team 2025 (arXiv 2510.26692),
    equation 1; ONNX operator LinearAttention, version 27.
    """
    tokens = TokenInputs(q, k, v, options, forms=FORMS_WITH_TRITON)
    return _correct(tokens, beta, _decay_gate(tokens, log_decay))


def _correct(tokens: TokenInputs, beta: Tensor, g: Tensor | None) -> tuple[Tensor, tuple[Tensor]]:
    """Check beta and the state, and compute the delta rule with checked decays or without."""
    meaning = f"one number per {_value_head(tokens)} and token"
    strength = tokens.gate("beta", beta, "B N T | B N T 1", meaning)
    (S,) = tokens.state(S="B N D E")
    q, k, v = tokens.q, tokens.k, tokens.v
    call = RecurrenceCall(q, k, v, S, strength, g, tokens.scale, k.dtype, q.dtype)
    out, S = run_form(call, tokens.form, tokens.chunk, _in_torch)
    return tokens.output(out), (S,)


def _value_head(tokens: TokenInputs) -> str:
    """Return what the heads with a state are called in errors."""
    return f"{'key/value' if tokens.N == tokens.G else 'value'} head"


def _decay_gate(tokens: TokenInputs, log_decay: Tensor) -> Tensor:
    """Return checked decays, `[B, N, T, 1 or D]`."""
    meaning = f"one number per {_value_head(tokens)} and token, or one per key channel as well"
    return tokens.gate("log_decay", log_decay, "B N T | B N T D", meaning)


def _in_torch(
    call: RecurrenceCall, form: str, chunk: int, c: Tensor | None = None, a: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute a delta rule in operations of torch; c and a are those of `Correction`."""
    G, T = call.k.shape[1:3]
    dtype = call.state.dtype
    correction = Correction(
        *(None if x is None else split_value_heads(x.to(dtype), G) for x in (call.beta, c, a))
    )
    g = None if call.log_decay is None else split_value_heads(call.log_decay.to(dtype), G)
    heads = group_heads(call.q.to(dtype) * call.scale, call.k.to(dtype), call.v.to(dtype))
    before, size = split_value_heads(call.state, G), chunk_size(form, chunk, T)
    with without_autocast(call.q):
        if size is None:
            out, new = recurrent(*heads, correction, g, before)
        else:
            out, new = chunked(*heads, correction, g, before, size)
    return out.flatten(1, 3).to(call.out_dtype), new.flatten(1, 2)


@with_shared_arguments(SHARED_ARGUMENTS, ScaledOptions)
def generalized_delta_rule(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B N T E"],
    c: Float[Tensor, "B N T D"],
    log_decay: Float[Tensor, "B N T"] | Float[Tensor, "B N T D"] | None = None,
    *,
    a: Float[Tensor, "B N T D"] | None = None,
    **options: Unpack[ScaledOptions],
) -> tuple[Float[Tensor, "B O T E"], tuple[Float[Tensor, "B N D E"]]]:
    """Compute a recurrence with a matrix of diagonal plus rank one.

    S_t = diag(exp(g_t)) S_{t-1} + a_t (S_{t-1}^T c_t)^T + k_t v_t^T;  o_t = scale S_t^T q_t

    The read S^T c is from the state **before** its decay. These rules are choices:

    | rule | c | a | v |
    |---|---|---|---|
    | gated delta rule, Kimi Delta Attention | exp(g) * beta k | -k | beta v |
    | Gated DeltaNet-2, erase gate b, write gate w | exp(g) * b * k | -k | w * v |
    | Comba, which erases at p | exp(g) * beta p | -k | beta v |
    | RWKV-7, removal key r, in-context rate alpha | -r | r * alpha | v |

    Heads are as in `delta_rule`: each of the N value heads has a state.

    Args:
        c, a: what is read, and where it is added (None is -k, faster), `[B, N, T, D]`.
        log_decay: g, the logarithm of the decay, `[B, N, T]` or `[B, N, T, D]`; -inf clears; None:
            no decay.

    >>> k = torch.eye(2)[[0, 1, 0]][None, None]
    >>> v = torch.tensor([[3.0], [5.0], [7.0]])[None, None]
    >>> out, (state,) = generalized_delta_rule(k, k, v, k, scale=1.0)  # the delta rule, beta = 1
    >>> out.flatten().tolist(), state.flatten().tolist()
    ([3.0, 5.0, 7.0], [7.0, 5.0])

    Source: Peng et al. 2025 (arXiv 2503.14456), equation 16; Kimi Team 2025 (arXiv 2510.26692),
    section 3.
    """
    tokens = TokenInputs(q, k, v, options)
    meaning = f"one vector per {_value_head(tokens)} and token"
    c = tokens.gate("c", c, "B N T D", meaning)
    a = None if a is None else tokens.gate("a", a, "B N T D", meaning)
    g = None if log_decay is None else _decay_gate(tokens, log_decay)
    (S,) = tokens.state(S="B N D E")
    call = RecurrenceCall(tokens.q, tokens.k, tokens.v, S, None, g, tokens.scale, k.dtype, q.dtype)
    out, S = _in_torch(call, tokens.form, tokens.chunk, c, a)
    return tokens.output(out), (S,)


@with_shared_arguments(SHARED_ARGUMENTS_WITH_TRITON, ScaledOptions)
def delta_product(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G T n D"],
    v: Float[Tensor, "B N T n E"],
    beta: Float[Tensor, "B N T n"],
    log_decay: Float[Tensor, "B N T"] | None = None,
    **options: Unpack[ScaledOptions],
) -> tuple[Float[Tensor, "B O T E"], tuple[Float[Tensor, "B N D E"]]]:
    """Compute the delta rule with n corrections per token, one after the other.

    S' = exp(g_t) S_{t-1};  S' <- S' + beta_ti k_ti (v_ti - S'^T k_ti)^T for i = 1..n;
    S_t = S';  o_t = scale S_t^T q_t

    It is the gated delta rule over n T keys, read after the last of a token. The state's matrix can
    be any product of n reflections, such as a rotation (n = 2).

    Args:
        k: n keys per token `[B, G, T, n, D]`; G divides H.
        v: n values per token `[B, N, T, n, E]`; G divides N.
        beta: the fraction of each correction that is written, `[B, N, T, n]`.
        log_decay: g, the logarithm of the decay factor of a token, `[B, N, T]`; None: no decay.
        chunk: the number of keys in a chunk, at least 1.

    >>> k = torch.eye(2)[None, None, None]  # one token with two keys
    >>> v = torch.tensor([[3.0], [5.0]])[None, None, None]
    >>> out, _ = delta_product(torch.ones(1, 1, 1, 2), k, v, torch.ones(1, 1, 1, 2), scale=1.0)
    >>> out.flatten().tolist()
    [8.0]

    Source: Siems et al. 2025 (arXiv 2502.10297), equation 4 and section 3.
    """
    tensors = {"q": (q, "B H T D"), "k": (k, "B G T n D"), "v": (v, "B N T n E")}
    tensors["beta"] = (beta, "B N T n")
    if log_decay is not None:
        tensors["log_decay"] = (log_decay, "B N T")
    sizes = check_sizes(**tensors)
    n, positions = sizes["n"], options.get("k_positions")
    if positions is not None:
        check_positions("k_positions", positions, sizes["B"], sizes["T"])
        empty = find_empty_slots(positions, q.device)
        positions = None if empty is None else -empty.long().repeat_interleave(n, 1)
    first = beta.new_zeros(*beta.shape)
    if log_decay is not None and n:
        first = F.pad(log_decay[..., None], (0, n - 1))  # [B,N,T,n]
    all_options: ScaledOptions = {**options, "k_positions": positions}
    out, S = gated_delta_rule(
        q.repeat_interleave(n, 2),
        k.flatten(2, 3),
        v.flatten(2, 3),
        beta.flatten(2),
        first.flatten(2),
        **all_options,
    )
    return out[:, :, n - 1 :: n], S
