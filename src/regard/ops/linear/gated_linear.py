"""Gated linear attention: each token says, channel by channel, how much of the state it leaves."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from regard.argument_checks import check_finite
from regard.ops.linear.call import (
    check_call,
    check_shape,
    emptied,
    empty_slots,
    first_state,
    state_dtype,
)
from regard.ops.linear.decayed_sum import decayed_sum
from regard.span import Positions


def gated_linear(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B G T E"],
    log_decay: Float[Tensor, "B G T #D"],
    *,
    scale: float | None = None,
    state: tuple[Float[Tensor, "B G D E"], ...] | None = None,
    k_positions: Positions | None = None,
    form: str = "auto",
    chunk: int = 64,
) -> tuple[Float[Tensor, "B H T E"], tuple[Float[Tensor, "B G D E"]]]:
    """Gated linear attention: the state decays by what the token says, then the token is written.

    S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T;  o_t = scale S_t^T q_t

    Query head h reads the state of key/value head h // (H/G). With g = 0 it is linear attention
    without features and normaliser, with one number per head retention; Mamba-2's recurrence is the
    form [B,G,T,1].

    Args:
        q, k, v: queries, keys and values of the same T tokens; G divides H.
        log_decay: g, one number per key channel, or one for all of them, of any floating dtype; at
            most 0 if the state is to stay bounded. -inf empties the state in front of the token.
        scale: on the queries; None is 1/sqrt(D).
        state: (S,), what a call before this one returned, fp32 (fp64 for fp64); None is 0. It is
            not changed.
        k_positions: slots at -1 are no tokens: they write nothing and decay nothing, and their
            outputs are 0.
        form: as for `linear_attention`.
        chunk: tokens in a chunk, at least 1; with one decay per channel it is rounded up to a power
            of 2.

    Returns:
        The output in the dtype of q, and the state behind the last token. Sums are in fp32 (fp64
        for fp64).

    Raises:
        ArgumentError, ArgumentTypeError: an argument does not fit; raised before anything is
            computed.

    >>> import torch
    >>> one = torch.ones(1, 1, 3, 1)
    >>> keep = torch.tensor([1.0, 0.5, 0.0]).log()[None, None, :, None]
    >>> gated_linear(one, one, one, keep)[0].flatten().tolist()
    [1.0, 1.5, 1.0]

    Source: Yang et al. 2023 (arXiv 2312.06635), equation 3 and section 4.
    """
    check_call(q, k, v, scale, k_positions, form, chunk)
    (B, G, T, D), E = k.shape, v.shape[3]
    meaning = "one number per key channel and token, or one for all channels"
    check_shape("log_decay", log_decay, ((B, G, T, D), (B, G, T, 1)), meaning, k)
    (S,) = first_state(state, {"S": (B, G, D, E)}, k)
    empty = empty_slots(k_positions, q)
    q, k, v, log_decay = (emptied(x, empty) for x in (q, k, v, log_decay))
    check_finite(query=q, key=k, value=v)
    queries = q.to(state_dtype(k)) * (D**-0.5 if scale is None else scale)
    out, S = decayed_sum(queries, k, v, log_decay, S, form=form, chunk=chunk)
    return emptied(out.to(q.dtype), empty), (S,)
