"""Iterate over a whole pattern in tiles without storing it, and pool its blocks exactly."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import ArgumentError
from regard.inspect.record.recorded_place import ALL, Place, own_or_shared
from regard.untrusted_text import tuple_repr

TILE_SIZE = 256
"""Rows and columns of a tile."""

MAX_CHECKED_STEPS = 4
"""The largest number of steps in a block of rows for which empty tiles are looked up in the masks.

With more steps, as for decoded tokens, every tile is computed.
"""


class Tile(NamedTuple):
    """Scores and weights of a block of rows and columns of one row of the batch.

    Args:
        rows: the range of rows, or their indices in increasing order.
        scores: `[h, t, n]`, -inf where masked.
        weights: `[h, t, n]`, 0 where masked.
    """

    rows: slice | Tensor
    columns: slice
    scores: Tensor
    weights: Tensor

    def __repr__(self) -> str:
        return tuple_repr(self)

    def keep_rows(self, rows: Tensor) -> Tile:
        """Return the tile with all rows masked except some.

        Args:
            rows: which rows of the place to keep, bool `[T]`.

        Returns:
            The tile; the other rows have scores -inf and weights 0.
        """
        out = ~rows[self.rows, None]
        if not bool(out.any()):
            return self
        scores = self.scores.masked_fill(out, -math.inf)
        return self._replace(scores=scores, weights=self.weights.masked_fill(out, 0))


def iterate_tiles(
    place: Place,
    size: int | tuple[int, int] = TILE_SIZE,
    *,
    heads: slice = ALL,
    batch: int = 0,
    rows: slice = ALL,
    dtype: torch.dtype = torch.float64,
) -> Iterator[Tile]:
    """Iterate over the tiles of a pattern, row block by row block.

    Tiles in which no query of the heads sees a key are skipped.

    Args:
        heads: a range of query heads of the model; by default all recorded heads.
        dtype: dtype in which scores are computed.

    Returns:
        An iterator of tiles.

    Raises:
        ArgumentError: a size is less than 1, or there is no such row of the batch.

    >>> import regard
    >>> recording = regard.inspect.record(regard.load("tiny"), "to be or not to be")
    >>> [(tile.rows, tile.columns.start) for tile in iterate_tiles(recording[0], 4)][:3]
    [(slice(0, 4, None), 0), (slice(4, 6, None), 0), (slice(4, 6, None), 4)]
    """
    tall, wide = size if isinstance(size, tuple) else (size, size)
    if min(tall, wide) < 1:
        raise ArgumentError(f"size is {size}; a tile has at least 1 row and 1 column")
    place.check_batch(batch)
    first, last, _ = rows.indices(place.T)
    row = slice(batch, batch + 1)
    for i in range(first, last, tall):
        block = slice(i, min(i + tall, last))
        for c, used in enumerate(_nonempty_blocks(place, block, wide, heads, batch)):
            if not used:
                continue
            columns = slice(c * wide, min((c + 1) * wide, place.N))
            pattern = place.block(block, columns, heads, batch=row, dtype=dtype)
            yield Tile(block, columns, pattern.scores[0], pattern.weights[0])


def _nonempty_blocks(place: Place, rows: slice, wide: int, heads: slice, batch: int) -> list[bool]:
    """Return, for each block of columns, whether some query of a block of rows sees it."""
    n = -(-place.N // wide)
    parts = list(place.split_rows(rows))
    if len(parts) > MAX_CHECKED_STEPS:
        return [True] * n
    used = torch.zeros(n, dtype=torch.bool)
    for step, own, _ in parts:
        if step.first_column != 0:  # its keys do not start at column 0
            used[torch.div(step.columns, wide, rounding_mode="floor").unique()] = True
            continue
        asked = step.call_rows(own)
        states = step.mask.tile_row(step.q_positions, step.k_positions, asked, wide)
        states = own_or_shared(states, batch)
        states = states[heads] if states.shape[0] > 1 else states  # [h or 1,nK]
        used[: states.shape[1]] |= (states > 0).any(0)
    return [bool(x) for x in used]


@dataclass(frozen=True, eq=False)
class Pooled:
    """Blocks of `size` rows and columns of a pattern; the last ones may be smaller.

    Args:
        mass: sum over the keys of a block, mean over its rows that see any key, `[..., R, C]`.
        max: largest weight of a block, `[..., R, C]`.
        seeing: number of rows of each block row that see any key, `[..., R]`.
        visible: number of query-key pairs of a block that the mask allows, `[..., R, C]`.
    """

    size: tuple[int, int]
    shape: tuple[int, int]
    mass: Float[Tensor, "*h R C"]
    max: Float[Tensor, "*h R C"]
    seeing: Int[Tensor, "*h R"]
    visible: Int[Tensor, "*h R C"]

    def __repr__(self) -> str:
        sizes = (" x ".join(map(str, each)) for each in (self.shape, self.size))
        return "Pooled({} weights in blocks of {})".format(*sizes)

    @property
    def pairs(self) -> Int[Tensor, "R C"]:
        """Return the number of query-key pairs of each block."""
        rows, columns = (
            _block_lengths(n, size) for n, size in zip(self.shape, self.size, strict=True)
        )
        return rows[:, None] * columns

    @property
    def density(self) -> Float[Tensor, "*h R C"]:
        """Return the mean weight of the allowed pairs of each block; 0 where none is allowed."""
        return self.mass * self.seeing[..., None] / self.visible.clamp(min=1)

    def head(self, i: int) -> Pooled:
        """Return the blocks of one head.

        Args:
            i: index of the head.

        Returns:
            Blocks without the head dimension.
        """
        parts = (x[i] for x in (self.mass, self.max, self.seeing, self.visible))
        return Pooled(self.size, self.shape, *parts)

    def coarser(self, times: int | tuple[int, int] = 2) -> Pooled:
        """Merge blocks; the result equals pooling the pattern itself at the larger size.

        Args:
            times: number of blocks to merge, down and across.

        Returns:
            The larger blocks.

        Raises:
            ArgumentError: `times` is less than 1.
        """
        down, across = times if isinstance(times, tuple) else (times, times)
        if min(down, across) < 1:
            raise ArgumentError(f"times is {times}; it must be at least 1")
        total = block_sums(self.mass * self.seeing[..., None], down, across)
        seeing = block_sums(self.seeing[..., None], down, 1)[..., 0]
        return Pooled(
            (self.size[0] * down, self.size[1] * across),
            self.shape,
            total / seeing.clamp(min=1)[..., None],
            block_max(self.max, down, across),
            seeing,
            block_sums(self.visible, down, across),
        )


def pool_pattern(
    place: Place,
    size: int | tuple[int, int],
    *,
    heads: slice = ALL,
    batch: int = 0,
) -> Pooled:
    """Compute mass and maximum of the blocks of a pattern, tile by tile.

    Args:
        size: rows and columns of a block, at least 1.
        heads: a range of query heads of the model; by default all recorded heads.

    Returns:
        Blocks of every head, `[h, R, C]`.

    Raises:
        ArgumentError: a size is less than 1, or there is no such row of the batch.

    >>> import regard
    >>> recording = regard.inspect.record(regard.load("tiny"), "to be or not to be")
    >>> pool_pattern(recording[0], 3).mass.sum(2).round(decimals=5).unique().tolist()
    [1.0]
    """
    accumulator = PoolAccumulator(place, size, heads=heads, batch=batch)
    for tile in iterate_tiles(place, accumulator.tile_size, heads=heads, batch=batch):
        accumulator.add(tile)
    return accumulator.blocks()


class PoolAccumulator:
    """Adds the tiles of a pattern to its blocks, for code that already iterates over the tiles."""

    def __init__(
        self, place: Place, size: int | tuple[int, int], *, heads: slice = ALL, batch: int = 0
    ) -> None:
        tall, wide = size if isinstance(size, tuple) else (size, size)
        if min(tall, wide) < 1:
            raise ArgumentError(f"size is {size}; a block has at least 1 row and 1 column")
        place.check_batch(batch)
        self._place, self._size = place, (tall, wide)
        h = len(place.heads if heads == ALL else range(place.H)[heads])
        R, C = -(-place.T // tall), -(-place.N // wide)
        self._mass, self._max = (torch.zeros(h, R, C, dtype=torch.float64) for _ in range(2))
        self._visible = torch.zeros(h, R, C, dtype=torch.int64)
        self._sees_any_key = torch.zeros(h, place.T, dtype=torch.bool)
        self._tokens = place.row_positions[batch] >= 0

    @property
    def tile_size(self) -> tuple[int, int]:
        """Return the size of the tiles that `add` takes, which is whole blocks."""
        tall, wide = self._size
        return tall * max(1, TILE_SIZE // tall), wide * max(1, TILE_SIZE // wide)

    def add(self, tile: Tile) -> None:
        """Add a tile of `tile_size` at a multiple of it; smaller at the end of the pattern."""
        tall, wide = self._size
        tile = tile.keep_rows(self._tokens)
        assert isinstance(tile.rows, slice), "tiles of `iterate_tiles` have ranges of rows"
        cells = (
            slice(None),
            slice(tile.rows.start // tall, -(-tile.rows.stop // tall)),
            slice(tile.columns.start // wide, -(-tile.columns.stop // wide)),
        )
        visible_cells = ~tile.scores.isneginf()
        self._mass[cells] += block_sums(tile.weights, tall, wide)
        largest = block_max(tile.weights, tall, wide).double()
        self._max[cells] = torch.maximum(self._max[cells], largest)
        self._visible[cells] += block_sums(visible_cells.to(tile.weights.dtype), tall, wide).long()
        self._sees_any_key[:, tile.rows] |= visible_cells.any(2)

    def blocks(self) -> Pooled:
        """Return the blocks of the tiles that were added."""
        tall, wide = self._size
        seeing = block_sums(self._sees_any_key.long()[..., None], tall, 1)[..., 0]
        return Pooled(
            (tall, wide),
            (self._place.T, self._place.N),
            self._mass / seeing.clamp(min=1)[..., None],
            self._max,
            seeing,
            self._visible,
        )


def _blocks(x: Tensor, tall: int, wide: int) -> Tensor:
    """Split `[..., t, n]` into blocks `[..., R, tall, C, wide]`, padded with zeros."""
    if x.shape[-1] % wide or x.shape[-2] % tall:
        x = F.pad(x, (0, -x.shape[-1] % wide, 0, -x.shape[-2] % tall))
    return torch.unflatten(torch.unflatten(x, -1, (-1, wide)), -3, (-1, tall))


def block_sums(x: Tensor, tall: int, wide: int) -> Tensor:
    """Return the sum of each block of `[..., t, n]`, rows first, which is much faster."""
    return _blocks(x, tall, wide).sum(-3).sum(-1)


def block_max(x: Tensor, tall: int, wide: int) -> Tensor:
    """Return the largest entry of each block of `[..., t, n]`, `[..., R, C]`."""
    return _blocks(x, tall, wide).amax(-3).amax(-1)


def _block_lengths(n: int, size: int) -> Tensor:
    """Return the length of each block of `size` entries out of n; the last one may be shorter."""
    return (n - torch.arange(0, n, size)).clamp(max=size)
