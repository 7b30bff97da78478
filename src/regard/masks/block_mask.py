"""Conversion of masks from and to the `BlockMask` of torch's `flex_attention`.

A `BlockMask` lists the blocks with a visible pair, and those in which every pair is visible;
in other blocks `mask_mod(b, h, q_idx, kv_idx)` decides for each pair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks.base import Mask, check_int, device_of_positions
from regard.masks.custom import Dense
from regard.masks.recognition import VisibleRows, recognize
from regard.masks.tiling import EMPTY, FULL
from regard.span import Positions, as_tensor, slot_count

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

MAX_RANGES = 8
"""The most key ranges per query that `mask_mod` compares; beyond, it reads bools."""


def to_block_mask(
    mask: Mask,
    q_positions: Positions,
    k_positions: Positions,
    *,
    block_size: int = 128,
    device: torch.device | str | None = None,
) -> BlockMask:
    """Convert a mask to a `BlockMask` for `torch.nn.attention.flex_attention`.

    Args:
        mask: the mask.
        q_positions, k_positions: those of queries and keys of the call, such as `Span(0, T)`.
        block_size: queries per block, and keys per block; torch's kernels take multiples of 128.
        device: where its tensors lie; by default the device of the positions.

    Returns:
        The `BlockMask` for these lengths, by key ranges, or a table of bools without ranges.

    Raises:
        ArgumentError, ArgumentTypeError: an argument is invalid, or there are no queries or keys.

    >>> from regard.masks import Causal, Window
    >>> from regard.span import Span
    >>> to_block_mask(Causal() & Window(100), Span(0, 1024), Span(0, 1024)).sparsity()
    76.5625
    """
    if not isinstance(mask, Mask):
        raise ArgumentTypeError(
            f"mask is {type(mask).__name__}; it must be a mask of regard.masks, such as "
            "Dense(tensor)"
        )
    check_int("block_size", block_size, 1)
    lengths = slot_count(q_positions), slot_count(k_positions)
    if 0 in lengths:
        raise ArgumentError(
            f"a BlockMask needs queries and keys, but there are {lengths[0]} and {lengths[1]}"
        )
    from torch.nn.attention.flex_attention import BlockMask

    device = device_of_positions(q_positions, k_positions, device)
    tiles = mask.tiles(q_positions, k_positions, (block_size, block_size), device=device)
    some, full = tiles != EMPTY, tiles == FULL
    for dim, length in ((2, lengths[0]), (3, lengths[1])):
        if length % block_size:  # a block that extends past the end is not full: its tail is masked
            full = full.clone()
            full.select(dim, -1).fill_(False)
    return BlockMask.from_kv_blocks(
        *_block_indices(some & ~full),
        *_block_indices(full),
        BLOCK_SIZE=block_size,
        mask_mod=range_mask_mod(mask, q_positions, k_positions, device),
        seq_lengths=lengths,
    )


def range_mask_mod(mask: Mask, q: Positions, k: Positions, device: torch.device) -> MaskMod:
    """Return the mask as a function of indices for FlexAttention, by ranges or a table of bools."""
    intervals = mask.intervals(q, device=device)
    if intervals is None or not 0 < intervals.starts.shape[-1] <= MAX_RANGES:
        table = mask.block(q, k, device=device)
        b_step, h_step = (int(n > 1) for n in table.shape[:2])

        def by_table(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return table[b * b_step, h * h_step, i, j]

        return by_table
    largest = torch.iinfo(torch.int32).max
    starts, stops = (
        [y.contiguous() for y in x.clamp(-largest, largest).to(torch.int32).unbind(-1)]
        for x in (intervals.starts, intervals.stops)
    )
    keys = as_tensor(k, device).to(torch.int32)
    row_step, (b_step, h_step) = int(keys.shape[0] > 1), (int(n > 1) for n in starts[0].shape[:2])

    def by_range(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        position = keys[b * row_step, j]
        visible = position < 0
        for start, stop in zip(starts, stops, strict=True):
            index = (b * b_step, h * h_step, i)
            visible = visible | ((position >= start[index]) & (position < stop[index]))
        return visible & (position >= 0)

    return by_range


def _block_indices(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Convert a bool table of blocks `[b, h, nQ, nK]` to counts and indices, chosen first."""
    order = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.to(torch.int32)


def from_block_mask(block_mask: BlockMask) -> Mask:
    """Convert a `BlockMask` of `torch.nn.attention.flex_attention`.

    A pair is visible in a full block, or if `mask_mod` allows it in a partial one, as in torch's
    compiled kernels.

    Args:
        block_mask: the `BlockMask` of a call with T queries and S keys.

    Returns:
        A rule such as `causal & window(4)` that is exactly the `BlockMask` for keys 0 to S - 1 and
        the last T of them as queries; or `Heads` of rules; otherwise `Dense`.

    Raises:
        ArgumentTypeError: `block_mask` is not a `BlockMask`.
        ArgumentError: `mask_mod` cannot be evaluated, as in a slice of a `BlockMask`.

    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> def window(b, h, q_idx, kv_idx):
    ...     return (q_idx >= kv_idx) & (q_idx - kv_idx < 4)
    >>> print(from_block_mask(create_block_mask(window, None, None, 256, 256, device="cpu")))
    causal & window(4)
    """
    from torch.nn.attention.flex_attention import BlockMask

    if not isinstance(block_mask, BlockMask):
        raise ArgumentTypeError(
            f"block_mask is {type(block_mask).__name__}; it must be a BlockMask of "
            "torch.nn.attention.flex_attention, as create_block_mask returns it"
        )
    blocks = _Blocks(block_mask)
    rows = VisibleRows(blocks.rows, *blocks.shape, device=block_mask.kv_indices.device)
    recognized = recognize(rows)
    return Dense(blocks.rows(slice(0, rows.T))) if recognized is None else recognized.mask


class _Blocks:
    """The visible pairs of a `BlockMask`, some rows at a time."""

    def __init__(self, block_mask: BlockMask) -> None:
        self._mod, self._size = block_mask.mask_mod, block_mask.BLOCK_SIZE
        self._partial = listed_blocks(block_mask.kv_num_blocks, block_mask.kv_indices)
        self._full = torch.zeros_like(self._partial)
        if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
            self._full = listed_blocks(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
        B, H = self._partial.shape[:2]
        T, S = block_mask.seq_lengths
        self.shape = (B, H, T, S)

    def rows(self, rows: slice) -> Tensor:
        """Return the mask of some queries, bool `[B or 1, H or 1, t, S]`."""
        (_, _, T, S), device = self.shape, self._partial.device
        q = torch.arange(*rows.indices(T), device=device) // self._size[0]
        k = torch.arange(S, device=device) // self._size[1]
        partial = self._partial[:, :, q]
        columns = partial.flatten(0, 2).any(0).nonzero()[:, 0]
        visible = self._full[:, :, q][..., k]
        if not len(columns):
            return visible
        # mask_mod is asked only where a block of these queries is partial
        first, stop = (x * self._size[1] for x in (int(columns[0]), int(columns[-1]) + 1))
        part = slice(first, min(stop, S))
        asked = partial[..., k[part]] & self._call_mask_mod(
            rows.start, len(q), first, part.stop - first
        )
        visible[..., part] |= asked
        return visible

    def _call_mask_mod(self, first_query: int, t: int, first_key: int, s: int) -> Tensor:
        """Return what `mask_mod` says of t queries and s keys."""
        from torch.nn.attention.flex_attention import create_mask

        def mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return self._mod(b, h, i + first_query, j + first_key)

        B, H = self.shape[:2]
        try:
            return create_mask(mod, B, H, t, s, device=str(self._partial.device))
        except (RuntimeError, IndexError) as problem:
            raise ArgumentError(
                f"the mask_mod of the BlockMask cannot be evaluated: {problem}; convert the whole "
                "BlockMask as create_block_mask returned it, not a slice of it"
            ) from problem


def listed_blocks(counts: Tensor, indices: Tensor) -> Tensor:
    """Return which blocks are listed, bool `[B or 1, H or 1, nQ, nK]`."""
    counts, indices = (x[(None,) * (n - x.ndim)] for x, n in ((counts, 3), (indices, 4)))
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    # entries behind the count are undefined: they are sent to a column that is cut off
    columns = torch.where(listed, indices.long(), indices.shape[-1])
    table = torch.zeros(*indices.shape[:-1], indices.shape[-1] + 1, dtype=torch.bool, device="cpu")
    return table.to(indices.device).scatter(-1, columns, value=True)[..., :-1]
