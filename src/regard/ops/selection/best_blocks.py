"""The choice of blocks by a score of each: MoBA, Quest, MSA of MiniMax-M3, QSA of Qwen4-Exp."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.argument_checks import check_positions, check_query_key
from regard.errors import ArgumentError
from regard.masks import Causal, Mask, Selected
from regard.ops.selection.lightning_indexer import (
    check_index_sizes,
    check_topk,
    index_scores,
)
from regard.ops.selection.position_blocks import (
    MAX_CHUNK_BYTES,
    BlockLayout,
    block_layout,
    head_scores,
    in_query_chunks,
    select_blocks,
    top_k_mask,
    without_gradient,
)
from regard.ops.shared_arguments import with_shared_arguments
from regard.ops.softmax.call import default_query_positions
from regard.span import Positions, Span, as_tensor
from regard.units import plural

SHARED_ARGUMENTS = {
    "q": "queries `[B, H, T, D]`, as the attention uses them (after rotary embedding).",
    "k": "keys `[B, G, S, D]`, as the attention uses them.",
    "q_positions": "the positions of the queries, as in `regard.attend`.",
    "k_positions": "the positions of the keys, as in `regard.attend`.",
    "max_bytes": "the memory in bytes that the scores of a chunk of queries may need; no result "
    "depends on it.",
    "Returns": "A mask that selects blocks for each query and query head.",
    "Raises": "ArgumentError, ArgumentTypeError: size or topk is below 1, or q, k and positions do "
    "not fit together.",
}
"""The meanings of the arguments that the selections share."""


class _SelectionCall:
    """The checked queries and keys of a selection, and the blocks of the keys."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        size: int,
        q_positions: Positions | None,
        k_positions: Positions | None,
    ) -> None:
        check_query_key(q, k)
        keys = Span(0, k.shape[2]) if k_positions is None else k_positions
        check_positions("k_positions", keys, q.shape[0], k.shape[2])
        queries = default_query_positions(keys, q.shape[2]) if q_positions is None else q_positions
        check_positions("q_positions", queries, q.shape[0], q.shape[2])
        self.q, self.blocks = q, block_layout(keys, size, q.device)
        self.own_blocks = self.blocks.block_of(queries)[:, None, :, None]  # [B,1,T,1]

    def own_and_best(self, score: Callable[[Tensor], Tensor], topk: int, max_bytes: int) -> Mask:
        """Select for each query its own and the topk - 1 best earlier blocks, `[B, H, t, N]`."""
        blocks, own, q = self.blocks, self.own_blocks, self.q.detach()
        number = blocks.block_numbers[:, None, None]
        past = (number < own) & (blocks.token_counts > 0)[:, None, None]  # [B,1,T,N]
        B, H, T, _ = q.shape

        def choose(rows: slice) -> Tensor:
            s = score(q[:, :, rows]).masked_fill(~past[:, :, rows], -torch.inf)
            return top_k_mask(s, topk - 1) | (number == own[:, :, rows])

        return self.mask(in_query_chunks(choose, T, B * H * blocks.blocks * 32, max_bytes))

    def mask(self, chosen: Tensor) -> Mask:
        """Return the mask of the chosen blocks `[B, H, T, N]`."""
        return Selected(chosen, self.blocks.size, self.blocks.first) & Causal()


def check_sizes(name: str, size: int, topk: int, what: str) -> None:
    """Check that the size of a block, or page, and topk are at least 1."""
    if size < 1 or topk < 1:
        raise ArgumentError(
            f"{name} with {what}s of {size} and topk {topk}: both must be 1 or more (the own "
            f"{what} counts among the topk)"
        )


@with_shared_arguments(SHARED_ARGUMENTS)
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

    Its own block counts towards topk. No gradient flows through the choice.

    Args:
        size: the positions per block; block i has i size to (i + 1) size - 1.
        topk: the number of blocks per query, including its own.

    >>> import regard
    >>> q = k = torch.randn(1, 1, 8, 4)
    >>> mask = moba_mask(q, k, size=2, topk=1)
    >>> print(mask, mask.visible(Span(0, 8), Span(0, 8)).tolist())
    selected(1x1x8x4, 2) & causal [[[1, 2, 1, 2, 1, 2, 1, 2]]]

    Source: Lu et al. 2025 (arXiv 2502.13189), equations 5 and 6, and "causality" in section 2.2.
    """
    check_sizes("MoBA", size, topk, "block")
    call = _SelectionCall(q, k, size, q_positions, k_positions)
    with without_gradient(q.device):
        mean_keys = block_mean_keys(k.detach(), call.blocks)
        return call.own_and_best(lambda x: head_scores(x, mean_keys), topk, max_bytes)


def block_mean_keys(k: Float[Tensor, "B G S D"], blocks: BlockLayout) -> Float[Tensor, "B G N D"]:
    """Return the mean key of each block `[B, G, N, D]`, in fp32 or better; 0 if empty."""
    dtype = torch.promote_types(k.dtype, torch.float32)
    counts = blocks.token_counts.clamp(min=1)[:, None, :, None]
    return blocks.to_blocks(k).sum(3, dtype=dtype) / counts


class PageBounds(NamedTuple):
    """The smallest and the largest number of the keys of each page, channel by channel.

    Attributes:
        low, high: `[B, G, N, D]`; 0 for a page without tokens.

    >>> k = torch.tensor([[1.0, 5.0], [3.0, -2.0]])[None, None]
    >>> page_bounds(k, block_layout(Span(0, 2), 2)).high.tolist()
    [[[[3.0, 5.0]]]]
    """

    low: Float[Tensor, "B G N D"]
    high: Float[Tensor, "B G N D"]


def page_bounds(k: Float[Tensor, "B G S D"], pages: BlockLayout) -> PageBounds:
    """Return the smallest and the largest number of the keys of each page, channel by channel."""
    keys = pages.to_blocks(k)  # [B, G, N, size, D]
    is_token = torch.unflatten(pages.occupied, 1, (pages.blocks, pages.size))[:, None, :, :, None]
    low = torch.where(is_token, keys, torch.inf).amin(3)
    high = torch.where(is_token, keys, -torch.inf).amax(3)
    is_page = is_token.any(3)
    return PageBounds(torch.where(is_page, low, 0), torch.where(is_page, high, 0))


def page_scores(q: Float[Tensor, "B H T D"], bounds: PageBounds) -> Float[Tensor, "B H T N"]:
    """Return the largest product that a query can have with a key between the bounds of a page.

    u = sum_d max(q_d low_d, q_d high_d) >= q . k for every key k of the page
    Source: Tang et al. 2024 (arXiv 2406.10774), algorithm 1.
    """
    low, high = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in bounds)
    # max(q low, q high) is q high where q is positive, and q low where it is negative
    return head_scores(q.clamp(min=0), high) + head_scores(q.clamp(max=0), low)


@with_shared_arguments(SHARED_ARGUMENTS)
def quest_mask(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S D"],
    *,
    size: int,
    topk: int,
    bounds: PageBounds | None = None,
    q_positions: Positions | None = None,
    k_positions: Positions | None = None,
    max_bytes: int = MAX_CHUNK_BYTES,
) -> Mask:
    """Select the pages that each query and query head attends to, as a mask for `regard.attend`.

    The score of page i is u_i = sum_d max(q_d low_id, q_d high_id), a bound of q . k. A query
    attends causally to its own page, and to the topk - 1 earlier ones with the largest scores.

    A page that is left out may hold the best key. No gradient flows through the choice.

    Args:
        size: the positions per page; page i has i size to (i + 1) size - 1.
        topk: the number of pages per query, including its own.
        bounds: the bounds of all pages from `page_bounds`; None computes them.

    >>> q = k = torch.randn(1, 1, 8, 4)
    >>> mask = quest_mask(q, k, size=2, topk=1)
    >>> print(mask, mask.visible(Span(0, 8), Span(0, 8)).tolist())
    selected(1x1x8x4, 2) & causal [[[1, 2, 1, 2, 1, 2, 1, 2]]]

    Source: Tang et al. 2024 (arXiv 2406.10774), section 3.3 and algorithm 1.
    """
    check_sizes("Quest", size, topk, "page")
    call = _SelectionCall(q, k, size, q_positions, k_positions)
    if bounds is not None:
        _check_bounds(bounds, k, call.blocks)
    with without_gradient(q.device):
        known = page_bounds(k.detach(), call.blocks) if bounds is None else bounds
        return call.own_and_best(lambda x: page_scores(x, known), topk, max_bytes)


def _check_bounds(bounds: PageBounds, k: Tensor, pages: BlockLayout) -> None:
    """Raise unless stored bounds have one vector per head and page of the keys."""
    B, G, _, D = k.shape
    for name, x in zip(bounds._fields, bounds, strict=True):
        if tuple(x.shape) != (B, G, pages.blocks, D) or x.dtype != k.dtype:
            raise ArgumentError(
                f"bounds.{name} is {tuple(x.shape)} in {x.dtype}; for keys {tuple(k.shape)} in "
                f"{k.dtype} in pages of {pages.size} it must be "
                f"{(B, G, pages.blocks, D)} in {k.dtype}: use page_bounds(k, pages)"
            )


@with_shared_arguments(SHARED_ARGUMENTS)
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

    Index head j chooses for H/J query heads, without a gradient.

    Args:
        q: index queries `[B, J, T, d]`.
        k: one index key per token `[B, 1, S, d]`.
        heads: the number of query heads H, a multiple of J.
        size: the positions per block; block i has i size to (i + 1) size - 1.
        topk: the number of blocks per query, local ones included, all of which are read.
        local: the number of last blocks that every query reads, with its own.

    Raises:
        ArgumentError, ArgumentTypeError: an argument is out of range or does not fit.

    >>> q, k = torch.randn(1, 2, 8, 4), torch.randn(1, 1, 8, 4)
    >>> mask = block_maximum_mask(q, k, heads=4, size=2, topk=1)
    >>> print(mask, mask.visible(Span(0, 8), Span(0, 8))[0, 0].tolist())
    selected(1x4x8x4, 2) & causal [1, 2, 1, 2, 1, 2, 1, 2]

    Source: MiniMax 2026 (MiniMax-M3), by its code in transformers, `MiniMaxM3VLIndexer`.
    """
    check_block_sizes(size, topk, local)
    if k.shape[1] != 1 or heads < 1 or heads % q.shape[1]:
        raise ArgumentError(
            f"k has {k.shape[1]} index heads and q has {q.shape[1]} for {heads} query heads; k "
            "must have 1, and the index heads of q must divide the query heads"
        )
    call = _SelectionCall(q, k, size, q_positions, k_positions)
    blocks, own = call.blocks, call.own_blocks  # own [B,1,T,1]
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
    return call.mask(chosen.repeat_interleave(heads // J, 1))


def closed_blocks_mask(
    q: Float[Tensor, "B J T d"],
    k: Float[Tensor, "B 1 N d"],
    w: Float[Tensor, "B T J"],
    blocks: BlockLayout,
    *,
    topk: int,
    q_positions: Positions,
    max_bytes: int = MAX_CHUNK_BYTES,
) -> Mask:
    """Select for each query the best closed blocks, and the tokens behind the last closed one.

    I_ti = sum_j w_tj relu(q_tj . k_i) for the blocks i < floor((t + 1) / m), whose last token is no
    later than t; among equal scores the earlier block is chosen, without a gradient.

    Args:
        q: index queries `[B, J, T, d]`.
        k: one pooled index key per block `[B, 1, N, d]`.
        w: the weight of each index head for each query `[B, T, J]`.
        blocks: the arrangement of the keys in N blocks of m positions.
        topk: the number of closed blocks per query.
        q_positions: the positions of the queries.
        max_bytes: the memory in bytes for the scores of a chunk of queries.

    Returns:
        A mask that is the same for all heads of the attention.

    Raises:
        ArgumentError: topk is below 1, or the shapes do not fit together.

    >>> q, k, w = torch.randn(1, 2, 8, 4), torch.randn(1, 1, 4, 4), torch.ones(1, 8, 2)
    >>> blocks = block_layout(Span(0, 8), 2)
    >>> mask = closed_blocks_mask(q, k, w, blocks, topk=1, q_positions=Span(0, 8))
    >>> mask.visible(Span(0, 8), Span(0, 8))[0, 0].tolist()
    [1, 2, 3, 2, 3, 2, 3, 2]

    Source: Qwen Team 2026 (Qwen4-Exp) and Zhipu AI 2026 (GLM-5.3-Flash), by their code in
    transformers.
    """
    check_topk(topk)
    J, T = check_index_sizes(q, k, w)
    check_positions("q_positions", q_positions, len(q), T)
    if k.shape[2] != blocks.blocks:
        raise ArgumentError(
            f"k has {plural(k.shape[2], 'key')}, and blocks {plural(blocks.blocks, 'block')}; give "
            "one pooled key per block"
        )
    own = blocks.block_of(q_positions)[:, :, None]  # [B,T,1]
    stop = torch.div(as_tensor(q_positions, q.device) + 1, blocks.size, rounding_mode="floor")
    number, filled = blocks.block_numbers[:, None], (blocks.token_counts > 0)[:, None]
    closed = (number < stop[:, :, None]) & filled  # [B,T,N]

    def choose(rows: slice) -> Tensor:
        scores = index_scores(q[:, :, rows], k, w[:, rows])
        best = top_k_mask(scores.masked_fill(~closed[:, rows], -torch.inf), topk)
        return (best | ((number == own[:, rows]) & ~closed[:, rows]))[:, None]

    with without_gradient(q.device):
        q, k, w = q.detach(), k.detach(), w.detach()
        chosen = in_query_chunks(choose, T, len(q) * (J + 4) * blocks.blocks * 8, max_bytes)
    return Selected(chosen, blocks.size, blocks.first) & Causal()


def check_block_sizes(size: int, topk: int, local: int) -> None:
    """Check that block size, topk and the number of local blocks are at least 1."""
    if min(size, topk, local) < 1:
        raise ArgumentError(
            f"MSA with blocks of {size}, topk {topk} and {local} local blocks: each must be 1 or "
            "more (the local blocks count among the topk)"
        )
