"""Mixture of block attention: each query sees its own block and the past blocks whose mean key fits
it best.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from regard.argument_checks import check_positions, check_query_key
from regard.errors import ArgumentError
from regard.masks import Causal, Mask, Selected
from regard.ops.selection.blocks import Order, by_rows, order, top, undifferentiated
from regard.ops.softmax.call import last
from regard.span import Positions, Span


def moba_mask(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S D"],
    *,
    size: int,
    topk: int,
    q_positions: Positions | None = None,
    k_positions: Positions | None = None,
) -> Mask:
    """The keys that each query and query head may see, as a mask for `regard.attend`.

    s_i = q . mean(K of block i);  chosen: the own block, always, and of the blocks in front of it
    those with the topk - 1 largest s_i; within the own block k <= q

    The own block counts among the topk, so that topk = 1 is the own block alone. No gradient flows
    through the choice.

    Args:
        q, k: queries and keys as attention scores them, rotated.
        size: positions per block; block edges are absolute multiples of it.
        topk: blocks per query.
        q_positions, k_positions: as in `regard.attend`.

    Raises:
        ArgumentError, ArgumentTypeError: size or topk is below 1, or q, k and positions do not fit.

    >>> import regard
    >>> q = k = torch.randn(1, 1, 8, 4)
    >>> mask = moba_mask(q, k, size=2, topk=1)
    >>> print(mask, mask.visible(Span(0, 8), Span(0, 8)).tolist())
    selected(1x1x8x4, 2) & causal [[[1, 2, 1, 2, 1, 2, 1, 2]]]

    Source: Lu et al. 2025 (arXiv 2502.13189), equations 5 and 6, and "causality" in section 2.2.
    """
    check_moba(size, topk)
    check_query_key(q, k)
    keys = Span(0, k.shape[2]) if k_positions is None else k_positions
    check_positions("k_positions", keys, q.shape[0], k.shape[2])
    q_positions = last(keys, q.shape[2]) if q_positions is None else q_positions
    check_positions("q_positions", q_positions, q.shape[0], q.shape[2])
    blocks = order(keys, size, q.device)
    with undifferentiated(q.device):
        chosen = _choose(q.detach(), means(k.detach(), blocks), blocks, q_positions, topk)
    return Selected(chosen, size, blocks.first) & Causal()


def check_moba(size: int, topk: int) -> None:
    """A block and a choice hold at least one."""
    if size < 1 or topk < 1:
        raise ArgumentError(
            f"MoBA with blocks of {size} and topk {topk}: both must be 1 or more (the own block "
            "counts among the topk)"
        )


def means(k: Float[Tensor, "B G S D"], blocks: Order) -> Float[Tensor, "B G N D"]:
    """The mean key of each block, over the tokens that it holds, in fp32 or better; 0 for an empty
    block.
    """
    kind = torch.promote_types(k.dtype, torch.float32)
    filled = blocks.filled.clamp(min=1)[:, None, :, None]
    return blocks.split(k).sum(3, dtype=kind) / filled


def _choose(q: Tensor, mean: Tensor, blocks: Order, positions: Positions, topk: int) -> Tensor:
    """[B,H,T,N], True = chosen."""
    own, number = blocks.own(positions)[:, None, :, None], blocks.number[:, None, None]
    past = (number < own) & (blocks.filled > 0)[:, None, None]
    B, H, T, _ = q.shape
    G, N = mean.shape[1:3]

    def choose(rows: slice) -> Tensor:
        x = torch.unflatten(q[:, :, rows].to(mean.dtype), 1, (G, H // G)).flatten(2, 3)
        s = torch.unflatten(x @ mean.mT, 2, (H // G, -1)).flatten(1, 2)  # [B,H,t,N]
        s = s.masked_fill(~past[:, :, rows], -torch.inf)
        return top(s, topk - 1) | (number == own[:, :, rows])

    return by_rows(choose, T, B * H * N * 32)
