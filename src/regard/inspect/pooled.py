"""A pattern at a distance: mass and max of its blocks, exactly, in memory that does not grow with T
x N.

    mass_IJ = mean over i in I of sum over j in J of p_ij        max_IJ = max over i in I, j in J of p_ij

I are the rows of a block that are tokens and see any key: so each row of blocks sums to 1 at every
size, less the share of a sink. Both
compose: what `coarser` makes of blocks is what the pattern itself gives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import ArgumentError
from regard.inspect.kept import ALL
from regard.inspect.place import Place
from regard.inspect.tiles import SIZE, walk


@dataclass(frozen=True, eq=False)
class Pooled:
    """Blocks of `size` rows and columns; the last ones may be smaller.

    mass, max: [..., R, C], of h heads or of one. seeing: [..., R], how many rows of a block see any
        key.
    visible: [..., R, C], how many pairs of a block the mask lets through; of the `pairs` [R, C]
        that there are.
    """

    size: tuple[int, int]
    shape: tuple[int, int]
    mass: Float[Tensor, "*h R C"]
    max: Float[Tensor, "*h R C"]
    seeing: Int[Tensor, "*h R"]
    visible: Int[Tensor, "*h R C"]

    @property
    def pairs(self) -> Int[Tensor, "R C"]:
        """How many query-key pairs each block has."""
        rows, columns = (_lengths(n, size) for n, size in zip(self.shape, self.size, strict=True))
        return rows[:, None] * columns

    @property
    def density(self) -> Float[Tensor, "*h R C"]:
        """The mean weight of the pairs that the mask lets through; 0 where it lets none."""
        return self.mass * self.seeing[..., None] / self.visible.clamp(min=1)

    def head(self, i: int) -> Pooled:
        """One of the heads."""
        parts = (x[i] for x in (self.mass, self.max, self.seeing, self.visible))
        return Pooled(self.size, self.shape, *parts)

    def coarser(self, times: int | tuple[int, int] = 2) -> Pooled:
        """Blocks of so many blocks: what pooling the pattern itself at that size gives.

        Raises:
            ArgumentError: times is less than 1.

        >>> import regard
        >>> found = regard.inspect.record(regard.load("tiny"), "to be or not to be").pooled(0, 0, 2)
        >>> found.coarser(3).mass.sum(1).round(decimals=5).tolist()
        [1.0]
        """
        down, across = times if isinstance(times, tuple) else (times, times)
        if min(down, across) < 1:
            raise ArgumentError(f"times is {times}; it must be at least 1")
        total = _sums(self.mass * self.seeing[..., None], down, across)
        seeing = _sums(self.seeing[..., None], down, 1)[..., 0]
        return Pooled(
            (self.size[0] * down, self.size[1] * across),
            self.shape,
            total / seeing.clamp(min=1)[..., None],
            _highest(self.max, down, across),
            seeing,
            _sums(self.visible, down, across),
        )


def pooled(
    place: Place,
    size: int | tuple[int, int],
    *,
    heads: slice = ALL,
    batch: int = 0,
) -> Pooled:
    """Mass and max of the blocks of a pattern, [h,R,C], streamed tile by tile.

    Args:
        place: from a recording.
        size: rows and columns of a block, at least 1.
        heads: as the model numbers them; all that were recorded by default.
        batch: which row of the batch.

    Raises:
        ArgumentError: a size is less than 1, or there is no such row of the batch.

    >>> import regard
    >>> found = regard.inspect.record(regard.load("tiny"), "to be or not to be")
    >>> pooled(found[0], 3).mass.sum(2).round(decimals=5).unique().tolist()
    [1.0]
    """
    tall, wide = size if isinstance(size, tuple) else (size, size)
    if min(tall, wide) < 1:
        raise ArgumentError(f"size is {size}; a block has at least 1 row and 1 column")
    h = len(place.heads if heads == ALL else range(place.H)[heads])
    R, C = -(-place.T // tall), -(-place.N // wide)
    mass, most = (torch.zeros(h, R, C, dtype=torch.float64) for _ in "mm")
    visible = torch.zeros(h, R, C, dtype=torch.int64)
    sees = torch.zeros(h, place.T, dtype=torch.bool)
    step = tall * max(1, SIZE // tall), wide * max(1, SIZE // wide)
    tokens = place.row_positions[batch] >= 0
    for tile in walk(place, step, heads=heads, batch=batch):
        tile = tile.only(tokens)
        at = (
            slice(None),
            slice(tile.rows.start // tall, -(-tile.rows.stop // tall)),
            slice(tile.columns.start // wide, -(-tile.columns.stop // wide)),
        )
        seen = ~tile.scores.isneginf()
        mass[at] += _sums(tile.weights, tall, wide)
        most[at] = torch.maximum(most[at], _highest(tile.weights, tall, wide))
        visible[at] += _sums(seen.long(), tall, wide)
        sees[:, tile.rows] |= seen.any(2)
    seeing = _sums(sees.long()[..., None], tall, 1)[..., 0]
    return Pooled(
        (tall, wide),
        (place.T, place.N),
        mass / seeing.clamp(min=1)[..., None],
        most,
        seeing,
        visible,
    )


def _blocks(x: Tensor, tall: int, wide: int) -> Tensor:
    """[..., t, n] -> [..., R, tall, C, wide], zeros behind the end."""
    x = F.pad(x, (0, -x.shape[-1] % wide, 0, -x.shape[-2] % tall))
    return torch.unflatten(torch.unflatten(x, -1, (-1, wide)), -3, (-1, tall))


def _sums(x: Tensor, tall: int, wide: int) -> Tensor:
    return _blocks(x, tall, wide).sum((-3, -1))


def _highest(x: Tensor, tall: int, wide: int) -> Tensor:
    return _blocks(x, tall, wide).amax((-3, -1))


def _lengths(n: int, size: int) -> Tensor:
    """How long each of the blocks of n is."""
    return (n - torch.arange(0, n, size)).clamp(max=size)
