"""What the constructors of the catalogue share: the usual projection and output."""

from __future__ import annotations

from torch import nn

from regard.arguments import head_size as head_size
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
    """Queries, keys and values of their own linear maps; the same steps on queries and keys."""
    return SeparateQKV(
        HeadProjection(dim, heads, head_dim, *steps, bias=bias),
        HeadProjection(dim, groups, head_dim, *steps, bias=bias),
        HeadProjection(dim, groups, value_dim or head_dim, bias=bias),
    )


def output_projection(dim: int, heads: int, value_dim: int, *, bias: bool = False) -> nn.Linear:
    """The output projection [B,T,H*E] -> [B,T,M]."""
    return Linear(heads * value_dim, dim, bias=bias)
