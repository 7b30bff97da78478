"""Additive attention, whose scores come from a network with one hidden layer."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.argument_checks import check_positions, check_query_key_value
from regard.errors import ArgumentError
from regard.masks import Mask
from regard.ops.softmax.call import as_mask
from regard.ops.softmax.definition import softmax_sum, softmax_weights, weighted_values
from regard.span import Positions, Span
from regard.tracing import tap

__all__ = ["AdditiveAttentionOutput", "additive_attention"]

BLOCK_BYTES = 2**26
"""The most bytes of the hidden layer `[B, H, t, S, A]` of one block without a gradient."""


class AdditiveAttentionOutput(NamedTuple):
    """The result of additive attention.

    Args:
        context: `[B, H, T, E]`, the weighted mean of the values; 0 for a query that sees no key.
        weights: `[B, H, T, S]`; a row sums to 1, or to 0 for a query that sees no key.
    """

    context: Tensor
    weights: Tensor


def additive_attention(
    query: Float[Tensor, "B H T A"],
    keys: Float[Tensor, "B G S A"],
    values: Float[Tensor, "B G S E"],
    weight: Float[Tensor, "H A"],
    *,
    mask: Mask | Tensor | None = None,
    q_positions: Positions | None = None,
    k_positions: Positions | None = None,
) -> AdditiveAttentionOutput:
    """Compute additive attention: e_ij is a product of a weight with the tanh of a sum.

    e_ij = weight . tanh(query_i + keys_j);  a_ij = exp(e_ij) / sum_j exp(e_ij)
    context_i = sum_j a_ij values_j

    With query_i = W s_{i-1} and keys_j = U h_j this is Bahdanau's attention; with W_1 h_i and W_2
    h_j, where [W_1 W_2] is Luong's matrix, his `concat` score. A masked key has no effect and gets
    no gradient, whatever it contains. A trace has the taps `scores` and `pattern`.

    Args:
        query: projected queries `[B, H, T, A]`.
        keys: projected keys `[B, G, S, A]`; query head h uses key/value head h // (H/G).
        values: `[B, G, S, E]`.
        weight: the vector v of each head, `[H, A]`.
        mask: a mask of `regard.masks`, a bool tensor (True: visible), or None: all tokens.
        q_positions: the positions of the queries; default 0 to T - 1.
        k_positions: the positions of the keys; default 0 to S - 1. -1 marks an empty slot.

    Returns:
        The context and the attention weights, in the dtype of the query.

    Raises:
        ArgumentError, ArgumentTypeError: shapes, dtypes or positions do not fit.

    >>> h = torch.randn(1, 1, 4, 8)
    >>> padded = torch.tensor([[0, 1, 2, -1]])
    >>> result = additive_attention(h[:, :, :1], h, h, torch.ones(1, 8), k_positions=padded)
    >>> result.context.shape, result.weights[0, 0, 0, 3].item()
    (torch.Size([1, 1, 1, 8]), 0.0)

    Source: Bahdanau et al. 2015 (arXiv 1409.0473), equations 5 and 6, appendix A.1.2; Luong et al.
    2015 (arXiv 1508.04025), equation 8.
    """
    check_query_key_value(query, keys, values)
    (B, H, T, _), S = query.shape, keys.shape[2]
    _check_weight(weight, query)
    q_positions = Span(0, T) if q_positions is None else q_positions
    k_positions = Span(0, S) if k_positions is None else k_positions
    check_positions("q_positions", q_positions, B, T)
    check_positions("k_positions", k_positions, B, S)
    checked_mask = as_mask(mask)
    checked_mask.require(B, H, T, S)
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    with torch.autocast(query.device.type, enabled=False):
        visible = checked_mask.block(q_positions, k_positions, device=query.device)
        s = _scores(query.to(dtype), keys.to(dtype), weight.to(dtype), visible)
        s = tap("scores", s)
        pattern = tap("pattern", softmax_weights(s, softmax_sum(s)))
        context = weighted_values(pattern, visible, values, finite=False)
    return AdditiveAttentionOutput(context.to(query.dtype), pattern.to(query.dtype))


def _scores(query: Tensor, keys: Tensor, weight: Tensor, visible: Tensor) -> Tensor:
    """Compute the scores `[B, H, T, S]`, -inf where masked, by blocks; visible is bool."""
    (B, H, T, A), (_, G, S, _) = query.shape, keys.shape
    keys = keys[:, :, None].expand(-1, -1, H // G, -1, -1).flatten(1, 2)  # [B,H,S,A]
    visible = visible.expand(B, H, T, S)
    step = max(1, BLOCK_BYTES // max(1, B * H * S * A * query.element_size()))
    blocks = []
    for i in range(0, T, step):
        queries, visible_block = query[:, :, i : i + step, None], visible[:, :, i : i + step]
        # The sum is masked before the tanh as well: a masked score has the gradient 0, but 0 times
        # the derivative of tanh at a NaN would be NaN.
        hidden = torch.tanh((queries + keys[:, :, None]).masked_fill(~visible_block[..., None], 0))
        s = torch.einsum("bhtsa,ha->bhts", hidden, weight)
        blocks.append(s.masked_fill(~visible_block, -math.inf))
    return torch.cat(blocks, 2) if blocks else query.new_zeros(B, H, 0, S)


def _check_weight(weight: Tensor, query: Tensor) -> None:
    """Check that the weight has one vector per head, in the query's dtype and device."""
    expected = (query.shape[1], query.shape[3])
    if tuple(weight.shape) != expected:
        raise ArgumentError(
            f"weight is {tuple(weight.shape)}; it must be {expected}, one vector of the size of a "
            "query per head: use weight[None] for one head"
        )
    if weight.dtype != query.dtype or weight.device != query.device:
        raise ArgumentError(
            f"weight is {weight.dtype} on {weight.device} and query {query.dtype} on "
            f"{query.device}; move or convert one with .to()"
        )
