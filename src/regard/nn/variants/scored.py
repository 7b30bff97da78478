"""Constructors of mechanisms with another step between the scores and the weights than a softmax:
sigmoid, ReLU, softpick, entmax and stick-breaking weights; scores that know the number of keys, the
other heads or their own sum.
"""

from __future__ import annotations

import torch
from torch import nn

from regard.argument_checks import resolve_head_dim
from regard.masks import Causal, Mask, Window
from regard.nn.attention import Attention
from regard.nn.variants.projections import output_projection, separate_qkv
from regard.nn.variants.registry import variant
from regard.positions import Rotary
from regard.scores import (
    CoPE,
    Entmax,
    ReLU,
    ScalableSoftmax,
    ScoreRule,
    Sigmoid,
    SignedSoftmax,
    Softpick,
    StickBreaking,
    TalkingHeads,
    TopK,
)


def _scored(
    dim: int,
    heads: int,
    groups: int,
    head_dim: int | None,
    score: ScoreRule,
    *,
    base: float | None = 10000.0,
    mask: Mask | None = None,
) -> Attention:
    """Return grouped-query attention with a score rule; no base means no rotary positions."""
    D = resolve_head_dim(dim, heads, head_dim)
    rotary = [] if base is None else [Rotary(D, base)]
    return Attention(
        separate_qkv(dim, heads, groups, D, *rotary),
        output_projection(dim, heads, D),
        mask=Causal() if mask is None else mask,
        score=score,
    )


@variant(
    family="softmax",
    equation="p_ij = sigmoid(s_ij - ln(n)); z = sum_j p_ij v_j",
    source="Ramapuram et al. 2024 (arXiv 2409.04431), equation 3 and section 4",
    groups=2,
)
def sigmoid_attention(
    dim: int,
    heads: int,
    *,
    groups: int,
    head_dim: int | None = None,
    base: float = 10000.0,
) -> Attention:
    """Sigmoid attention: each key gets a weight by its own score, without competition between keys.

    x [B,T,M] -> [B,T,M]; causal, with rotary positions. n is the number of keys that the query
    sees.

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`.

    >>> sigmoid_attention(32, 4, groups=2).score
    sigmoid()

    Source: Ramapuram et al. 2024 (arXiv 2409.04431), equation 3 and section 4.
    """
    return _scored(dim, heads, groups, head_dim, Sigmoid(), base=base)


@variant(
    family="softmax",
    equation="p_ij = relu(s_ij) / n; z = sum_j p_ij v_j",
    source="Wortsman et al. 2023 (arXiv 2309.08586), section 3",
    groups=2,
)
def relu_attention(
    dim: int,
    heads: int,
    *,
    groups: int,
    head_dim: int | None = None,
    power: float = 1.0,
    base: float = 10000.0,
) -> Attention:
    """ReLU attention: the weight of a key is its rectified score, divided by the number of keys.

    x [B,T,M] -> [B,T,M]; causal, with rotary positions.

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.
        power: the exponent of the rectified score; 2 is squared ReLU.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`, or power is not greater than 0.

    >>> relu_attention(32, 4, groups=2, power=2.0).score
    relu(2)

    Source: Wortsman et al. 2023 (arXiv 2309.08586), section 3.
    """
    return _scored(dim, heads, groups, head_dim, ReLU(power), base=base)


@variant(
    family="softmax",
    equation="p_ij = relu(exp(s_ij) - 1) / sum_l abs(exp(s_il) - 1)",
    source="Zuhri et al. 2025 (arXiv 2504.20966), equation 4",
    groups=2,
)
def softpick(
    dim: int,
    heads: int,
    *,
    groups: int,
    head_dim: int | None = None,
    base: float = 10000.0,
) -> Attention:
    """Softpick: a rectified softmax, in which a head may give no weight at all; it needs no sink.

    x [B,T,M] -> [B,T,M]; causal, with rotary positions.

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`.

    >>> softpick(32, 4, groups=2).score
    softpick()

    Source: Zuhri et al. 2025 (arXiv 2504.20966), equation 4.
    """
    return _scored(dim, heads, groups, head_dim, Softpick(), base=base)


@variant(
    family="softmax",
    equation="p_i = max over p of p s_i + H_a(p); z = sum_j p_ij v_j",
    source="Peters et al. 2019 (arXiv 1905.05702), equation 9",
    groups=2,
)
def entmax(
    dim: int,
    heads: int,
    *,
    groups: int,
    head_dim: int | None = None,
    alpha: float = 1.5,
    base: float = 10000.0,
) -> Attention:
    """Entmax: weights that sum to 1 and are exactly 0 for keys with small scores.

    x [B,T,M] -> [B,T,M]; causal, with rotary positions.

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.
        alpha: 1.5, or 2 for sparsemax.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`, or alpha is neither 1.5 nor 2.

    >>> entmax(32, 4, groups=2, alpha=2.0).score
    entmax(2)

    Source: Peters et al. 2019 (arXiv 1905.05702), equation 9.
    """
    return _scored(dim, heads, groups, head_dim, Entmax(alpha), base=base)


@variant(
    family="softmax",
    equation="p_ij = sign(s_ij) exp(abs(s_ij)) / sum_l exp(abs(s_il)); z = sum_j p_ij v_j",
    source="Lv et al. 2024 (arXiv 2411.07176), equation 4",
    groups=2,
)
def signed_softmax(
    dim: int,
    heads: int,
    *,
    groups: int,
    head_dim: int | None = None,
    base: float = 10000.0,
) -> Attention:
    """Signed attention weights (Cog attention): a key with a negative score takes its values away.

    x [B,T,M] -> [B,T,M]; causal, with rotary positions.

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`.

    >>> signed_softmax(32, 4, groups=2).score
    signedsoftmax()

    Source: Lv et al. 2024 (arXiv 2411.07176), equation 4.
    """
    return _scored(dim, heads, groups, head_dim, SignedSoftmax(), base=base)


@variant(
    family="softmax",
    equation="p_ij = sigmoid(s_ij) product_l (1 - sigmoid(s_il)), j < l < i",
    source="Tan et al. 2024 (arXiv 2410.17980), equations 1 to 3",
    groups=2,
)
def stick_breaking(
    dim: int,
    heads: int,
    *,
    groups: int,
    head_dim: int | None = None,
) -> Attention:
    """Stick-breaking attention: from the nearest key to the farthest, each takes a share of what is
    left.

    x [B,T,M] -> [B,T,M]; a token sees the tokens before it, and not itself. There are no position
    encodings: the order of the keys is part of the weights.

    Args:
        dim, heads, groups, head_dim: as for `gqa`.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`.

    >>> stick_breaking(32, 4, groups=2).score
    stickbreaking()

    Source: Tan et al. 2024 (arXiv 2410.17980), equations 1 to 3.
    """
    return _scored(
        dim,
        heads,
        groups,
        head_dim,
        StickBreaking(),
        base=None,
        mask=Causal() & ~Window(1),
    )


@variant(
    family="softmax",
    equation="z_h = softmax(a_h ln(n) q_h k_g^T / sqrt(D) + causal) v_g",
    source="Nakanishi 2025 (arXiv 2501.19399), equation 2",
    groups=2,
)
def scalable_softmax(
    dim: int,
    heads: int,
    *,
    groups: int,
    head_dim: int | None = None,
    base: float = 10000.0,
) -> Attention:
    """Scalable-Softmax: scores grow with the logarithm of the number of keys, so that weights do
    not fade in long texts.

    x [B,T,M] -> [B,T,M]; causal, with rotary positions. The factor of each head is learned, from
    0.43 on.

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`.

    >>> scalable_softmax(32, 4, groups=2).score_tensors[0].shape
    torch.Size([4])

    Source: Nakanishi 2025 (arXiv 2501.19399), equation 2.
    """
    return _scored(
        dim,
        heads,
        groups,
        head_dim,
        ScalableSoftmax(nn.Parameter(torch.full((heads,), 0.43))),
        base=base,
    )


@variant(
    family="softmax",
    equation="p_h = sum_g A_hg softmax(sum_m B_gm s_m)",
    source="Shazeer et al. 2020 (arXiv 2003.02436), section 3",
    groups=2,
)
def talking_heads(
    dim: int,
    heads: int,
    *,
    groups: int,
    head_dim: int | None = None,
    base: float = 10000.0,
) -> Attention:
    """Talking-heads attention: heads mix their scores before the softmax, and their weights after
    it.

    x [B,T,M] -> [B,T,M]; causal, with rotary positions. Both mixtures begin as the identity, which
    is `gqa`.

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`.

    >>> talking_heads(32, 4, groups=2).score
    talkingheads(4 heads, before and after)

    Source: Shazeer et al. 2020 (arXiv 2003.02436), section 3.
    """
    mixes = (nn.Parameter(torch.eye(heads)) for _ in range(2))
    return _scored(dim, heads, groups, head_dim, TalkingHeads(*mixes), base=base)


@variant(
    family="softmax",
    equation="z = softmax(topk of s_ij + causal) v",
    source="Zhao et al. 2019 (arXiv 1912.11637), equation 3",
    groups=2,
    top=3,
)
def top_k(
    dim: int,
    heads: int,
    *,
    groups: int,
    head_dim: int | None = None,
    top: int = 32,
    base: float = 10000.0,
) -> Attention:
    """Top-k attention: the softmax runs over the k largest scores of each row.

    x [B,T,M] -> [B,T,M]; causal, with rotary positions.

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.
        top: the number of keys that keep their weight.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`, or top is less than 1.

    >>> top_k(32, 4, groups=2, top=8).score
    topk(8)

    Source: Zhao et al. 2019 (arXiv 1912.11637), equation 3.
    """
    return _scored(dim, heads, groups, head_dim, TopK(top), base=base)


@variant(
    family="softmax",
    equation="p_ij = sum_l sigmoid(s_il), j <= l <= i; z = softmax(s_ij + q_i e[p_ij] + causal) v",
    source="Golovneva et al. 2024 (arXiv 2405.18719), equations 3 to 6",
    groups=2,
    positions=6,
)
def cope(
    dim: int,
    heads: int,
    *,
    groups: int,
    head_dim: int | None = None,
    positions: int = 64,
) -> Attention:
    """Contextual position encoding: a query counts the keys that its gates choose, and adds the
    embedding of that number to the score.

    x [B,T,M] -> [B,T,M]; causal. The embeddings are shared by all heads.

    Args:
        dim, heads, groups, head_dim: as for `gqa`.
        positions: the number of embeddings; larger numbers share the last one.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`, or positions is less than 1.

    >>> cope(32, 4, groups=2, positions=16).score
    cope(16x8)

    Source: Golovneva et al. 2024 (arXiv 2405.18719), equations 3 to 6.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    table = nn.Parameter(torch.randn(positions, D) * D**-0.5)
    return _scored(dim, heads, groups, head_dim, CoPE(table), base=None)
