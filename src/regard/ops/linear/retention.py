"""Retention: a linear recurrence whose state decays at every token by a fixed factor, which differs
between heads.
"""

from __future__ import annotations

import torch
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


def retention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B N T E"],
    *,
    decay: Float[Tensor, " N"] | None = None,
    scale: float | None = None,
    state: tuple[Float[Tensor, "B N D E"], ...] | None = None,
    k_positions: Positions | None = None,
    form: str = "auto",
    chunk: int = 64,
) -> tuple[Float[Tensor, "B O T E"], tuple[Float[Tensor, "B N D E"]]]:
    """Compute retention: the sum of the values up to each token, weighted by q . k and by
    gamma^(t - j), where t - j is how many tokens the key is before the query.

    S_t = gamma_g S_{t-1} + k_t v_t^T
    o_t = scale S_t^T q_t = scale sum_{j <= t} gamma_g^(t - j) (q_t . k_j) v_j

    Each value head g has one gamma and one state: with as many value heads as key heads, query head
    h reads the state of key/value head h // (H/G), and otherwise heads are as in `delta_rule`.
    With gamma = 1 this is linear attention without a feature map and normalisation. In the paper,
    rotary positions are applied to q and k before, and each head is normalised afterwards; the
    module `regard.nn.variants.retention` does both. Every token decays the state once, even where
    positions have gaps.

    Args:
        q: queries `[B, H, T, D]`.
        k: keys `[B, G, T, D]` of the same T tokens; G divides H.
        v: values `[B, N, T, E]`; G divides N.
        decay: gamma of each value head, `[N]`, from 0 to 1; it may require a gradient. None:
            1 - 2^(-5-g), that is 0.96875, 0.984375, 0.9921875, ...
        scale: the factor on the queries; None: 1/sqrt(D).
        state: (S,) as an earlier call returned it, S `[B, N, D, E]` in fp32 (fp64 for fp64 inputs);
            None: zeros. It is not changed.
        k_positions: positions of the tokens; slots at -1 are empty: they write nothing and decay
            nothing, and their outputs are 0.
        form: "auto", "recurrent", "chunk" or "parallel", as in `linear_attention`.
        chunk: the number of tokens in a chunk, at least 1.

    Returns:
        The output `[B, max(H, N), T, E]` in the dtype of q, and the state after the last token.
        Sums are in fp32 (fp64 for fp64 inputs).

    Raises:
        ArgumentError, ArgumentTypeError: an argument is invalid; raised before anything is
            computed.

    >>> one = torch.ones(1, 1, 3, 1)
    >>> retention(one, one, one, decay=torch.tensor([0.5]))[0].flatten().tolist()
    [1.0, 1.5, 1.75]

    Source: Sun et al. 2023 (arXiv 2307.08621), equations 5 to 8.
    """
    check_call(q, k, v, scale, k_positions, form, chunk)
    (B, G, T, D), (N, E) = k.shape, v.shape[1::2]
    if decay is not None:
        kind = "key/value" if N == G else "value"
        meaning = f"one factor per {kind} head, each of which has one state"
        check_tensor_shape("decay", decay, ((N,),), meaning, k)
    (S,) = initial_state(state, {"S": (B, N, D, E)}, k)
    empty = empty_slot_mask(k_positions, q)
    q, k, v = (zero_empty_slots(x, empty) for x in (q, k, v))
    check_finite(query=q, key=k, value=v)
    dtype = state_dtype(k)
    g = (
        default_log_decays(N, k.device, dtype)
        if decay is None
        else _to_float32_or_wider(decay).log().to(dtype)
    )
    rows = 1 if empty is None else empty.shape[0]
    log_decay = zero_empty_slots(g[None, :, None, None].expand(rows, N, T, 1), empty)
    queries = q.to(dtype) * (D**-0.5 if scale is None else scale)
    out, S = linear_recurrence(queries, k, v, log_decay, S, form=form, chunk=chunk)
    return zero_empty_slots(out.to(q.dtype), empty), (S,)


def default_log_decays(
    groups: int, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> Float[Tensor, " G"]:
    """Return ln(1 - 2^(-5-g)) for g = 0 ... G-1, the decays of the heads in the paper.

    They are computed with log1p, which is below 0 even where 1 - 2^(-5-g) would be rounded to 1.

    >>> default_log_decays(3).exp().tolist()
    [0.96875, 0.984375, 0.9921875]

    Source: Sun et al. 2023 (arXiv 2307.08621), equation 8.
    """
    g = torch.arange(groups, device=device, dtype=dtype)
    return torch.log1p(-torch.exp2(-5 - g))


def _to_float32_or_wider(x: Tensor) -> Tensor:
    """Return x in fp64 if it is fp64, else in fp32."""
    return x if x.dtype == torch.float64 else x.float()
