"""Native sparse attention: compressed tokens, the importance of blocks that follows from them, and
the choice of blocks.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from regard.argument_checks import check_positions, check_query_key, divisors
from regard.errors import ArgumentError
from regard.masks import Causal, Mask, Selected
from regard.ops.selection.blocks import Order, best_blocks, by_rows, undifferentiated
from regard.ops.softmax import attention_weights
from regard.span import Positions


@dataclass(frozen=True)
class NSABlocks:
    """The sizes of native sparse attention, with the paper's figures.

    Attributes:
        compress: tokens in a compressed block, l.
        stride: tokens from the start of one to the start of the next, d.
        select: tokens in a block of the selection, l'.
        count: blocks per query, n, the forced ones included.
        window: keys of the window, w, the query's own included.
        initial, local: forced blocks: the first ones, and the last ones up to the query's own.

    Raises:
        ArgumentError: stride does not divide compress and select, compress is larger than select,
            count is smaller than the forced blocks, or a size is below 1 (initial: 0).

    >>> NSABlocks().count
    16

    Source: Yuan et al. 2025 (arXiv 2502.11089), section 4.1.
    """

    compress: int = 32
    stride: int = 16
    select: int = 64
    count: int = 16
    window: int = 512
    initial: int = 1
    local: int = 2

    def __post_init__(self) -> None:
        l, d, s, n, w, initial, local = astuple(self)
        if min(l, d, s, n, w, local) < 1 or initial < 0:
            raise ArgumentError(f"{self}: each size must be at least 1, initial at least 0")
        if l % d or s % d or l > s:
            raise ArgumentError(
                f"compress {l}, stride {d}, select {s}: stride must divide both, and compress "
                "must be at most select; "
                f"allowed strides: {', '.join(str(x) for x in divisors(l) if s % x == 0)}"
            )
        if n < initial + local:
            raise ArgumentError(
                f"count is {n}, fewer than the forced blocks, {initial} initial + {local} local; "
                f"give at least {initial + local}"
            )


def windows(
    x: Float[Tensor, "B G S D"], laid: Order, sizes: NSABlocks
) -> Float[Tensor, "B G C l D"]:
    """The tokens of each compressed block: block i holds positions i d .. i d + l - 1 behind the
    first one.
    """
    return laid.lay(x).unfold(2, sizes.compress, sizes.stride).mT  # [B,G,C,D,l] -> [B,G,C,l,D]


def ends(laid: Order, sizes: NSABlocks) -> Int[Tensor, "B C"]:
    """The position of the last token of each compressed block; -1 where a token of it is
    missing.
    """
    whole = laid.held.unfold(1, sizes.compress, sizes.stride).all(-1)  # [B,C]
    at = torch.arange(whole.shape[1], device=whole.device) * sizes.stride + sizes.compress - 1
    return torch.where(whole, laid.first[:, None] * laid.size + at, -1)


def importance(
    p: Float[Tensor, "B H T C"], groups: int, sizes: NSABlocks
) -> Float[Tensor, "B G T N"]:
    """What share of the attention to compressed tokens falls on each block, summed over the heads
    of a group.

    importance[j] = sum_h sum_{m < l'/d} sum_{n < l/d} p_h[(l'/d) j - m - n], with j and the index
    counted from 1

    A compressed token gives its weight to a block once for each stride that they have in common.
    (Read with indices from 0, the printed sum would give it to the block in front.)

    Source: Yuan et al. 2025 (arXiv 2502.11089), equations 9 and 10.
    """
    shares, per_block = sizes.compress // sizes.stride, sizes.select // sizes.stride
    # the weight that falls on each stride of the sequence: those of the compressed blocks that
    # cover it
    strides = sum(F.pad(p, (n, shares - 1 - n)) for n in range(shares))
    assert isinstance(strides, Tensor)
    blocks = torch.unflatten(strides, -1, (-1, per_block)).sum(-1)  # [B,H,T,N]
    return torch.unflatten(blocks, 1, (groups, -1)).sum(2)


def selection_mask(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G C D"],
    laid: Order,
    sizes: NSABlocks,
    *,
    q_positions: Positions,
    k_positions: Int[Tensor, "#B C"],
    scale: float | None = None,
) -> Mask:
    """The blocks that each group of query heads reads, from its attention to compressed keys, as a
    mask.

    p = softmax(scale q k^T) over the compressed tokens that end at or before the query; blocks: the
    first `initial`, the last `local` up to the query's own, and the most important others, `count`
    in all

    Args:
        q, k: queries, and compressed keys at the positions of their last tokens (`ends`).
        laid: the order of the keys that are selected from.

    No gradient flows through the choice.

    Raises:
        ArgumentError, ArgumentTypeError: q, k and positions do not fit.

    Source: Yuan et al. 2025 (arXiv 2502.11089), equations 8 to 12.
    """
    check_query_key(q, k)
    check_positions("q_positions", q_positions, q.shape[0], q.shape[2])
    check_positions("k_positions", k_positions, q.shape[0], k.shape[2])
    own, number = laid.own(q_positions)[:, None, :, None], laid.number[:, None, None]
    allowed = (number <= own) & (laid.filled > 0)[:, None, None]
    forced = (number < sizes.initial) | (number > own - sizes.local)
    (B, H, T, _), G = q.shape, k.shape[1]
    q, k = q.detach(), k.detach()

    def choose(rows: slice) -> Tensor:
        p = attention_weights(
            q,
            k,
            rows=rows,
            mask=Causal(),
            scale=scale,
            q_positions=q_positions,
            k_positions=k_positions,
        )
        share = importance(p, G, sizes)
        return best_blocks(share, forced[:, :, rows], allowed[:, :, rows], sizes.count)

    with undifferentiated(q.device):
        table = by_rows(choose, T, B * H * k.shape[2] * 24)
    return Selected(table.repeat_interleave(H // G, 1), sizes.select, laid.first) & Causal()
