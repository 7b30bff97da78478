"""Constructors of mechanisms that differ from grouped-query attention by what happens to the result
of a head: gates, the difference of pairs of heads, and the removal of a token's own value.
"""

from __future__ import annotations

from regard.argument_checks import check_groups, resolve_head_dim
from regard.masks import Causal
from regard.nn.attention import Attention
from regard.nn.head_finishes import (
    FinishedProjection,
    HeadFinish,
    HeadGate,
    OwnValueRemoval,
    PairDifference,
)
from regard.nn.variants.projections import output_projection, separate_qkv
from regard.nn.variants.registry import variant
from regard.positions import Rotary


def _finished(
    dim: int, heads: int, groups: int, D: int, base: float, finish: HeadFinish
) -> Attention:
    """Build causal grouped-query attention with rotary positions and a step on its result."""
    project = separate_qkv(dim, heads, groups, D, Rotary(D, base))
    output = output_projection(dim, finish.heads(heads), D)
    return Attention(FinishedProjection(project, finish), output, mask=Causal())


@variant(
    family="softmax",
    equation="z'_h = z_h * sigmoid(W_g x)_h, one number for each head",
    source="Qiu et al. 2025 (arXiv 2505.06708), section 4; code: LFM3",
    groups=2,
)
def head_gate(
    dim: int, heads: int, *, groups: int, head_dim: int | None = None, base: float = 10000.0
) -> Attention:
    """Gate per head: every head is multiplied by one sigmoid gate, which is computed from the
    hidden state of the query, as in LFM3.

    x [B,T,M] -> [B,T,M]

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`.

    >>> head_gate(32, 4, groups=2).project.finishes[0].linear.weight.shape
    torch.Size([4, 32])

    Source: Qiu et al. 2025 (arXiv 2505.06708), section 4, headwise gates.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    return _finished(dim, heads, groups, D, base, HeadGate(dim, heads))


@variant(
    family="softmax",
    equation="z'_h = z_h * softplus(W_g x)_h, one number for each head",
    source="Poolside 2026, code of Laguna in transformers",
    groups=2,
)
def softplus_gate(
    dim: int, heads: int, *, groups: int, head_dim: int | None = None, base: float = 10000.0
) -> Attention:
    """Softplus gate per head: every head is multiplied by ln(1 + exp(W_g x)), which has no upper
    bound, as in Laguna.

    x [B,T,M] -> [B,T,M]

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`.

    >>> softplus_gate(32, 4, groups=2).project.finishes[0].activation
    'softplus'

    Source: the code of Laguna in transformers, 2026.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    finish = HeadGate(dim, heads, activation="softplus")
    return _finished(dim, heads, groups, D, base, finish)


@variant(
    family="softmax",
    equation="z'_h = z_h * sigmoid((W_g x)_h + b_h), with one bias for each head",
    source="The code of Beam in transformers, 2026",
    groups=2,
)
def biased_gate(
    dim: int, heads: int, *, groups: int, head_dim: int | None = None, base: float = 10000.0
) -> Attention:
    """Gated output with a bias per head: a sigmoid gate for every channel, and one learned bias for
    all channels of a head, as in Beam.

    x [B,T,M] -> [B,T,M]

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`.

    >>> biased_gate(32, 4, groups=2).project.finishes[0].bias.shape
    torch.Size([4])

    Source: the code of Beam in transformers, 2026.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    return _finished(dim, heads, groups, D, base, HeadGate(dim, heads, D, bias=True))


@variant(
    family="softmax",
    equation="z_h = softmax(q1 k^T / sqrt(D)) v - l softmax(q2 k^T / sqrt(D)) v, l = "
    "sigmoid(W_l x)_h",
    source="Microsoft 2026, Differential Transformer V2 (code: microsoft/unilm)",
    groups=2,
)
def differential_v2(
    dim: int, heads: int, *, groups: int, head_dim: int | None = None, base: float = 10000.0
) -> Attention:
    """Differential attention V2: the difference of two query heads that share keys and values, with
    a weight for each token and head, and no norm.

    x [B,T,M] -> [B,T,M]; each of the H heads has two query heads, and the cache is that of `gqa`.

    Args:
        dim, head_dim, base: as for `gqa`.
        heads: the number of heads H of the result; attention has 2 H query heads.
        groups: the key/value heads G, which divide H.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`.

    >>> differential_v2(32, 4, groups=2).project.shape
    ProjectionShape(H=8, G=2, D=8, E=8, memory=(16, 16))

    Source: Microsoft 2026, Differential Transformer V2.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    check_groups(heads, groups)  # G divides H, so that both heads of a pair have the same keys
    return _finished(dim, 2 * heads, groups, D, base, PairDifference(dim, heads))


@variant(
    family="softmax",
    equation="z'_h = z_h - (z_h dot u) u, u = v / sqrt(v dot v) of the same token",
    source="XSA 2026 (arXiv 2603.09078)",
    groups=2,
)
def exclusive(
    dim: int,
    heads: int,
    *,
    groups: int,
    learned: bool = False,
    head_dim: int | None = None,
    base: float = 10000.0,
) -> Attention:
    """Exclusive self-attention (XSA): what a head returns along the token's own value is removed,
    because the residual connection has it already.

    x [B,T,M] -> [B,T,M]

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.
        learned: whether each head learns how much it removes, tanh(alpha) with alpha = 0 at first,
            as in NeoMME.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`.

    >>> exclusive(32, 4, groups=2, learned=True).project.finishes[0].alpha.shape
    torch.Size([4])

    Source: XSA 2026 (arXiv 2603.09078).
    """
    D = resolve_head_dim(dim, heads, head_dim)
    return _finished(dim, heads, groups, D, base, OwnValueRemoval(heads, learned=learned))
