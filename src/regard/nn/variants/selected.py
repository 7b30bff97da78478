"""Attention to selected keys: native sparse attention, mixture of block attention, Quest, MiniMax's
block maximum, DeepSeek sparse attention, and indexers of pooled keys.
"""

from __future__ import annotations

from typing import Unpack

from torch import nn

from regard.nn.attention.compressed import BlockPooling
from regard.nn.attention.nsa import NSA, BlockCompressor
from regard.nn.attention.selected import (
    BlockMaximum,
    Indexer,
    MoBA,
    PooledIndexer,
    Quest,
    QuestAttention,
    SelectedAttention,
)
from regard.nn.blocks.norms import RMSNorm
from regard.nn.projections.heads import HeadProjection
from regard.nn.variants.options import Rotated
from regard.nn.variants.projections import Start
from regard.nn.variants.registry import variant
from regard.ops.selection.nsa import NSABlocks
from regard.positions import Rotary


@variant(
    "selection",
    "out = W_o sum_b sigmoid(g_b(x)) softmax(q K_b^T / sqrt(D)) V_b, b: compressed, selected "
    "blocks, window",
    "Yuan et al. 2025 (arXiv 2502.11089), section 3",
    users="no released model; the paper trained one of 27B parameters",
    choose="a model is trained from scratch for very long contexts on GPUs",
    avoid="a trained model is at hand: take dsa; or there is only a CPU",
    where="b: one of the three branches; g_b: learned gate of a branch",
    example={"compress": 4, "stride": 2, "select": 4, "count": 4, "window": 6},
    published={"groups": 4},
)
def nsa(
    dim: int,
    heads: int,
    *,
    compress: int = 32,
    stride: int = 16,
    select: int = 64,
    count: int = 16,
    window: int = 512,
    **options: Unpack[Rotated],
) -> NSA:
    """Native sparse attention: a gated sum of attention to compressed tokens, to selected blocks
    and to a window.

    A cache stores 6 G D values per token, and a decoding step reads S/d + n l' + w tokens.

    Args:
        compress: the number of tokens l in a compressed block.
        stride: the distance d between the starts of compressed blocks.
        select: the number of tokens l' in a selected block.
        count: the number of selected blocks n.
        window: the size w of the window.
        groups: the key/value heads G, which divide H. The heads of a group share their selection.
    """
    start = Start(dim, heads, **options)
    sizes = NSABlocks(compress, stride, select, count, window)
    rotary = start.rotary[0]
    return NSA(
        start.q(rotary),
        [start.kv(), start.kv(rotary), start.kv(rotary)],
        [start.kv() for _ in range(3)],
        compress_key=BlockCompressor(compress, start.D),
        compress_value=BlockCompressor(compress, start.D),
        key_transform=rotary,
        gate=nn.Linear(dim, 3 * heads),
        output=start.output(),
        sizes=sizes,
    )


@variant(
    "selection",
    "z = softmax(q K[I]^T / sqrt(D)) V[I]; I = the query's block and the topk - 1 earlier blocks "
    "with the largest q . mean(K of the block)",
    "Lu et al. 2025 (arXiv 2502.13189), section 2.2",
    users="the long-context service of Kimi",
    choose="a trained model must read longer contexts, with full attention as the way back",
    avoid="the answer is spread over many blocks",
    example={"block": 4, "topk": 2},
)
def moba(
    dim: int, heads: int, *, block: int = 512, topk: int = 3, **options: Unpack[Rotated]
) -> SelectedAttention:
    """Mixture of block attention: each query head reads its own block and the past blocks that
    match it best.

    A cache stores 2 G D values per token, and a decoding step reads at most topk blocks.

    Args:
        block: the number of positions in a block.
        topk: the number of blocks per query, its own included; 1 is its own block only.
    """
    start = Start(dim, heads, **options)
    return SelectedAttention(start.qkv(), MoBA(block, topk), start.output())


@variant(
    "selection",
    "z = softmax(q K[I]^T / sqrt(D)) V[I]; I = the query's page and the topk - 1 earlier pages "
    "with the largest sum_d max(q_d low_d, q_d high_d)",
    "Tang et al. 2024 (arXiv 2406.10774), section 3.3",
    users="none is trained with it; a way to serve models that were trained without it",
    choose="a trained model decodes over a long context, and reading all keys is the limit",
    avoid="the cache is the limit: it keeps all keys, and bounds too",
    where=(
        "high_d: largest number of channel d in the keys of a page; low_d: smallest number of "
        "channel d in the keys of a page; q_d: number of channel d of the query; sum_d: sum over "
        "the channels"
    ),
    example={"page": 4, "topk": 2},
)
def quest(
    dim: int, heads: int, *, page: int = 16, topk: int = 128, **options: Unpack[Rotated]
) -> QuestAttention:
    """Quest: each query head reads its own page of keys and the past pages whose keys could give it
    the largest score, by the bounds of each channel.

    A cache stores 2 G D values per token and 2 G D per page, and a decoding step reads all bounds
    and at most topk pages per query head. A page that is left out may hold the best key, because a
    bound may be larger than every score of its page.

    Args:
        page: the number of positions in a page.
        topk: the number of pages per query, its own included; 1 is its own page only.
    """
    start = Start(dim, heads, **options)
    return QuestAttention(start.qkv(), Quest(page, topk), start.output())


@variant(
    "selection",
    "z = softmax(q K[I]^T / sqrt(D)) V[I]; I = the query's block and the topk - 1 earlier blocks "
    "with the largest max(q' . k')",
    "MiniMax 2026 (MiniMax-M3), `MiniMaxM3VLIndexer` of transformers; its attention also has "
    "QK-norm",
    users="MiniMax-M3, in most layers",
    choose="a model is trained for a long context, and single keys decide which blocks matter",
    avoid="a model was trained without it: its index heads must be trained first",
    where="k': index key of a token in the block; q': query of the index head of a key/value head",
    example={"block": 4, "topk": 2, "index_dim": 8, "rotary_dim": 4},
)
def msa(
    dim: int,
    heads: int,
    *,
    block: int = 128,
    topk: int = 16,
    local: int = 1,
    index_dim: int = 128,
    rotary_dim: int | None = None,
    **options: Unpack[Rotated],
) -> SelectedAttention:
    """MiniMax sparse attention: one small index head for each key/value head scores every key, and
    its query heads read the blocks with the best keys.

    A cache stores 2 G D + d values per token, and a decoding step reads all index keys and at most
    topk blocks. A block with many good keys and no best one is left out.

    Args:
        block: the number of positions in a block.
        topk: the number of blocks per query, the local ones included.
        local: the number of last blocks that every query reads, its own included.
        index_dim: the size d of an index head.
        rotary_dim: how many of the d dims have rotary positions, in the layout "half"; None is all.
    """
    start = Start(dim, heads, **options)
    project = start.qkv()
    rotary = Rotary(index_dim, options["base"], rotary_dim=rotary_dim)
    selector = BlockMaximum(
        HeadProjection(dim, start.groups, index_dim, RMSNorm(index_dim), rotary),
        HeadProjection(dim, 1, index_dim, RMSNorm(index_dim), rotary),
        heads=heads,
        size=block,
        topk=topk,
        local=local,
    )
    return SelectedAttention(project, selector, start.output())


@variant(
    "selection",
    "z = softmax(q K[I]^T / sqrt(D)) V[I]; I = the topk keys with the largest sum_j w_j relu(q'_j "
    ". k')",
    "DeepSeek-AI 2025 (DeepSeek-V3.2-Exp), section 2",
    users="DeepSeek-V3.2",
    choose="a trained model with a long context must compute less for each token",
    avoid="the cache is the limit: it keeps all keys, and those of the indexer too",
    where=(
        "k': key of the indexer; q': queries of the indexer; w: learned weight of an indexer head"
    ),
    example={"topk": 4, "index_heads": 3, "index_dim": 8, "rotary_dim": 4},
)
def dsa(
    dim: int,
    heads: int,
    *,
    topk: int = 2048,
    index_heads: int = 64,
    index_dim: int = 128,
    rotary_dim: int = 64,
    **options: Unpack[Rotated],
) -> SelectedAttention:
    """DeepSeek sparse attention: the small heads of a lightning indexer score every key, and all
    heads read the keys with the highest scores.

    A cache stores 2 G D + d values per token. This constructor combines the indexer with
    grouped-query attention. DeepSeek's models combine it with MLA; for that, pass a
    `LatentProjection` to `SelectedAttention`.

    Args:
        topk: the number of keys per query.
        index_heads: the number of index heads J.
        index_dim: the size d of an index head.
        rotary_dim: how many of the d dims have rotary positions, in the layout "half".
    """
    start = Start(dim, heads, **options)
    project = start.qkv()
    rotary = Rotary(index_dim, options["base"], rotary_dim=rotary_dim)
    indexer = Indexer(
        HeadProjection(dim, index_heads, index_dim, rotary),
        HeadProjection(dim, 1, index_dim, rotary, flat=nn.LayerNorm(index_dim, eps=1e-6)),
        nn.Linear(dim, index_heads, bias=False),
        topk=topk,
    )
    return SelectedAttention(project, indexer, start.output())


@variant(
    "selection",
    "z = softmax(q K[I]^T / sqrt(D)) V[I]; I = the tokens of the topk whole blocks with the "
    "largest sum_j relu(q'_j . R norm(mean(k'))), and the tokens after the last whole block",
    "Qwen Team 2026 (Qwen4-Exp), `Qwen4ExpTextQSAIndexer` of transformers; its attention also has "
    "QK-norm and an output gate",
    users="Qwen4-Exp, in one of four layers",
    choose="a model is trained for a long context, and an indexer of all keys costs too much",
    avoid="a model was trained without it: its index heads must be trained first",
    where=(
        "j: number of an indexer head; k': index keys of the tokens of a block; q': queries of the "
        "indexer; R: rotation to the first position of the block"
    ),
    example={"block": 2, "topk": 3, "index_heads": 3, "index_dim": 8, "rotary_dim": 4},
)
def qsa(
    dim: int,
    heads: int,
    *,
    block: int = 4,
    topk: int = 512,
    index_heads: int = 4,
    index_dim: int = 128,
    rotary_dim: int | None = None,
    **options: Unpack[Rotated],
) -> SelectedAttention:
    """Qwen sparse attention: the mean of the index keys of m tokens stands for them, and all heads
    read the tokens of the best blocks, and the newest ones.

    A cache stores 2 G D + d values per token, and a decoding step reads all index keys and at most
    topk m + m - 1 tokens. A mean may hide the one key that matters.

    Args:
        block: the number m of positions in a block.
        topk: the number of whole blocks per query.
        index_heads: the number of index heads J.
        index_dim: the size d of an index head.
        rotary_dim: how many of the d dims have rotary positions, in the layout "half"; None is all.
    """
    start = Start(dim, heads, **options)
    rotary = Rotary(index_dim, options["base"], rotary_dim=rotary_dim)
    indexer = PooledIndexer(
        HeadProjection(dim, index_heads, index_dim, RMSNorm(index_dim), rotary),
        BlockPooling(dim, index_dim, block, RMSNorm(index_dim), rotary, gated=False),
        None,
        topk=topk,
    )
    return SelectedAttention(start.qkv(), indexer, start.output())


@variant(
    "selection",
    "z = softmax(q K[I]^T / sqrt(D)) V[I]; I = the tokens of the topk whole blocks with the "
    "largest sum_j w_j relu(q'_j . e_i), and the tokens after the last whole block; e_i = sum_t "
    "softmax_t(W_z x_t + b_t) * k'_t",
    "Zhipu AI 2026 (GLM-5.3-Flash), `Glm5NextTextIndexer` of transformers; its attention is MLA",
    users="GLM-5.3-Flash, in one of four layers",
    choose="a model is trained for a long context, and an indexer of all keys costs too much",
    avoid="the cache is the limit: it keeps all keys, and two vectors of the indexer",
    where=(
        "b_t: learned bias of a place in the block; e: pooled key of a block; i: number of a "
        "block; j: number of an indexer head; k': index keys; q': queries of the indexer; w: "
        "learned weight of an indexer head; W_z: learned matrix of the gates"
    ),
    example={"block": 2, "topk": 3, "index_heads": 3, "index_dim": 8},
)
def dsa_pools(
    dim: int,
    heads: int,
    *,
    block: int = 4,
    topk: int = 512,
    index_heads: int = 32,
    index_dim: int = 128,
    **options: Unpack[Rotated],
) -> SelectedAttention:
    """DeepSeek sparse attention on pools: the index keys of m tokens are pooled with a weight for
    each channel, and all heads read the tokens of the best pools, and the newest ones.

    A cache stores 2 G D + 2 d values per token, and a decoding step reads what index keys are
    pooled from and at most topk m + m - 1 tokens.

    Args:
        block: the number m of positions in a pool.
        topk: the number of whole pools per query.
        index_heads: the number of index heads J.
        index_dim: the size d of an index head.
    """
    start = Start(dim, heads, **options)
    indexer = PooledIndexer(
        HeadProjection(dim, index_heads, index_dim),
        BlockPooling(dim, index_dim, block, norm=nn.LayerNorm(index_dim, eps=1e-6)),
        nn.Linear(dim, index_heads, bias=False),
        topk=topk,
    )
    return SelectedAttention(start.qkv(), indexer, start.output())
