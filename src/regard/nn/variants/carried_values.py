"""Constructors of softmax attention with values from the first layer of the decoder."""

from __future__ import annotations

from regard.argument_checks import resolve_head_dim
from regard.errors import ArgumentError
from regard.masks import Causal
from regard.nn.attention import Attention
from regard.nn.cross_layer import ValueResidualQKV
from regard.nn.projections import HeadProjection
from regard.nn.variants.projections import output_projection
from regard.nn.variants.registry import variant
from regard.positions import Rotary


@variant(
    family="softmax",
    equation="z_h = softmax(q_h k_g^T / sqrt(D) + causal) v_g; v = s W_v x + (1 - s) v1, v1 = v of "
    "the first layer",
    source="Zhou et al. 2024 (arXiv 2410.17897), section 3",
    groups=2,
)
def value_residual(
    dim: int,
    heads: int,
    *,
    groups: int,
    layer: int = 0,
    share: float = 0.5,
    head_dim: int | None = None,
    base: float = 10000.0,
) -> Attention:
    """Value residual learning (ResFormer): each layer mixes its values with those of the first
    layer, so that what a token is reaches every layer directly.

    x [B,T,M] -> [B,T,M]; this is the attention of one layer. A layer behind the first one runs in a
    `Decoder`, which passes the values; a cache stores the mixed values, 2 G D numbers per token.

    Args:
        dim, heads, groups, head_dim: as for `gqa`.
        layer: the index of the layer, from 0; layer 0 gives its values, and the others read them.
        share: the initial value of s, the learned share of a layer's own values; 1 is `gqa`.
        base: the base of the rotary positions.

    Returns:
        The module.

    Raises:
        ArgumentError, ArgumentTypeError: as for `gqa`, or layer is negative, or share is not
            finite.

    >>> [value_residual(32, 4, groups=2, layer=i).project.share is None for i in range(2)]
    [True, False]

    Source: Zhou et al. 2024 (arXiv 2410.17897), section 3.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    rotary = Rotary(D, base)
    project = ValueResidualQKV(
        HeadProjection(dim, heads, D, rotary),
        HeadProjection(dim, groups, D, rotary),
        HeadProjection(dim, groups, D),
        is_first=is_first_layer(layer),
        share=share,
    )
    return Attention(project, output_projection(dim, heads, D), mask=Causal())


def is_first_layer(layer: int) -> bool:
    """Return whether the index of a layer is that of the first one.

    Raises:
        ArgumentError: the index is negative.
    """
    if layer < 0:
        raise ArgumentError(f"layer is {layer}; it must be at least 0", argument="layer")
    return layer == 0
