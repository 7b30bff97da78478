"""States that solve a regression: the Mesa layer exactly, Titans by gradient descent."""

from __future__ import annotations

from typing import TypeAlias, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from regard.ops.linear.call import (
    SHARED_ARGUMENTS,
    RecurrenceOptions,
    ScaledOptions,
    TokenInputs,
    without_autocast,
    zero_empty_slots,
)
from regard.ops.linear.linear_recurrence import (
    decay_since_start,
    finite_part,
    inverse_of_unit_triangle,
    linear_recurrence,
    pairwise_decay,
    split_into_chunks,
    valid_decays,
)
from regard.ops.shared_arguments import with_shared_arguments


@with_shared_arguments(SHARED_ARGUMENTS, RecurrenceOptions, chunk=16)
def mesa(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B H T D"],
    v: Float[Tensor, "B H T E"],
    beta: Float[Tensor, "B H T"],
    log_decay: Float[Tensor, "B H T"],
    ridge: Float[Tensor, "H D"],
    **options: Unpack[RecurrenceOptions],
) -> tuple[Float[Tensor, "B H T E"], tuple[Float[Tensor, "B H D E"], Float[Tensor, "B H D D"]]]:
    """Compute the Mesa layer: the best linear map from past keys to values, on the query.

    A_t = exp(g_t) A_{t-1} + beta_t k_t k_t^T;  C_t = exp(g_t) C_{t-1} + beta_t k_t v_t^T;
    o_t = C_t^T (A_t + diag(ridge))^{-1} q_t

    Each system is solved by its Cholesky factor, in D^3 / 3 multiplications per token and head,
    where the paper takes steps of conjugate gradients. A matrix that is not positive definite gives
    NaN.

    Args:
        q: queries `[B, H, T, D]`; they are not scaled.
        k: keys `[B, H, T, D]` of the same T tokens.
        v: values `[B, H, T, E]`.
        beta: the weight of a token in the regression, at least 0, `[B, H, T]`.
        log_decay: g, the logarithm of the decay factor, `[B, H, T]`, at most 0.
        ridge: the regularization of each key channel, above 0, `[H, D]`.
        state: (C, A) of an earlier call, in fp32 (fp64 for fp64 inputs); None: zeros.
        form: "recurrent" by token, "chunk", "parallel" as one chunk, or "auto", which takes
            "recurrent" for up to 8 tokens, else "chunk". All give the same result.
        chunk: the number of tokens in a chunk, at least 1; a chunk holds that many matrices A.

    Returns:
        The output `[B, H, T, E]` in the dtype of q, and the state (C, A) after the last token.
        Sums are in fp32 (fp64 for fp64 inputs).

    >>> k = torch.ones(1, 1, 2, 1)
    >>> v = torch.tensor([[[[2.0], [4.0]]]])  # one key with the values 2 and 4: their mean
    >>> one, zero = torch.ones(1, 1, 2), torch.zeros(1, 1, 2)
    >>> mesa(k, k, v, one, zero, torch.full((1, 1), 1e-6))[0].flatten().round(decimals=3).tolist()
    [2.0, 3.0]

    Source: von Oswald et al. 2025 (arXiv 2506.05233), equations 6 to 8.
    """
    all_options: ScaledOptions = {"scale": None, "chunk": 16, **options}
    tokens = TokenInputs(q, k, v, all_options, one_state_per_head="a Mesa layer")
    meaning, wide, T = "one number per head and token", tokens.dtype, tokens.T
    strength = tokens.gate("beta", beta, "B H T", meaning).to(wide)  # [B,H,T,1]
    g = tokens.gate("log_decay", log_decay, "B H T", meaning).to(wide)
    tokens.check("ridge", ridge, "H D", "one number per head and key channel")
    C, A = tokens.state(C="B H D E", A="B H D D")
    q, k, v = (x.to(wide) for x in (tokens.q, tokens.k, tokens.v))
    with without_autocast(q):
        written = strength * k
        # A product would carry a NaN to earlier tokens, so sums are of finite numbers; the
        # recurrence below marks the outputs.
        bad = (0 * written.detach() + 0 * k.detach()).sum(-1, keepdim=True)
        bad = bad + (0 * g.detach()).masked_fill(g.detach() == -torch.inf, 0)
        keys, weighted = (x.masked_fill(~bad.isfinite(), 0) for x in (k, written))
        decays = g.masked_fill(~(g < torch.inf), 0)
        ridges = torch.diag_embed(ridge.to(wide))[:, None]  # [H,1,D,D]
        answers, step = [], tokens.chunk_size or 1
        for first in range(0, T, step):
            where = slice(first, first + step)
            part, weights = keys[:, :, where], weighted[:, :, where]
            sums, A = _key_sums(part, weights, decays[:, :, where], A)
            factor, info = torch.linalg.cholesky_ex(sums + ridges)
            solution = torch.cholesky_solve(q[:, :, where, :, None], factor)[..., 0]
            answers.append(solution.masked_fill(info[..., None] != 0, torch.nan))
        solved = torch.cat(answers, 2) if answers else q
        out, C = linear_recurrence(solved, written, v, g, C, form=tokens.form, chunk=64)
    return tokens.output(out), (C, A + bad.sum(2)[..., None])


def _key_sums(k: Tensor, written: Tensor, g: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """Return the matrices A after each of n tokens `[B, H, n, D, D]`, and the last one."""
    n, D = k.shape[-2:]
    outer = (written[..., :, None] * k[..., None, :]).flatten(-2)  # [B,H,n,D*D]
    # an outer product that overflows must reach no earlier token
    outer, bad = finite_part(outer)
    sums = pairwise_decay(g) @ outer + bad.cumsum(-2)
    sums = torch.unflatten(sums, -1, (D, D)) + decay_since_start(g)[..., None] * A[:, :, None]
    return sums, sums[:, :, n - 1]


Gates: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]


@with_shared_arguments(SHARED_ARGUMENTS, ScaledOptions)
def titans_memory(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B H T D"],
    v: Float[Tensor, "B H T E"],
    step: Float[Tensor, "B H T"],
    log_decay: Float[Tensor, "B H T"],
    log_momentum: Float[Tensor, "B H T"],
    **options: Unpack[ScaledOptions],
) -> tuple[Float[Tensor, "B H T E"], tuple[Float[Tensor, "B H D E"], Float[Tensor, "B H D E"]]]:
    """Compute the linear memory of Titans: gradient descent with momentum, and forgetting.

    N_t = exp(e_t) N_{t-1} - step_t grad(1/2 |M_{t-1}^T k_t - v_t|^2);
    M_t = exp(g_t) M_{t-1} + N_t;  o_t = scale M_t^T q_t

    In the paper's letters, exp(g) = 1 - alpha, exp(e) = eta and step = theta. Without momentum and
    forgetting (e = -inf, g = 0) this is the delta rule with beta = step.

    Args:
        k: keys `[B, H, T, D]` of the same T tokens.
        v: values `[B, H, T, E]`.
        step: the step size of each token `[B, H, T]`, of any floating dtype.
        log_decay: g, the logarithm of what M keeps `[B, H, T]`, at most 0, -inf allowed.
        log_momentum: e, the logarithm of the momentum `[B, H, T]`, at most 0, -inf allowed.
        state: (M, N) of an earlier call, in fp32 (fp64 for fp64 inputs); None: zeros.

    Returns:
        The output `[B, H, T, E]` in the dtype of q, and the state (M, N) after the last token.
        Sums are in fp32 (fp64 for fp64 inputs).

    >>> k, v = torch.ones(1, 1, 2, 1), torch.full((1, 1, 2, 1), 4.0)
    >>> half, zero = torch.full((1, 1, 2), 0.5), torch.zeros(1, 1, 2)
    >>> titans_memory(k, k, v, half, zero, zero - torch.inf, scale=1.0)[0].flatten().tolist()
    [2.0, 3.0]

    Source: Behrouz et al. 2024 (arXiv 2501.00663), equations 9 to 15.
    """
    tokens = TokenInputs(q, k, v, options, one_state_per_head="a memory of Titans")
    meaning, wide = "one number per head and token", tokens.dtype
    gates = {"step": step, "log_decay": log_decay, "log_momentum": log_momentum}
    theta, g, e = (tokens.gate(x, y, "B H T", meaning).to(wide) for x, y in gates.items())
    M, N = tokens.state(M="B H D E", N="B H D E")
    q, k, v = (x.to(wide) for x in (tokens.q, tokens.k, tokens.v))
    q = q * tokens.scale
    # N is added to M at every token, but at no empty slot
    real = zero_empty_slots(torch.ones_like(theta), tokens.empty)
    size = tokens.chunk_size
    with without_autocast(q):
        run = _recurrent if size is None or not tokens.T else _chunked
        out, M, N = run(q, k, v, (theta, g, e, real), M, N, size or 1)
    return tokens.output(out), (M, N)


def _recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    M: Tensor,
    N: Tensor,
    size: int,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the memory token by token; gates `[B, H, T, 1]`: theta, g, e, and 1 or 0 if empty."""
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
    q: Tensor, k: Tensor, v: Tensor, gates: Gates, M: Tensor, N: Tensor, size: int
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
