"""Softmax attention that does something more with its heads: a gate, or the difference of two patterns."""

from __future__ import annotations

from regard.masks import Causal
from regard.nn.attention import Attention
from regard.nn.finish import Differential, Gated
from regard.nn.project import Heads
from regard.nn.variants.parts import head_size, join, separate
from regard.nn.variants.registry import variant
from regard.positions import Rotary


@variant(
    family="softmax",
    equation="z'_h = z_h * sigmoid(W_g x)_h",
    source="Qiu et al. 2025 (arXiv 2505.06708), section 3",
    groups=2,
)
def gated(
    dim: int, heads: int, *, groups: int, head_dim: int | None = None, base: float = 10000.0
) -> Attention:
    """Gated output: the token that asks opens or closes each number of what its heads bring, as in Qwen3-Next.

    x [B,T,M] -> [B,T,M]

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.

    Raises:
        ArgumentError: as for `gqa`.

    >>> gated(32, 4, groups=2).project.gate
    Heads(
      4 heads of 8
      (linear): Linear(in_features=32, out_features=32, bias=False)
      (flat): Identity()
      (steps): ModuleList()
    )

    Source: Qiu et al. 2025 (arXiv 2505.06708), section 3.
    """
    D = head_size(dim, heads, head_dim)
    project = separate(dim, heads, groups, D, Rotary(D, base))
    return Attention(Gated(project, Heads(dim, heads, D)), join(dim, heads, D), mask=Causal())


@variant(
    family="softmax",
    equation="z_h = (1 - l0) norm((softmax(q1 k1^T / sqrt(D)) - l softmax(q2 k2^T / sqrt(D))) v)",
    source="Ye et al. 2024 (arXiv 2410.05258), equations 1 to 3",
)
def differential(
    dim: int,
    heads: int,
    *,
    groups: int | None = None,
    head_dim: int | None = None,
    depth: int = 0,
    base: float = 10000.0,
) -> Attention:
    """Differential attention: of two patterns over the same values, one is taken off the other.

    x [B,T,M] -> [B,T,M]; H heads, each of two query heads of D and values of 2 D.

    Args:
        dim, heads: the model dim M and the heads H.
        groups: key/value heads G; None is H.
        head_dim: D; None is M / (2 H), which makes it as large as `mha`.
        depth: which layer this is, from 0.
        base: of the rotary positions.

    Raises:
        ArgumentError: a size is less than 1, G does not divide H, or depth is negative.

    >>> differential(32, 4).project.shape
    ProjectionShape(H=8, G=8, D=4, E=8, memory=(32, 32))

    Source: Ye et al. 2024 (arXiv 2410.05258), equations 1 to 3.
    """
    D, G = head_size(dim, 2 * heads, head_dim), groups or heads
    rotary = Rotary(D, base)
    project = Differential(
        Heads(dim, 2 * heads, D, rotary), Heads(dim, 2 * G, D, rotary), Heads(dim, G, 2 * D),
        depth=depth,
    )  # fmt: skip
    return Attention(project, join(dim, heads, 2 * D), mask=Causal())
