"""Softmax attention with other heads: multi-head, multi-query, grouped-query."""

from __future__ import annotations

from regard.masks import Causal
from regard.nn.attention import Attention
from regard.nn.variants.parts import head_size, join, separate
from regard.nn.variants.registry import variant
from regard.positions import Rotary
from regard.positions.rotary import Layout


@variant(
    family="softmax",
    equation="z_h = softmax(q_h k_g^T / sqrt(D) + causal) v_g, g = h // (H/G); out = W_o [z_1; ...; z_H]",
    source="Ainslie et al. 2023 (arXiv 2305.13245), section 2.2",
    groups=2,
)
def gqa(
    dim: int,
    heads: int,
    *,
    groups: int,
    head_dim: int | None = None,
    base: float = 10000.0,
    layout: Layout = "half",
) -> Attention:
    """Grouped-query attention: H/G query heads share each key/value head.

    x [B,T,M] -> [B,T,M]; a cache keeps 2 G D numbers per token.

    Args:
        dim, heads: the model dim M and the query heads H.
        groups: the key/value heads G; G divides H.
        head_dim: D; None is M / H.
        base: of the rotary positions.
        layout: which dims make a rotary pair.

    Raises:
        ArgumentError: a size is less than 1, or groups does not divide heads; head_dim is None and M / H is not whole; or
            layout is unknown.

    >>> import torch
    >>> gqa(32, 4, groups=2)(torch.zeros(1, 5, 32)).shape
    torch.Size([1, 5, 32])

    Source: Ainslie et al. 2023 (arXiv 2305.13245), section 2.2.
    """
    D = head_size(dim, heads, head_dim)
    project = separate(dim, heads, groups, D, Rotary(D, base, layout=layout))
    return Attention(project, join(dim, heads, D), mask=Causal())


@variant(
    family="softmax",
    equation="z_h = softmax(q_h k^T / sqrt(D) + causal) v",
    source="Shazeer 2019 (arXiv 1911.02150), section 3",
)
def mqa(dim: int, heads: int, *, head_dim: int | None = None, base: float = 10000.0) -> Attention:
    """Multi-query attention: all query heads share one key/value head.

    x [B,T,M] -> [B,T,M]; a cache keeps 2 D numbers per token.

    Raises:
        ArgumentError: as `gqa`.

    >>> mqa(32, 4).project.shape.memory
    (8, 8)

    Source: Shazeer 2019 (arXiv 1911.02150), section 3.
    """
    return gqa(dim, heads, groups=1, head_dim=head_dim, base=base)
