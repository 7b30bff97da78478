"""Softmax attention that looks at a part of the past: windows, chunks, sinks, documents, prefixes."""

from __future__ import annotations

from collections.abc import Sequence

from regard.errors import ArgumentError
from regard.masks import Causal, Chunk, Document, Mask, Prefix, Window
from regard.nn.attention import Attention
from regard.nn.variants.parts import head_size, join, separate
from regard.nn.variants.registry import variant
from regard.positions import Rotary


@variant(
    family="softmax",
    equation="z_i = softmax(q_i k_j^T / sqrt(D) over i - W < j <= i) v_j",
    source="Beltagy et al. 2020 (arXiv 2004.05150), section 3.1; Jiang et al. 2023, Mistral 7B (arXiv 2310.06825)",
    groups=2,
    window=5,
)
def sliding_window(
    dim: int,
    heads: int,
    *,
    groups: int,
    window: int,
    head_dim: int | None = None,
    base: float = 10000.0,
) -> Attention:
    """Sliding window: a token sees the last W tokens, its own included, as in Mistral 7B.

    x [B,T,M] -> [B,T,M]; a cache keeps W tokens, whatever the length; l layers reach l (W - 1) + 1 tokens.

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.
        window: W.

    Raises:
        ArgumentError: as for `gqa`, or window is less than 1.

    >>> print(sliding_window(32, 4, groups=2, window=3).mask)
    causal & window(3)

    Source: Jiang et al. 2023 (arXiv 2310.06825), section 2.
    """
    return _under(Causal() & Window(window), dim, heads, groups, head_dim, base)


@variant(
    family="softmax",
    equation="layer l: window(W), but every n-th layer: all of the past",
    source="Gemma 3 (arXiv 2503.19786), section 2.1; Gemma 2 (arXiv 2408.00118), section 2",
    groups=2,
    window=5,
)
def local_global(
    dim: int,
    heads: int,
    *,
    groups: int,
    window: int,
    layer: int = 0,
    every: int = 6,
    head_dim: int | None = None,
    base: float = 10000.0,
    global_base: float | None = None,
) -> Attention:
    """Alternating layers: most see a window, every n-th sees everything, as in Gemma 2 (n = 2) and Gemma 3 (n = 6).

    x [B,T,M] -> [B,T,M]; the attention of one layer.

    Args:
        dim, heads, groups, head_dim: as for `gqa`.
        window: W of the local layers.
        layer: which layer this is, from 0; layers n - 1, 2 n - 1, ... are global.
        every: n.
        base: of the rotary positions in local layers.
        global_base: of those in global layers; None is the same. Gemma 3 has 10,000 and 1,000,000.

    Raises:
        ArgumentError: as for `gqa`, or layer is negative, every or window less than 1.

    >>> [str(local_global(32, 4, groups=2, window=3, layer=i, every=2).mask) for i in range(4)]
    ['causal & window(3)', 'causal', 'causal & window(3)', 'causal']

    Source: Gemma 3 (arXiv 2503.19786), section 2.1.
    """
    if layer < 0 or every < 1:
        raise ArgumentError(f"layer is {layer} and every is {every}; they must be at least 0 and 1")
    if (layer + 1) % every == 0:
        return _under(Causal(), dim, heads, groups, head_dim, global_base or base)
    return _under(Causal() & Window(window), dim, heads, groups, head_dim, base)


@variant(
    family="softmax",
    equation="z_i = softmax(q_i k_j^T / sqrt(D) over j <= i, j // C = i // C) v_j",
    source="Meta 2025, Llama 4 model card and code: layers with chunked attention",
    groups=2,
    chunk=4,
)
def chunked(
    dim: int,
    heads: int,
    *,
    groups: int,
    chunk: int,
    head_dim: int | None = None,
    base: float = 10000.0,
) -> Attention:
    """Chunked attention: a token sees the past of its own chunk of C positions; nothing crosses a border, as in Llama 4.

    x [B,T,M] -> [B,T,M]

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.
        chunk: C.

    Raises:
        ArgumentError: as for `gqa`, or chunk is less than 1.

    >>> print(chunked(32, 4, groups=2, chunk=3).mask)
    causal & chunk(3)

    Source: Llama 4, as released.
    """
    return _under(Causal() & Chunk(chunk), dim, heads, groups, head_dim, base)


@variant(
    family="softmax",
    equation="z_i = softmax(q_i k_j^T / sqrt(D) over j <= i or j < n) v_j",
    source="Raffel et al. 2020 (arXiv 1910.10683), section 3.2.1; Liu et al. 2018 (arXiv 1801.10198)",
    causal=False,
    groups=2,
    prefix=4,
)
def prefix_lm(
    dim: int,
    heads: int,
    *,
    groups: int,
    prefix: int | Sequence[int],
    head_dim: int | None = None,
    base: float = 10000.0,
) -> Attention:
    """Prefix language model: the first n tokens see one another, the others see what came before them.

    x [B,T,M] -> [B,T,M]; with a cache, the prefix must be given in one call.

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.
        prefix: n, or one for each row of the batch.

    Raises:
        ArgumentError: as for `gqa`, or prefix is negative.

    >>> print(prefix_lm(32, 4, groups=2, prefix=3).mask)
    causal | prefix(3)

    Source: Raffel et al. 2020 (arXiv 1910.10683), section 3.2.1.
    """
    length = prefix if isinstance(prefix, int) else tuple(prefix)
    return _under(Causal() | Prefix(length), dim, heads, groups, head_dim, base)


@variant(
    family="softmax",
    equation="z_i = softmax(q_i k_j^T / sqrt(D) over j <= i, document(j) = document(i)) v_j",
    source="Krell et al. 2021 (arXiv 2107.02027), section 3",
    groups=2,
    bounds=(0, 5, 9, 64),
)
def packed(
    dim: int,
    heads: int,
    *,
    groups: int,
    bounds: Sequence[int],
    head_dim: int | None = None,
    base: float = 10000.0,
) -> Attention:
    """Packed documents: several texts stand in one row, and none sees another.

    x [B,T,M] -> [B,T,M]; rotary positions need no restart, because only differences count.

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.
        bounds: where each document starts, and the end of the last.

    Raises:
        ArgumentError: as for `gqa`, or bounds fall.

    >>> from regard.span import Span
    >>> packed(32, 4, groups=2, bounds=(0, 3, 7)).mask.visible(Span(0, 7), Span(0, 7)).tolist()
    [[[1, 2, 3, 1, 2, 3, 4]]]

    Source: Krell et al. 2021 (arXiv 2107.02027), section 3.
    """
    return _under(Causal() & Document(tuple(bounds)), dim, heads, groups, head_dim, base)


def _under(
    mask: Mask, dim: int, heads: int, groups: int, head_dim: int | None, base: float
) -> Attention:
    """Grouped-query rotary attention under a mask."""
    D = head_size(dim, heads, head_dim)
    project = separate(dim, heads, groups, D, Rotary(D, base))
    return Attention(project, join(dim, heads, D), mask=mask)
