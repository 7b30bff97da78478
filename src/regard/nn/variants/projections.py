"""The standard projection and output map, which most constructors of the catalogue use."""

from __future__ import annotations

from torch import nn

from regard.nn.linear import Linear
from regard.nn.projections import HeadProjection, SeparateQKV


def separate_qkv(
    dim: int,
    heads: int,
    groups: int,
    head_dim: int,
    *steps: nn.Module,
    value_dim: int | None = None,
    bias: bool = False,
) -> SeparateQKV:
    """Build separate projections to queries, keys and values.

    Args:
        dim: the model dim M.
        heads: the query heads H.
        groups: the key/value heads G.
        head_dim: the head dim D.
        *steps: steps on query and key heads, such as a `Rotary`.
        value_dim: the value dim E; None is D.
        bias: whether the linear maps have a bias.

    Returns:
        The projection.
    """
    return SeparateQKV(
        HeadProjection(dim, heads, head_dim, *steps, bias=bias),
        HeadProjection(dim, groups, head_dim, *steps, bias=bias),
        HeadProjection(dim, groups, value_dim or head_dim, bias=bias),
    )


def output_projection(dim: int, heads: int, value_dim: int, *, bias: bool = False) -> nn.Linear:
    """Build the output map [B,T,H*E] -> [B,T,M]."""
    return Linear(heads * value_dim, dim, bias=bias)
