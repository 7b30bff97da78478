"""Selected attention: native sparse attention, mixture of block attention, and DeepSeek's top-k
indexer.
"""

from __future__ import annotations

from torch import nn

from regard.nn.projections import Heads
from regard.nn.selected import NSA, Compress, Indexer, MoBA, SelectedAttention
from regard.nn.variants.parts import head_size, join, separate
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
    """Native sparse attention: compressed tokens, the blocks they point at, and a window, under
    gates.

    x [B,T,M] -> [B,T,M]; a cache keeps 6 G D numbers per token, of which a step reads S/d + n l' +
    w tokens.

    Args:
        dim, heads: the model dim M and the query heads H.
        groups: the key/value heads G; G divides H. The heads of a group share their selection.
        head_dim: D; None is M / H.
        base: of the rotary positions.
        compress, stride, select, count, window: `NSABlocks`: l, d, l', n and w.

    Raises:
        ArgumentError: as `gqa` and `NSABlocks`.

    >>> import torch
    >>> layer = nsa(32, 4, groups=2, compress=4, stride=2, select=4, count=4, window=6)
    >>> layer(torch.zeros(1, 9, 32)).shape
    torch.Size([1, 9, 32])

    Source: Yuan et al. 2025 (arXiv 2502.11089), section 3.
    """
    D = head_size(dim, heads, head_dim)
    sizes = NSABlocks(compress, stride, select, count, window)
    rotary = Rotary(D, base)
    return NSA(
        Heads(dim, heads, D, rotary),
        [Heads(dim, groups, D, *steps) for steps in ((), (rotary,), (rotary,))],
        [Heads(dim, groups, D) for _ in range(3)],
        compress_key=Compress(compress, D),
        compress_value=Compress(compress, D),
        key_transform=rotary,
        gate=nn.Linear(dim, 3 * heads),
        output=join(dim, heads, D),
        sizes=sizes,
    )


@variant(
    family="selected",
    equation="z = softmax(q K[I]^T / sqrt(D)) V[I], I: the own block and the topk - 1 past ones "
    "with the largest q . mean(K)",
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
    """Mixture of block attention: each query head reads its own block and the past blocks that fit
    it best.

    x [B,T,M] -> [B,T,M]; a cache keeps 2 G D numbers per token, of which a step reads at most topk
    blocks.

    Args:
        dim, heads, groups, head_dim, base: as `gqa`.
        block: positions per block.
        topk: blocks per query, the own one included; 1 is the own block alone.

    Raises:
        ArgumentError: as `gqa`; block or topk is below 1.

    >>> moba(32, 4, groups=2, block=4, topk=2).describe(100).kv_per_token.value
    32

    Source: Lu et al. 2025 (arXiv 2502.13189), section 2.2.
    """
    D = head_size(dim, heads, head_dim)
    project = separate(dim, heads, groups, D, Rotary(D, base))
    return SelectedAttention(project, MoBA(block, topk), join(dim, heads, D))


@variant(
    family="selected",
    equation="z = softmax(q K[I]^T / sqrt(D)) V[I], I: the topk keys with the largest sum_j w_j "
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
    """Attention to the keys that a lightning indexer chose: small heads of its own score every key,
    all heads read the best.

    x [B,T,M] -> [B,T,M]; a cache keeps 2 G D + d numbers per token; here beside grouped heads, in
    DeepSeek's models beside a latent (`SelectedAttention` takes any projection).

    Args:
        dim, heads, groups, head_dim, base: as `gqa`.
        topk: keys per query.
        index_heads, index_dim: the indexer's heads J and their dim d.
        rotary_dim: how many of its d dims turn with the position, in halves; the others do not.

    Raises:
        ArgumentError: as `gqa`; topk or a size is below 1, or rotary_dim is odd or larger than
            index_dim.

    >>> layer = dsa(32, 4, groups=2, topk=4, index_heads=3, index_dim=8, rotary_dim=4)
    >>> layer.describe(100).kv_per_token
    Quantity(value=40, formula='16 + 16 + 8')

    Source: DeepSeek-AI 2025 (DeepSeek-V3.2-Exp), section 2.
    """
    D = head_size(dim, heads, head_dim)
    project = separate(dim, heads, groups, D, Rotary(D, base))
    rotary = Rotary(index_dim, base, rotary_dim=rotary_dim)
    indexer = Indexer(
        Heads(dim, index_heads, index_dim, rotary),
        Heads(dim, 1, index_dim, rotary, flat=nn.LayerNorm(index_dim, eps=1e-6)),
        nn.Linear(dim, index_heads, bias=False),
        topk=topk,
    )
    return SelectedAttention(project, indexer, join(dim, heads, D))
