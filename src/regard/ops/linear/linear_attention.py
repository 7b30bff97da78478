"""Linear attention: exp(q . k) is replaced by a product of feature maps, phi(q) . phi(k), so that a
matrix of fixed size replaces the keys and values of all earlier tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from regard.argument_checks import check_finite
from regard.errors import ArgumentError
from regard.ops.linear.feature_maps import FeatureMap, feature_map_of, normalised_query_features
from regard.ops.linear.linear_recurrence import linear_recurrence
from regard.ops.linear.validation import (
    check_call,
    empty_slot_mask,
    initial_state,
    state_dtype,
    zero_empty_slots,
)
from regard.span import Positions


def linear_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B N T E"],
    *,
    feature_map: FeatureMap = "elu+1",
    normalise: bool = True,
    scale: float = 1.0,
    state: tuple[Tensor, ...] | None = None,
    k_positions: Positions | None = None,
    form: str = "auto",
    chunk: int = 64,
) -> tuple[Float[Tensor, "B O T E"], tuple[Tensor, ...]]:
    """Compute causal linear attention: the mean of the values up to each token, weighted by phi(q)
    . phi(k).

    S_t = S_{t-1} + phi(k_t) v_t^T,  z_t = z_{t-1} + phi(k_t)
    o_t = S_t^T phi(q_t) / (z_t . phi(q_t))

    Without `normalise`, o_t = scale S_t^T phi(q_t), and there is no z. With as many value
    heads as key heads, query head h reads the state of key/value head h // (H/G); otherwise heads
    are as in `delta_rule`. No epsilon is added to the denominator: where it is exactly 0 (no
    token was written, relu is 0 in every channel, or every feature of the keys underflows), the
    output is 0 rather than 0/0. With positive features and an untrained model, the weights differ
    little between keys: with elu+1 and Gaussian q and k of standard deviation 1, the matching key
    gets only 1.46 times the weight of any other key.

    Args:
        q: queries `[B, H, T, D]`.
        k: keys `[B, G, T, D]` of the same T tokens; G divides H.
        v: values `[B, N, T, E]`; G divides N.
        feature_map: phi, a name in `regard.linear.FEATURE_MAPS`, or a function `[B, n, T, D]` ->
            `[B, n, T, F]` that maps each token separately.
        normalise: whether the weights are divided by their sum. With features that may be negative
            (identity) the sum may be close to 0.
        scale: the factor on the queries without `normalise`; with it, the output does not depend on
            the scale.
        state: the state that an earlier call returned: (S, z), or (S,) without `normalise`, with S
            `[B, N, F, E]` and z `[B, G, F]` in fp32 (fp64 for fp64 inputs). None: zeros. It is not
            changed.
        k_positions: positions of the tokens; slots at -1 are empty: they write nothing, and their
            outputs are 0.
        form: "recurrent" is the definition, token by token; "chunk" uses matrix products over
            chunks; "parallel" is one chunk of length T; "auto" takes "recurrent" for up to 8
            tokens, else "chunk". All give the same result.
        chunk: the number of tokens in a chunk, at least 1; T need not be a multiple.

    Returns:
        The output `[B, max(H, N), T, E]` in the dtype of q, and the state after the last token.
        Features and sums are in fp32 (fp64 for fp64 inputs).

    Raises:
        ArgumentError, ArgumentTypeError: an argument is invalid; raised before anything is
            computed.

    >>> q, v = torch.randn(1, 2, 5, 4), torch.ones(1, 2, 5, 3)
    >>> out, (S, z) = linear_attention(q, q, v)
    >>> out.round(decimals=5).unique().tolist(), S.shape, z.shape  # the mean of ones is 1
    ([1.0], torch.Size([1, 2, 4, 3]), torch.Size([1, 2, 4]))

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), equations 8 to 12 and 16 to 20.
    """
    check_call(q, k, v, scale, k_positions, form, chunk)
    features, empty = feature_map_of(feature_map), empty_slot_mask(k_positions, q)
    q, k, v = (zero_empty_slots(x, empty) for x in (q, k, v))
    check_finite(query=q, key=k, value=v)
    dtype = state_dtype(k)
    with torch.autocast(q.device.type, enabled=False):
        keys = _checked_features(features, k.to(dtype))
        keys = zero_empty_slots(keys, empty)  # again, because phi(0) may differ from 0
        (B, G, _, F), (N, E) = keys.shape, v.shape[1::2]
        if normalise:
            S, z = initial_state(state, {"S": (B, N, F, E), "z": (B, G, F)}, k)
            queries = normalised_query_features(feature_map, q.to(dtype))
            # z is computed as one more column of S, for a value that is always 1
            S_and_z = torch.cat([S, z.repeat_interleave(N // G, 1)[..., None]], -1)
            v_and_one = pad(v.to(dtype), (0, 1), value=1.0)
            out, S_and_z = linear_recurrence(
                queries, keys, v_and_one, None, S_and_z, form=form, chunk=chunk
            )
            out, new_state = (
                _normalised(out),
                # z depends on the keys only, so that the value heads of a key head have the same
                tuple(x.contiguous() for x in (S_and_z[..., :-1], S_and_z[:, :: N // G, :, -1])),
            )
        else:
            (S,) = initial_state(state, {"S": (B, N, F, E)}, k)
            queries = features(q.to(dtype)) * scale
            out, S = linear_recurrence(queries, keys, v, None, S, form=form, chunk=chunk)
            new_state = (S,)
    return zero_empty_slots(out.to(q.dtype), empty), new_state


def _checked_features(features: Callable[[Tensor], Tensor], k: Tensor) -> Tensor:
    """Return the features `[B, G, T, F]` of keys `[B, G, T, D]`, after a check of their shape."""
    result = features(k)
    if result.ndim != 4 or result.shape[:3] != k.shape[:3]:
        raise ArgumentError(
            f"feature_map returned {tuple(result.shape)} for keys {tuple(k.shape)}; it may change "
            "the last dimension only"
        )
    return result


def _normalised(sums: Tensor) -> Tensor:
    """Divide sums of weighted values by the sum of the weights, which is the last column; 0 where
    that sum is 0.

    Non-finite sums are replaced by 0 before the division and marked as NaN after it, because the
    gradient of the division would carry a NaN to earlier tokens.
    """
    nan_marker = 0 * sums.detach()
    sums = torch.where(sums.isfinite(), sums, 0)
    total = sums[..., -1:]
    is_zero = total == 0
    mean = (sums[..., :-1] / total.masked_fill(is_zero, 1)).masked_fill(is_zero, 0)
    return mean + nan_marker[..., :-1] + nan_marker[..., -1:]
