"""Gated linear attention: a linear recurrence whose decay depends on the token, with one factor
per channel or per head.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from regard.argument_checks import check_finite
from regard.ops.linear.linear_recurrence import linear_recurrence
from regard.ops.linear.validation import (
    check_call,
    check_tensor_shape,
    empty_slot_mask,
    initial_state,
    state_dtype,
    zero_empty_slots,
)
from regard.span import Positions


def gated_linear(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B N T E"],
    log_decay: Float[Tensor, "B N T #D"],
    *,
    scale: float | None = None,
    state: tuple[Float[Tensor, "B N D E"], ...] | None = None,
    k_positions: Positions | None = None,
    form: str = "auto",
    chunk: int = 64,
) -> tuple[Float[Tensor, "B O T E"], tuple[Float[Tensor, "B N D E"]]]:
    """Compute gated linear attention: the state decays by a factor that depends on the token, then
    the token is added.

    S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T;  o_t = scale S_t^T q_t

    With as many value heads as key heads, query head h reads the state of key/value head h //
    (H/G); otherwise heads are as in `delta_rule`. With g = 0 this is linear attention
    without a feature map and normalisation; with a constant g per head it is retention; with one g
    per head and token, `[B, G, T, 1]`, it is the recurrence of Mamba-2.

    Args:
        q: queries `[B, H, T, D]`.
        k: keys `[B, G, T, D]` of the same T tokens; G divides H.
        v: values `[B, N, T, E]`; G divides N.
        log_decay: g, the logarithm of the decay factor, `[B, N, T, D]` with one number per key
            channel, or `[B, N, T, 1]` with one for all channels, of any floating dtype. Above 0 the
            state may grow without bound; -inf clears the state before the token is written.
        scale: the factor on the queries; None: 1/sqrt(D).
        state: (S,) as an earlier call returned it, S `[B, N, D, E]` in fp32 (fp64 for fp64 inputs);
            None: zeros. It is not changed.
        k_positions: positions of the tokens; slots at -1 are empty: they write nothing and decay
            nothing, and their outputs are 0.
        form: "auto", "recurrent", "chunk" or "parallel", as in `linear_attention`.
        chunk: the number of tokens in a chunk, at least 1; with one decay per channel it is rounded
            up to a power of 2.

    Returns:
        The output `[B, max(H, N), T, E]` in the dtype of q, and the state after the last token.
        Sums are in fp32 (fp64 for fp64 inputs).

    Raises:
        ArgumentError, ArgumentTypeError: an argument is invalid; raised before anything is
            computed.

    >>> import torch
    >>> one = torch.ones(1, 1, 3, 1)
    >>> keep = torch.tensor([1.0, 0.5, 0.0]).log()[None, None, :, None]
    >>> gated_linear(one, one, one, keep)[0].flatten().tolist()
    [1.0, 1.5, 1.0]

    Source: Yang et al. 2023 (arXiv 2312.06635), equation 3 and section 4.
    """
    check_call(q, k, v, scale, k_positions, form, chunk)
    (B, _, T, D), (N, E) = k.shape, v.shape[1::2]
    meaning = "one number per key channel and token, or one for all channels"
    check_tensor_shape("log_decay", log_decay, ((B, N, T, D), (B, N, T, 1)), meaning, k)
    (S,) = initial_state(state, {"S": (B, N, D, E)}, k)
    empty = empty_slot_mask(k_positions, q)
    q, k, v, log_decay = (zero_empty_slots(x, empty) for x in (q, k, v, log_decay))
    check_finite(query=q, key=k, value=v)
    queries = q.to(state_dtype(k)) * (D**-0.5 if scale is None else scale)
    out, S = linear_recurrence(queries, k, v, log_decay, S, form=form, chunk=chunk)
    return zero_empty_slots(out.to(q.dtype), empty), (S,)
