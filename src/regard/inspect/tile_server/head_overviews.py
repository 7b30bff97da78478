"""A small picture and some metrics of every head, made from 64 exact rows while the model runs.

1,024 heads of 131,072 tokens would need 34 GB for their queries alone. Here each head is reduced to
64 exact rows, spread over the text, pooled to 64 x 64 blocks; the keys are dropped after that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.inspect.record.recorded_place import KeyValuePool, Place, RecordedStep
from regard.inspect.tile_server.exact_tiles import MASKED, HeadTiles
from regard.tracing import Trace

SIDE = 64
"""Rows of a head that are computed, and blocks of columns to which they are pooled."""
METRICS = ("entropy", "sink", "previous_token", "local", "distance", "largest")
"""Metrics of a head over its sampled rows, in the order in which they are sent."""
SINKS, LOCAL = 4, 32
SMALLEST = 1e-38
"""A weight above 0 whose logarithm is finite in fp32."""


@dataclass(frozen=True, eq=False)
class HeadOverview:
    """What the atlas shows of one head.

    Args:
        mass: sum of the weights in each block of columns, of each sampled row, `[r, c]`; -1 where
            the row sees no key of the block.
        max: largest weight in the same cells.
        metrics: `METRICS`, means over the sampled rows; NaN where none applies.
    """

    mass: Tensor
    max: Tensor
    metrics: tuple[float, ...]


def head_overview(tiles: HeadTiles) -> HeadOverview:
    """Compute the overview of a head from `SIDE` exact rows.

    entropy is H_i / ln n_i; sink the weight on the first 4 positions; previous_token p_{i,i-1};
    local the weight at distances below 32; distance sum_j p_ij |i - j|; largest max_j p_ij.

    Args:
        tiles: the head.
    """
    r = min(SIDE, tiles.T)
    rows = ((torch.arange(r) + 1) * tiles.T // r - 1).clamp(min=0)
    size = max(1, -(-tiles.N // SIDE))
    place, batch = tiles.place, tiles.batch
    row_positions, columns = place.row_positions[batch][rows], place.column_positions[batch]
    sums = torch.zeros(len(METRICS), r, dtype=torch.float64)

    def observe(which: Tensor, start: int, p: Tensor) -> None:
        positions = columns[start : start + p.shape[1]]
        w = p.clamp(min=0)
        # torch.special.entr takes four times as long; where w is 0, so is the product
        entropy = -torch.linalg.vecdot(w, w.clamp(min=SMALLEST).log_())
        total = w.sum(1)
        sums[0, which] += entropy.double()
        first = (positions >= 0) & (positions < SINKS)
        if bool(first.any()):
            sums[1, which] += w[:, first].sum(1).double()
        # the distances within a chunk of consecutive positions need no array of their own
        low = positions[0] if len(positions) else 0
        offsets = (positions - low).to(p.dtype)
        away = row_positions[which].double() - float(low)
        sums[4, which] += (away * total.double() - (w @ offsets).double()).abs()
        sums[5, which] = torch.maximum(sums[5, which], w.amax(1).double())
        of_rows, of_keys = row_positions[which], positions[positions >= 0]
        if not len(of_keys):
            return
        is_near = (of_rows > of_keys.min() - LOCAL) & (of_rows < of_keys.max() + LOCAL)
        for n in is_near.nonzero()[:, 0].tolist():  # the others have no key at a distance below 32
            row, here = int(which[n]), int(of_rows[n])
            is_local = (positions > here - LOCAL) & (positions < here + LOCAL) & (positions >= 0)
            if bool(is_local.any()):
                sums[3, row] += float(w[n, is_local].sum())
                sums[2, row] += float(w[n, positions == here - 1].sum())

    mass, largest, pairs = tiles.row_blocks(rows, 0, tiles.N, size, observe)
    mass = mass.masked_fill(pairs == 0, MASKED)
    keys_seen = tiles.keys_seen[rows]
    sums[0] = sums[0] / keys_seen.clamp(min=2).log()
    applies = keys_seen > 0
    means = [float(x[applies].mean()) if bool(applies.any()) else math.nan for x in sums]
    return HeadOverview(mass, largest, tuple(means))


@dataclass(eq=False)
class Overviews:
    """The overviews of all heads of a run, by place and query head."""

    heads: dict[tuple[str, int], HeadOverview] = field(default_factory=dict)
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.heads)


class OverviewRecorder(Trace):
    """Reduces every head of every softmax attention call to its overview, while the model runs.

    Only the first call of a place with more than one query is reduced, that is, the prompt. Use it
    beside `Recorder`, which keeps the heads that are to be opened.

    Args:
        done: called with the number of heads so far, for a progress bar.

    >>> import regard
    >>> with OverviewRecorder() as overviews:
    ...     _ = regard.load("tiny").forward(torch.arange(4)[None])
    >>> len(overviews.overviews)
    32
    """

    observes_calls: ClassVar[bool] = True

    def __init__(self, done: Callable[[int], object] | None = None) -> None:
        super().__init__()
        self.missing = "ignore"
        self.overviews = Overviews()
        self._done = done

    def on_attention_call(self, call: Any, result: Any, kernel: str) -> None:
        """Reduce the heads of a call."""
        name = self.where
        lse = result.lse
        if call.q.shape[2] < 2 or lse is None or name in self.overviews.sizes or call.score:
            return
        with torch.no_grad():
            place = _place_of(call, lse, name, kernel)
            self.overviews.sizes[name] = (place.T, place.N)
            like: HeadTiles | None = None
            for head in range(place.H):
                like = HeadTiles(place, head, like=like)
                self.overviews.heads[name, head] = head_overview(like)
                if self._done is not None:
                    self._done(len(self.overviews))


def _place_of(call: Any, lse: Tensor, name: str, kernel: str) -> Place:
    """Return a call as a place that refers to its tensors; nothing is copied."""
    S = call.k.shape[2]
    columns = torch.arange(S)
    step = RecordedStep(
        call.q.detach(),
        lse.detach(),
        None,
        columns,
        call.q_positions,
        call.k_positions,
        call.mask,
        call.bias,
        call.scale,
        call.softcap,
        call.sink,
        kernel,
    )
    G = call.k.shape[1]
    pool = KeyValuePool(call.k.detach(), None, columns, tuple(range(G)), G)
    H = call.q.shape[1]
    return Place(name, (step,), (pool,), H, tuple(range(H)), S)
