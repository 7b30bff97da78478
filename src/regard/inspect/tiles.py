"""Walking over a whole pattern in tiles, without ever holding it; tiles that a mask leaves empty
are not computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.inspect.kept import ALL
from regard.inspect.place import Place

SIZE = 256
"""Rows and columns of a tile."""

FEW = 4
"""Steps in a block of rows, up to which their masks are asked what is empty; of decoded tokens all
is computed.
"""


class Tile(NamedTuple):
    """Scores (-inf where masked) and weights of a block, [h,t,n] of one row of the batch."""

    rows: slice
    columns: slice
    scores: Tensor
    weights: Tensor

    def only(self, rows: Tensor) -> Tile:
        """The tile in which only some rows of the place, bool [T], see anything."""
        out = ~rows[self.rows, None]
        if not bool(out.any()):
            return self
        scores = self.scores.masked_fill(out, -math.inf)
        return self._replace(scores=scores, weights=self.weights.masked_fill(out, 0))


def walk(
    place: Place,
    size: int | tuple[int, int] = SIZE,
    *,
    heads: slice = ALL,
    batch: int = 0,
    rows: slice = ALL,
    dtype: torch.dtype = torch.float64,
) -> Iterator[Tile]:
    """The tiles of a pattern, row block by row block, those left out in which no query of the heads
    sees a key.

    Args:
        place: from a recording.
        size: rows and columns of a tile.
        heads: as the model numbers them; all that were recorded by default.
        batch: which row of the batch.
        rows: a range of rows only.

    Raises:
        ArgumentError: a size is less than 1, or the place has no such row of a batch.

    >>> import regard
    >>> found = regard.inspect.record(regard.load("tiny"), "to be or not to be")
    >>> [(tile.rows, tile.columns.start) for tile in walk(found[0], 4)][:3]
    [(slice(0, 4, None), 0), (slice(4, 6, None), 0), (slice(4, 6, None), 4)]
    """
    tall, wide = size if isinstance(size, tuple) else (size, size)
    if min(tall, wide) < 1:
        raise ArgumentError(f"size is {size}; a tile has at least 1 row and 1 column")
    if not 0 <= batch < place.B:
        raise ArgumentError(f"batch is {batch}; {place.name} has rows 0 to {place.B - 1}")
    first, last, _ = rows.indices(place.T)
    row = slice(batch, batch + 1)
    for i in range(first, last, tall):
        block = slice(i, min(i + tall, last))
        for c, used in enumerate(_used(place, block, wide, heads, batch)):
            if not used:
                continue
            columns = slice(c * wide, min((c + 1) * wide, place.N))
            found = place.block(block, columns, heads, batch=row, dtype=dtype)
            yield Tile(block, columns, found.scores[0], found.weights[0])


def _used(place: Place, rows: slice, wide: int, heads: slice, batch: int) -> list[bool]:
    """Which blocks of columns some query of a block of rows may see."""
    n = -(-place.N // wide)
    parts = list(place.parts(rows))
    if len(parts) > FEW:
        return [True] * n
    used = torch.zeros(n, dtype=torch.bool)
    for step, own, _ in parts:
        if step.run != 0:  # its keys are no blocks of columns
            used[torch.unique(torch.div(step.columns, wide, rounding_mode="floor"))] = True
            continue
        asked = slice(own.start + step.first, own.stop + step.first)
        states = step.mask.tile_row(step.q_positions, step.k_positions, asked, wide)
        states = states[batch if states.shape[0] > 1 else 0]
        states = states[heads] if states.shape[0] > 1 else states  # [h or 1,nK]
        used[: states.shape[1]] |= (states > 0).any(0)
    return [bool(x) for x in used]
