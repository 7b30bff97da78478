"""Exact tiles of the pattern of one head, at any length, from the recorded q, k and lse.

Blocks of 2^L rows and 2^L columns make level L, and a tile shows 256 x 256 blocks:

    p_ij = exp(softcap(scale q_i . k_j) + bias_ij - L_i)   where the mask lets i attend to j
    mass = sum over the columns of a block, mean over its rows;   max = largest p_ij of a block

Both compose: a tile of level L + 1 follows from four tiles of level L. The products of a tile are
computed in fp32, so that a weight has a relative error of about 2^-22 times the size of its score;
fp64 recordings are computed in fp64. Rows, columns and cells that are read as numbers are computed
in fp64 by `page_answers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from regard.inspect.record.recorded_place import (
    ColumnRanges,
    Place,
    RecordedStep,
    own_or_shared,
    range_of,
)
from regard.inspect.record.tiles import block_max, block_sums

BLOCKS = 256
"""Rows and columns of blocks in a tile."""
ROWS_AT_ONCE = 512
"""Number of rows whose products with `COLUMNS_AT_ONCE` keys are computed together."""
COLUMNS_AT_ONCE = 2048
SAMPLED_COLUMNS_AT_ONCE = 4096
"""Number of keys with which the products of sampled rows are computed together."""
PEAKS = 3
"""Number of largest weights of a tile whose place is reported."""
MASKED = -1.0
"""The value of a block in which no query may attend to a key."""


class Peak(NamedTuple):
    """A large weight: its row, its column, its value, and how many keys its row sees."""

    row: int
    column: int
    weight: float
    keys: float

    @property
    def rank(self) -> float:
        """Return p ln(1 + n), by which peaks are ordered: how far the weight is from uniform."""
        return self.weight * math.log1p(self.keys)


@dataclass(frozen=True, eq=False)
class TileData:
    """The blocks of a tile.

    Args:
        mass: sum over the columns, mean over the rows of a block, `[R, C]`; -1 where the mask
            allows no pair.
        max: largest weight of a block, `[R, C]`, or -1.
        visible: share of the pairs of a block that the mask allows, `[R, C]`; None if all of them.
        keys: mean number of keys that the rows of a block row see in the whole pattern, `[R]`.
        peaks: the most concentrated weights, by p ln n: near 1 in a row of few keys is nothing.
        computed: share of the tile whose rows are all computed; the rest is sampled.
    """

    mass: Tensor
    max: Tensor
    visible: Tensor | None
    keys: Tensor
    peaks: tuple[Peak, ...]
    computed: float = 1.0
    sampled: int = 0


Observer: TypeAlias = Callable[[Tensor, int, Tensor], None]
"""Receives (which rows, first column, weights `[t, c]`, -1 where masked)."""


class Range(NamedTuple):
    """Rows and columns of a tile, clipped to the pattern."""

    r0: int
    r1: int
    c0: int
    c1: int


class HeadTiles:
    """Computes tiles of one query head of a place.

    Args:
        place: a place whose columns have one key each (`split_by_pool`).
        like: another head of the place, whose mask is not evaluated again if all heads have it.
    """

    def __init__(
        self, place: Place, head: int, batch: int = 0, *, like: HeadTiles | None = None
    ) -> None:
        self.place, self.head, self.batch = place, head, batch
        self.T, self.N = place.T, place.N
        if like is not None and like.place is place and like.mask_of_all_heads:
            self._step_ranges, self.keys_seen = like._step_ranges, like.keys_seen
        self._index = place.head_index(head)
        pool = place.pools[0]
        self._group = pool.group_index(head, place.H)
        double = pool.k.dtype == torch.float64
        self.dtype = torch.float64 if double else torch.float32

    @property
    def recorded_heads(self) -> slice:
        """Return the index of the head among the recorded ones, as a range."""
        return slice(self._index, self._index + 1)

    @cached_property
    def k(self) -> Tensor:
        """Return the keys of the head, `[N, D]`."""
        return self.place.pools[0].k[self.batch, self._group].to(self.dtype)

    def q(self, step: RecordedStep, own: slice) -> Tensor:
        """Return some queries of a step, `[t, D]`."""
        return step.q[self.batch, self._index, own].to(self.dtype)

    @cached_property
    def denominators(self) -> Tensor:
        """Return ln of the softmax denominators in fp64, `[T]`; +inf where no key is seen."""
        parts = [step.denominator[self.batch, self._index] for step in self.place.steps]
        whole = torch.cat(parts)
        return whole.masked_fill(whole.isneginf(), math.inf)

    @cached_property
    def is_token(self) -> Tensor:
        """Return which rows hold a token, bool `[T]`."""
        return self.place.row_positions[self.batch] >= 0

    @property
    def top_level(self) -> int:
        """Return the level at which one tile shows the whole pattern."""
        return max(0, math.ceil(math.log2(max(self.T, self.N, 1) / BLOCKS)))

    def range(self, level: int, i: int, j: int) -> Range:
        """Return the rows and columns of tile (i, j) of a level."""
        size = BLOCKS << level
        return Range(i * size, min((i + 1) * size, self.T), j * size, min((j + 1) * size, self.N))

    # ---- masks
    @property
    def mask_of_all_heads(self) -> bool:
        """Return whether the masks are known as ranges that do not depend on the head."""
        return all(self._step_ranges) and not any(
            step.mask.block(step.q_positions, step.k_positions, slice(0, 1), slice(0, 1)).shape[1]
            > 1
            for step in self.place.steps
        )

    @cached_property
    def _step_ranges(self) -> list[ColumnRanges | None]:
        """Return the columns that each step's queries see, as starts and stops; or None."""
        return [self._ranges_of(step) for step in self.place.steps]

    def _ranges_of(self, step: RecordedStep) -> ColumnRanges | None:
        ranges = None if step.edited else step.column_ranges(self.batch)
        if ranges is None:
            return None
        head = self.head if ranges.starts.shape[0] > 1 else 0
        return ColumnRanges(ranges.starts[head], ranges.stops[head])

    def visible(self, number: int, own: slice, c0: int, c1: int) -> Tensor | bool:
        """Return which of some keys some queries see, bool `[t, c]`; True is all, False none."""
        step, ranges = self.place.steps[number], self._step_ranges[number]
        if ranges is not None:
            starts, stops = ranges[0][own], ranges[1][own]
            if bool(((starts <= c0) & (stops >= c1)).any(1).all()):
                return True
            if not bool(((starts < c1) & (stops > c0) & (starts < stops)).any()):
                return False
            return _inside(starts, stops, c0, c1)
        slots = step.slots(slice(c0, c1))
        keys, picked = range_of(slots)
        if keys.stop <= keys.start:
            return False
        block = own_or_shared(step.allowed(step.mask, own, keys, self.batch), self.head)
        block = block if picked is None else block[:, picked]
        visible = torch.zeros(block.shape[0], c1 - c0, dtype=torch.bool)
        visible[:, step.columns[slots] - c0] = block
        return visible

    @cached_property
    def keys_seen(self) -> Tensor:
        """Return how many keys each row sees, fp64 `[T]`; it is at most N."""
        parts = []
        for number, step in enumerate(self.place.steps):
            ranges = self._step_ranges[number]
            if ranges is not None:
                parts.append((ranges[1] - ranges[0]).clamp(min=0).sum(1).double())
                continue
            counts = torch.zeros(step.T, dtype=torch.float64)
            for own in _chunks(slice(0, step.T), max(1, (1 << 22) // max(1, self.N))):
                visible = self.visible(number, own, 0, self.N)
                counts[own] = (
                    float(self.N * visible)
                    if isinstance(visible, bool)
                    else visible.double().sum(1)
                )
            parts.append(counts)
        return torch.cat(parts)

    def is_empty(self, where: Range) -> bool:
        """Return whether the mask is known to allow no pair of a range, by its rule alone."""
        rows = slice(where.r0, where.r1)
        for number, own, _ in self._parts(rows):
            ranges = self._step_ranges[number]
            if ranges is None:
                return False
            starts, stops = ranges[0][own], ranges[1][own]
            overlap = (starts < where.c1) & (stops > where.c0) & (starts < stops)
            if bool(overlap.any()):
                return False
        return True

    # ---- weights
    def _parts(self, rows: slice) -> Iterator[tuple[int, slice, slice]]:
        """Generate (number of a step, its rows, these relative to `rows.start`)."""
        numbers = {id(step): n for n, step in enumerate(self.place.steps)}
        for step, own, target in self.place.split_rows(rows):
            yield numbers[id(step)], own, target

    def weights(self, rows: Tensor | slice, number: int, c0: int, c1: int) -> Tensor | None:
        """Compute weights of some rows of a step, `[t, c]`; -1 where masked, None if all are."""
        step = self.place.steps[number]
        own = rows if isinstance(rows, slice) else slice(int(rows[0]), int(rows[-1]) + 1)
        if isinstance(rows, slice) or own.stop - own.start == len(rows):
            visible = self.visible(number, own, c0, c1)
            rows = own
        else:
            each = [self.visible(number, slice(i, i + 1), c0, c1) for i in rows.tolist()]
            visible = torch.cat(
                [torch.full((1, c1 - c0), x) if isinstance(x, bool) else x for x in each]
            )
        if visible is False:
            return None
        if step.edited or step.bias is not None or not self._is_plain(step):
            return self._general(rows, number, c0, c1)
        p = self._plain_weights(rows, number, slice(c0, c1))
        if not isinstance(visible, bool):
            p = torch.where(visible, p, MASKED)
        return p

    def _is_plain(self, step: RecordedStep) -> bool:
        """Return whether every column of the place is a key of the step, in order."""
        return step.first_column == 0 and step.pool_index is None

    def _general(self, rows: Tensor | slice, number: int, c0: int, c1: int) -> Tensor:
        """Compute weights with a bias, an edit or keys in another order, through the recording."""
        first = self.place.first_row(number)
        own = rows if isinstance(rows, slice) else slice(int(rows[0]), int(rows[-1]) + 1)
        block = self.place.block(
            slice(first + own.start, first + own.stop),
            slice(c0, c1),
            slice(self.head, self.head + 1),
            batch=slice(self.batch, self.batch + 1),
            dtype=self.dtype,
        )
        p = torch.where(block.scores[0, 0].isneginf(), MASKED, block.weights[0, 0])
        return p if isinstance(rows, slice) else p[rows - own.start]

    # ---- tiles
    def tile(
        self, level: int, i: int, j: int, *, pause: Callable[[], object] | None = None
    ) -> TileData:
        """Compute tile (i, j) of a level exactly, from every row and column."""
        where, size = self.range(level, i, j), 1 << level
        R, C = -(-(where.r1 - where.r0) // size), -(-(where.c1 - where.c0) // size)
        mass, pairs = torch.zeros(R, C, dtype=torch.float64), torch.zeros(R, C, dtype=torch.float64)
        most = torch.full((R, C), MASKED, dtype=self.dtype)
        peaks: list[Peak] = []
        tall = max(size, ROWS_AT_ONCE // size * size)
        wide = max(size, COLUMNS_AT_ONCE // size * size)
        for rows in _chunks(slice(where.r0, where.r1), tall):
            for columns in _chunks(slice(where.c0, where.c1), wide):
                if pause is not None:
                    pause()
                p = self._chunk(rows, columns)
                if p is None:
                    continue
                to = _blocks_of(rows, where.r0, size), _blocks_of(columns, where.c0, size)
                largest = _block_max_of(p, size, size)
                origin = rows.start, columns.start
                peaks = _add_peaks(peaks, p, largest, size, origin, self.keys_seen[rows])
                hidden = p < 0
                any_hidden = bool(hidden.any())
                area = torch.ones((), dtype=p.dtype).expand(p.shape)
                mass[to] += block_sums(p.clamp(min=0) if any_hidden else p, size, size)
                pairs[to] += block_sums((~hidden).to(p.dtype) if any_hidden else area, size, size)
                most[to] = torch.maximum(most[to], largest)
        area = _areas(where, size, mass)
        mass /= self.seeing(where, size).clamp(min=1)[:, None]
        mass = mass.masked_fill(pairs == 0, MASKED)
        share = None if bool((pairs == area).all()) else (pairs / area).float()
        keys = self.keys_of(where, size)
        return TileData(mass.float(), most.float(), share, keys, tuple(peaks))

    def _chunk(self, rows: slice, columns: slice) -> Tensor | None:
        """Compute the weights of a range of rows and columns, -1 where masked; None if all are."""
        parts = list(self._parts(rows))
        if len(parts) == 1:
            return self.weights(parts[0][1], parts[0][0], columns.start, columns.stop)
        whole = torch.full(
            (rows.stop - rows.start, columns.stop - columns.start), MASKED, dtype=self.dtype
        )
        for number, own, target in parts:
            p = self.weights(own, number, columns.start, columns.stop)
            if p is not None:
                whole[target] = p
        return whole

    def seeing(self, where: Range, size: int) -> Tensor:
        """Return how many rows of each block row see any key of the pattern, `[R]`."""
        sees = (self.keys_seen[where.r0 : where.r1] > 0).double()
        return block_sums(sees[:, None], size, 1)[:, 0]

    def keys_of(self, where: Range, size: int) -> Tensor:
        """Return the mean number of keys that the seeing rows of each block row see, `[R]`."""
        keys = block_sums(self.keys_seen[where.r0 : where.r1, None], size, 1)[:, 0]
        return (keys / self.seeing(where, size).clamp(min=1)).float()

    def preview(self, level: int, i: int, j: int) -> TileData:
        """Compute a tile from one exact row of each block row: a sample, with every column."""
        where, size = self.range(level, i, j), 1 << level
        R, C = -(-(where.r1 - where.r0) // size), -(-(where.c1 - where.c0) // size)
        chosen = (where.r0 + size * torch.arange(R) + size // 2).clamp(max=where.r1 - 1)
        sums, largest, pairs = self.row_blocks(chosen, where.c0, where.c1, size)
        columns_each = (where.c1 - where.c0 - size * torch.arange(C)).clamp(max=size)
        mass, share = sums.masked_fill(pairs == 0, MASKED), pairs.double() / columns_each
        keys = self.keys_seen[chosen].float()
        return TileData(mass.float(), largest.float(), share.float(), keys, (), 0.0, 1)

    def row_blocks(
        self, rows: Tensor, c0: int, c1: int, size: int, observe: Observer | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Pool exact rows over column blocks: (sums, maxima or -1, visible pairs), `[rows, C]`."""
        C = -(-(c1 - c0) // size)
        sums, largest, pairs = (torch.zeros(len(rows), C, dtype=self.dtype) for _ in range(3))
        largest.fill_(MASKED)
        wide = max(size, SAMPLED_COLUMNS_AT_ONCE // size * size)
        start = int(rows[0]) if len(rows) else 0
        whole = slice(start, int(rows[-1]) + 1 if len(rows) else 0)
        for number, own, target in self._parts(whole):
            indices = ((rows >= start + target.start) & (rows < start + target.stop)).nonzero()[
                :, 0
            ]
            local = rows[indices] - start - target.start + own.start
            for columns in _chunks(slice(c0, c1), wide) if len(local) else ():
                seeing, p = self._sampled(local, number, columns)
                if not len(seeing):
                    continue
                if observe is not None:
                    observe(indices[seeing], columns.start, p)
                to = indices[seeing], _blocks_of(columns, c0, size)
                hidden = p < 0
                largest[to] = _block_max_of(p, 1, size)
                if bool(hidden.any()):
                    pairs[to] = block_sums((~hidden).to(p.dtype), 1, size)
                    p = p.clamp_(min=0)
                else:
                    pairs[to] = block_sums(torch.ones((), dtype=p.dtype).expand(p.shape), 1, size)
                sums[to] = block_sums(p, 1, size)
        return sums, largest, pairs

    def _sampled(self, local: Tensor, number: int, columns: slice) -> tuple[Tensor, Tensor]:
        """Compute chosen rows of a step: (which see a key, their weights, -1 where masked)."""
        ranges, step = self._step_ranges[number], self.place.steps[number]
        if ranges is None or step.edited or step.bias is not None or not self._is_plain(step):
            p = self.weights(local, number, columns.start, columns.stop)
            every = torch.arange(len(local) if p is not None else 0)
            return every, torch.zeros(0) if p is None else p
        starts, stops = ranges[0][local], ranges[1][local]
        overlap = (starts < columns.stop) & (stops > columns.start) & (starts < stops)
        seeing = overlap.any(1).nonzero()[:, 0]
        if not len(seeing):
            return seeing, torch.zeros(0)
        starts, stops, local = starts[seeing], stops[seeing], local[seeing]
        p = self._plain_weights(local, number, columns)
        partial = ~((starts <= columns.start) & (stops >= columns.stop)).any(1)
        if bool(partial.any()):
            visible = _inside(starts[partial], stops[partial], columns.start, columns.stop)
            p[partial] = torch.where(visible, p[partial], MASKED)
        return seeing, p

    def _plain_weights(self, rows: Tensor | slice, number: int, columns: slice) -> Tensor:
        """Compute exp(softcap(scale q . k) - L) of rows of a step, as if every key were seen."""
        step, first = self.place.steps[number], self.place.first_row(number)
        scores = step.q[self.batch, self._index, rows].to(self.dtype) @ self.k[columns].T
        scores *= step.scale
        if step.softcap is not None:
            scores.div_(step.softcap).tanh_().mul_(step.softcap)
        denominators = self.denominators[first : first + step.T][rows].to(self.dtype)
        return scores.sub_(denominators[:, None]).exp_()


def coarser_blocks(
    tiles: HeadTiles, part: TileData, level: int, where: tuple[int, int], depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Merge a tile's blocks to blocks 2^depth times as large: (mass, max, visible share)."""
    size, times = 1 << level, 1 << depth
    inner = tiles.range(level, *where)
    seeing = tiles.seeing(inner, size)
    area = _areas(inner, size, part.mass)
    pairs = area if part.visible is None else part.visible.double() * area
    mass = block_sums(part.mass.double().clamp(min=0) * seeing[:, None], times, times)
    counted = block_sums(pairs, times, times)
    num_seeing = block_sums(seeing[:, None], times, 1)[:, 0]
    mass = (mass / num_seeing.clamp(min=1)[:, None]).masked_fill(counted == 0, MASKED)
    share = counted / block_sums(area, times, times)
    return mass.float(), _block_max_of(part.max, times, times).float(), share.float()


def _inside(starts: Tensor, stops: Tensor, c0: int, c1: int) -> Tensor:
    """Return which columns from c0 to c1 lie in the ranges `[t, n]` of each row, bool `[t, c]`."""
    columns = torch.arange(c0, c1)
    inside = torch.zeros(len(starts), c1 - c0, dtype=torch.bool)
    for n in range(starts.shape[1]):
        inside |= (columns >= starts[:, n, None]) & (columns < stops[:, n, None])
    return inside


def _areas(where: Range, size: int, blocks: Tensor) -> Tensor:
    """Return the number of cells of each block `[R, C]` of a tile; the last ones are smaller."""
    rows, columns = (
        (end - start - size * torch.arange(n)).clamp(max=size).double()
        for start, end, n in (
            (where.r0, where.r1, blocks.shape[0]),
            (where.c0, where.c1, blocks.shape[1]),
        )
    )
    return rows[:, None] * columns


def _block_max_of(p: Tensor, tall: int, wide: int) -> Tensor:
    """Return the largest entry of each block of `tall` x `wide`; padding counts as masked."""
    if p.shape[0] % tall or p.shape[1] % wide:
        pad = (0, -p.shape[1] % wide, 0, -p.shape[0] % tall)
        p = torch.nn.functional.pad(p, pad, value=MASKED)
    return block_max(p, tall, wide)


def merge_peaks(peaks: list[Peak]) -> list[Peak]:
    """Return the first `PEAKS` of them, the most concentrated first."""
    return sorted(peaks, key=lambda peak: -peak.rank)[:PEAKS]


def _add_peaks(
    peaks: list[Peak], p: Tensor, largest: Tensor, size: int, origin: tuple[int, int], keys: Tensor
) -> list[Peak]:
    """Return the peaks among those known and those of one more chunk, each of another block."""
    first = keys[::size][: largest.shape[0], None]
    ranks = (largest * first.log1p().to(largest)).flatten()
    ranks = ranks.masked_fill(ranks.isnan(), MASKED)
    ranks, which = ranks.topk(min(PEAKS, largest.numel()))
    least = peaks[-1].rank if len(peaks) == PEAKS else 0.0
    for rank, index in zip(ranks.tolist(), which.tolist(), strict=True):
        if not rank > 0.99 * least:
            break
        a, b = divmod(index, largest.shape[1])
        block = p[a * size : (a + 1) * size, b * size : (b + 1) * size]
        r, c = divmod(int(block.flatten().argmax()), block.shape[1])
        row = a * size + r
        peak = Peak(origin[0] + row, origin[1] + b * size + c, float(block[r, c]), float(keys[row]))
        peaks = [*peaks, peak]
    return merge_peaks(peaks)


def _blocks_of(which: slice, start: int, size: int) -> slice:
    """Return the blocks of a tile that begins at `start` to which rows or columns belong."""
    return slice((which.start - start) // size, -(-(which.stop - start) // size))


def _chunks(which: slice, size: int) -> Iterator[slice]:
    """Split a range into ranges of at most `size`."""
    for start in range(which.start, which.stop, size):
        yield slice(start, min(start + size, which.stop))
