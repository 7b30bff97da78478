"""Constructors of attention to selected keys: native sparse attention, mixture of block attention,
Quest, MiniMax's block maximum, and DeepSeek sparse attention.
"""

from __future__ import annotations

from torch import nn

from regard.argument_checks import resolve_head_dim
from regard.nn.norms import RMSNorm
from regard.nn.nsa import NSA, BlockCompressor
from regard.nn.projections import HeadProjection
from regard.nn.selected_attention import (
    BlockMaximum,
    Indexer,
    MoBA,
    Quest,
    QuestAttention,
    SelectedAttention,
)
from regard.nn.variants.projections import output_projection, separate_qkv
from regard.nn.variants.registry import variant
from regard.ops.selection.nsa import NSABlocks
from regard.positions import Rotary


@variant(
    family="selected",
    equation="out = W_o sum_b sigmoid(g_b(x)) softmax(q K_b^T / sqrt(D)) V_b, b: compressed, "
    "selected blocks, window",
    source="Yuan et al. 2025 (arXiv 2502.11089), section 3",
    groups=2,
    compress=4,
    stride=2,
    select=4,
    count=4,
    window=6,
)
def nsa(
    dim: int,
    heads: int,
    *,
    groups: int,
    head_dim: int | None = None,
    base: float = 10000.0,
    compress: int = 32,
    stride: int = 16,
    select: int = 64,
    count: int = 16,
    window: int = 512,
) -> NSA:
    """Native sparse attention: a gated sum of attention to compressed tokens, to selected blocks
    and to a window.

    x [B,T,M] -> [B,T,M]; a cache stores 6 G D values per token, and a decoding step reads S/d + n
    l' + w tokens.

    Args:
        dim: the model dim M.
        heads: the query heads H.
        groups: the key/value heads G, which divide H. The heads of a group share their selection.
        head_dim: the head dim D; None is M / H.
        base: the base of the rotary positions.
        compress: the number of tokens l in a compressed block.
        stride: the distance d between the starts of compressed blocks.
        select: the number of tokens l' in a selected block.
        count: the number of selected blocks n.
        window: the size w of the window.

    Returns:
        The module.

    Raises:
        ArgumentError: a size is less than 1, groups does not divide heads, or the block sizes do
            not fit one another (`NSABlocks`).

    >>> import torch
    >>> layer = nsa(32, 4, groups=2, compress=4, stride=2, select=4, count=4, window=6)
    >>> layer(torch.zeros(1, 9, 32)).shape
    torch.Size([1, 9, 32])

    Source: Yuan et al. 2025 (arXiv 2502.11089), section 3.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    sizes = NSABlocks(compress, stride, select, count, window)
    rotary = Rotary(D, base)
    return NSA(
        HeadProjection(dim, heads, D, rotary),
        [HeadProjection(dim, groups, D, *steps) for steps in ((), (rotary,), (rotary,))],
        [HeadProjection(dim, groups, D) for _ in range(3)],
        compress_key=BlockCompressor(compress, D),
        compress_value=BlockCompressor(compress, D),
        key_transform=rotary,
        gate=nn.Linear(dim, 3 * heads),
        output=output_projection(dim, heads, D),
        sizes=sizes,
    )


@variant(
    family="selected",
    equation="z = softmax(q K[I]^T / sqrt(D)) V[I]; I = the query's block and the topk - 1 earlier "
    "blocks with the largest q . mean(K of the block)",
    source="Lu et al. 2025 (arXiv 2502.13189), section 2.2",
    groups=2,
    block=4,
    topk=2,
)
def moba(
    dim: int,
    heads: int,
    *,
    groups: int,
    head_dim: int | None = None,
    base: float = 10000.0,
    block: int = 512,
    topk: int = 3,
) -> SelectedAttention:
    """Mixture of block attention: each query head reads its own block and the past blocks that
    match it best.

    x [B,T,M] -> [B,T,M]; a cache stores 2 G D values per token, and a decoding step reads at most
    topk blocks.

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.
        block: the number of positions in a block.
        topk: the number of blocks per query, its own included; 1 is its own block only.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`, or block or topk is below 1.

    >>> moba(32, 4, groups=2, block=4, topk=2).describe(100).kv_per_token.value
    32

    Source: Lu et al. 2025 (arXiv 2502.13189), section 2.2.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    project = separate_qkv(dim, heads, groups, D, Rotary(D, base))
    return SelectedAttention(project, MoBA(block, topk), output_projection(dim, heads, D))


@variant(
    family="selected",
    equation="z = softmax(q K[I]^T / sqrt(D)) V[I]; I = the query's page and the topk - 1 earlier "
    "pages with the largest sum_d max(q_d low_d, q_d high_d)",
    source="Tang et al. 2024 (arXiv 2406.10774), section 3.3",
    groups=2,
    page=4,
    topk=2,
)
def quest(
    dim: int,
    heads: int,
    *,
    groups: int,
    head_dim: int | None = None,
    base: float = 10000.0,
    page: int = 16,
    topk: int = 128,
) -> QuestAttention:
    """Quest: each query head reads its own page of keys and the past pages whose keys could give it
    the largest score, by the bounds of each channel.

    x [B,T,M] -> [B,T,M]; a cache stores 2 G D values per token and 2 G D per page, and a decoding
    step reads all bounds and at most topk pages per query head. A page that is left out may hold
    the best key, because a bound may be larger than every score of its page.

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.
        page: the number of positions in a page.
        topk: the number of pages per query, its own included; 1 is its own page only.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`, or page or topk is below 1.

    >>> quest(32, 4, groups=2, page=4, topk=2).spec.read(100).tokens
    12

    Source: Tang et al. 2024 (arXiv 2406.10774), section 3.3.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    project = separate_qkv(dim, heads, groups, D, Rotary(D, base))
    return QuestAttention(project, Quest(page, topk), output_projection(dim, heads, D))


@variant(
    family="selected",
    equation="z = softmax(q K[I]^T / sqrt(D)) V[I]; I = the query's block and the topk - 1 earlier "
    "blocks with the largest max(q' . k')",
    source="MiniMax 2026 (MiniMax-M3), `MiniMaxM3VLIndexer` of transformers",
    groups=2,
    block=4,
    topk=2,
    index_dim=8,
    rotary_dim=4,
)
def msa(
    dim: int,
    heads: int,
    *,
    groups: int,
    head_dim: int | None = None,
    base: float = 10000.0,
    block: int = 128,
    topk: int = 16,
    local: int = 1,
    index_dim: int = 128,
    rotary_dim: int | None = None,
) -> SelectedAttention:
    """MiniMax sparse attention: one small index head for each key/value head scores every key, and
    its query heads read the blocks with the best keys.

    x [B,T,M] -> [B,T,M]; a cache stores 2 G D + d values per token, and a decoding step reads all
    index keys and at most topk blocks. A block with many good keys and no best one is left out.

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.
        block: the number of positions in a block.
        topk: the number of blocks per query, the local ones included.
        local: the number of last blocks that every query reads, its own included.
        index_dim: the size d of an index head.
        rotary_dim: how many of the d dims have rotary positions, in the layout "half"; None is all.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`; or a size is below 1, or rotary_dim is odd or larger than
            index_dim.

    >>> layer = msa(32, 4, groups=2, block=4, topk=2, index_dim=8, rotary_dim=4)
    >>> layer.describe(100).kv_per_token
    Quantity(value=40, formula='16 + 16 + 8')

    Source: MiniMax 2026 (MiniMax-M3), `MiniMaxM3VLIndexer` of transformers; its attention also has
    QK-norm.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    project = separate_qkv(dim, heads, groups, D, Rotary(D, base))
    rotary = Rotary(index_dim, base, rotary_dim=rotary_dim)
    selector = BlockMaximum(
        HeadProjection(dim, groups, index_dim, RMSNorm(index_dim), rotary),
        HeadProjection(dim, 1, index_dim, RMSNorm(index_dim), rotary),
        heads=heads,
        size=block,
        topk=topk,
        local=local,
    )
    return SelectedAttention(project, selector, output_projection(dim, heads, D))


@variant(
    family="selected",
    equation="z = softmax(q K[I]^T / sqrt(D)) V[I]; I = the topk keys with the largest sum_j w_j "
    "relu(q'_j . k')",
    source="DeepSeek-AI 2025 (DeepSeek-V3.2-Exp), section 2",
    groups=2,
    topk=4,
    index_heads=3,
    index_dim=8,
    rotary_dim=4,
)
def dsa(
    dim: int,
    heads: int,
    *,
    groups: int,
    head_dim: int | None = None,
    base: float = 10000.0,
    topk: int = 2048,
    index_heads: int = 64,
    index_dim: int = 128,
    rotary_dim: int = 64,
) -> SelectedAttention:
    """DeepSeek sparse attention: the small heads of a lightning indexer score every key, and all
    heads read the keys with the highest scores.

    x [B,T,M] -> [B,T,M]; a cache stores 2 G D + d values per token. This constructor combines the
    indexer with grouped-query attention. DeepSeek's models combine it with MLA; for that, pass a
    `LatentProjection` to `SelectedAttention`.

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.
        topk: the number of keys per query.
        index_heads: the number of index heads J.
        index_dim: the size d of an index head.
        rotary_dim: how many of the d dims have rotary positions, in the layout "half".

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`; or topk or a size is below 1, or rotary_dim is odd or larger
            than index_dim.

    >>> layer = dsa(32, 4, groups=2, topk=4, index_heads=3, index_dim=8, rotary_dim=4)
    >>> layer.describe(100).kv_per_token
    Quantity(value=40, formula='16 + 16 + 8')

    Source: DeepSeek-AI 2025 (DeepSeek-V3.2-Exp), section 2.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    project = separate_qkv(dim, heads, groups, D, Rotary(D, base))
    rotary = Rotary(index_dim, base, rotary_dim=rotary_dim)
    indexer = Indexer(
        HeadProjection(dim, index_heads, index_dim, rotary),
        HeadProjection(dim, 1, index_dim, rotary, flat=nn.LayerNorm(index_dim, eps=1e-6)),
        nn.Linear(dim, index_heads, bias=False),
        topk=topk,
    )
    return SelectedAttention(project, indexer, output_projection(dim, heads, D))
