"""Constructors of mechanisms whose scores get a bias: one that tokens compute (forget gates,
dynamic masks, relative vectors), or a learned function of the distance (KERPLE, FIRE).
"""

from __future__ import annotations

import torch
from torch import nn

from regard.argument_checks import resolve_head_dim
from regard.biases import FIRE, Bias, Kerple
from regard.masks import Causal, Full
from regard.nn.attention import Attention
from regard.nn.data_bias import (
    DisentangledProjection,
    DynamicMaskProjection,
    ForgetGate,
    ForgettingProjection,
    PathProjection,
    RelativeKeyProjection,
    RelativeLogitProjection,
    SelectiveProjection,
    SinusoidKeyProjection,
)
from regard.nn.norms import RMSNorm
from regard.nn.projections import HeadProjection
from regard.nn.variants.projections import output_projection, separate_qkv
from regard.nn.variants.registry import variant
from regard.positions import Rotary


def _heads(
    dim: int, heads: int, groups: int, head_dim: int, *, bias: bool = False
) -> tuple[HeadProjection, HeadProjection, HeadProjection]:
    """Return the maps to queries, keys and values, without positions."""
    q, k, v = (HeadProjection(dim, n, head_dim, bias=bias) for n in (heads, groups, groups))
    return q, k, v


def _forgetting(
    dim: int, heads: int, groups: int, head_dim: int | None, gate: ForgetGate
) -> Attention:
    D = resolve_head_dim(dim, heads, head_dim)
    return Attention(
        ForgettingProjection(*_heads(dim, heads, groups, D), dim, gate=gate),
        output_projection(dim, heads, D),
        mask=Causal(),
    )


@variant(
    family="softmax",
    equation="z = softmax(q_i k_j / sqrt(D) + sum_l ln(sigmoid(f_l)) + causal) v, j < l <= i",
    source="Lin et al. 2025 (arXiv 2503.02130), equations 6 to 8",
    groups=2,
)
def forgetting(dim: int, heads: int, *, groups: int, head_dim: int | None = None) -> Attention:
    """Forgetting attention (FoX): every token has a forget gate, which multiplies the weights of
    all earlier tokens.

    x [B,T,M] -> [B,T,M]; causal, without position encodings. A cache stores one more number per
    token and head.

    Args:
        dim, heads, groups, head_dim: as for `gqa`.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`.

    >>> forgetting(32, 4, groups=2).project.shape.memory
    (16, 16, 4)

    Source: Lin et al. 2025 (arXiv 2503.02130), equations 6 to 8.
    """
    return _forgetting(dim, heads, groups, head_dim, "sigmoid")


@variant(
    family="softmax",
    equation="z = softmax(q_i k_j / sqrt(D) - sum_l softplus(f_l) + causal) v, j < l <= i",
    source="Veisi et al. 2025 (arXiv 2503.08067)",
    groups=2,
)
def cable(dim: int, heads: int, *, groups: int, head_dim: int | None = None) -> Attention:
    """CABLE: ALiBi whose slope every token computes; forgetting attention with another sign of the
    gate.

    x [B,T,M] -> [B,T,M]; causal, without position encodings.

    Args:
        dim, heads, groups, head_dim: as for `gqa`.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`.

    >>> cable(32, 4, groups=2).project.gate
    'softplus'

    Source: Veisi et al. 2025 (arXiv 2503.08067).
    """
    return _forgetting(dim, heads, groups, head_dim, "softplus")


def _biased(dim: int, heads: int, groups: int, head_dim: int | None, bias: Bias) -> Attention:
    D = resolve_head_dim(dim, heads, head_dim)
    return Attention(
        separate_qkv(dim, heads, groups, D),
        output_projection(dim, heads, D),
        mask=Causal(),
        bias=bias,
    )


@variant(
    family="softmax",
    equation="z_h = softmax(q_h k_g^T / sqrt(D) - r1_h ln(1 + r2_h (i - j)) + causal) v_g",
    source="Chi et al. 2022 (arXiv 2205.09921), section 4",
    groups=2,
)
def kerple(dim: int, heads: int, *, groups: int, head_dim: int | None = None) -> Attention:
    """KERPLE: a learned penalty that grows with the logarithm of the distance replaces position
    embeddings.

    x [B,T,M] -> [B,T,M]; causal. Both numbers of each head begin at 1.

    Args:
        dim, heads, groups, head_dim: as for `gqa`.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`.

    >>> kerple(32, 4, groups=2).bias
    kerple(4)

    Source: Chi et al. 2022 (arXiv 2205.09921), section 4.
    """
    r1, r2 = (nn.Parameter(torch.ones(heads)) for _ in range(2))
    return _biased(dim, heads, groups, head_dim, Kerple(r1, r2))


@variant(
    family="softmax",
    equation="z = softmax(s_ij + mlp(ln(c (i - j) + 1) / ln(c max(i, L) + 1)) + causal) v",
    source="Li et al. 2023 (arXiv 2310.04418), equations 6 and 19",
    groups=2,
    hidden=3,
)
def fire(
    dim: int, heads: int, *, groups: int, head_dim: int | None = None, hidden: int = 32
) -> Attention:
    """FIRE: a small network of the distance, relative to the position of the query, replaces
    position embeddings.

    x [B,T,M] -> [B,T,M]; causal. The threshold L begins at 512, and c at 0.1.

    Args:
        dim, heads, groups, head_dim: as for `gqa`.
        hidden: the number of hidden units of the network.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`.

    >>> fire(32, 4, groups=2).bias
    fire(4, 32 hidden units)

    Source: Li et al. 2023 (arXiv 2310.04418), equations 6 and 19.
    """
    start = (
        torch.tensor([0.1]),
        torch.tensor([512.0]),
        torch.randn(hidden),
        torch.zeros(hidden),
        torch.randn(heads, hidden) * max(hidden, 1) ** -0.5,
        torch.zeros(heads),
    )
    return _biased(dim, heads, groups, head_dim, FIRE(*map(nn.Parameter, start)))


@variant(
    family="softmax",
    equation="z = softmax(q_i (k_j + a[clip(j - i)]) / sqrt(D) + causal) v",
    source="Shaw et al. 2018 (arXiv 1803.02155), equations 4 and 5",
    groups=2,
    reach=3,
)
def shaw(
    dim: int,
    heads: int,
    *,
    groups: int,
    head_dim: int | None = None,
    reach: int = 64,
) -> Attention:
    """Shaw's relative positions: a learned vector for each distance is added to the key.

    x [B,T,M] -> [B,T,M]; causal. The vectors are shared by all heads. An encoder assembles
    `RelativeKeyProjection` with vectors for both directions.

    Args:
        dim, heads, groups, head_dim: as for `gqa`.
        reach: the largest distance with a vector of its own; larger ones share it.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`, or reach is negative.

    >>> shaw(32, 4, groups=2, reach=5).project.table.shape
    torch.Size([6, 8])

    Source: Shaw et al. 2018 (arXiv 1803.02155), equations 4 and 5.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    return Attention(
        RelativeKeyProjection(*_heads(dim, heads, groups, D), left=reach, right=0),
        output_projection(dim, heads, D),
        mask=Causal(),
    )


@variant(
    family="softmax",
    equation="z = softmax(((q_i + u) k_j + (q_i + w) W_r r[i - j]) / sqrt(D) + causal) v",
    source="Dai et al. 2019 (arXiv 1901.02860), section 3.3",
    groups=2,
    size=6,
)
def transformer_xl(
    dim: int,
    heads: int,
    *,
    groups: int,
    head_dim: int | None = None,
    size: int | None = None,
    base: float = 10000.0,
) -> Attention:
    """Relative positions of Transformer-XL and XLNet: a product with a map of the sinusoid of the
    distance is added to the score.

    x [B,T,M] -> [B,T,M]; causal. The sinusoids are appended to queries and keys, so that every
    kernel computes the mechanism, with heads of D + size.

    Args:
        dim, heads, groups, head_dim: as for `gqa`.
        size: the number of sinusoids R, an even number; None is the model dim, as in the paper.
        base: the base of the frequencies.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`, or size is not even.

    >>> transformer_xl(32, 4, groups=2, size=16).project.shape.D
    24

    Source: Dai et al. 2019 (arXiv 1901.02860), section 3.3; XLNet: Yang et al. 2019 (arXiv
    1906.08237).
    """
    D = resolve_head_dim(dim, heads, head_dim)
    own = _heads(dim, heads, groups, D)
    return Attention(
        SinusoidKeyProjection(*own, size=dim if size is None else size, base=base),
        output_projection(dim, heads, D),
        mask=Causal(),
        scale=D**-0.5,
    )


@variant(
    family="softmax",
    equation="z = softmax((q_i k_j + q_i K_r[d(i - j)] + k_j Q_r[d(i - j)]) / sqrt(3 D)) v",
    source="He et al. 2020 (arXiv 2006.03654), equation 4",
    causal=False,
    buckets=4,
    max_distance=12,
)
def deberta(
    dim: int,
    heads: int,
    *,
    head_dim: int | None = None,
    buckets: int = 256,
    max_distance: int = 512,
) -> Attention:
    """Disentangled attention of DeBERTa: content meets content, and content meets position in both
    directions.

    x [B,T,M] -> [B,T,M]; every token sees every token.

    Args:
        dim, heads, head_dim: as for `mha`.
        buckets: the number of buckets of distances in one direction.
        max_distance: the distance of the last bucket.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `mha`, or buckets and max_distance do not fit.

    >>> deberta(32, 4, buckets=4, max_distance=16).project.embedding.shape
    torch.Size([8, 32])

    Source: He et al. 2020 (arXiv 2006.03654), equation 4; log buckets: the released DeBERTa-v2.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    own = _heads(dim, heads, heads, D, bias=True)
    return Attention(
        DisentangledProjection(*own, dim, buckets=buckets, max_distance=max_distance),
        output_projection(dim, heads, D, bias=True),
        mask=Full(),
        scale=(3 * D) ** -0.5,
    )


@variant(
    family="softmax",
    equation="z = softmax(q_i k_j / sqrt(D) + (r_i P)[i - j] + causal) v",
    source="Inkling 2026, `InklingRelativeLogits` of transformers",
    groups=2,
    extent=5,
)
def relative_logits(
    dim: int,
    heads: int,
    *,
    groups: int,
    head_dim: int | None = None,
    profiles: int = 16,
    extent: int = 1024,
) -> Attention:
    """Relative logits of Inkling: every token mixes learned profiles of biases by distance.

    x [B,T,M] -> [B,T,M]; causal. A key at a distance of `extent` or more has no bias.

    Args:
        dim, heads, groups, head_dim: as for `gqa`.
        profiles: the number of profiles.
        extent: the number of distances with a bias.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`, or profiles or extent is below 1.

    >>> relative_logits(32, 4, groups=2, extent=6).project.profiles.shape
    torch.Size([16, 6])

    Source: Inkling 2026, `InklingRelativeLogits` of transformers.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    r = HeadProjection(dim, heads, profiles)
    return Attention(
        RelativeLogitProjection(*_heads(dim, heads, groups, D), r, extent=extent),
        output_projection(dim, heads, D),
        mask=Causal(),
    )


@variant(
    family="softmax",
    equation="z = softmax(s_ij + e_j + causal, topk of e) v, e_j = exp(a_g softplus(W v_j))",
    source="Shi et al. 2025 (arXiv 2508.02124); Doge in transformers",
    groups=2,
    keep=6,
)
def dynamic_mask(
    dim: int,
    heads: int,
    *,
    groups: int,
    head_dim: int | None = None,
    keep: int = 2048,
    base: float = 10000.0,
) -> Attention:
    """Dynamic mask attention of Doge: the values of a token give its key a bias, and a query sees
    the keys with the largest biases.

    x [B,T,M] -> [B,T,M]; causal, with normed heads and rotary positions.

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.
        keep: the number of keys that a query sees.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`, or keep is below 1.

    >>> dynamic_mask(32, 4, groups=2).project.a.shape
    torch.Size([2])

    Source: Shi et al. 2025 (arXiv 2508.02124); `DogeAttention` of transformers.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    q, k = (HeadProjection(dim, n, D, RMSNorm(D), Rotary(D, base)) for n in (heads, groups))
    return Attention(
        DynamicMaskProjection(q, k, HeadProjection(dim, groups, D), keep=keep),
        output_projection(dim, heads, D),
        mask=Causal(),
    )


@variant(
    family="softmax",
    equation="z = softmax(q_i^T (product_l H_l) k_j / sqrt(D) + causal) v, H_l = E - b_l w_l w_l^T",
    source="Yang et al. 2025 (arXiv 2505.16381), equations 2 and 3",
    groups=2,
)
def path(dim: int, heads: int, *, groups: int, head_dim: int | None = None) -> Attention:
    """PaTH: every token between a key and a query changes the key by a reflection that it computes.

    x [B,T,M] -> [B,T,M]; causal. The reflections replace position encodings.

    Args:
        dim, heads, groups, head_dim: as for `gqa`.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`.

    >>> path(32, 4, groups=2).project.shape.memory
    (16, 16, 16, 2)

    Source: Yang et al. 2025 (arXiv 2505.16381), equations 2 and 3.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    w = HeadProjection(dim, groups, D)
    return Attention(
        PathProjection(*_heads(dim, heads, groups, D), w, dim),
        output_projection(dim, heads, D),
        mask=Causal(),
    )


@variant(
    family="softmax",
    equation="z = softmax(s_ij - sum_l relu(s0_lj) + causal) v, j < l < i",
    source="Leviathan et al. 2024 (arXiv 2410.02703), section 3",
    groups=2,
)
def selective(
    dim: int,
    heads: int,
    *,
    groups: int,
    head_dim: int | None = None,
    base: float = 10000.0,
) -> Attention:
    """Selective attention: the scores of the first head say which earlier tokens a token hides from
    all later ones.

    x [B,T,M] -> [B,T,M]; causal, with rotary positions. It has no parameters of its own.

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`.

    >>> selective(32, 4, groups=2).project.shape.memory
    (16, 16, 8)

    Source: Leviathan et al. 2024 (arXiv 2410.02703), section 3.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    q, k = (HeadProjection(dim, n, D, Rotary(D, base)) for n in (heads, groups))
    return Attention(
        SelectiveProjection(q, k, HeadProjection(dim, groups, D)),
        output_projection(dim, heads, D),
        mask=Causal(),
    )
