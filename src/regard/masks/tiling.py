"""Key intervals of each query, and the classification of tiles as empty, partial or full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int, Int8
from torch import Tensor
from torch.nn import functional as F

from regard.errors import ArgumentError
from regard.span import Positions, Span, as_tensor, slice_positions, slot_count
from regard.units import plural

UNBOUNDED = 1 << 62
"""A number larger than any key position: the stop of a range without an end."""


class Intervals(NamedTuple):
    """n half-open ranges of key positions for each query; a range with start >= stop is empty.

    Attributes:
        starts: the first position of each range, int64 `[B or 1, H or 1, t, n]`.
        stops: the first position after each range, of the same shape.
    """

    starts: Int[Tensor, "#B #H t n"]
    stops: Int[Tensor, "#B #H t n"]


def normalize_intervals(raw: Intervals) -> Intervals:
    """Return the same sets of positions >= 0 as disjoint, sorted ranges.

    With ranges sorted by start, start_i = max(start_i, stop_0, ..., stop_{i-1}).
    """
    starts, stops = _sort(raw.starts.clamp(min=0), raw.stops)
    if starts.shape[-1] > 1:
        before = stops.cummax(-1).values[..., :-1]
        starts = torch.cat([starts[..., :1], torch.maximum(starts[..., 1:], before)], -1)
        starts, stops = _sort(starts, stops)
    used = (starts < stops).flatten(0, 2).any(0)
    n = max(int(used.sum()), 1)  # empty ranges are last in each row
    return Intervals(starts[..., :n], stops[..., :n])


def _sort(starts: Tensor, stops: Tensor) -> tuple[Tensor, Tensor]:
    """Sort the ranges by start, with empty ranges last as (UNBOUNDED, UNBOUNDED)."""
    empty = starts >= stops
    starts, order = starts.masked_fill(empty, UNBOUNDED).sort(-1)
    return starts, stops.masked_fill(empty, UNBOUNDED).gather(-1, order)


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """Return the positions in both lists: every range of a is intersected with every range of b."""
    starts = torch.maximum(a.starts[..., :, None], b.starts[..., None, :])
    stops = torch.minimum(a.stops[..., :, None], b.stops[..., None, :])
    return normalize_intervals(Intervals(starts.flatten(-2), stops.flatten(-2)))


def broadcast_shape(*shapes: Sequence[int]) -> torch.Size:
    """Return the shape that tensors of these shapes broadcast to.

    `torch.broadcast_shapes` makes 60 Python calls for this, and kernels need it often.
    """
    dims = max(map(len, shapes))
    padded = [(*(1,) * (dims - len(shape)), *shape) for shape in shapes]
    return torch.Size(next((n for n in sizes if n != 1), 1) for sizes in zip(*padded, strict=True))


def broadcast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors, expanded to their common broadcast shape."""
    expanded: tuple[Tensor, ...] = tuple(torch.broadcast_tensors(*tensors))
    return expanded


def union(a: Intervals, b: Intervals) -> Intervals:
    """Return the positions that are in at least one of the two lists."""
    shape = broadcast_shape(a.starts.shape[:-1], b.starts.shape[:-1])
    starts, stops = (
        torch.cat([x.expand(*shape, -1), y.expand(*shape, -1)], -1)
        for x, y in zip(a, b, strict=True)
    )
    return normalize_intervals(Intervals(starts, stops))


def complement(a: Intervals) -> Intervals:
    """Return the positions >= 0 that are in none of the ranges of a normalized list."""
    zero, far = torch.zeros_like(a.starts[..., :1]), torch.full_like(a.starts[..., :1], UNBOUNDED)
    return normalize_intervals(
        Intervals(torch.cat([zero, a.stops], -1), torch.cat([a.starts, far], -1))
    )


def clear_rows(intervals: Intervals, rows: Bool[Tensor, "#B t"]) -> Intervals:
    """Return the intervals with all ranges of some queries made empty."""
    cleared = rows[:, None, :, None]
    return Intervals(*(x.masked_fill(cleared, UNBOUNDED) for x in intervals))


def stack_heads(heads: Sequence[Intervals]) -> Intervals:
    """Join intervals of one head each, `[B or 1, 1, t, n_h]`, to `[B or 1, H, t, max n_h]`."""
    n = max(head.starts.shape[-1] for head in heads)
    B = max(head.starts.shape[0] for head in heads)

    def join(parts: list[Tensor]) -> Tensor:
        padded = [torch.nn.functional.pad(x, (0, n - x.shape[-1]), value=UNBOUNDED) for x in parts]
        return torch.cat([x.expand(B, -1, -1, -1) for x in padded], 1)

    return Intervals(join([x.starts for x in heads]), join([x.stops for x in heads]))


EMPTY, PARTIAL, FULL = 0, 1, 2
"""The states of a tile: no pair, some pairs or all pairs of a query and a key are visible."""
UNKNOWN = -1
"""The state of a tile whose mask must be evaluated to find its state."""

MAX_BLOCKS_AT_ONCE = 32
"""The largest number of neighbouring key blocks that are evaluated together."""


def count_filled_slots(k_positions: Positions, bk: int) -> Int[Tensor, "B nK"]:
    """Return how many slots of each block of `bk` keys hold a token, `[B or 1, nK]`."""
    if isinstance(k_positions, Span):
        lo, hi = _block_bounds(k_positions, bk)
        return (hi - lo).clamp(min=0)[None]
    return _split_into_blocks((k_positions >= 0).long(), bk, 0).sum(-1)


def states_from_intervals(
    intervals: Intervals, k_positions: Positions, bk: int
) -> Int8[Tensor, "B H nK"]:
    """Return the states of the blocks of `bk` keys for queries with these normalized intervals.

    Visible keys are counted per block and query: O(t n nK) for a `Span`; stored positions are
    sorted first.
    """
    if isinstance(k_positions, Span):
        visible = _count_span(intervals, k_positions, bk)  # [B,H,t,nK]
    else:
        visible = _count_stored(intervals, k_positions, bk)
    n_filled = count_filled_slots(k_positions, bk).to(visible.device)[:, None]
    states = torch.full_like(visible[:, :, 0], PARTIAL, dtype=torch.int8)
    states = states.masked_fill((visible == n_filled[:, :, None]).all(2), FULL)
    return states.masked_fill((visible == 0).all(2), EMPTY)


def _count_span(intervals: Intervals, keys: Span, bk: int) -> Tensor:
    """Count the visible keys of each query in each block, `[B, H, t, nK]`."""
    lo, hi = _block_bounds(keys, bk, intervals.starts.device)
    visible = torch.zeros((), dtype=torch.int64, device=lo.device)
    for start, stop in zip(intervals.starts.unbind(-1), intervals.stops.unbind(-1), strict=True):
        visible = visible + (
            torch.minimum(stop[..., None], hi) - torch.maximum(start[..., None], lo)
        ).clamp(min=0)
    return visible


def _count_stored(intervals: Intervals, keys: Tensor, bk: int) -> Tensor:
    """Count as `_count_span` does, for key positions `[B or 1, S]` in any order."""
    inside = (
        _split_into_blocks(torch.where(keys >= 0, keys.long(), UNBOUNDED), bk, UNBOUNDED)
        .sort(-1)
        .values
    )  # [B,nK,bk]
    B = max(inside.shape[0], intervals.starts.shape[0])
    _, H, t, n = intervals.starts.shape
    nK = inside.shape[1]
    inside = inside.expand(B, -1, -1).contiguous()

    def count_below(bounds: Tensor) -> Tensor:
        bounds = bounds.expand(B, -1, -1, -1).reshape(B, 1, -1).expand(-1, nK, -1).contiguous()
        return torch.searchsorted(inside, bounds)

    visible = (count_below(intervals.stops) - count_below(intervals.starts)).clamp(
        min=0
    )  # [B,nK,H*t*n]
    return visible.reshape(B, nK, H, t, n).sum(-1).permute(0, 2, 3, 1)


def count_visible(intervals: Intervals, k_positions: Positions) -> Int[Tensor, "B H t"]:
    """Count the keys that each query sees."""
    S = slot_count(k_positions)
    if S == 0 or intervals.starts.shape[2] == 0:
        B = 1 if isinstance(k_positions, Span) else k_positions.shape[0]
        shape = broadcast_shape((B, 1, 1), intervals.starts.shape[:-1])
        return torch.zeros(shape, dtype=torch.int64, device=intervals.starts.device)
    if isinstance(k_positions, Span):
        return _count_span(intervals, k_positions, S)[..., 0]
    return _count_stored(intervals, k_positions, S)[..., 0]


def and_states(a: Tensor, b: Tensor) -> Int8[Tensor, "..."]:
    """Return the states of `x & y`; two partial tiles give UNKNOWN."""
    a, b = broadcast(a, b)
    out = torch.full_like(a, UNKNOWN)
    out = torch.where(a == FULL, b, torch.where(b == FULL, a, out))
    return out.masked_fill((a == EMPTY) | (b == EMPTY), EMPTY)


def not_states(a: Tensor) -> Int8[Tensor, "..."]:
    """Return the states of `~x` from those of x."""
    return torch.where(a == UNKNOWN, a, FULL - a)


def or_states(a: Tensor, b: Tensor) -> Int8[Tensor, "..."]:
    """Return the states of `x | y`, by De Morgan's law."""
    return not_states(and_states(not_states(a), not_states(b)))


def states_without_rows(
    states: Int8[Tensor, "b h nK"], rows: Bool[Tensor, "b_rows t"] | None
) -> Int8[Tensor, "B h nK"]:
    """Return the states for the case that some of the queries see nothing.

    A full tile becomes partial, and a partial one UNKNOWN.
    """
    if rows is None:
        return states
    some, every = (x[:, None, None] for x in (rows.any(1), rows.all(1)))
    less = torch.where(states == FULL, PARTIAL, torch.where(states == PARTIAL, UNKNOWN, states))
    return torch.where(some, less, states).masked_fill(every, EMPTY)


def evaluate_unknown_blocks(
    states: Int8[Tensor, "b h nK"],
    n_filled: Int[Tensor, "b_filled nK"],
    S: int,
    bk: int,
    evaluate: Callable[[slice], Tensor],
) -> Int8[Tensor, "B H nK"]:
    """Return the states with each UNKNOWN replaced by the exact one, empty slots counted."""
    unknown = (states == UNKNOWN).flatten(0, 1).any(0).tolist()
    slots = torch.full((len(unknown),), bk, device=n_filled.device)
    slots[-1] = S - (len(unknown) - 1) * bk
    states = states.expand(max(states.shape[0], n_filled.shape[0]), -1, -1)
    states = states.masked_fill((n_filled < slots)[:, None] & (states == FULL), PARTIAL)
    states = states.masked_fill((n_filled == 0)[:, None], EMPTY)
    for first, last in _unknown_runs(unknown):
        block = evaluate(slice(first * bk, min(last * bk, S)))
        exact = block_states(block, bk)
        B, H = (max(x, y) for x, y in zip(states.shape[:2], exact.shape[:2], strict=True))
        states = states.expand(B, H, -1).clone()
        states[:, :, first:last] = exact
    return states


def block_states(block: Bool[Tensor, "B H t s"], bk: int) -> Int8[Tensor, "B H nK"]:
    """Return the states of the key blocks of a dense mask `[B, H, t, s]`."""
    some, each = block.any(2), block.all(2)  # [B,H,s]
    missing = -block.shape[3] % bk
    some = torch.unflatten(F.pad(some, (0, missing)), -1, (-1, bk)).any(-1)
    each = torch.unflatten(F.pad(each, (0, missing), value=True), -1, (-1, bk)).all(-1)
    return some.to(torch.int8) + each.to(torch.int8) * some


def _unknown_runs(unknown: list[bool]) -> list[tuple[int, int]]:
    """Return the ranges of neighbouring UNKNOWN blocks, at most MAX_BLOCKS_AT_ONCE long."""
    runs: list[tuple[int, int]] = []
    for j, is_unknown in enumerate(unknown):
        if not is_unknown:
            continue
        if runs and runs[-1][1] == j and j - runs[-1][0] < MAX_BLOCKS_AT_ONCE:
            runs[-1] = (runs[-1][0], j + 1)
        else:
            runs.append((j, j + 1))
    return runs


def _block_bounds(keys: Span, bk: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Return the first position >= 0 of each block, and the first position after it."""
    lo = torch.arange(keys.start, keys.stop, bk, device=device)
    return lo.clamp(min=0), (lo + bk).clamp(max=keys.stop)


def _split_into_blocks(x: Tensor, bk: int, value: int) -> Tensor:
    """Reshape `[B, S]` to `[B, nK, bk]`; the last block is padded with `value`."""
    return torch.unflatten(F.pad(x, (0, -x.shape[1] % bk), value=value), -1, (-1, bk))


class CallSlice(NamedTuple):
    """Some queries (rows) and keys (columns) of one attention call, and where to compute."""

    q_positions: Positions
    k_positions: Positions
    rows: slice
    columns: slice
    device: torch.device

    @property
    def q(self) -> Tensor:
        """The positions of the queries in the slice, `[B or 1, t]`."""
        return as_tensor(slice_positions(self.q_positions, self.rows), self.device).to(self.device)

    @property
    def k(self) -> Tensor:
        """The positions of the keys in the slice, `[B or 1, s]`."""
        return as_tensor(slice_positions(self.k_positions, self.columns), self.device).to(
            self.device
        )

    @property
    def keys(self) -> Positions:
        """The positions of all keys of the call; a `Span` stays a `Span`."""
        keys = self.k_positions
        return keys if isinstance(keys, Span) else keys.to(self.device)


class SlotPair(NamedTuple):
    """One query slot and one key slot of a call, as scalar tensors."""

    b: Tensor
    h: Tensor
    q_idx: Tensor
    kv_idx: Tensor
    q: Tensor
    k: Tensor


def device_of_positions(
    q: Positions, k: Positions, device: torch.device | str | None
) -> torch.device:
    """Return `device` if it is given, else the device of the position tensors, else the CPU."""
    if device is None:
        device = next((x.device for x in (k, q) if isinstance(x, Tensor)), "cpu")
    return torch.device(device)


def to_4d(x: Tensor) -> Tensor:
    """Return `x` with leading dimensions of size 1, so that it has four dimensions."""
    return x if x.ndim == 4 else x[(None,) * (4 - x.ndim)]


def check_batch_rows(mask: str, rows: int, B: int) -> None:
    """Raise unless a mask that stores `rows` batch rows fits a call of batch size `B`."""
    if rows != 1 and rows != B:  # torch.compile gets `rows not in (1, B)` wrong for a dynamic B
        raise ArgumentError(
            f"{mask} holds {plural(rows, 'batch row')}, but the call has batch {B}; give one entry "
            "per batch row, or one for all"
        )
