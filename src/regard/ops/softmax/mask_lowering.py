"""What a mask leaves to do: blocks of queries, each with the pieces of the keys that they see.

A fused kernel knows two shapes only: every key, or the square causal triangle. Everything else is
lowered to those, with an additive mask on the pieces that need one, and joined by lse. What is
masked for a whole tile is never visited.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from regard import masks
from regard.masks import EMPTY, FULL, PARTIAL, Mask
from regard.ops.softmax.call import Call
from regard.span import Span

BLOCK_QUERIES = 256
"""Queries per block."""


class BlockSizes(NamedTuple):
    """How finely a call is cut.

    rows: queries per block, and keys: keys per tile, where tiles are asked for. long: full tiles in
    a row that are worth a piece of their own; fewer join their masked neighbours. small: a triangle
    of at most so many rows beside older keys is cheaper under a mask than as two pieces.
    """

    rows: int = BLOCK_QUERIES
    keys: int = 128
    long: int = 4
    small: int = 32


DEFAULT_BLOCK_SIZES = BlockSizes()

MIN_KEYS = 16
"""Below one SIMD vector of keys, and without a mask, torch 2.13 on CPU turns a row of NaN scores
into zeros (pytorch #141128).
"""


class KeyRange(NamedTuple):
    """A range of keys: start to stop - 1, as numbers, because a compiled graph ties itself to the
    numbers in a slice.

    causal: row i sees the first i + 1 of them.
    mask: makes the float mask [B|1,H|1,t|1,s] that is added to scores, -inf = masked. It is made
        when it is used, and again for the gradient, so that the masks of all pieces never exist at
        once.
    """

    start: int
    stop: int
    causal: bool = False
    mask: Callable[[], Tensor] | None = None

    @property
    def columns(self) -> slice:
        """The keys."""
        return slice(self.start, self.stop)

    @property
    def size(self) -> int:
        """How many keys."""
        return self.stop - self.start


class QueryBlock(NamedTuple):
    """A range of queries, and the disjoint pieces of the keys that they see; none: they see
    nothing.
    """

    rows: slice
    pieces: list[KeyRange]


def lower_mask(call: Call, grain: BlockSizes = DEFAULT_BLOCK_SIZES) -> list[QueryBlock]:
    """The work of a call. Rows that are not listed see nothing."""
    if call.bias is None:
        known = _lower_without_reading(call, grain)
        if known is not None:
            return known
    everything = QueryBlock(
        slice(0, call.T), [_masked_range(call, slice(0, call.T), slice(0, call.S))]
    )
    if call.compiling or call.q.device.type != "cpu":
        # tiles are found by reading tensors: not in a graph, not across a device
        return [everything]
    blocks = [slice(i, min(i + grain.rows, call.T)) for i in range(0, call.T, grain.rows)]
    return [_lower_by_tiles(call, rows, grain) for rows in blocks]


def _lower_without_reading(call: Call, grain: BlockSizes) -> list[QueryBlock] | None:
    """The work of a plain or causal mask over contiguous positions, or None: nothing is read to
    know it.
    """
    q, k = call.q_positions, call.k_positions
    if not (isinstance(q, Span) and isinstance(k, Span) and k.start >= 0):
        return None
    if call.sees_everything:
        return [QueryBlock(slice(0, call.T), [KeyRange(0, call.S)])]
    if isinstance(call.mask, masks.Causal):
        return _lower_causal(call, q, k, grain)
    rest = _padding_beside_causal(call.mask)
    if rest is not None and q == k:
        # the triangle by the flag, what concerns keys only as one row of a mask
        mask = partial(_additive_mask_of_range, replace(call, mask=rest), 0, 1, 0, call.S)
        return [QueryBlock(slice(0, call.T), [KeyRange(0, call.S, True, mask)])]
    return None


def _padding_beside_causal(mask: Mask) -> Mask | None:
    """The padding of `causal & padding`, or None."""
    terms = mask.terms()
    rest = [term for term in terms if not isinstance(term, masks.Causal)]
    known = len(terms) == 2 and len(rest) == 1 and isinstance(rest[0], masks.Padding)
    return rest[0] if known else None


def _lower_causal(call: Call, q: Span, k: Span, grain: BlockSizes) -> list[QueryBlock]:
    """Causal by positions: blind rows, then a triangle beside the older keys, then rows that see
    every key.
    """
    first = min(max(k.start - q.start, 0), call.T)
    past = max(q.start + first - k.start, 0)
    edge = max(0, min(call.T - first, call.S - past))  # rows of the triangle
    work = []
    if edge:
        rows = slice(first, first + edge)
        few = past + edge < MIN_KEYS  # under a mask, NaN scores stay NaN
        if edge == 1 and not few:
            pieces = [KeyRange(0, past + 1)]
        elif few or (past and edge <= grain.small):
            pieces = [_masked_range(call, rows, slice(0, past + edge))]
        else:
            pieces = [
                *([KeyRange(0, past)] if past else []),
                KeyRange(past, past + edge, causal=True),
            ]
        work.append(QueryBlock(rows, pieces))
    if first + edge < call.T and call.S:
        work.append(QueryBlock(slice(first + edge, call.T), [KeyRange(0, call.S)]))
    return work


def _lower_by_tiles(call: Call, rows: slice, grain: BlockSizes) -> QueryBlock:
    """The pieces of a block of queries: runs of tiles that are not empty, long full stretches
    without a mask.
    """
    found = visible_key_ranges(call, rows, grain.keys, grain.long)
    bare = call.bias is None
    return QueryBlock(
        rows,
        [
            KeyRange(keys.start, keys.stop) if full and bare else _masked_range(call, rows, keys)
            for keys, full in found
        ],
    )


def visible_key_ranges(call: Call, rows: slice, size: int, long: int) -> list[tuple[slice, bool]]:
    """Ranges of keys that some query of a block sees, and whether all see all of them, in every row
    and head.
    """
    tiles = call.mask.tile_row(call.q_positions, call.k_positions, rows, size)
    most, least = tiles.amax((0, 1)).tolist(), tiles.amin((0, 1)).tolist()
    state = [hi and (lo if lo == FULL else PARTIAL) for hi, lo in zip(most, least, strict=True)]
    return [
        (slice(start * size, min(stop * size, call.S)), full)
        for start, stop, full in merge_tiles(state, long)
    ]


def merge_tiles(state: list[int], long: int) -> list[tuple[int, int, bool]]:
    """Runs (start, stop, full) over the tiles that are not empty.

    Full tiles are a run of their own if they are `long`, or have no partial neighbour; fewer join
    it: under a mask they are cheaper than one more piece.

    >>> runs([0, 1, 2, 2, 2, 1, 0, 2], long=3)
    [(1, 2, False), (2, 5, True), (5, 6, False), (7, 8, True)]
    >>> runs([1, 2, 1, 0], long=3)
    [(0, 3, False)]
    """
    found: list[tuple[int, int, bool]] = []
    for kind, group in groupby(range(len(state)), key=state.__getitem__):
        tiles = list(group)
        start, stop = tiles[0], tiles[-1] + 1
        beside = PARTIAL in (*state[max(start - 1, 0) : start], *state[stop : stop + 1])
        full = kind == FULL and (len(tiles) >= long or not beside)
        if kind == EMPTY:
            continue
        if found and found[-1][1] == start and not full and not found[-1][2]:
            start = found.pop()[0]
        found.append((start, stop, full))
    return found


def _masked_range(call: Call, rows: slice, columns: slice) -> KeyRange:
    """A piece under an additive mask."""
    where = rows.start, rows.stop, columns.start, columns.stop
    return KeyRange(
        columns.start, columns.stop, False, partial(_additive_mask_of_range, call, *where)
    )


def _additive_mask_of_range(call: Call, top: int, bottom: int, start: int, stop: int) -> Tensor:
    return additive_mask(call, slice(top, bottom), slice(start, stop))


def additive_mask(call: Call, rows: slice, columns: slice) -> Tensor:
    """The bias where a key is visible (0 without one), -inf where not: float [B|1,H|1,t,s]."""
    where = (call.q_positions, call.k_positions, rows, columns)
    visible = call.mask.block(*where, device=call.q.device)
    if call.bias is None:
        base = torch.zeros((), dtype=call.score_dtype, device=visible.device)
    else:
        base = call.bias.block(*where, dtype=call.score_dtype, device=visible.device)
    return torch.where(visible, base, -math.inf)
