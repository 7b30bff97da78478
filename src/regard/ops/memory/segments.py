"""Which queries of a call read the memory in front of which segment, and which keys are written behind it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from regard.process import is_compiling
from regard.span import Positions, Span, as_tensor, count


class Piece(NamedTuple):
    """One segment, as far as a call has it.

    queries: the slots of the call's queries among which those of the segment are.
    keys: the same for keys.
    q_in: [B or 1, t], which of these queries belong to it; None is all.
    k_in: [B or 1, s], which of these keys are to be written; None is all.
    closed: whether there may be anything to write: the segment's last position, or a later one, has been seen.
    """

    queries: slice
    keys: slice
    q_in: Tensor | None
    k_in: Tensor | None
    closed: bool


def pieces(
    positions: Positions, T: int, size: int, device: torch.device | None = None
) -> Iterator[Piece]:
    """The segments of a call whose keys stand at `positions`, and whose queries are the last T of them, in order.

    Position p belongs to segment p // size; segment s is closed when position (s + 1) size - 1 or a later one of its row
    has been seen.

    >>> [(piece.queries, piece.keys, piece.closed) for piece in pieces(Span(4, 6), 3, 4)]
    [(slice(0, 1, None), slice(0, 4, None), True), (slice(1, 3, None), slice(4, 6, None), False)]
    """
    if count(positions) == 0:
        return
    compiling = is_compiling()
    if isinstance(positions, Span) and (size <= T or not compiling):
        yield from _of_a_span(positions, T, size)
    elif compiling:  # also a few tokens at a span: its graph serves them in front of a border, across and behind it
        yield from _of_a_graph(as_tensor(positions, device), T, size)
    else:
        yield from _of_rows(as_tensor(positions), T, size)


def _of_a_span(keys: Span, T: int, size: int) -> Iterator[Piece]:
    """All rows alike: slices, and nothing to read."""
    held, base = keys.length - T, keys.start // size
    n = (keys.stop - 1) // size - base + 1
    for i in range(n):
        first = 0 if i == 0 else (base + i) * size - keys.start
        last = keys.length if i == n - 1 else (base + i + 1) * size - keys.start
        queries = slice(max(first - held, 0), max(last - held, 0))
        yield Piece(queries, slice(first, last), None, None, i < n - 1 or keys.stop % size == 0)


def _of_rows(positions: Tensor, T: int, size: int) -> Iterator[Piece]:
    """Rows whose borders differ: the slots between the first and the last one of any row, and which of them it is."""
    segment, open_ = _segments(positions, size)
    held = positions.shape[1] - T
    for s in segment[positions >= 0].unique().tolist():
        inside = (segment == s) & (positions >= 0)
        slots = inside.any(0).nonzero()
        keys = slice(int(slots[0]), int(slots[-1]) + 1)
        queries = slice(max(keys.start - held, 0), max(keys.stop - held, 0))
        writes = inside[:, keys] & (s < open_)
        yield Piece(queries, keys, inside[:, held:][:, queries], writes, bool(writes.any()))


def _of_a_graph(positions: Tensor, T: int, size: int) -> Iterator[Piece]:
    """As rows, in a compiled graph, which reads no tensor: as many segments as T tokens without a gap can touch."""
    segment, open_ = _segments(positions, size)
    used = positions >= 0
    first = segment.masked_fill(~used, torch.iinfo(segment.dtype).max).amin(1, keepdim=True)
    held, most = positions.shape[1] - T, -(-T // size) + 1
    fits = torch.where(used, segment - first < most, True).all()
    torch._assert_async(
        fits, "positions have gaps of whole segments; call it without torch.compile"
    )
    for n in range(most):
        inside = (segment == first + n) & used
        yield Piece(
            slice(0, T), slice(0, positions.shape[1]), inside[:, held:],
            inside & (segment < open_), closed=True,
        )  # fmt: skip


def _segments(positions: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The segment of every slot [B,S], and the first segment of each row that is not closed [B,1]."""
    last = positions.amax(1, keepdim=True).clamp(min=-1)
    return positions.div(size, rounding_mode="floor"), (last + 1).div(size, rounding_mode="floor")
