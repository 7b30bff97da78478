"""Constructors of mechanisms whose cache has a bounded size: Infini-attention, with both update
rules, and StreamingLLM.
"""

from __future__ import annotations

from regard.argument_checks import resolve_head_dim
from regard.nn.infini_attention import InfiniAttention
from regard.nn.streaming_attention import StreamingAttention
from regard.nn.variants.projections import output_projection, separate_qkv
from regard.nn.variants.registry import variant
from regard.ops.infini_attention import EmptyMemoryRule, UpdateRule
from regard.positions import Rotary


@variant(
    family="memory",
    equation="z = sigmoid(g) sigma(q) M / (sigma(q) n) + (1 - sigmoid(g)) softmax(q k^T / sqrt(D) "
    "over j <= i in the same segment) v; after each segment M += sigma(k)^T v, n += sum sigma(k); "
    "sigma = elu + 1",
    source="Munkhdalai et al. 2024 (arXiv 2404.07143), equations 4 to 8 and 10",
    segment=8,
    groups=2,
)
def infini(
    dim: int,
    heads: int,
    *,
    segment: int = 2048,
    groups: int | None = None,
    head_dim: int | None = None,
    base: float = 10000.0,
    empty: EmptyMemoryRule = "zero",
) -> InfiniAttention:
    """Infini-attention: softmax inside a segment, and a memory of fixed size for all earlier
    segments.

    x [B,T,M] -> [B,T,M]; a cache stores G D (E + 1) values, and 2 G D for each token of one
    segment.

    Args:
        dim: the model dim M.
        heads: the query heads H.
        segment: the number of positions N in a segment.
        groups: the key/value heads G, which divide H; None is H.
        head_dim: the head dim D; None is M / H.
        base: the base of the rotary positions of the softmax attention; the memory uses no
            positions.
        empty: how the gate treats the empty memory in the first segment: "zero" reads zeros, "skip"
            uses the softmax only.

    Returns:
        The module.

    Raises:
        ArgumentError, ArgumentTypeError: a size is less than 1, groups does not divide heads,
            head_dim is None and M / H is not whole, or empty is unknown.

    >>> import torch
    >>> infini(32, 4, segment=8)(torch.zeros(1, 20, 32)).shape
    torch.Size([1, 20, 32])

    Source: Munkhdalai et al. 2024 (arXiv 2404.07143), section 2.
    """
    return _infini(dim, heads, segment, groups, head_dim, base, empty, "linear")


@variant(
    family="memory",
    equation="as infini, with M += sigma(k)^T (v - sigma(k) M / (sigma(k) n))",
    source="Munkhdalai et al. 2024 (arXiv 2404.07143), equations 4 to 7, 9 and 10",
    segment=8,
    groups=2,
)
def infini_delta(
    dim: int,
    heads: int,
    *,
    segment: int = 2048,
    groups: int | None = None,
    head_dim: int | None = None,
    base: float = 10000.0,
    empty: EmptyMemoryRule = "zero",
) -> InfiniAttention:
    """Infini-attention with the delta rule: a segment writes only the difference between its values
    and the values that the memory already returns for its keys.

    x [B,T,M] -> [B,T,M]; a cache stores as many values as for `infini`. If a value is written twice
    under one key, the memory returns half of it.

    Args:
        dim, heads, segment, groups, head_dim, base, empty: as for `infini`.

    Returns:
        The module.

    Raises:
        ArgumentError, ArgumentTypeError: as for `infini`.

    >>> infini_delta(32, 4, segment=8).update
    'delta'

    Source: Munkhdalai et al. 2024 (arXiv 2404.07143), equation 9.
    """
    return _infini(dim, heads, segment, groups, head_dim, base, empty, "delta")


def _infini(
    dim: int,
    heads: int,
    segment: int,
    groups: int | None,
    head_dim: int | None,
    base: float,
    empty: EmptyMemoryRule,
    update: UpdateRule,
) -> InfiniAttention:
    """Build Infini-attention with one of the two update rules."""
    D = resolve_head_dim(dim, heads, head_dim)
    project = separate_qkv(dim, heads, heads if groups is None else groups, D)
    return InfiniAttention(
        project,
        output_projection(dim, heads, D),
        segment=segment,
        rotary=Rotary(D, base),
        update=update,
        empty=empty,
    )


@variant(
    family="softmax",
    equation="z = softmax(q R(d_j) k_j^T / sqrt(D)) v over the keys p - R < j <= p, with d_j = "
    "p - j, and the sinks j < s, with d_j = min(p, s + R - 1) - j",
    source="Xiao et al. 2024 (arXiv 2309.17453), section 3.2",
    sinks=2,
    recent=6,
    groups=2,
)
def streaming(
    dim: int,
    heads: int,
    *,
    sinks: int = 4,
    recent: int = 2000,
    groups: int | None = None,
    head_dim: int | None = None,
    base: float = 10000.0,
) -> StreamingAttention:
    """StreamingLLM: attention to a few first tokens and to the last ones, with positions counted
    inside the cache.

    x [B,T,M] -> [B,T,M]; a cache stores 2 G D values for each of s + R tokens.

    Args:
        dim: the model dim M.
        heads: the query heads H.
        sinks: the number s of first tokens that are always kept.
        recent: the number R of last tokens that are kept, the query's own included.
        groups: the key/value heads G, which divide H; None is H.
        head_dim: the head dim D; None is M / H.
        base: the base of the rotary positions.

    Returns:
        The module.

    Raises:
        ArgumentError, ArgumentTypeError: a size is out of range, groups does not divide heads, or
            head_dim is None and M / H is not whole.

    >>> import torch
    >>> streaming(32, 4, sinks=2, recent=6)(torch.zeros(1, 20, 32)).shape
    torch.Size([1, 20, 32])

    Source: Xiao et al. 2024 (arXiv 2309.17453), section 3.2; sinks and recent as in its code.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    project = separate_qkv(dim, heads, heads if groups is None else groups, D, Rotary(D, base))
    return StreamingAttention(project, output_projection(dim, heads, D), sinks=sinks, recent=recent)
