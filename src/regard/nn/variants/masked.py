"""Constructors of softmax mechanisms with a sparse mask: windows, chunks, documents, Longformer,
BigBird and the Sparse Transformer.
"""

from __future__ import annotations

from collections.abc import Sequence

from regard.argument_checks import resolve_head_dim
from regard.errors import ArgumentError
from regard.masks import (
    BigBird,
    Causal,
    Chunk,
    Dilated,
    Document,
    Global,
    Mask,
    Prefix,
    Strided,
    Window,
)
from regard.nn.attention import Attention
from regard.nn.variants.projections import output_projection, separate_qkv
from regard.nn.variants.registry import variant
from regard.nn.windowed_attention import Longformer
from regard.positions import Rotary


@variant(
    family="softmax",
    equation="z_i = softmax(q_i k_j^T / sqrt(D) over i - W < j <= i) v_j",
    source="Beltagy et al. 2020 (arXiv 2004.05150), section 3.1; Jiang et al. 2023, Mistral 7B "
    "(arXiv 2310.06825)",
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
    """Sliding window: a token sees the last W tokens, itself included, as in Mistral 7B.

    x [B,T,M] -> [B,T,M]; a cache stores W tokens at any length. Through l layers, a token depends
    on the last l (W - 1) + 1 tokens.

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.
        window: the number of tokens W.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`, or window is less than 1.

    >>> print(sliding_window(32, 4, groups=2, window=3).mask)
    causal & window(3)

    Source: Jiang et al. 2023 (arXiv 2310.06825), section 2.
    """
    return _gqa_with_mask(Causal() & Window(window), dim, heads, groups, head_dim, base)


@variant(
    family="softmax",
    equation="z_i = softmax(q_i k_j^T / sqrt(D) over i - W < j <= i) v_j; in every n-th layer over "
    "j <= i",
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
    """Alternating layers: most layers attend to a window, and every n-th to all past tokens.

    Gemma 2 has n = 2, and Gemma 3 has n = 6.

    x [B,T,M] -> [B,T,M]; this is the attention of one layer.

    Args:
        dim, heads, groups, head_dim: as for `gqa`.
        window: the window W of the local layers.
        layer: the index of the layer, from 0; layers n - 1, 2 n - 1, ... are global.
        every: the period n of the global layers.
        base: the base of the rotary positions in local layers.
        global_base: the base in global layers; None is the same. Gemma 3 uses 10,000 and 1,000,000.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`, or layer is negative, or every or window is less than 1.

    >>> [str(local_global(32, 4, groups=2, window=3, layer=i, every=2).mask) for i in range(4)]
    ['causal & window(3)', 'causal', 'causal & window(3)', 'causal']

    Source: Gemma 3 (arXiv 2503.19786), section 2.1.
    """
    if layer < 0 or every < 1:
        raise ArgumentError(
            f"layer is {layer} and every is {every}; layer must be at least 0, and every at "
            "least 1",
            argument="layer",
        )
    if (layer + 1) % every == 0:
        return _gqa_with_mask(Causal(), dim, heads, groups, head_dim, global_base or base)
    return _gqa_with_mask(Causal() & Window(window), dim, heads, groups, head_dim, base)


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
    """Chunked attention: a token sees the past of its own chunk of C positions, and no other chunk,
    as in Llama 4.

    x [B,T,M] -> [B,T,M]

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.
        chunk: the number of positions C in a chunk.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`, or chunk is less than 1.

    >>> print(chunked(32, 4, groups=2, chunk=3).mask)
    causal & chunk(3)

    Source: Llama 4, as released.
    """
    return _gqa_with_mask(Causal() & Chunk(chunk), dim, heads, groups, head_dim, base)


@variant(
    family="softmax",
    equation="z_i = softmax(q_i k_j^T / sqrt(D) over j <= i or j < n) v_j",
    source="Raffel et al. 2020 (arXiv 1910.10683), section 3.2.1; Liu et al. 2018 (arXiv "
    "1801.10198)",
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
    """Prefix language model: the first n tokens see one another, later tokens see the past.

    x [B,T,M] -> [B,T,M]; with a cache, the whole prefix must be passed in one call.

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.
        prefix: the length n of the prefix, or one for each row of the batch.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`, or prefix is negative.

    >>> print(prefix_lm(32, 4, groups=2, prefix=3).mask)
    causal | prefix(3)

    Source: Raffel et al. 2020 (arXiv 1910.10683), section 3.2.1.
    """
    length = prefix if isinstance(prefix, int) else tuple(prefix)
    return _gqa_with_mask(Causal() | Prefix(length), dim, heads, groups, head_dim, base)


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
    """Packed documents: several texts share one row, and each token sees the past of its own text
    only.

    x [B,T,M] -> [B,T,M]. Positions need not start at 0 in each document, because rotary scores
    depend on differences of positions only.

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.
        bounds: the start of each document, and the end of the last.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`, or bounds decrease.

    >>> from regard.span import Span
    >>> packed(32, 4, groups=2, bounds=(0, 3, 7)).mask.visible(Span(0, 7), Span(0, 7)).tolist()
    [[[1, 2, 3, 1, 2, 3, 4]]]

    Source: Krell et al. 2021 (arXiv 2107.02027), section 3.
    """
    return _gqa_with_mask(Causal() & Document(tuple(bounds)), dim, heads, groups, head_dim, base)


def _gqa_with_mask(
    mask: Mask, dim: int, heads: int, groups: int, head_dim: int | None, base: float
) -> Attention:
    """Build grouped-query attention with rotary positions under a mask."""
    D = resolve_head_dim(dim, heads, head_dim)
    project = separate_qkv(dim, heads, groups, D, Rotary(D, base))
    return Attention(project, output_projection(dim, heads, D), mask=mask)


@variant(
    family="softmax",
    equation="z_t = softmax(q_t k_j^T / sqrt(D) over window and global tokens j) v_j; for a global "
    "token t: softmax(q'_t k'_j^T / sqrt(D) over all tokens j) v'_j",
    source="Beltagy et al. 2020 (arXiv 2004.05150), section 3.1",
    causal=False,
    window=4,
    positions=(0, 6),
)
def longformer(
    dim: int,
    heads: int,
    *,
    window: int,
    positions: tuple[int, ...] = (0,),
    step: int = 1,
    head_dim: int | None = None,
    bias: bool = True,
    is_causal: bool = False,
) -> Longformer:
    """Longformer: a window around every token, and global tokens with separate projections.

    x [B,T,M] -> [B,T,M]

    Args:
        dim, heads, head_dim, bias: as for `mha`.
        window: the total width w of the window, even: w/2 keys on either side; with is_causal, w/2
            keys before the token.
        positions: the positions of the global tokens.
        step: the dilation of the window: a token sees every step-th key, as many keys as without
            dilation.
        is_causal: whether a token sees no later tokens.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `mha`, or window is odd, or step is less than 1.

    >>> print(longformer(32, 4, window=4).mask)
    window(3, ahead=2) | global((0,))

    Source: Beltagy et al. 2020 (arXiv 2004.05150), section 3.1.
    """
    if window < 2 or window % 2:
        raise ArgumentError(
            f"window is {window}; it is the total width and must be even, such as "
            f"{max(2, window - 1)} or {window + 1}",
            argument="window",
        )
    D = resolve_head_dim(dim, heads, head_dim)
    local_project, global_project = (
        separate_qkv(dim, heads, heads, D, bias=bias) for _ in range(2)
    )
    return Longformer(
        local_project,
        global_project,
        output_projection(dim, heads, D, bias=bias),
        positions=positions,
        window=window // 2 + 1,
        ahead=None if is_causal else window // 2,
        step=step,
    )


@variant(
    family="softmax",
    equation="z_i = softmax(q_i k_j^T / sqrt(D) over i - j = 0, s, 2 s, ..., (W - 1) s, and "
    "globals) v_j",
    source="Beltagy et al. 2020 (arXiv 2004.05150), section 3.1, dilated sliding window",
    window=3,
    step=2,
)
def dilated(
    dim: int,
    heads: int,
    *,
    window: int,
    step: int,
    positions: tuple[int, ...] = (),
    head_dim: int | None = None,
) -> Attention:
    """Dilated window: a token sees W past keys at distances 0, s, 2 s, ..., and the global tokens
    of the past.

    x [B,T,M] -> [B,T,M]

    Args:
        dim, heads, head_dim: as for `mha`.
        window: the number of keys W.
        step: the distance s between two of these keys.
        positions: the positions of the global tokens.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `mha`, or window or step is less than 1.

    >>> print(dilated(32, 4, window=3, step=2).mask)
    causal & dilated(3, 2)

    Source: Beltagy et al. 2020 (arXiv 2004.05150), section 3.1.
    """
    mask: Mask = Dilated(window, step)
    return _mha_with_mask(
        Causal() & (mask | Global(positions) if positions else mask), dim, heads, head_dim
    )


@variant(
    family="softmax",
    equation="z_i = softmax(q_i k_j^T / sqrt(D) over window, global and random blocks) v_j",
    source="Zaheer et al. 2020 (arXiv 2007.14062), section 2",
    causal=False,
    block=2,
    blocks=32,
    random=2,
)
def bigbird(
    dim: int,
    heads: int,
    *,
    block: int = 64,
    blocks: int = 64,
    window: int = 3,
    random: int = 3,
    seed: int = 0,
    head_dim: int | None = None,
    bias: bool = False,
    is_causal: bool = False,
) -> Attention:
    """BigBird: the tokens of a block see the neighbouring blocks, the first and the last block, and
    a few random blocks.

    x [B,T,M] -> [B,T,M]; the random blocks are drawn from the seed once, and are the same in
    training and evaluation and at every length.

    Args:
        dim, heads, head_dim, bias: as for `mha`.
        block: the number of positions in a block.
        blocks: the number of blocks; block * blocks is the maximum length.
        window: the number of neighbouring blocks, its own included; odd.
        random: the number of random blocks per block.
        seed: the seed of the random blocks.
        is_causal: whether random blocks are drawn from the past, and a token sees no later tokens.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `mha` and `regard.masks.BigBird`.

    >>> bigbird(32, 4, block=2, blocks=8, is_causal=True).mask.causal
    True

    Source: Zaheer et al. 2020 (arXiv 2007.14062), section 2.
    """
    mask = BigBird(block, blocks, window, random, seed, is_causal)
    return _mha_with_mask(mask, dim, heads, head_dim, bias=bias)


@variant(
    family="softmax",
    equation="z_i = softmax(q_i k_j^T / sqrt(D) over j <= i, i - j < l or (i - j) mod l = 0) v_j",
    source="Child et al. 2019 (arXiv 1904.10509), section 4.2",
    stride=4,
)
def sparse_strided(dim: int, heads: int, *, stride: int, head_dim: int | None = None) -> Attention:
    """Sparse Transformer, strided: a token sees the last l tokens, and every l-th token before
    them.

    x [B,T,M] -> [B,T,M]. Through two layers, a token depends on every earlier token. With l near
    sqrt n, the cost is O(n sqrt n) for n tokens.

    Args:
        dim, heads, head_dim: as for `mha`.
        stride: the stride l.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `mha`, or stride is less than 1.

    >>> print(sparse_strided(32, 4, stride=8).mask)
    causal & strided(8)

    Source: Child et al. 2019 (arXiv 1904.10509), section 4.2.
    """
    return _mha_with_mask(Causal() & Strided(stride), dim, heads, head_dim)


@variant(
    family="softmax",
    equation="z_i = softmax(q_i k_j^T / sqrt(D) over j <= i, j // l = i // l or j mod l >= l - c) "
    "v_j",
    source="Child et al. 2019 (arXiv 1904.10509), section 4.2",
    stride=4,
)
def sparse_fixed(
    dim: int, heads: int, *, stride: int, columns: int = 1, head_dim: int | None = None
) -> Attention:
    """Sparse Transformer, fixed: a token sees its own block of l tokens, and the last c tokens of
    every earlier block.

    x [B,T,M] -> [B,T,M]

    Args:
        dim, heads, head_dim: as for `mha`.
        stride: the block size l.
        columns: the number c of last tokens of each earlier block.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `mha`, or stride is less than 1, or columns is not 1 to stride.

    >>> print(sparse_fixed(32, 4, stride=8).mask)
    causal & strided(8, fixed=1)

    Source: Child et al. 2019 (arXiv 1904.10509), section 4.2.
    """
    return _mha_with_mask(Causal() & Strided(stride, columns), dim, heads, head_dim)


def _mha_with_mask(
    mask: Mask, dim: int, heads: int, head_dim: int | None, *, bias: bool = False
) -> Attention:
    """Build multi-head attention without positions under a mask."""
    D = resolve_head_dim(dim, heads, head_dim)
    return Attention(
        separate_qkv(dim, heads, heads, D, bias=bias),
        output_projection(dim, heads, D, bias=bias),
        mask=mask,
    )
