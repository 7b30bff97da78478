"""Quest: each query attends to its own page of keys and to the earlier pages whose keys could give
it the largest score, by a bound from the smallest and the largest number in each channel.
"""

from __future__ import annotations

from typing import NamedTuple

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


class PageBounds(NamedTuple):
    """The smallest and the largest number of the keys of each page, channel by channel.

    Attributes:
        low: `[B, G, N, D]`; 0 for a page without tokens.
        high: `[B, G, N, D]`; 0 for a page without tokens.

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

    >>> q = torch.tensor([2.0, -1.0])[None, None, None]
    >>> k = torch.tensor([[1.0, 5.0], [3.0, -2.0]])[None, None]
    >>> page_scores(q, page_bounds(k, block_layout(Span(0, 2), 2))).item()  # the products: -3, 8
    8.0

    Source: Tang et al. 2024 (arXiv 2406.10774), algorithm 1.
    """
    low, high = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in bounds)
    # max(q low, q high) is q high where q is positive, and q low where it is negative
    return head_scores(q.clamp(min=0), high) + head_scores(q.clamp(max=0), low)


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

    The score of page i is u_i = sum_d max(q_d low_id, q_d high_id), which no product of the query
    with a key of the page exceeds. A query attends causally to its own page, and to the topk - 1
    earlier pages with the largest scores.

    A page that is left out may hold the best key: the bound of another page may be larger than
    every product of that page. No gradient flows through the choice.

    Args:
        q: queries `[B, H, T, D]`, as the attention uses them (after rotary embedding).
        k: keys `[B, G, S, D]`, as the attention uses them.
        size: the number of positions per page; page i contains the positions i size to
            (i + 1) size - 1.
        topk: the number of pages per query, including its own.
        bounds: the bounds of all pages from `page_bounds`, where they are stored; None computes
            them from the keys.
        q_positions: the positions of the queries, as in `regard.attend`.
        k_positions: the positions of the keys, as in `regard.attend`.
        max_bytes: the memory in bytes that the scores of a chunk of queries may need; no result
            depends on it.

    Returns:
        A mask that selects pages for each query and query head.

    Raises:
        ArgumentError, ArgumentTypeError: size or topk is below 1, or q, k, bounds and positions do
            not fit together.

    >>> q = k = torch.randn(1, 1, 8, 4)
    >>> mask = quest_mask(q, k, size=2, topk=1)
    >>> print(mask, mask.visible(Span(0, 8), Span(0, 8)).tolist())
    selected(1x1x8x4, 2) & causal [[[1, 2, 1, 2, 1, 2, 1, 2]]]

    Source: Tang et al. 2024 (arXiv 2406.10774), section 3.3 and algorithm 1.
    """
    check_page_sizes(size, topk)
    check_query_key(q, k)
    keys = Span(0, k.shape[2]) if k_positions is None else k_positions
    check_positions("k_positions", keys, q.shape[0], k.shape[2])
    q_positions = default_query_positions(keys, q.shape[2]) if q_positions is None else q_positions
    check_positions("q_positions", q_positions, q.shape[0], q.shape[2])
    pages = block_layout(keys, size, q.device)
    if bounds is not None:
        _check_bounds(bounds, k, pages)
    with without_gradient(q.device):
        known = page_bounds(k.detach(), pages) if bounds is None else bounds
        chosen = own_and_best_past_blocks(
            lambda rows: page_scores(q.detach()[:, :, rows], known),
            pages,
            q_positions,
            topk,
            (q.shape[0], q.shape[1], q.shape[2]),
            max_bytes,
        )
    return Selected(chosen, size, pages.first) & Causal()


def check_page_sizes(size: int, topk: int) -> None:
    """Check that page size and topk are at least 1."""
    if size < 1 or topk < 1:
        raise ArgumentError(
            f"Quest with pages of {size} and topk {topk}: both must be 1 or more (the own page "
            "counts among the topk)"
        )


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
