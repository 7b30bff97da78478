"""Retention: a sum that forgets at a fixed rate, another one in each head."""

from __future__ import annotations

import torch
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


def retention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B G T E"],
    *,
    decay: Float[Tensor, " G"] | None = None,
    scale: float | None = None,
    state: tuple[Float[Tensor, "B G D E"], ...] | None = None,
    k_positions: Positions | None = None,
    form: str = "auto",
    chunk: int = 64,
) -> tuple[Float[Tensor, "B H T E"], tuple[Float[Tensor, "B G D E"]]]:
    """Retention: the sum of the values seen so far, weighted by q . k and by gamma to the power of
    how long ago.

    S_t = gamma_g S_{t-1} + k_t v_t^T
    o_t = scale S_t^T q_t = scale sum_{j <= t} gamma_g^(t - j) (q_t . k_j) v_j

    Query head h reads the state of key/value head h // (H/G), which has one gamma. With gamma 1 it
    is linear attention without features and normaliser. The paper turns q and k by rotary positions
    first, and normalises each head afterwards: `regard.nn.variants.retention`. Every token decays
    the state by one step, whatever the gaps between positions.

    Args:
        q, k, v: queries, keys and values of the same T tokens; G divides H.
        decay: gamma, from 0 to 1; None is 1 - 2^(-5-g): 0.96875, 0.984375, 0.9921875, ... Gradients
            reach it.
        scale: on the queries; None is 1/sqrt(D).
        state: (S,), what a call before this one returned, fp32 (fp64 for fp64); None is 0. It is
            not changed.
        k_positions: slots at -1 are no tokens: they write nothing and decay nothing, and their
            outputs are 0.
        form, chunk: as for `linear_attention`.

    Returns:
        The output in the dtype of q, and the state behind the last token. Sums are in fp32 (fp64
        for fp64).

    Raises:
        ArgumentError, ArgumentTypeError: an argument does not fit; raised before anything is
            computed.

    >>> one = torch.ones(1, 1, 3, 1)
    >>> retention(one, one, one, decay=torch.tensor([0.5]))[0].flatten().tolist()
    [1.0, 1.5, 1.75]

    Source: Sun et al. 2023 (arXiv 2307.08621), equations 5 to 8.
    """
    check_call(q, k, v, scale, k_positions, form, chunk)
    (B, G, T, D), E = k.shape, v.shape[3]
    if decay is not None:
        meaning = "one factor per key/value head, each of which has one state"
        check_shape("decay", decay, ((G,),), meaning, k)
    (S,) = first_state(state, {"S": (B, G, D, E)}, k)
    empty = empty_slots(k_positions, q)
    q, k, v = (emptied(x, empty) for x in (q, k, v))
    check_finite(query=q, key=k, value=v)
    dtype = state_dtype(k)
    g = log_decays(G, k.device, dtype) if decay is None else _wide(decay).log().to(dtype)
    rows = 1 if empty is None else empty.shape[0]
    steps = emptied(g[None, :, None, None].expand(rows, G, T, 1), empty)
    queries = q.to(dtype) * (D**-0.5 if scale is None else scale)
    out, S = decayed_sum(queries, k, v, steps, S, form=form, chunk=chunk)
    return emptied(out.to(q.dtype), empty), (S,)


def log_decays(
    groups: int, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> Float[Tensor, " G"]:
    """ln(1 - 2^(-5-g)) for g = 0 ... G-1: the decays of the paper's heads.

    By log1p, so that heads with a decay that rounds to 1 forget all the same.

    >>> log_decays(3).exp().tolist()
    [0.96875, 0.984375, 0.9921875]

    Source: Sun et al. 2023 (arXiv 2307.08621), equation 8.
    """
    g = torch.arange(groups, device=device, dtype=dtype)
    return torch.log1p(-torch.exp2(-5 - g))


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
