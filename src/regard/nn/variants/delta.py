"""Mechanisms whose state is corrected, not added to: DeltaNet and Gated DeltaNet."""

from __future__ import annotations

from regard.nn.norms import RMSNorm
from regard.nn.project import Heads, Separate
from regard.nn.recurrent import Recurrent
from regard.nn.rules.delta import Decay, Delta
from regard.nn.steps import Swish, UnitLength
from regard.nn.variants.parts import head_size, join
from regard.nn.variants.registry import variant


@variant(
    family="linear",
    equation="S <- S + beta k (v - S^T k)^T; z = norm(S^T q / sqrt(D)); beta = sigmoid(W x), |q| = |k| = 1",
    source="Yang et al. 2024 (arXiv 2406.06484), section 3",
)
def delta_net(
    dim: int,
    heads: int,
    *,
    groups: int | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
    normalise_keys: bool = True,
    most: float = 1.0,
) -> Recurrent:
    """DeltaNet: linear attention that replaces what the state holds under a key, by the delta rule.

    x [B,T,M] -> [B,T,M]; a cache keeps G D E numbers, whatever the length.
    Queries, keys and values pass a swish; there is no short convolution in front of it, and no output gate.

    Args:
        dim, heads: the model dim M and the query heads H.
        groups: the key/value heads G, each with a state of its own; None is H. G divides H.
        head_dim: D; None is M / H.
        value_dim: E; None is D.
        normalise_keys: whether queries and keys are scaled to length 1. Without it nothing keeps the state bounded.
        most: the greatest strength beta, at most 2 (`regard.nn.rules.delta.Delta`).

    Raises:
        ArgumentError: a size is less than 1, groups does not divide heads, most is not above 0 and at most 2; or head_dim is
            None and M / H is not whole.

    >>> import torch
    >>> delta_net(32, 4)(torch.zeros(1, 5, 32)).shape
    torch.Size([1, 5, 32])

    Source: Yang et al. 2024 (arXiv 2406.06484), section 3.
    """
    D = head_size(dim, heads, head_dim)
    G, E = heads if groups is None else groups, D if value_dim is None else value_dim
    project = _swished(dim, heads, G, D, E, normalise=normalise_keys)
    rule = Delta(dim, G, most=most)
    return Recurrent(project, rule, join(dim, heads, E), norm=RMSNorm(E))


@variant(
    family="linear",
    equation="S' = exp(g) S; S <- S' + beta k (v - S'^T k)^T; z = norm(S^T q / sqrt(D)) * silu(W_g x); g = -exp(A) softplus(W x + b)",
    source="Yang et al. 2024 (arXiv 2412.06464), section 3",
)
def gated_delta_net(
    dim: int,
    heads: int,
    *,
    groups: int | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
    normalise_keys: bool = True,
    most: float = 1.0,
) -> Recurrent:
    """Gated DeltaNet: the delta rule on a state that each token first lets decay, and an output gate.

    x [B,T,M] -> [B,T,M]; a cache keeps G D E numbers, whatever the length. There is no short convolution.

    Args:
        dim, heads, groups, head_dim, value_dim, normalise_keys, most: as for `delta_net`.

    Raises:
        ArgumentError: as `delta_net`.

    >>> gated_delta_net(32, 4, groups=2, value_dim=16).describe().state.formula
    'G D E = 2 x 8 x 16'

    Source: Yang et al. 2024 (arXiv 2412.06464), section 3.
    """
    D = head_size(dim, heads, head_dim)
    G, E = heads if groups is None else groups, D if value_dim is None else value_dim
    project = _swished(dim, heads, G, D, E, normalise=normalise_keys)
    rule = Delta(dim, G, decay=Decay(dim, G), most=most)
    gate = Heads(dim, heads, E)
    return Recurrent(project, rule, join(dim, heads, E), norm=RMSNorm(E), gate=gate)


def _swished(dim: int, heads: int, groups: int, D: int, E: int, *, normalise: bool) -> Separate:
    """Queries, keys and values behind a swish; queries and keys of length 1, if asked."""
    steps = (Swish(), UnitLength()) if normalise else (Swish(),)
    return Separate(
        Heads(dim, heads, D, *steps), Heads(dim, groups, D, *steps), Heads(dim, groups, E, Swish())
    )
