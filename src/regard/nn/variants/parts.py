"""What the constructors of the catalogue share: the usual projection and output."""

from __future__ import annotations

from torch import nn

from regard.nn.linear import Linear
from regard.nn.projections import Heads, Separate


def separate(
    dim: int,
    heads: int,
    groups: int,
    head_dim: int,
    *steps: nn.Module,
    value_dim: int | None = None,
    bias: bool = False,
) -> Separate:
    """Queries, keys and values of their own linear maps; the same steps on queries and keys."""
    return Separate(
        Heads(dim, heads, head_dim, *steps, bias=bias),
        Heads(dim, groups, head_dim, *steps, bias=bias),
        Heads(dim, groups, value_dim or head_dim, bias=bias),
    )


def join(dim: int, heads: int, value_dim: int, *, bias: bool = False) -> nn.Linear:
    """The output projection [B,T,H*E] -> [B,T,M]."""
    return Linear(heads * value_dim, dim, bias=bias)
