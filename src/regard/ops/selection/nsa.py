"""Native sparse attention (NSA): compressed tokens, importance of blocks, selection."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from regard.argument_checks import check_positions, check_query_key, divisors
from regard.errors import ArgumentError
from regard.masks import Causal, Mask, Selected
from regard.ops.selection.position_blocks import (
    MAX_CHUNK_BYTES,
    BlockLayout,
    in_query_chunks,
    select_blocks,
    without_gradient,
)
from regard.ops.softmax import attention_weights
from regard.span import Positions


@dataclass(frozen=True)
class NSABlocks:
    """The sizes of native sparse attention; the defaults are those of the paper.

    Args:
        compress: l, the number of tokens in a block that is compressed to one token.
        stride: d, the number of tokens between the starts of neighbouring compressed blocks.
        select: l', the number of tokens in a block of the selection.
        count: n, the number of selected blocks per query, including the forced ones.
        window: w, the number of keys in the sliding window, including the query's own.
        initial: the number of blocks at the start that are always selected.
        local: the number of those that end with the query's own block.

    Raises:
        ArgumentError: the sizes do not fit one another.

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


def compression_windows(
    x: Float[Tensor, "B G S D"], layout: BlockLayout, sizes: NSABlocks
) -> Float[Tensor, "B G C l D"]:
    """Return the tokens of the C compressed blocks, `[B, G, C, l, D]`, from i d on."""
    return (
        layout.to_position_order(x).unfold(2, sizes.compress, sizes.stride).mT
    )  # [B,G,C,D,l] -> [B,G,C,l,D]


def compression_positions(layout: BlockLayout, sizes: NSABlocks) -> Int[Tensor, "B C"]:
    """Return the position of the last token of each compressed block `[B, C]`; -1 if incomplete."""
    is_complete = layout.occupied.unfold(1, sizes.compress, sizes.stride).all(-1)  # [B,C]
    last_offset = (
        torch.arange(is_complete.shape[1], device=is_complete.device) * sizes.stride
        + sizes.compress
        - 1
    )
    return torch.where(is_complete, layout.first[:, None] * layout.size + last_offset, -1)


def block_importance(
    p: Float[Tensor, "B H T C"], groups: int, sizes: NSABlocks
) -> Float[Tensor, "B G T N"]:
    """Return the importance of each block: the summed attention to tokens that overlap it.

    importance[j] = sum_h sum_{m < l'/d} sum_{n < l/d} p_h[(l'/d) j - m - n], with j and the index
    of p_h counted from 1

    A compressed token counts once for each stride of d tokens that lies in both.

    Source: Yuan et al. 2025 (arXiv 2502.11089), equations 9 and 10.
    """
    shares, per_block = sizes.compress // sizes.stride, sizes.select // sizes.stride
    # the weight of d consecutive tokens is the sum over the compressed blocks that contain them
    strides = sum(F.pad(p, (n, shares - 1 - n)) for n in range(shares))
    assert isinstance(strides, Tensor)
    blocks = torch.unflatten(strides, -1, (-1, per_block)).sum(-1)  # [B,H,T,N]
    return torch.unflatten(blocks, 1, (groups, -1)).sum(2)


def selection_mask(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G C D"],
    layout: BlockLayout,
    sizes: NSABlocks,
    *,
    q_positions: Positions,
    k_positions: Int[Tensor, "#B C"],
    scale: float | None = None,
    max_bytes: int = MAX_CHUNK_BYTES,
) -> Mask:
    """Select the blocks that the query heads of a group attend to, by compressed keys.

    p = softmax(scale q k^T) over the compressed tokens before the query. It attends to the first
    `initial` blocks, the last `local` blocks, and those with the largest `block_importance`,
    `count` in all, without a gradient.

    Args:
        q: queries `[B, H, T, D]`.
        k: compressed keys `[B, G, C, D]`.
        layout: the arrangement of the uncompressed keys in blocks of `sizes.select` positions.
        sizes: the sizes of the blocks.
        q_positions: the positions of the queries.
        k_positions: those of the compressed keys (`compression_positions`), `[B or 1, C]`.
        scale: the factor on q . k; None: 1/sqrt(D).
        max_bytes: the memory in bytes for the scores of a chunk of queries.

    Returns:
        The mask, equal for the query heads of a group.

    Raises:
        ArgumentError, ArgumentTypeError: q, k and positions do not fit together.

    >>> from regard.ops.selection import block_layout
    >>> from regard.span import Span
    >>> sizes = NSABlocks(compress=2, stride=2, select=4, count=2, initial=1, local=1)
    >>> tokens, ends = Span(0, 16), torch.arange(1, 16, 2)[None]
    >>> q, k, layout = torch.randn(1, 2, 16, 4), torch.randn(1, 1, 8, 4), block_layout(tokens, 4)
    >>> mask = selection_mask(q, k, layout, sizes, q_positions=tokens, k_positions=ends)
    >>> seen = mask.block(tokens, tokens, slice(12, 13))[0, 0]
    >>> seen.sum().item()  # query 12 sees a block of 4 keys, and its own block up to itself
    5

    Source: Yuan et al. 2025 (arXiv 2502.11089), equations 8 to 12.
    """
    check_query_key(q, k)
    check_positions("q_positions", q_positions, q.shape[0], q.shape[2])
    check_positions("k_positions", k_positions, q.shape[0], k.shape[2])
    own, number = (
        layout.block_of(q_positions)[:, None, :, None],
        layout.block_numbers[:, None, None],
    )
    allowed = (number <= own) & (layout.token_counts > 0)[:, None, None]
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
        importance = block_importance(p, G, sizes)
        return select_blocks(importance, forced[:, :, rows], allowed[:, :, rows], sizes.count)

    with without_gradient(q.device):
        table = in_query_chunks(choose, T, B * H * k.shape[2] * 24, max_bytes)
    return Selected(table.repeat_interleave(H // G, 1), sizes.select, layout.first) & Causal()
