"""The delta rule, without a decay (`delta_rule`) and with one (`gated_delta_rule`). Both are
computed token by token (`recurrent`) or with matrix products over chunks of tokens (`chunked`).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from regard.argument_checks import check_finite
from regard.ops.linear.causal_products import (
    finite_part,
    inverse_of_unit_triangle,
    valid_decays,
)
from regard.ops.linear.form_choice import choose_form
from regard.ops.linear.linear_recurrence import (
    FORMS_WITH_TRITON,
    check_call,
    check_tensor_shape,
    chunk_size,
    decay_since_start,
    decay_until_end,
    decayed_products,
    empty_slot_mask,
    initial_state,
    pairwise_decay,
    split_into_chunks,
    zero_empty_slots,
)
from regard.ops.linear.triton.kernel import RecurrenceCall, run
from regard.ops.linear.value_heads import (
    group_heads,
    shared_matmul,
    split_value_heads,
)
from regard.span import Positions


def recurrent(
    q: Float[Tensor, "B G #P R T D"],
    k: Float[Tensor, "B G 1 T D"],
    v: Float[Tensor, "B G P T E"],
    beta: Float[Tensor, "B G P T 1"],
    log_decay: Float[Tensor, "B G P T #D"] | None,
    state: Float[Tensor, "B G P D E"],
) -> tuple[Float[Tensor, "B G P R T E"], Float[Tensor, "B G P D E"]]:
    """Compute the delta rule token by token: decay the state, read the value that it stores for the
    key, add a part of the difference from the new value, and read the output.

    S <- diag(exp(g_t)) S;  u = beta_t (v_t - S^T k_t);  S <- S + k_t u^T;  o_t = S^T q_t

    >>> k = torch.eye(2)[None, None, None]
    >>> v = torch.tensor([[3.0], [5.0]])[None, None, None]
    >>> beta, zeros = torch.ones(1, 1, 1, 2, 1), torch.zeros(1, 1, 1, 2, 1)
    >>> out, state = recurrent(k[:, :, None], k, v, beta, None, zeros)
    >>> state.flatten().tolist()  # the keys are orthogonal, so both values are stored exactly
    [3.0, 5.0]

    Source: Yang et al. 2024 (arXiv 2406.06484), equation 2; with decay: Yang et al. 2024 (arXiv
    2412.06464), equation 10; a decay per channel: Kimi Team 2025 (arXiv 2510.26692), equation 1.
    """
    S, outputs = state.clone(), []
    for t in range(k.shape[-2]):
        key = k[..., t, :, None]  # [B,G,1,D,1]
        if log_decay is not None:
            S = S * log_decay[..., t, :, None].exp()
        stored = key.mT @ S  # [B,G,P,1,E]
        S = S + key * (beta[..., t, :, None] * (v[..., t, None, :] - stored))
        outputs.append(q[..., t, :] @ S)  # [B,G,P,R,E]
    return (torch.stack(outputs, -2) if outputs else q @ S.unsqueeze(-3)), S


def chunked(
    q: Float[Tensor, "B G #P R T D"],
    k: Float[Tensor, "B G 1 T D"],
    v: Float[Tensor, "B G P T E"],
    beta: Float[Tensor, "B G P T 1"],
    log_decay: Float[Tensor, "B G P T #D"] | None,
    state: Float[Tensor, "B G P D E"],
    size: int,
) -> tuple[Float[Tensor, "B G P R T E"], Float[Tensor, "B G P D E"]]:
    """Compute the delta rule with matrix products over chunks of `size` tokens (the last one may be
    shorter).

    With c_i the sum of g over the chunk up to token i, and L_ij = exp(c_i - c_j) for j <= i, the
    updates u of the tokens solve
    (I + strict(diag(beta) K K^T * L)) U = diag(beta) (V - diag(exp(c)) K S);  then
    O = diag(exp(c)) Q S + (Q K^T * L) U  and  S <- exp(c_C) S + K^T diag(exp(c_C - c)) U.

    With a decay per channel c_i has D numbers, and (X K^T * L)_ij is sum_d x_id k_jd exp(c_id -
    c_jd): `decayed_products`.

    The system is solved for all chunks at once; only the state passes from chunk to chunk. A
    difference such as c_i - c_j is not computed from c: its terms g are summed separately, so that
    no digits cancel, and g = -inf gives the factor 0 rather than NaN. Where beta is close to 2 and
    keys are similar, the system is ill-conditioned, and longer chunks have larger rounding errors.

    >>> k = torch.eye(2)[None, None, None]
    >>> v = torch.tensor([[3.0], [5.0]])[None, None, None]
    >>> beta, zeros = torch.ones(1, 1, 1, 2, 1), torch.zeros(1, 1, 1, 2, 1)
    >>> out, state = chunked(k[:, :, None], k, v, beta, None, zeros, 2)
    >>> state.flatten().tolist()
    [3.0, 5.0]

    Source: Yang et al. 2024 (arXiv 2406.06484), section 3.2 and equations 8 to 11; with decay:
    arXiv 2412.06464, section 3.3; a decay per channel: Kimi Team 2025 (arXiv 2510.26692), section
    3.
    """
    T, R = k.shape[-2], q.shape[-3]
    if T == 0:
        return q @ state.unsqueeze(-3), state.clone()
    size = min(size, T)
    by_channel = log_decay is not None and log_decay.shape[-1] > 1
    if by_channel:
        size = 1 << (size - 1).bit_length()
    q, k, v, beta = (split_into_chunks(x, size) for x in (q, k, v, beta))
    q = q.movedim(-4, -3)  # [B,G,P or 1,n,R,C,D]
    (q, bad_q), (k, bad_k), (beta, bad) = map(finite_part, (q, k, beta))
    bad, g = bad + bad_k.sum(-1, keepdim=True), None
    if log_decay is not None:
        g, bad_g = valid_decays(split_into_chunks(log_decay, size))
        bad = bad + bad_g.sum(-1, keepdim=True)
    system, bad_system = finite_part((beta * products_after_decay(k, k, g)).tril_(-1))
    inverse, overflow = inverse_of_unit_triangle(system, beta)
    bad = bad + overflow + bad_system.sum(-1, keepdim=True)
    weights = products_after_decay(
        q, k.unsqueeze(-3), None if g is None else g.unsqueeze(-3)
    )  # [B,G,P or 1,n,R,C,C]
    weights, bad_weights = finite_part(weights)
    bad_q = (bad_q.sum(-1, keepdim=True) + bad_weights.sum(-1, keepdim=True)).flatten(-3, -2)
    start, end = (None, None) if g is None else (decay_since_start(g), decay_until_end(g))
    erased_keys = k if start is None else k * start
    if start is not None and end is not None and by_channel:
        q, k = q * start.unsqueeze(-3), k * end
    q, weights = q.flatten(-3, -2), weights.flatten(-3, -2)  # [B,G,P or 1,n,R*C,D or C]
    # The error of a token whose numbers are not finite is NaN, which `bad` collects.
    v, outputs, bad = v + bad, [], torch.zeros_like(state[..., :1, :])
    for i in range(k.shape[-3]):
        errors = v[..., i, :, :] - shared_matmul(erased_keys[..., i, :, :], state)
        errors, bad_errors = finite_part(errors)
        u, bad_updates = finite_part(shared_matmul(inverse[..., i, :, :], errors))
        bad = bad[..., -1:, :] + (bad_errors + bad_updates).cumsum(-2)  # [B,G,P,C,E]
        read, written = shared_matmul(q[..., i, :, :], state), u
        if start is not None and end is not None:
            if not by_channel:  # one factor per token, also where value heads share q and k
                read = read * start[..., i, :, :].repeat(1, 1, 1, R, 1)
                written = u * end[..., i, :, :]
            state = state * start[..., i, -1, :, None]
        outputs.append(
            read
            + shared_matmul(weights[..., i, :, :], u)
            + (bad if R == 1 else bad.repeat(1, 1, 1, R, 1))
        )
        state = state + shared_matmul(k[..., i, :, :].mT, written)
    out = torch.unflatten(torch.stack(outputs, -3) + bad_q, -2, (R, size))
    out = out.movedim(-3, -4).flatten(-3, -2)[..., :T, :]  # [B,G,P,R,T,E]
    return out, state + bad[..., -1:, :]


def products_after_decay(x: Tensor, k: Tensor, g: Tensor | None) -> Tensor:
    """Return the products of x_i and k_j, both `[..., C, D]`, after the decay from token j to token
    i, for j <= i, and 0 for j > i: `[..., C, C]`.
    """
    if g is None:
        return (x @ k.mT).tril_()
    if g.shape[-1] > 1:
        return decayed_products(x, k, g)
    # the products are hidden last, because one that overflows times a decay of 0 is NaN
    return ((x @ k.mT) * pairwise_decay(g)).tril_()


def delta_rule(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B N T E"],
    beta: Float[Tensor, "B N T"] | Float[Tensor, "B N T 1"],
    *,
    scale: float | None = None,
    state: tuple[Float[Tensor, "B N D E"], ...] | None = None,
    k_positions: Positions | None = None,
    form: str = "auto",
    chunk: int = 64,
) -> tuple[Float[Tensor, "B O T E"], tuple[Float[Tensor, "B N D E"]]]:
    """Compute the delta rule: each token corrects the value that the state stores for its key,
    where linear attention would add its value to the state.

    S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T;  o_t = scale S_t^T q_t

    Each of the N value heads has a state: with N = G, query head h reads the state of key/value
    head h // (H/G); with more value heads, value head h uses key head h // (N/G), and query heads
    are shared in the same way (`regard.ops.linear.value_heads`). With beta = 1 and |k| = 1 the
    value for k is replaced; with beta = 0 nothing is written. **Keys must satisfy 0 <= beta |k|^2
    <= 2**, because one step multiplies the stored value for k by 1 - beta |k|^2; outside this range
    the state grows without bound. Models normalise k (and q) to length 1; this function does not.

    Args:
        q: queries `[B, H, T, D]`.
        k: keys `[B, G, T, D]` of the same T tokens; G divides H.
        v: values `[B, N, T, E]`; G divides N.
        beta: the fraction of the correction that is written, `[B, N, T]` or `[B, N, T, 1]`, of any
            floating dtype.
        scale: the factor on the queries; None: 1/sqrt(D).
        state: (S,) as an earlier call returned it, S `[B, N, D, E]` in fp32 (fp64 for fp64 inputs);
            None: zeros. It is not changed.
        k_positions: positions of the tokens; slots at -1 are empty: they write nothing, and their
            outputs are 0.
        form: "recurrent" is the definition, token by token; "chunk" solves a triangular system per
            chunk; "parallel" is one chunk of length T; "triton" uses kernels for GPUs with chunks
            of their own size; "auto" takes "recurrent" for up to 8 tokens, else "triton" on a GPU
            where it serves the call, else "chunk". All give the same result.
        chunk: the number of tokens in a chunk, at least 1; T need not be a multiple.

    Returns:
        The output `[B, max(H, N), T, E]` in the dtype of q, and the state after the last token.
        Sums are in fp32 (fp64 for fp64 inputs).

    Raises:
        ArgumentError, ArgumentTypeError: an argument is invalid; raised before anything is
            computed.
        KernelRefusal: form is "triton", which cannot run the call; the message says why.

    >>> k = torch.eye(2)[[0, 1, 0]][None, None]  # the third token has the key of the first
    >>> v = torch.tensor([[3.0], [5.0], [7.0]])[None, None]
    >>> out, (state,) = delta_rule(k, k, v, torch.ones(1, 1, 3), scale=1.0)
    >>> out.flatten().tolist(), state.flatten().tolist()
    ([3.0, 5.0, 7.0], [7.0, 5.0])

    Source: Schlag et al. 2021 (arXiv 2102.11174), section 4.2; in chunks: Yang et al. 2024 (arXiv
    2406.06484).
    """
    check_call(q, k, v, scale, k_positions, form, chunk, FORMS_WITH_TRITON)
    return _run_rule(q, k, v, {"beta": beta}, scale, state, k_positions, form, chunk)


def gated_delta_rule(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B N T E"],
    beta: Float[Tensor, "B N T"] | Float[Tensor, "B N T 1"],
    log_decay: Float[Tensor, "B N T"] | Float[Tensor, "B N T D"],
    *,
    scale: float | None = None,
    state: tuple[Float[Tensor, "B N D E"], ...] | None = None,
    k_positions: Positions | None = None,
    form: str = "auto",
    chunk: int = 64,
) -> tuple[Float[Tensor, "B O T E"], tuple[Float[Tensor, "B N D E"]]]:
    """Compute the gated delta rule: at each token the state decays, then the token corrects the
    value that the state stores for its key.

    S' = diag(exp(g_t)) S_{t-1};  S_t = S' + beta_t k_t (v_t - S'^T k_t)^T;  o_t = scale S_t^T q_t

    With one decay per value head this is Gated DeltaNet; with one per key channel it is Kimi Delta
    Attention. Heads are as in `delta_rule`; Qwen3-Next has 16 query and key heads and 32 value
    heads. ONNX's operator LinearAttention supports both with its update rule "gated_delta".

    Args:
        q: queries `[B, H, T, D]`.
        k: keys `[B, G, T, D]` of the same T tokens; G divides H.
        v: values `[B, N, T, E]`; G divides N.
        beta: the fraction of the correction that is written, `[B, N, T]` or `[B, N, T, 1]`, of any
            floating dtype.
        log_decay: g, the logarithm of the decay factor, `[B, N, T]` with one number per value
            head, or `[B, N, T, D]` with one per key channel, of any floating dtype. Above 0 the
            state may grow without bound; 0 gives the delta rule; -inf clears the state, or the
            channel, before the token is written.
        scale: the factor on the queries; None: 1/sqrt(D).
        state: (S,) as an earlier call returned it, S `[B, N, D, E]` in fp32 (fp64 for fp64 inputs);
            None: zeros. It is not changed.
        k_positions: positions of the tokens; slots at -1 are empty: they write nothing and decay
            nothing, and their outputs are 0.
        form: "auto", "recurrent", "chunk", "parallel" or "triton", as in `delta_rule`.
        chunk: the number of tokens in a chunk, at least 1; with a decay per channel it is rounded
            up to a power of 2.

    Returns:
        The output `[B, max(H, N), T, E]` in the dtype of q, and the state after the last token.
        Sums are in fp32 (fp64 for fp64 inputs).

    Raises:
        ArgumentError, ArgumentTypeError: an argument is invalid; raised before anything is
            computed.
        KernelRefusal: form is "triton", which cannot run the call; the message says why.

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
    check_call(q, k, v, scale, k_positions, form, chunk, FORMS_WITH_TRITON)
    gates = {"beta": beta, "log_decay": log_decay}
    return _run_rule(q, k, v, gates, scale, state, k_positions, form, chunk)


def _run_rule(
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
    """Check the gates and the state, and compute the delta rule with or without a decay; the caller
    has checked q, k, v and the options.
    """
    (B, G, T, D), (N, E) = k.shape, v.shape[1::2]
    channels = {"beta": 1, "log_decay": D}
    for name, gate in gates.items():
        meaning = f"one number per {'key/value' if N == G else 'value'} head and token"
        meaning += ", or one per key channel as well" * (name == "log_decay")
        check_tensor_shape(name, gate, ((B, N, T), (B, N, T, channels[name])), meaning, k)
    (S,) = initial_state(state, {"S": (B, N, D, E)}, k)
    empty, dtype = empty_slot_mask(positions, q), q.dtype
    q, k, v = (zero_empty_slots(x, empty) for x in (q, k, v))
    check_finite(query=q, key=k, value=v)
    gates_4d = (x if x.ndim == 4 else x[..., None] for x in gates.values())
    strength, *decay = (zero_empty_slots(x, empty) for x in gates_4d)
    call = RecurrenceCall(
        q, k, v, S, strength, decay[0] if decay else None,
        D**-0.5 if scale is None else scale, k.dtype, dtype,
    )  # fmt: skip
    form = choose_form(call, form)
    if form == "triton":
        out, new = run(call, lambda x: _corrected_recurrence(x, "chunk", chunk))
    else:
        out, new = _corrected_recurrence(call, form, chunk)
    return zero_empty_slots(out, empty), (new,)


def _corrected_recurrence(call: RecurrenceCall, form: str, chunk: int) -> tuple[Tensor, Tensor]:
    """Compute the delta rule of a call in operations of torch."""
    q, k, v, strength, log_decay, S = (
        call.q, call.k, call.v, call.beta, call.log_decay, call.state,
    )  # fmt: skip
    assert strength is not None
    G, T = k.shape[1:3]
    beta = split_value_heads(strength.to(S.dtype), G)
    g = None if log_decay is None else split_value_heads(log_decay.to(S.dtype), G)
    q = q.to(S.dtype) * call.scale
    queries, keys, values = group_heads(q, k.to(S.dtype), v.to(S.dtype))
    grouped, size = split_value_heads(S, G), chunk_size(form, chunk, T)
    with torch.autocast(q.device.type, enabled=False):
        if size is None:
            out, new = recurrent(queries, keys, values, beta, g, grouped)
        else:
            out, new = chunked(queries, keys, values, beta, g, grouped, size)
    return out.flatten(1, 3).to(call.out_dtype), new.flatten(1, 2)
