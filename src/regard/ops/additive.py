"""Additive attention: scores from a network with one hidden layer, softmax, and the mean of the
values.
"""

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
from regard.ops.softmax.reference import mix, total, weights
from regard.span import Positions, Span
from regard.tracing import tap

__all__ = ["Aligned", "additive_attention"]

BLOCK_BYTES = 2**26
"""What the hidden layer of a block of queries may take; with gradients, torch keeps all blocks."""


class Aligned(NamedTuple):
    """What queries found, and where.

    context: [B,H,T,E], the weighted mean of the values; 0 for a row that sees nothing.
    weights: [B,H,T,S], the alignment; a row sums to 1, or is 0 throughout.
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
) -> Aligned:
    """Additive attention: query and key are added, and a vector reads the score from the tanh of
    the sum.

    e_ij = weight . tanh(query_i + keys_j);  a_ij = exp(e_ij) / sum_j exp(e_ij)
    context_i = sum_j a_ij values_j

    With query = W s_{i-1} and keys = U h_j it is Bahdanau's; with the two halves of one W on a
    pair, Luong's `concat`. Queries and keys come projected: the keys of a source are computed once
    for all steps. What is masked reaches neither context nor weights, and gets no gradient,
    whatever it holds. Taps: `scores`, `pattern`.

    Args:
        query, keys, values: query head h reads key/value head h // (H/G); Bahdanau has one head.
        weight: v, one vector per head.
        mask: a rule on positions, or a bool tensor, True = may attend; None sees every key whose
            position is >= 0.
        q_positions: default 0..T-1.
        k_positions: default 0..S-1; -1 is a slot that holds nothing, such as padding.

    Raises:
        ArgumentError, ArgumentTypeError: shapes, dtypes or positions do not fit; raised before
            anything is computed.

    >>> h = torch.randn(1, 1, 4, 8)
    >>> padded = torch.tensor([[0, 1, 2, -1]])
    >>> found = additive_attention(h[:, :, :1], h, h, torch.ones(1, 8), k_positions=padded)
    >>> found.context.shape, found.weights[0, 0, 0, 3].item()
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
    rule = as_mask(mask)
    rule.require(B, H, T, S)
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    with torch.autocast(query.device.type, enabled=False):
        visible = rule.block(q_positions, k_positions, device=query.device)
        s = _scores(query.to(wide), keys.to(wide), weight.to(wide), visible)
        s = tap("scores", s)
        pattern = tap("pattern", weights(s, total(s)))
        context = mix(pattern, visible, values, finite=False)
    return Aligned(context.to(query.dtype), pattern.to(query.dtype))


def _scores(query: Tensor, keys: Tensor, weight: Tensor, visible: Tensor) -> Tensor:
    """The scores [B,H,T,S], -inf where masked, a block of queries at a time."""
    (B, H, T, A), (_, G, S, _) = query.shape, keys.shape
    keys = keys[:, :, None].expand(-1, -1, H // G, -1, -1).flatten(1, 2)  # [B,H,S,A]
    visible = visible.expand(B, H, T, S)
    step = max(1, BLOCK_BYTES // max(1, B * H * S * A * query.element_size()))
    blocks = []
    for i in range(0, T, step):
        rows, seen = query[:, :, i : i + step, None], visible[:, :, i : i + step]
        # selected before the tanh: the gradient of a masked score is 0, and 0 times the slope at a
        # NaN is a NaN
        hidden = torch.tanh((rows + keys[:, :, None]).masked_fill(~seen[..., None], 0))
        s = torch.einsum("bhtsa,ha->bhts", hidden, weight)
        blocks.append(s.masked_fill(~seen, -math.inf))
    return torch.cat(blocks, 2) if blocks else query.new_zeros(B, H, 0, S)


def _check_weight(weight: Tensor, query: Tensor) -> None:
    need = (query.shape[1], query.shape[3])
    if tuple(weight.shape) != need:
        raise ArgumentError(
            f"weight is {tuple(weight.shape)}; it must be {need}, one vector of the queries' size "
            "per head: "
            "use weight[None] for one head"
        )
    if weight.dtype != query.dtype or weight.device != query.device:
        raise ArgumentError(
            f"weight is {weight.dtype} on {weight.device} and query {query.dtype} on "
            f"{query.device}; "
            "move or convert one with .to()"
        )
