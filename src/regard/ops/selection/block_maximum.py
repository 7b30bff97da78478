"""The choice of blocks by their best key (MiniMax-M3's sparse attention): a small index head for
each key/value head scores every key, and the largest score of a block is the score of the block.
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
    block_layout,
    in_query_chunks,
    select_blocks,
    without_gradient,
)
from regard.ops.softmax.call import default_query_positions
from regard.span import Positions, Span


def block_maximum_mask(
    q: Float[Tensor, "B J T d"],
    k: Float[Tensor, "B 1 S d"],
    *,
    heads: int,
    size: int,
    topk: int,
    local: int = 1,
    q_positions: Positions | None = None,
    k_positions: Positions | None = None,
    max_bytes: int = MAX_CHUNK_BYTES,
) -> Mask:
    """Select the blocks that each query attends to, as a mask for `regard.attend`.

    The score of block i for index head j is s_ji = max over the keys s <= t of block i of
    q_jt . k_s. A query attends causally to its own block and the local - 1 blocks before it, and
    to the blocks with the largest scores, topk in all.

    Index head j chooses for the query heads j H/J to (j + 1) H/J - 1. No gradient flows through the
    choice.

    Args:
        q: index queries `[B, J, T, d]`.
        k: one index key per token `[B, 1, S, d]`.
        heads: the number of query heads H, a multiple of J.
        size: the number of positions per block; block i contains the positions i size to
            (i + 1) size - 1.
        topk: the number of blocks per query, including the local ones; if more are local, all of
            them are read.
        local: the number of last blocks that every query reads, including its own.
        q_positions: the positions of the queries, as in `regard.attend`.
        k_positions: the positions of the keys, as in `regard.attend`.
        max_bytes: the memory in bytes that the scores of a chunk of queries may need; no result
            depends on it.

    Returns:
        A mask that selects blocks for each query and query head.

    Raises:
        ArgumentError, ArgumentTypeError: size, topk or local is below 1, J does not divide heads,
            or q, k and positions do not fit together.

    >>> q, k = torch.randn(1, 2, 8, 4), torch.randn(1, 1, 8, 4)
    >>> mask = block_maximum_mask(q, k, heads=4, size=2, topk=1)
    >>> print(mask, mask.visible(Span(0, 8), Span(0, 8))[0, 0].tolist())
    selected(1x4x8x4, 2) & causal [1, 2, 1, 2, 1, 2, 1, 2]

    Source: MiniMax 2026 (MiniMax-M3), by its code in transformers, `MiniMaxM3VLIndexer`.
    """
    check_block_sizes(size, topk, local)
    check_query_key(q, k)
    if k.shape[1] != 1 or heads < 1 or heads % q.shape[1]:
        raise ArgumentError(
            f"k has {k.shape[1]} index heads and q has {q.shape[1]} for {heads} query heads; k "
            "must have 1, and the index heads of q must divide the query heads"
        )
    keys = Span(0, k.shape[2]) if k_positions is None else k_positions
    check_positions("k_positions", keys, q.shape[0], k.shape[2])
    q_positions = default_query_positions(keys, q.shape[2]) if q_positions is None else q_positions
    check_positions("q_positions", q_positions, q.shape[0], q.shape[2])
    blocks = block_layout(keys, size, q.device)
    own = blocks.block_of(q_positions)[:, None, :, None]  # [B,1,T,1]
    number = blocks.block_numbers[:, None, None]
    allowed = (number <= own) & (blocks.token_counts > 0)[:, None, None]
    forced = allowed & (number > own - local)
    B, J, T, _ = q.shape
    L = blocks.blocks * size

    def choose(rows: slice) -> Tensor:
        scores = queries[:, :, rows] @ index_keys.mT  # [B,J,t,L]
        # the keys after the query are in its own block, which is forced: no future key is asked
        scores = scores.masked_fill(~blocks.occupied[:, None, None], -torch.inf)
        best = torch.unflatten(scores, 3, (blocks.blocks, size)).amax(4)
        return select_blocks(best, forced[:, :, rows], allowed[:, :, rows], topk)

    with without_gradient(q.device):
        dtype = torch.promote_types(q.dtype, torch.float32)
        queries = q.detach().to(dtype)
        index_keys = blocks.to_position_order(k.detach().to(dtype))
        chosen = in_query_chunks(choose, T, B * J * L * 16, max_bytes)
    chosen = chosen.repeat_interleave(heads // J, 1)
    return Selected(chosen, size, blocks.first) & Causal()


def check_block_sizes(size: int, topk: int, local: int) -> None:
    """Check that block size, topk and the number of local blocks are at least 1."""
    if min(size, topk, local) < 1:
        raise ArgumentError(
            f"MSA with blocks of {size}, topk {topk} and {local} local blocks: each must be 1 or "
            "more (the local blocks count among the topk)"
        )
