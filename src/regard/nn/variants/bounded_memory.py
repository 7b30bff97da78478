"""Memory of bounded size: Infini-attention, with both rules of writing, and StreamingLLM."""

from __future__ import annotations

from regard.nn.infini_attention import InfiniAttention
from regard.nn.streaming_attention import StreamingAttention
from regard.nn.variants.projections import head_size, output_projection, separate_qkv
from regard.nn.variants.registry import variant
from regard.ops.memory.compressive import Update
from regard.ops.memory.infini import Empty
from regard.positions import Rotary


@variant(
    family="memory",
    equation="z = sig(g) sigma(q) M / sigma(q) n + (1 - sig(g)) softmax(q k^T / sqrt(D) + causal, "
    "own segment) v; "
    "behind each segment M += sigma(k)^T v, n += sum sigma(k); sigma = elu + 1",
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
    empty: Empty = "zero",
) -> InfiniAttention:
    """Infini-attention: softmax inside a segment, and a memory of fixed size for all segments
    before.

    x [B,T,M] -> [B,T,M]; a cache keeps G D (E + 1) numbers, and 2 G D for each token of one
    segment.

    Args:
        dim, heads: the model dim M and the query heads H.
        segment: N, how many positions a segment has.
        groups: the key/value heads G; None is H.
        head_dim: D; None is M / H.
        base: of the rotary positions of the local attention; the memory has none.
        empty: what the gate does in the first segment: "zero" or "skip".

    Raises:
        ArgumentError, ArgumentTypeError: a size is less than 1, groups does not divide heads,
            head_dim is None and M / H is not whole, or empty is another word.

    >>> import torch
    >>> infini(32, 4, segment=8)(torch.zeros(1, 20, 32)).shape
    torch.Size([1, 20, 32])

    Source: Munkhdalai et al. 2024 (arXiv 2404.07143), section 2.
    """
    return _infini(dim, heads, segment, groups, head_dim, base, empty, "linear")


@variant(
    family="memory",
    equation="as infini, with M += sigma(k)^T (v - sigma(k) M / sigma(k) n)",
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
    empty: Empty = "zero",
) -> InfiniAttention:
    """Infini-attention that writes only what its memory does not answer already.

    x [B,T,M] -> [B,T,M]; arguments, and what a cache keeps, as `infini`. What is written twice
    reads as half of it.

    Raises:
        ArgumentError, ArgumentTypeError: as `infini`.

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
    empty: Empty,
    update: Update,
) -> InfiniAttention:
    D = head_size(dim, heads, head_dim)
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
    equation="z = softmax(q R(d) k^T / sqrt(D)) v over p - R < j <= p at d = p - j and j < s at d "
    "= min(p, s + R - 1) - j",
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
    """StreamingLLM: a few first tokens and the last ones, at positions inside what is kept.

    x [B,T,M] -> [B,T,M]; a cache keeps 2 G D numbers for each of s + R tokens.

    Args:
        dim, heads: the model dim M and the query heads H.
        sinks: s, how many first tokens are kept for ever.
        recent: R, how many last tokens are kept, the query's own included.
        groups: the key/value heads G; None is H.
        head_dim: D; None is M / H.
        base: of the rotary positions.

    Raises:
        ArgumentError, ArgumentTypeError: a size is out of range, groups does not divide heads, or
            head_dim is None and M / H is not whole.

    >>> import torch
    >>> streaming(32, 4, sinks=2, recent=6)(torch.zeros(1, 20, 32)).shape
    torch.Size([1, 20, 32])

    Source: Xiao et al. 2024 (arXiv 2309.17453), section 3.2; sinks and recent as in its code.
    """
    D = head_size(dim, heads, head_dim)
    project = separate_qkv(dim, heads, heads if groups is None else groups, D, Rotary(D, base))
    return StreamingAttention(project, output_projection(dim, heads, D), sinks=sinks, recent=recent)
