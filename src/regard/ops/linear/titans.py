"""The linear memory of Titans: gradient descent with momentum, one step per token."""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from regard.argument_checks import check_finite
from regard.errors import ArgumentError
from regard.ops.linear.causal_products import (
    finite_part,
    inverse_of_unit_triangle,
    valid_decays,
)
from regard.ops.linear.linear_recurrence import (
    check_call,
    check_tensor_shape,
    chunk_size,
    empty_slot_mask,
    initial_state,
    pairwise_decay,
    split_into_chunks,
    zero_empty_slots,
)
from regard.span import Positions
from regard.units import plural

Gates: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]


def titans_memory(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B H T D"],
    v: Float[Tensor, "B H T E"],
    step: Float[Tensor, "B H T"],
    log_decay: Float[Tensor, "B H T"],
    log_momentum: Float[Tensor, "B H T"],
    *,
    scale: float | None = None,
    state: tuple[Float[Tensor, "B H D E"], ...] | None = None,
    k_positions: Positions | None = None,
    form: str = "auto",
    chunk: int = 64,
) -> tuple[Float[Tensor, "B H T E"], tuple[Float[Tensor, "B H D E"], Float[Tensor, "B H D E"]]]:
    """Compute the linear memory of Titans: a matrix M that learns to predict values from keys, by
    one step of gradient descent with momentum per token, and that forgets.

    N_t = exp(e_t) N_{t-1} - step_t grad(1/2 |M_{t-1}^T k_t - v_t|^2);
    M_t = exp(g_t) M_{t-1} + N_t;  o_t = scale M_t^T q_t

    In the paper's letters, exp(g) = 1 - alpha, exp(e) = eta and step = theta. Without momentum and
    forgetting (e = -inf, g = 0) this is the delta rule with beta = step. In chunks, the error of
    each token solves one triangular system, whose weights are the product of the two decays.

    Args:
        q: queries `[B, H, T, D]`.
        k: keys `[B, H, T, D]` of the same T tokens.
        v: values `[B, H, T, E]`.
        step: the step size of each token `[B, H, T]`, of any floating dtype.
        log_decay: g, the logarithm of what M keeps `[B, H, T]`, at most 0, -inf allowed.
        log_momentum: e, the logarithm of the momentum `[B, H, T]`, at most 0, -inf allowed.
        scale: the factor on the queries; None: 1/sqrt(D).
        state: (M, N) as an earlier call returned it, in fp32 (fp64 for fp64 inputs); None: zeros.
            It is not changed.
        k_positions: positions of the tokens; slots at -1 are empty: they write nothing and decay
            nothing, and their outputs are 0.
        form: "auto", "recurrent", "chunk" or "parallel", as in `delta_rule`.
        chunk: the number of tokens in a chunk, at least 1; T need not be a multiple.

    Returns:
        The output `[B, H, T, E]` in the dtype of q, and the state (M, N) after the last token.
        Sums are in fp32 (fp64 for fp64 inputs).

    Raises:
        ArgumentError, ArgumentTypeError: an argument is invalid; raised before anything is
            computed.

    >>> k, v = torch.ones(1, 1, 2, 1), torch.full((1, 1, 2, 1), 4.0)
    >>> half, zero = torch.full((1, 1, 2), 0.5), torch.zeros(1, 1, 2)
    >>> titans_memory(k, k, v, half, zero, zero - torch.inf, scale=1.0)[0].flatten().tolist()
    [2.0, 3.0]
    >>> titans_memory(k, k, v, half, zero, zero, scale=1.0)[0].flatten().tolist()  # momentum 1
    [2.0, 5.0]

    Source: Behrouz et al. 2024 (arXiv 2501.00663), equations 9 to 15.
    """
    check_call(q, k, v, scale, k_positions, form, chunk)
    (B, H, T, D), E = k.shape, v.shape[-1]
    if q.shape[1] != H or v.shape[1] != H:
        raise ArgumentError(
            f"q has {plural(q.shape[1], 'head')}, k {H} and v {v.shape[1]}; a memory of "
            "Titans has as many key and value heads as query heads: repeat them"
        )
    gates = {"step": step, "log_decay": log_decay, "log_momentum": log_momentum}
    for name, gate in gates.items():
        check_tensor_shape(name, gate, ((B, H, T),), "one number per head and token", k)
    shape = (B, H, D, E)
    M, N = initial_state(state, {"M": shape, "N": shape}, k)
    empty, dtype, wide = empty_slot_mask(k_positions, q), q.dtype, M.dtype
    q, k, v = (zero_empty_slots(x, empty).to(wide) for x in (q, k, v))
    check_finite(query=q, key=k, value=v)
    theta, g, e = (zero_empty_slots(x[..., None], empty).to(wide) for x in gates.values())
    q = q * (D**-0.5 if scale is None else scale)
    # N is added to M at every token, but at no empty slot
    real = (
        torch.ones_like(theta) if empty is None else zero_empty_slots(torch.ones_like(theta), empty)
    )
    size = chunk_size(form, chunk, T)
    with torch.autocast(q.device.type, enabled=False):
        run = _recurrent if size is None or not T else _chunked
        out, M, N = run(q, k, v, (theta, g, e, real), M, N, size or 1)
    return zero_empty_slots(out.to(dtype), empty), (M, N)


def _recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    M: Tensor,
    N: Tensor,
    size: int,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the memory token by token: q, k `[B, H, T, D]`, v `[B, H, T, E]`, the gates `[B, H,
    T, 1]`: theta, g, e, and 1 for a token or 0 for an empty slot.
    """
    theta, g, e, real = gates
    outputs = []
    for t in range(k.shape[2]):
        key = k[:, :, t, :, None]
        error = v[:, :, t, None] - key.mT @ M
        N = N * e[:, :, t, :, None].exp() + key * (theta[:, :, t, :, None] * error)
        M = M * g[:, :, t, :, None].exp() + real[:, :, t, :, None] * N
        outputs.append(q[:, :, t, None] @ M)
    return (torch.cat(outputs, 2) if outputs else q @ M), M.clone(), N.clone()


def _chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    M: Tensor,
    N: Tensor,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the memory in chunks of `size` tokens, with the arguments of `_recurrent`.

    With P_ij the decay of M and R_ij the momentum from token j to token i, both from the start of
    the chunk, the weight of token j's step in M_i is W = P R, and that of N before the chunk is
    the row sum of P diag(R_i). The errors u solve
    (I + diag(theta) (K K^T * W')) U = diag(theta) (V - K * p' M - K * r' N),
    where W', p' and r' are those of the token before.
    """
    theta, g, e, real = gates
    T, size = k.shape[2], min(size, k.shape[2])
    q, k, v, theta, real = (split_into_chunks(x, size) for x in (q, k, v, theta, real))
    (q, bad_q), (k, bad_k), (theta, bad) = map(finite_part, (q, k, theta))
    (g, bad_g), (e, bad_e) = (valid_decays(split_into_chunks(x, size)) for x in (g, e))
    bad = bad + bad_g + bad_e + bad_k.sum(-1, keepdim=True)  # [B,H,n,C,1]
    P, R = pairwise_decay(g), pairwise_decay(e)  # [B,H,n,C,C]
    P = P * real.mT
    W = P @ R
    p = g.cumsum(-2).exp()  # [B,H,n,C,1]
    from_start = e.cumsum(-2).exp()
    r = P @ from_start
    products, bad_products = finite_part((k @ k.mT).tril_(-1))
    system, bad_system = finite_part(theta * (products * _before(W)))
    # W = P R joins tokens, so that no number of the system may have a gradient of NaN: the
    # tokens that overflow leave the system.
    overflow = inverse_of_unit_triangle(system.detach(), theta.detach())[1]
    overflow = overflow + (bad_products + bad_system).sum(-1, keepdim=True)
    finite = overflow == 0
    inverse, _ = inverse_of_unit_triangle(torch.where(finite & finite.mT, system, 0), theta)
    # hidden before and behind the product, so that the gradient of W is finite as well
    weights, bad_weights = finite_part((q @ k.mT).tril_())
    weights = (weights * W).tril_()
    bad_q = bad_q.sum(-1, keepdim=True) + bad_weights.sum(-1, keepdim=True)
    by_M, by_N, outputs = k * _before(p, 1.0), k * _before(r), []
    # The error of a token whose numbers are not finite is NaN, which `bad` collects.
    v = v + (bad + overflow)
    bad = torch.zeros_like(M[:, :, :1])
    for i in range(k.shape[2]):
        errors, bad_errors = finite_part(v[:, :, i] - by_M[:, :, i] @ M - by_N[:, :, i] @ N)
        u, bad_updates = finite_part(inverse[:, :, i] @ errors)
        bad = bad[:, :, -1:] + (bad_errors + bad_updates).cumsum(2)  # [B,H,C,E]
        read = (q[:, :, i] * p[:, :, i]) @ M + (q[:, :, i] * r[:, :, i]) @ N
        outputs.append(read + weights[:, :, i] @ u + bad)
        keys = k[:, :, i].mT
        into_M, into_N = (x[:, :, i, -1, :, None] * u for x in (W, R))
        M = M * p[:, :, i, -1, :, None] + N * r[:, :, i, -1, :, None] + keys @ into_M
        N = N * from_start[:, :, i, -1, :, None] + keys @ into_N
    out = (torch.stack(outputs, 2) + bad_q).flatten(2, 3)[:, :, :T]
    return out, M + bad[:, :, -1:], N + bad[:, :, -1:]


def _before(x: Tensor, first: float = 0.0) -> Tensor:
    """Return the rows of x one token later, and `first` at the first token: `[..., C, d]`."""
    return F.pad(x[..., :-1, :], (0, 0, 1, 0), value=first)
