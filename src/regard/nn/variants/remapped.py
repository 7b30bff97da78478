"""Constructors of mechanisms that read longer texts than those of training by other distances."""

from __future__ import annotations

from regard.argument_checks import resolve_head_dim
from regard.nn.remapped_attention import (
    DistanceMap,
    DualChunk,
    LMInfinite,
    RemappedAttention,
    ReRoPE,
    SelfExtend,
)
from regard.nn.variants.projections import output_projection, separate_qkv
from regard.nn.variants.registry import variant
from regard.positions import Rotary


def _remapped(
    dim: int, heads: int, groups: int, head_dim: int | None, base: float, distances: DistanceMap
) -> RemappedAttention:
    """Build grouped-query attention with these distances."""
    D = resolve_head_dim(dim, heads, head_dim)
    project = separate_qkv(dim, heads, groups, D, Rotary(D, base))
    return RemappedAttention(project, output_projection(dim, heads, D), distances)


@variant(
    family="softmax",
    equation="z_i = softmax(q_i R_d k_j^T / sqrt(D) over j <= i) v_j, d = i - j in the same chunk, "
    "min(i mod c + c, n) - j mod c for the block before, min(2 c - 1, n) - j mod c for earlier "
    "blocks",
    source="An et al. 2024 (arXiv 2402.17463), section 3",
    groups=2,
    chunk=4,
    length=6,
)
def dual_chunk(
    dim: int,
    heads: int,
    *,
    groups: int,
    chunk: int,
    length: int,
    head_dim: int | None = None,
    base: float = 10000.0,
) -> RemappedAttention:
    """Dual chunk attention (DCA): a trained model reads longer texts, because no rotary distance
    exceeds the training length; distances within a chunk are the real ones.

    x [B,T,M] -> [B,T,M]; weights and cache are those of `gqa`.

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.
        chunk: the size c of a chunk, below the training length.
        length: n, the largest position of a query, below the training length.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`, or length is less than chunk.

    >>> dual_chunk(32, 4, groups=2, chunk=4, length=6).distances
    DualChunk(chunk=4, length=6)

    Source: An et al. 2024 (arXiv 2402.17463), section 3.
    """
    return _remapped(dim, heads, groups, head_dim, base, DualChunk(chunk, length))


@variant(
    family="softmax",
    equation="z_i = softmax(q_i R_d k_j^T / sqrt(D) over j <= i) v_j, d = i - j in the window W, "
    "then floor(i / n) + W - W / n - floor(j / n)",
    source="Jin et al. 2024 (arXiv 2401.01325), section 3.2",
    groups=2,
    group=2,
    window=4,
)
def self_extend(
    dim: int,
    heads: int,
    *,
    groups: int,
    group: int,
    window: int,
    head_dim: int | None = None,
    base: float = 10000.0,
) -> RemappedAttention:
    """Self-Extend: a trained model reads longer texts, because far positions are grouped; the
    nearest keys keep their distances.

    x [B,T,M] -> [B,T,M]; weights and cache are those of `gqa`.

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.
        group: the number of positions that become one.
        window: the number W of nearest keys, a multiple of group.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`, or group does not divide window.

    >>> self_extend(32, 4, groups=2, group=2, window=4).distances
    SelfExtend(group=2, window=4)

    Source: Jin et al. 2024 (arXiv 2401.01325), section 3.2.
    """
    return _remapped(dim, heads, groups, head_dim, base, SelfExtend(group, window))


@variant(
    family="softmax",
    equation="z_i = softmax(q_i R_d k_j^T / sqrt(D) over j <= i) v_j, d = min(i - j, W)",
    source="Su 2023, Rectified Rotary Position Embeddings (code: bojone/rerope)",
    groups=2,
    window=4,
)
def rerope(
    dim: int,
    heads: int,
    *,
    groups: int,
    window: int,
    head_dim: int | None = None,
    base: float = 10000.0,
) -> RemappedAttention:
    """ReRoPE: a trained model reads longer texts, because no rotary distance exceeds the window.

    x [B,T,M] -> [B,T,M]; weights and cache are those of `gqa`.

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.
        window: the largest distance W, below the training length.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`, or window is less than 1.

    >>> rerope(32, 4, groups=2, window=4).distances
    ReRoPE(window=4)

    Source: Su 2023, "Rectified Rotary Position Embeddings".
    """
    return _remapped(dim, heads, groups, head_dim, base, ReRoPE(window))


@variant(
    family="softmax",
    equation="z_i = softmax(q_i R_d k_j^T / sqrt(D) over i - W < j <= i or j < s) v_j, d = min(i - "
    "j, W)",
    source="Han et al. 2023 (arXiv 2308.16137), section 3.2",
    groups=2,
    sinks=2,
    window=4,
)
def lm_infinite(
    dim: int,
    heads: int,
    *,
    groups: int,
    sinks: int,
    window: int,
    head_dim: int | None = None,
    base: float = 10000.0,
) -> RemappedAttention:
    """LM-Infinite: a trained model reads a stream without end. It sees the last tokens and the
    first ones, at no larger distance than the window.

    x [B,T,M] -> [B,T,M]; a cache stores the first and the last tokens.

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.
        sinks: the number s of first tokens.
        window: the number W of last tokens, and the largest distance.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`, or a number is less than 1.

    >>> print(lm_infinite(32, 4, groups=2, sinks=2, window=4).mask)
    causal & (window(4) | sinks(2))

    Source: Han et al. 2023 (arXiv 2308.16137), section 3.2.
    """
    return _remapped(dim, heads, groups, head_dim, base, LMInfinite(sinks, window))
