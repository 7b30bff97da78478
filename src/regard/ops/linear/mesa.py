"""The Mesa layer: attention whose state is the solution of a regression over all past tokens."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from regard.argument_checks import check_finite
from regard.errors import ArgumentError
from regard.ops.linear.causal_products import finite_part
from regard.ops.linear.linear_recurrence import (
    check_call,
    check_tensor_shape,
    chunk_size,
    decay_since_start,
    empty_slot_mask,
    initial_state,
    linear_recurrence,
    pairwise_decay,
    zero_empty_slots,
)
from regard.span import Positions
from regard.units import plural


def mesa(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B H T D"],
    v: Float[Tensor, "B H T E"],
    beta: Float[Tensor, "B H T"],
    log_decay: Float[Tensor, "B H T"],
    ridge: Float[Tensor, "H D"],
    *,
    state: tuple[Float[Tensor, "B H D E"] | Float[Tensor, "B H D D"], ...] | None = None,
    k_positions: Positions | None = None,
    form: str = "auto",
    chunk: int = 16,
) -> tuple[Float[Tensor, "B H T E"], tuple[Float[Tensor, "B H D E"], Float[Tensor, "B H D D"]]]:
    """Compute the Mesa layer: at each token, the linear map that best predicts the past values from
    the past keys is applied to the query.

    A_t = exp(g_t) A_{t-1} + beta_t k_t k_t^T;  C_t = exp(g_t) C_{t-1} + beta_t k_t v_t^T;
    o_t = C_t^T (A_t + diag(ridge))^{-1} q_t

    Each system is solved by its Cholesky factor, where the paper takes a number of steps of the
    conjugate gradient method, so that the result has no error of a stopped iteration. A solve costs
    D^3 / 3 multiplications per token and head. A matrix that is not positive definite, as a
    negative beta or ridge can make it, gives NaN.

    Args:
        q: queries `[B, H, T, D]`; they are not scaled.
        k: keys `[B, H, T, D]` of the same T tokens.
        v: values `[B, H, T, E]`.
        beta: the weight of a token in the regression, at least 0, `[B, H, T]`.
        log_decay: g, the logarithm of the decay factor, `[B, H, T]`, at most 0.
        ridge: the regularisation of each key channel, above 0, `[H, D]`.
        state: (C, A) as an earlier call returned it, in fp32 (fp64 for fp64 inputs); None: zeros.
            It is not changed.
        k_positions: positions of the tokens; slots at -1 are empty: they write nothing and decay
            nothing, and their outputs are 0.
        form: "recurrent" is the definition, token by token; "chunk" computes the matrices of a
            chunk at once; "parallel" is one chunk of length T; "auto" takes "recurrent" for up to 8
            tokens, else "chunk". All give the same result.
        chunk: the number of tokens in a chunk, at least 1; a chunk holds that many matrices A.

    Returns:
        The output `[B, H, T, E]` in the dtype of q, and the state (C, A) after the last token.
        Sums are in fp32 (fp64 for fp64 inputs).

    Raises:
        ArgumentError, ArgumentTypeError: an argument is invalid; raised before anything is
            computed.

    >>> k = torch.ones(1, 1, 2, 1)
    >>> v = torch.tensor([[[[2.0], [4.0]]]])  # one key with the values 2 and 4: their mean
    >>> one, zero = torch.ones(1, 1, 2), torch.zeros(1, 1, 2)
    >>> mesa(k, k, v, one, zero, torch.full((1, 1), 1e-6))[0].flatten().round(decimals=3).tolist()
    [2.0, 3.0]

    Source: von Oswald et al. 2025 (arXiv 2506.05233), equations 6 to 8.
    """
    check_call(q, k, v, None, k_positions, form, chunk)
    (B, H, T, D), E = k.shape, v.shape[-1]
    if q.shape[1] != H or v.shape[1] != H:
        raise ArgumentError(
            f"q has {plural(q.shape[1], 'head')}, k {H} and v {v.shape[1]}; a Mesa layer "
            "has as many key and value heads as query heads: repeat them"
        )
    meaning = "one number per head and token"
    check_tensor_shape("beta", beta, ((B, H, T),), meaning, k)
    check_tensor_shape("log_decay", log_decay, ((B, H, T),), meaning, k)
    check_tensor_shape("ridge", ridge, ((H, D),), "one number per head and key channel", k)
    C, A = initial_state(state, {"C": (B, H, D, E), "A": (B, H, D, D)}, k)
    empty, dtype, wide = empty_slot_mask(k_positions, q), q.dtype, A.dtype
    q, k, v = (zero_empty_slots(x, empty).to(wide) for x in (q, k, v))
    check_finite(query=q, key=k, value=v)
    strength, g = (
        zero_empty_slots(x[..., None], empty).to(wide) for x in (beta, log_decay)
    )  # [B,H,T,1]
    size = chunk_size(form, chunk, T)
    with torch.autocast(q.device.type, enabled=False):
        written = strength * k
        # A product would carry a NaN to earlier tokens, so sums are of finite numbers; the
        # recurrence below marks the outputs.
        bad = (0 * written.detach() + 0 * k.detach()).sum(-1, keepdim=True)
        bad = bad + (0 * g.detach()).masked_fill(g.detach() == -torch.inf, 0)
        keys, weighted = (x.masked_fill(~bad.isfinite(), 0) for x in (k, written))
        decays = g.masked_fill(~(g < torch.inf), 0)
        ridges = torch.diag_embed(ridge.to(wide))[:, None]  # [H,1,D,D]
        answers, step = [], 1 if size is None else size
        for first in range(0, T, step):
            where = slice(first, first + step)
            part, weights = keys[:, :, where], weighted[:, :, where]
            sums, A = _key_sums(part, weights, decays[:, :, where], A)
            factor, info = torch.linalg.cholesky_ex(sums + ridges)
            solution = torch.cholesky_solve(q[:, :, where, :, None], factor)[..., 0]
            answers.append(solution.masked_fill(info[..., None] != 0, torch.nan))
        solved = torch.cat(answers, 2) if answers else q
        out, C = linear_recurrence(solved, written, v, g, C, form=form, chunk=64)
    return zero_empty_slots(out.to(dtype), empty), (C, A + bad.sum(2)[..., None])


def _key_sums(k: Tensor, written: Tensor, g: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """Return the matrices A after each of n tokens `[B, H, n, D, D]`, and the last one, from the
    matrix A `[B, H, D, D]` before them.
    """
    n, D = k.shape[-2:]
    outer = (written[..., :, None] * k[..., None, :]).flatten(-2)  # [B,H,n,D*D]
    # an outer product that overflows must reach no earlier token
    outer, bad = finite_part(outer)
    sums = pairwise_decay(g) @ outer + bad.cumsum(-2)
    sums = torch.unflatten(sums, -1, (D, D)) + decay_since_start(g)[..., None] * A[:, :, None]
    return sums, sums[:, :, n - 1]
