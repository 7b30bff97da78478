"""Linear attention: a product of feature maps in place of exp(q . k), so that the past fits in one
matrix.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from regard.argument_checks import check_finite
from regard.errors import ArgumentError
from regard.ops.linear.call import check_call, emptied, empty_slots, first_state, state_dtype
from regard.ops.linear.decayed_sum import decayed_sum
from regard.ops.linear.features import FeatureMap, feature_map_of, relative
from regard.span import Positions


def linear_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B G T E"],
    *,
    feature_map: FeatureMap = "elu+1",
    normalise: bool = True,
    scale: float = 1.0,
    state: tuple[Tensor, ...] | None = None,
    k_positions: Positions | None = None,
    form: str = "auto",
    chunk: int = 64,
) -> tuple[Float[Tensor, "B H T E"], tuple[Tensor, ...]]:
    """Causal linear attention: the mean of the values seen so far, weighted by phi(q) . phi(k).

    S_t = S_{t-1} + phi(k_t) v_t^T,  z_t = z_{t-1} + phi(k_t)
    o_t = S_t^T phi(q_t) / (z_t . phi(q_t))

    Without `normalise`, o_t = scale S_t^T phi(q_t) and there is no z. Query head h reads the state
    of key/value head h // (H/G). Nothing is added to the denominator: where it is exactly 0
    (nothing was seen; relu shut every channel; every feature of the keys is below the smallest
    number) the output is 0, not 0/0. The weights of positive features differ little between keys
    that are not trained for it: with elu+1 and Gaussian q and k of standard deviation 1, the
    matching key weighs 1.46 times as much as any other.

    Args:
        q, k, v: queries, keys and values of the same T tokens; G divides H.
        feature_map: phi: a name in `regard.linear.FEATURE_MAPS`, or a function [B,n,T,D] ->
            [B,n,T,F] of each token.
        normalise: whether the weights are divided by their sum. With features that may be negative
            (identity) the sum may come near 0.
        scale: on the queries, without `normalise`; with it every scale gives the same.
        state: what a call before this one returned: (S, z), or (S,) without `normalise`; S
            [B,G,F,E], z [B,G,F], fp32 (fp64 for fp64). None is 0. It is not changed.
        k_positions: slots at -1 are no tokens: they write nothing, and their outputs are 0.
        form: "recurrent" is the definition, "chunk" has products of matrices per chunk, "parallel"
            is one chunk of length T, "auto" takes "recurrent" for a few tokens, else "chunk".
        chunk: tokens in a chunk, at least 1; T need not be a multiple.

    Returns:
        The output in the dtype of q, and the state behind the last token. Features and sums are in
        fp32 (fp64 for fp64).

    Raises:
        ArgumentError, ArgumentTypeError: an argument does not fit; raised before anything is
            computed.

    >>> q, v = torch.randn(1, 2, 5, 4), torch.ones(1, 2, 5, 3)
    >>> out, (S, z) = linear_attention(q, q, v)
    >>> out.round(decimals=5).unique().tolist(), S.shape, z.shape  # the mean of ones is 1
    ([1.0], torch.Size([1, 2, 4, 3]), torch.Size([1, 2, 4]))

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), equations 8 to 12 and 16 to 20.
    """
    check_call(q, k, v, scale, k_positions, form, chunk)
    features, empty = feature_map_of(feature_map), empty_slots(k_positions, q)
    q, k, v = (emptied(x, empty) for x in (q, k, v))
    check_finite(query=q, key=k, value=v)
    wide = state_dtype(k)
    with torch.autocast(q.device.type, enabled=False):
        keys = _features(features, k.to(wide))
        keys = emptied(keys, empty)  # once more: phi(0) need not be 0
        B, G, _, F = keys.shape
        if normalise:
            S, z = first_state(state, {"S": (B, G, F, v.shape[3]), "z": (B, G, F)}, k)
            queries = relative(feature_map, q.to(wide))
            # z is one more column of S, under a value that is always 1
            both = torch.cat([S, z[..., None]], -1)
            ones = pad(v.to(wide), (0, 1), value=1.0)
            out, both = decayed_sum(queries, keys, ones, None, both, form=form, chunk=chunk)
            out, after = _mean(out), tuple(x.contiguous() for x in (both[..., :-1], both[..., -1]))
        else:
            (S,) = first_state(state, {"S": (B, G, F, v.shape[3])}, k)
            queries = features(q.to(wide)) * scale
            out, S = decayed_sum(queries, keys, v, None, S, form=form, chunk=chunk)
            after = (S,)
    return emptied(out.to(q.dtype), empty), after


def _features(features: Callable[[Tensor], Tensor], k: Tensor) -> Tensor:
    """The features of keys, of a shape that a state can be made of."""
    found = features(k)
    if found.ndim != 4 or found.shape[:3] != k.shape[:3]:
        raise ArgumentError(
            f"feature_map made {tuple(found.shape)} of keys {tuple(k.shape)}; it must keep all "
            "but the last dimension"
        )
    return found


def _mean(sums: Tensor) -> Tensor:
    """Sums of weighted values, and in the last column the sum of the weights -> their quotient; 0
    where that is 0.

    What is not finite goes round the division, whose gradient would take a NaN to the tokens in
    front of it.
    """
    spoilt = 0 * sums.detach()
    sums = torch.where(sums.isfinite(), sums, 0)
    total = sums[..., -1:]
    none = total == 0
    mean = (sums[..., :-1] / total.masked_fill(none, 1)).masked_fill(none, 0)
    return mean + spoilt[..., :-1] + spoilt[..., -1:]
