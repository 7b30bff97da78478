"""The generalised delta rule: a state that decays in each channel, is changed by a matrix of rank
one, and adds a key with its value. Kimi Delta Attention, Gated DeltaNet-2, Comba and RWKV-7 are
choices of its vectors.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from regard.argument_checks import check_finite
from regard.ops.linear.causal_products import (
    finite_part,
    inverse_of_unit_triangle,
    valid_decays,
)
from regard.ops.linear.delta_rule import products_after_decay
from regard.ops.linear.linear_recurrence import (
    check_call,
    check_tensor_shape,
    chunk_size,
    decay_since_start,
    decay_until_end,
    empty_slot_mask,
    initial_state,
    split_into_chunks,
    zero_empty_slots,
)
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
    c: Float[Tensor, "B G P T D"],
    a: Float[Tensor, "B G P T D"] | None,
    log_decay: Float[Tensor, "B G P T #D"] | None,
    state: Float[Tensor, "B G P D E"],
) -> tuple[Float[Tensor, "B G P R T E"], Float[Tensor, "B G P D E"]]:
    """Compute the generalised delta rule token by token.

    u_t = S^T c_t;  S <- diag(exp(g_t)) S + a_t u_t^T + k_t v_t^T;  o_t = S^T q_t
    """
    S, outputs = state.clone(), []
    for t in range(k.shape[-2]):
        u = c[..., t, None, :] @ S  # [B,G,P,1,E]
        S = S if log_decay is None else S * log_decay[..., t, :, None].exp()
        value, key = v[..., t, None, :], k[..., t, :, None]
        S = S + (key * (value - u) if a is None else a[..., t, :, None] * u + key * value)
        outputs.append(q[..., t, :] @ S)  # [B,G,P,R,E]
    return (torch.stack(outputs, -2) if outputs else q @ S.unsqueeze(-3)), S


def chunked(
    q: Float[Tensor, "B G #P R T D"],
    k: Float[Tensor, "B G 1 T D"],
    v: Float[Tensor, "B G P T E"],
    c: Float[Tensor, "B G P T D"],
    a: Float[Tensor, "B G P T D"] | None,
    log_decay: Float[Tensor, "B G P T #D"] | None,
    state: Float[Tensor, "B G P D E"],
    size: int,
) -> tuple[Float[Tensor, "B G P R T E"], Float[Tensor, "B G P D E"]]:
    """Compute the generalised delta rule with matrix products over chunks of `size` tokens (the
    last one may be shorter).

    With the decay L_ij from token j to token i of a chunk, and L_i from its start to token i, the
    reads u of the tokens solve
    (I - A) U = diag(L_{i-1}) C S + B V,  A_ij = L_{i-1,j} c_i . a_j,  B_ij = L_{i-1,j} c_i . k_j,
    for j < i;  then O = diag(L_i) Q S + (Q K^T * L) V + (Q A^T * L) U. In each channel L_ij is the
    exponential of a sum of g, never of a difference of sums, so that no decay overflows.

    Source: Yang et al. 2024 (arXiv 2406.06484), section 3.2; Peng et al. 2025 (arXiv 2503.14456),
    appendix; the decays: `regard.ops.linear.linear_recurrence.decayed_products`.
    """
    T, R = k.shape[-2], q.shape[-3]
    if T == 0:
        return q @ state.unsqueeze(-3), state.clone()
    size = min(size, T)
    if log_decay is not None and log_decay.shape[-1] > 1:
        size = 1 << (size - 1).bit_length()
    q, k, v, c = (split_into_chunks(x, size) for x in (q, k, v, c))
    (q, bad_q), (k, bad_k), (v, bad), (c, bad_c) = map(finite_part, (q, k, v, c))
    bad_q, bad = bad_q.sum(-1, keepdim=True), bad + (bad_k + bad_c).sum(-1, keepdim=True)
    if a is not None:
        a, bad_a = finite_part(split_into_chunks(a, size))
        bad = bad + bad_a.sum(-1, keepdim=True)
    if log_decay is None:
        g, start, end = None, torch.ones_like(k[..., :1]), None
    else:
        g, bad_g = valid_decays(split_into_chunks(log_decay, size))
        bad = bad + bad_g.sum(-1, keepdim=True)
        start, end = decay_since_start(g), decay_until_end(g)
    from_keys, bad_rows = finite_part(_strict_products(c, k, g))
    system = from_keys
    if a is not None:
        system, bad_system = finite_part(-_strict_products(c, a, g))
        bad_rows = bad_rows + bad_system
    inverse, overflow = inverse_of_unit_triangle(system, torch.ones_like(c[..., :1]))
    q = q.movedim(-4, -3)  # [B,G,P or 1,n,R,C,D]
    weights, bad_q = _query_weights(q, k, g, bad_q.movedim(-4, -3))  # [B,G,P or 1,n,R*C,C]
    if a is not None:
        read_weights, bad_q = _query_weights(q, a, g, bad_q)
        back = a if end is None else a * end
    c = c * F.pad(start[..., :-1, :], (0, 0, 1, 0), value=1.0)
    q, keys = (q * start.unsqueeze(-3)).flatten(-3, -2), k if end is None else k * end
    # The read of a token whose numbers are not finite is NaN, which `bad` collects.
    added = from_keys @ v + (bad + overflow + bad_rows.sum(-1, keepdim=True))
    outputs, bad = [], torch.zeros_like(state[..., :1, :])
    for i in range(k.shape[-3]):
        value, key = v[..., i, :, :], keys[..., i, :, :].mT
        u, bad_right = finite_part(added[..., i, :, :] + c[..., i, :, :] @ state)
        u = inverse[..., i, :, :] @ u
        u, bad_reads = finite_part(value - u if a is None else u)
        bad = bad[..., -1:, :] + (bad_right + bad_reads).cumsum(-2)  # [B,G,P,C,E]
        value = u if a is None else value
        out = shared_matmul(q[..., i, :, :], state) + shared_matmul(weights[..., i, :, :], value)
        state = state * start[..., i, -1, :, None] + shared_matmul(key, value)
        if a is not None:
            out = out + read_weights[..., i, :, :] @ u
            state = state + back[..., i, :, :].mT @ u
        outputs.append(out + (bad if R == 1 else bad.repeat(1, 1, 1, R, 1)))
    out = torch.unflatten(torch.stack(outputs, -3) + bad_q.flatten(-3, -2), -2, (R, size))
    out = out.movedim(-3, -4).flatten(-3, -2)[..., :T, :]  # [B,G,P,R,T,E]
    return out, state + bad[..., -1:, :]


def _query_weights(q: Tensor, k: Tensor, g: Tensor | None, bad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the finite part of the weights `[B, G, P, n, R*C, C]` of the queries `[B, G, P, n, R,
    C, D]` for keys `[B, G, P, n, C, D]`, and `bad` with NaN for the queries whose weights are not
    finite, `[B, G, P, n, R, C, 1]`.
    """
    weights = products_after_decay(q, k.unsqueeze(-3), None if g is None else g.unsqueeze(-3))
    weights, bad_weights = finite_part(weights)
    return weights.flatten(-3, -2), bad + bad_weights.sum(-1, keepdim=True)


def _strict_products(c: Tensor, k: Tensor, g: Tensor | None) -> Tensor:
    """Return the products of c_i and k_j after the decay from token j to token i - 1, for j < i,
    and 0 for other pairs: `[..., C, C]`.
    """
    next_c = F.pad(c[..., 1:, :], (0, 0, 0, 1))
    return F.pad(products_after_decay(next_c, k, g)[..., :-1, :], (0, 0, 1, 0))


def generalised_delta_rule(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B N T E"],
    c: Float[Tensor, "B N T D"],
    log_decay: Float[Tensor, "B N T"] | Float[Tensor, "B N T D"] | None = None,
    *,
    a: Float[Tensor, "B N T D"] | None = None,
    scale: float | None = None,
    state: tuple[Float[Tensor, "B N D E"], ...] | None = None,
    k_positions: Positions | None = None,
    form: str = "auto",
    chunk: int = 64,
) -> tuple[Float[Tensor, "B O T E"], tuple[Float[Tensor, "B N D E"]]]:
    """Compute a recurrence whose state is multiplied by a diagonal matrix plus a matrix of rank
    one.

    S_t = diag(exp(g_t)) S_{t-1} + a_t (S_{t-1}^T c_t)^T + k_t v_t^T;  o_t = scale S_t^T q_t

    The read S^T c is from the state **before** its decay; a rule that reads the decayed state has
    c = exp(g) * p. These rules are choices of the vectors:

    | rule | c | a | v |
    |---|---|---|---|
    | gated delta rule, Kimi Delta Attention | exp(g) * beta k | -k | beta v |
    | Gated DeltaNet-2, erase gate b, write gate w | exp(g) * b * k | -k | w * v |
    | Comba, which erases at p | exp(g) * beta p | -k | beta v |
    | RWKV-7, removal key r, in-context rate alpha | -r | r * alpha | v |

    Heads are as in `delta_rule`: each of the N value heads has a state.

    Args:
        q: queries `[B, H, T, D]`.
        k: keys `[B, G, T, D]` of the same T tokens; G divides H.
        v: values `[B, N, T, E]`; G divides N.
        c: what is read from the state before its decay, `[B, N, T, D]`, of any floating dtype.
        log_decay: g, the logarithm of the decay factor, `[B, N, T]` with one number per value head,
            or `[B, N, T, D]` with one per key channel, of any floating dtype; -inf clears the
            channel; None: no decay.
        a: where the read is added, `[B, N, T, D]`, of any floating dtype; None is -k, which takes
            about half as many products.
        scale: the factor on the queries; None: 1/sqrt(D).
        state: (S,) as an earlier call returned it, S `[B, N, D, E]` in fp32 (fp64 for fp64 inputs);
            None: zeros. It is not changed.
        k_positions: positions of the tokens; slots at -1 are empty: they write nothing and decay
            nothing, and their outputs are 0.
        form: "auto", "recurrent", "chunk" or "parallel", as in `delta_rule`.
        chunk: the number of tokens in a chunk, at least 1; with a decay per channel it is rounded
            up to a power of 2.

    Returns:
        The output `[B, max(H, N), T, E]` in the dtype of q, and the state after the last token.
        Sums are in fp32 (fp64 for fp64 inputs).

    Raises:
        ArgumentError, ArgumentTypeError: an argument is invalid; raised before anything is
            computed.

    >>> k = torch.eye(2)[[0, 1, 0]][None, None]
    >>> v = torch.tensor([[3.0], [5.0], [7.0]])[None, None]
    >>> out, (state,) = generalised_delta_rule(k, k, v, k, scale=1.0)  # the delta rule, beta = 1
    >>> out.flatten().tolist(), state.flatten().tolist()
    ([3.0, 5.0, 7.0], [7.0, 5.0])

    Source: Peng et al. 2025 (arXiv 2503.14456), equation 16; Kimi Team 2025 (arXiv 2510.26692),
    section 3, which calls it diagonal plus low rank.
    """
    check_call(q, k, v, scale, k_positions, form, chunk)
    (B, G, T, D), (N, E) = k.shape, v.shape[1::2]
    head = f"{'key/value' if N == G else 'value'} head and token"
    check_tensor_shape("c", c, ((B, N, T, D),), f"one vector per {head}", k)
    if a is not None:
        check_tensor_shape("a", a, ((B, N, T, D),), f"one vector per {head}", k)
    if log_decay is not None:
        meaning = f"one number per {head}, or one per key channel as well"
        check_tensor_shape("log_decay", log_decay, ((B, N, T), (B, N, T, D)), meaning, k)
    (S,) = initial_state(state, {"S": (B, N, D, E)}, k)
    empty, dtype = empty_slot_mask(k_positions, q), q.dtype
    q, k, v = (zero_empty_slots(x, empty) for x in (q, k, v))
    check_finite(query=q, key=k, value=v)

    def grouped(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        x = x if x.ndim == 4 else x[..., None]
        return split_value_heads(zero_empty_slots(x, empty).to(S.dtype), G)

    q = q.to(S.dtype) * (D**-0.5 if scale is None else scale)
    heads = group_heads(q, k.to(S.dtype), v.to(S.dtype))
    erase, add, g = grouped(c), grouped(a), grouped(log_decay)
    assert erase is not None
    before, size = split_value_heads(S, G), chunk_size(form, chunk, T)
    with torch.autocast(q.device.type, enabled=False):
        if size is None:
            out, new = recurrent(*heads, erase, add, g, before)
        else:
            out, new = chunked(*heads, erase, add, g, before, size)
    out = out.flatten(1, 3).to(dtype)
    return zero_empty_slots(out, empty), (new.flatten(1, 2),)
