"""Masks of other libraries: their conventions, dense masks, and the `BlockMask` of flex_attention.

Models often pass a tensor of booleans, or of 0 and -inf; a kernel can skip what a rule hides. A
recognized rule, such as `causal & window(4)`, equals the mask in every element: candidates come
from the last query, and from the first and the last visible keys, and are then compared.

A `BlockMask` lists the blocks with a visible pair, and those in which every pair is visible;
in other blocks `mask_mod(b, h, q_idx, kv_idx)` decides for each pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.argument_checks import check_int
from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks.base import Lengths, Mask
from regard.masks.batched import Document, Padding, Prefix
from regard.masks.blocks import BlockCausal
from regard.masks.custom import Dense, Heads
from regard.masks.patterns import Causal, Full, Sinks, Window
from regard.masks.tiling import EMPTY, FULL, device_of_positions
from regard.span import Positions, Span, as_tensor, slot_count

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


COMPARED_ROWS = 64
"""The number of rows of a mask that are read at once: they fit into the caches of a processor."""


@dataclass(frozen=True)
class VisibleRows:
    """A dense mask that is read some rows at a time, so that it need not fit into memory."""

    read: Callable[[slice], Tensor]
    B: int
    H: int
    T: int
    S: int
    device: torch.device

    @classmethod
    def of(cls, table: Tensor) -> VisibleRows:
        """Return the rows of a bool tensor `[B or 1, H or 1, T, S]`."""
        B, H = (1 if table.stride(i) == 0 else table.shape[i] for i in range(2))
        T, S = table.shape[2:]
        return cls(lambda rows: table[:B, :H, rows], B, H, T, S, table.device)

    @property
    def default_start(self) -> int:
        """The default position of the first query: the queries are the last T of the keys."""
        return self.S - self.T

    def queries(self, start: int) -> Span:
        """Return the positions of the queries from that of the first one."""
        return Span(start, self.T, tokens=start < 0)

    def slices(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of the queries, the last ones first, and their masks."""
        for i in reversed(range(0, self.T, COMPARED_ROWS)):
            rows = slice(i, min(i + COMPARED_ROWS, self.T))
            yield rows, self.read(rows)

    def equals(self, rule: Mask, start: int) -> bool:
        """Return whether a rule is this mask from the position `start` on; last rows come first."""
        queries, keys = self.queries(start), Span(0, self.S)
        for rows, visible in self.slices():
            block = rule.block(queries, keys, rows, device=self.device)
            if not torch.equal(*torch.broadcast_tensors(block, visible)):
                return False
        return True

    def shared(self) -> VisibleRows:
        """Return the same mask without a dimension for the batch, or the heads, where all agree."""
        one = self
        if one.B > 1 and all(x.equal(x[:1].expand_as(x)) for _, x in one.slices()):
            one = replace(one, read=lambda rows: self.read(rows)[:1], B=1)
        if one.H > 1 and all(x.equal(x[:, :1].expand_as(x)) for _, x in one.slices()):
            one = one.head(0)
        return one

    def head(self, h: int) -> VisibleRows:
        """Return the mask of one head."""
        return replace(self, read=lambda rows: self.read(rows)[:, h : h + 1], H=1)


class RecognizedRule(NamedTuple):
    """A rule that equals a mask of T queries and S keys."""

    mask: Mask
    q_positions: Span


def recognize(rows: VisibleRows, *, any_start: bool = False) -> RecognizedRule | None:
    """Return a rule that equals a mask, or None if no known rule does."""
    if rows.T == 0 or rows.S == 0:
        return None
    rows = rows.shared()
    if rows.T == rows.B == rows.H == 1 and (one := _one_query(rows, any_start=any_start)):
        return one
    if rows.H == 1:
        for rule, start in _candidates(_Outline(rows), any_start=any_start):
            if rows.equals(rule, start):
                return RecognizedRule(rule, rows.queries(start))
        return None
    heads: list[RecognizedRule] = []
    for h in range(rows.H):
        recognized = recognize(rows.head(h), any_start=any_start)
        if recognized is None or (heads and heads[0].q_positions != recognized.q_positions):
            return None
        heads.append(recognized)
    return RecognizedRule(Heads(tuple(x.mask for x in heads)), heads[0].q_positions)


def _one_query(rows: VisibleRows, *, any_start: bool) -> RecognizedRule | None:
    """Return the rule of a single query of decoding that sees a range of keys, or None."""
    visible = rows.read(slice(0, 1)).reshape(rows.S)
    count = int(visible.count_nonzero())
    if count == rows.S:
        return RecognizedRule(Full(), rows.queries(rows.default_start))
    if count == 0:
        return None
    as_bytes = visible.view(torch.uint8)
    first, last = int(as_bytes.argmax()), rows.S - 1 - int(as_bytes.flip(0).argmax())
    if count != last + 1 - first or not (any_start or last == rows.default_start):
        return None
    rule = Causal() if first == 0 else Causal() & Window(count)
    return RecognizedRule(rule, rows.queries(last))


@dataclass(frozen=True, eq=False)
class RecognizedMask:
    """The meaning of a dense mask in a call with T queries and S keys.

    `uniform_rows`: whether it hides a whole row by a finite number; torch then returns the mean of
    all values, which no rule expresses.
    """

    mask: Mask | None
    q_positions: Span
    bias: Tensor | None = None
    uniform_rows: bool = False


def recognize_mask(mask: Tensor, T: int, S: int) -> RecognizedMask:
    """Find the rule behind a mask in the convention of `F.scaled_dot_product_attention`."""
    mask = unexpanded(mask.detach())
    mask = mask[(None,) * (4 - mask.ndim)]
    mask = mask.expand(*mask.shape[:2], T, S)
    if mask.dtype == torch.bool:
        return _recognize_table(mask)
    lowest = mask <= torch.finfo(mask.dtype).min / 2
    recognized = _recognize_table(~lowest)
    bias = None if bool((lowest | (mask == 0)).all()) else mask.masked_fill(lowest, 0)
    finite = (lowest & (mask > -torch.inf)).any(-1)
    return replace(recognized, bias=bias, uniform_rows=bool((lowest.all(-1) & finite).any()))


def unexpanded(mask: Tensor) -> Tensor:
    """Return a mask with size 1 in the dimensions along which it is one expanded element."""
    return mask[tuple(slice(0, 1 if step == 0 else None) for step in mask.stride())]


def _recognize_table(visible: Tensor) -> RecognizedMask:
    """Return the rule of a bool mask `[B or 1, H or 1, T, S]`, or the mask itself."""
    rows = VisibleRows.of(visible)
    recognized = recognize(rows, any_start=True)
    if recognized is None:
        return RecognizedMask(Dense(visible), rows.queries(rows.default_start))
    return RecognizedMask(
        None if recognized.mask == Full() else recognized.mask, recognized.q_positions
    )


class _Outline:
    """What the candidates are derived from, each part read when it is asked for."""

    def __init__(self, rows: VisibleRows) -> None:
        self.rows = rows
        self.last_row = rows.read(slice(rows.T - 1, rows.T))[:, 0, 0]

    @cached_property
    def keys(self) -> Tensor:
        """Which keys at least one query sees, bool `[B, S]`."""
        keys = self.last_row.clone()
        for _, visible in self.rows.slices():
            if bool(keys.all()):
                break
            keys |= visible[:, 0].any(1)
        return keys

    @cached_property
    def row_ends(self) -> tuple[Tensor, Tensor]:
        """The first and the last visible key of each query, `[B, T]`; S and -1 without any."""
        S, parts = self.rows.S, []
        for _, visible in self.rows.slices():
            row = visible[:, 0].to(torch.uint8)  # [B,t,S]
            some = row.amax(-1) > 0
            first, last = row.argmax(-1), S - 1 - row.flip(-1).argmax(-1)
            parts.append((torch.where(some, first, S), torch.where(some, last, -1)))
        firsts, lasts = zip(*reversed(parts), strict=True)
        return torch.cat(firsts, 1), torch.cat(lasts, 1)


def _candidates(outline: _Outline, *, any_start: bool) -> Iterator[tuple[Mask, int]]:
    """Yield the rules that a mask may be, simplest first, with the first query's position."""
    rows = outline.rows
    yield Full(), rows.default_start
    visible = outline.last_row.any(0).nonzero()
    if not len(visible) and not bool(outline.keys.any()):
        return
    starts = [rows.default_start]
    if any_start:
        last = outline.last_row[0].nonzero()
        starts.append(0)
        starts += [int(last[-1]) - (rows.T - 1)] if len(last) else []
    first = int(visible[0]) if len(visible) else rows.S
    padding = None
    for start in dict.fromkeys(starts):
        rules: list[Mask] = [Causal()]
        # the last query has the longest past: the first key that it sees in any row of the batch
        # bounds a window
        if 1 <= (size := start + rows.T - first) < rows.S:
            rules.append(Causal() & Window(size))
        yield from ((rule, start) for rule in rules)
        if not bool(outline.keys.all()):
            if padding is None:
                padding = Padding.from_keep(outline.keys)
                yield padding, rows.default_start
            yield from ((rule & padding, start) for rule in rules)
    yield from ((rule, rows.default_start) for rule in _other_candidates(outline))


def _other_candidates(outline: _Outline) -> Iterator[Mask]:
    """Yield the rules that depend on the visible keys of all queries."""
    rows, hides_keys = outline.rows, not bool(outline.keys.all())
    runs = (outline.last_row[:, 1:] & ~outline.last_row[:, :-1]).sum(-1)
    if not hides_keys and int(runs.max()) > 2:
        return  # without padding a query sees at most a beginning and a window
    first, last = outline.row_ends
    q = torch.arange(rows.default_start, rows.S, device=rows.device)
    sees, causal = last >= 0, Causal()
    size = int((q - first)[sees].max()) + 1
    ahead = int((last - q)[sees].max())
    local: list[Mask] = [causal]
    if size >= 1 and ahead >= 0:
        local.append(causal & Window(size))
        yield local[-1]
        yield Window(size, ahead=ahead)
    if q[0] >= 0 and int(last[0, 0]) >= 0:
        yield BlockCausal(int(last[0, 0]) + 1 - int(first[0, 0]))
    yield from _documents(q, first, last, local)
    lengths = tuple((last[:, 0] + 1).tolist())
    yield causal | Prefix(lengths if len(lengths) > 1 else lengths[0])
    hidden = (~outline.last_row[0]).nonzero()
    if len(hidden) and int(last[0, -1]) == int(q[-1]):
        sinks, window = int(hidden[0]), int(q[-1]) - int(hidden[-1])
        if window >= 1:
            yield causal & (Window(window) | Sinks(sinks))
    if hides_keys:
        padding = Padding.from_keep(outline.keys)
        yield from (rule & padding for rule in local)


def _documents(q: Tensor, first: Tensor, last: Tensor, local: list[Mask]) -> Iterator[Mask]:
    """Yield packed documents, which start where a query is its own first visible key."""
    bounds = []
    for firsts, lasts in zip(first, last, strict=True):
        starts = {int(x) for x in q[firsts == q]}
        sees = lasts >= 0
        if not bool(sees.any()):
            return
        bounds.append((*sorted(starts | {int(firsts[sees].min())}), int(lasts.max()) + 1))
    document = Document(tuple(bounds) if len(bounds) > 1 else bounds[0])
    yield document
    for rule in local:
        yield rule & document


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


def from_drop(drop: Bool[Tensor, "*shape"]) -> Dense:
    """Convert a bool mask in which True means drop, as `nn.MultiheadAttention` takes it.

    Args:
        drop: bool `[T, S]` or `[B or 1, H or 1, T or 1, S]`, True where a query may not attend.

    Returns:
        The mask, in which True means that the query may attend.

    Raises:
        ArgumentTypeError: not a bool tensor.

    >>> print(from_drop(torch.tensor([[False, True], [False, False]])).table.int().tolist())
    [[1, 0], [1, 1]]
    """
    _check_bool("drop", drop)
    return Dense(~drop)


def to_drop(keep: Bool[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
    """Convert a bool mask in which True means attend to one in which True means drop.

    Args:
        keep: a bool tensor of any shape, such as `mask.block(...)`.

    Returns:
        The negated tensor.

    Raises:
        ArgumentTypeError: not a bool tensor.

    >>> to_drop(torch.tensor([True, False])).tolist()
    [False, True]
    """
    _check_bool("keep", keep)
    return ~keep


def from_additive(mask: Float[Tensor, "*shape"]) -> Dense:
    """Convert a float mask of 0 where a query may attend, and -inf or `finfo.min` where it may not.

    Entries <= finfo.min / 2 are masked.

    Args:
        mask: a float tensor `[T, S]` or `[B or 1, H or 1, T or 1, S]`.

    Returns:
        The mask as a bool tensor.

    Raises:
        ArgumentTypeError: `mask` is not a float tensor.
        ArgumentError: an entry is neither 0 nor masked; such a tensor is a bias.

    >>> from_additive(torch.tensor([[0.0, float("-inf")]])).table.tolist()
    [[True, False]]
    """
    if not isinstance(mask, Tensor) or not mask.is_floating_point():
        got = (
            str(mask.dtype).removeprefix("torch.")
            if isinstance(mask, Tensor)
            else type(mask).__name__
        )
        raise ArgumentTypeError(
            f"additive mask is {got}; it must be a float tensor; for a bool mask, use Dense(mask)"
        )
    dropped = mask <= torch.finfo(mask.dtype).min / 2
    other = ~dropped & (mask != 0)
    if bool(other.any()):
        index = other.nonzero()[0].tolist()
        raise ArgumentError(
            f"additive mask has {float(mask[tuple(index)])} at {index}; it must be 0 or at most "
            "finfo.min / 2: numbers in between are a bias, pass them as bias="
        )
    return Dense(~dropped)


def to_additive(
    keep: Bool[Tensor, "*shape"], dtype: torch.dtype = torch.float32
) -> Float[Tensor, "*shape"]:
    """Convert a bool mask to a float one: 0 where a query may attend, and -inf where it may not.

    Args:
        keep: a bool tensor of any shape, True = may attend, such as `mask.block(...)`.
        dtype: the floating dtype of the result.

    Returns:
        A float tensor of the same shape.

    Raises:
        ArgumentTypeError: not a bool tensor, or a dtype that is not floating.

    >>> to_additive(torch.tensor([True, False])).tolist()
    [0.0, -inf]
    """
    _check_bool("keep", keep)
    if not dtype.is_floating_point:
        raise ArgumentTypeError(
            f"dtype is {dtype}; an additive mask needs a floating dtype, such as torch.float32"
        )
    return torch.zeros(keep.shape, dtype=dtype, device=keep.device).masked_fill(
        ~keep, float("-inf")
    )


def from_lengths(lengths: Lengths) -> Padding:
    """Build the mask of a batch that is padded on the right.

    FlashAttention calls these lengths `seqused_k`, and ONNX `nonpad_kv_seqlen`.

    Args:
        lengths: the number of real tokens of each row.

    Returns:
        The padding mask.

    Raises:
        ArgumentError, ArgumentTypeError: a length is below 0 or not an int.

    >>> from_lengths([2, 3])
    Padding(runs=(((0, 2),), ((0, 3),)))
    """
    return Padding.right(lengths)


def from_window_size(left: int, right: int = 0) -> Mask | None:
    """Convert FlashAttention's `window_size=(left, right)`.

    Args:
        left: how many keys before the query are visible, its own key not counted; -1 is no limit.
        right: how many keys after the query are visible; -1 is no limit.

    Returns:
        The mask; None if neither side is limited.

    Raises:
        ArgumentError, ArgumentTypeError: a side is below -1 or not an int.

    >>> print(from_window_size(3), "|", from_window_size(-1), "|", from_window_size(8, 8))
    causal & window(4) | causal | window(9, ahead=8)
    """
    check_int("left", left, -1, "-1 is no limit")
    check_int("right", right, -1, "-1 is no limit")
    if right == 0:
        return Causal() if left < 0 else Causal() & Window(left + 1)
    if left < 0:
        return None if right < 0 else Window(_UNLIMITED_WINDOW, ahead=right)
    return Window(left + 1, ahead=None if right < 0 else right)


def from_sliding_window(size: int | None) -> Mask:
    """Convert the `sliding_window` of a transformers configuration.

    Args:
        size: the number of visible keys, the query's own included; None is no limit.

    Returns:
        The causal mask with this window.

    Raises:
        ArgumentError, ArgumentTypeError: the size is below 1 or not an int.

    >>> print(from_sliding_window(4096))
    causal & window(4096)
    """
    return Causal() if size is None else Causal() & Window(size)


_UNLIMITED_WINDOW = 1 << 40
"""A window longer than any sequence, and small enough that sums with positions fit into int64."""


def _check_bool(name: str, x: object) -> None:
    if not isinstance(x, Tensor) or x.dtype != torch.bool:
        got = str(x.dtype).removeprefix("torch.") if isinstance(x, Tensor) else type(x).__name__
        raise ArgumentTypeError(f"{name} is {got}; it must be a bool tensor: use {name}.bool()")
