"""Mixture of block attention (MoBA): each query attends to its own block and to the earlier
blocks whose mean key matches it best.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from regard.argument_checks import check_positions, check_query_key
from regard.errors import ArgumentError
from regard.masks import Causal, Mask, Selected
from regard.ops.selection.position_blocks import (
    MAX_CHUNK_BYTES,
    BlockLayout,
    block_layout,
    head_scores,
    own_and_best_past_blocks,
    without_gradient,
)
from regard.ops.softmax.call import default_query_positions
from regard.span import Positions, Span


def moba_mask(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S D"],
    *,
    size: int,
    topk: int,
    q_positions: Positions | None = None,
    k_positions: Positions | None = None,
    max_bytes: int = MAX_CHUNK_BYTES,
) -> Mask:
    """Select the blocks that each query and query head attends to, as a mask for `regard.attend`.

    The score of block i is s_i = q . mean(keys of block i). A query attends causally to its own
    block, and to the topk - 1 earlier blocks with the largest scores.

    The query's own block counts towards topk: topk = 1 selects it alone. No gradient flows through
    the choice.

    Args:
        q: queries `[B, H, T, D]`, as the attention uses them (after rotary embedding).
        k: keys `[B, G, S, D]`, as the attention uses them.
        size: the number of positions per block; block i contains the positions i size to
            (i + 1) size - 1.
        topk: the number of blocks per query, including its own.
        q_positions: the positions of the queries, as in `regard.attend`.
        k_positions: the positions of the keys, as in `regard.attend`.
        max_bytes: the memory in bytes that the scores of a chunk of queries may need; no result
            depends on it.

    Returns:
        A mask that selects blocks for each query and query head.

    Raises:
        ArgumentError, ArgumentTypeError: size or topk is below 1, or q, k and positions do not fit
            together.

    >>> import regard
    >>> q = k = torch.randn(1, 1, 8, 4)
    >>> mask = moba_mask(q, k, size=2, topk=1)
    >>> print(mask, mask.visible(Span(0, 8), Span(0, 8)).tolist())
    selected(1x1x8x4, 2) & causal [[[1, 2, 1, 2, 1, 2, 1, 2]]]

    Source: Lu et al. 2025 (arXiv 2502.13189), equations 5 and 6, and "causality" in section 2.2.
    """
    check_moba_sizes(size, topk)
    check_query_key(q, k)
    keys = Span(0, k.shape[2]) if k_positions is None else k_positions
    check_positions("k_positions", keys, q.shape[0], k.shape[2])
    q_positions = default_query_positions(keys, q.shape[2]) if q_positions is None else q_positions
    check_positions("q_positions", q_positions, q.shape[0], q.shape[2])
    blocks = block_layout(keys, size, q.device)
    with without_gradient(q.device):
        mean_keys = block_mean_keys(k.detach(), blocks)
        chosen = own_and_best_past_blocks(
            lambda rows: head_scores(q.detach()[:, :, rows], mean_keys),
            blocks,
            q_positions,
            topk,
            (q.shape[0], q.shape[1], q.shape[2]),
            max_bytes,
        )
    return Selected(chosen, size, blocks.first) & Causal()


def check_moba_sizes(size: int, topk: int) -> None:
    """Check that block size and topk are at least 1."""
    if size < 1 or topk < 1:
        raise ArgumentError(
            f"MoBA with blocks of {size} and topk {topk}: both must be 1 or more (the own block "
            "counts among the topk)"
        )


def block_mean_keys(k: Float[Tensor, "B G S D"], blocks: BlockLayout) -> Float[Tensor, "B G N D"]:
    """Return the mean key of each block `[B, G, N, D]` over its tokens, in fp32 or better; 0
    for an empty block.
    """
    dtype = torch.promote_types(k.dtype, torch.float32)
    counts = blocks.token_counts.clamp(min=1)[:, None, :, None]
    return blocks.to_blocks(k).sum(3, dtype=dtype) / counts
