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

from regard.inspect.metrics.head_metrics import VALUES, MeasuredPlace
from regard.inspect.record.recorded_place import KeyValuePool, Place, RecordedStep
from regard.inspect.record.tiles import Tile
from regard.inspect.tile_server.exact_tiles import (
    MASKED,
    HeadTiles,
    Observer,
    Peak,
    TileData,
)
from regard.timing import torch_threads
from regard.tracing import Trace

SIDE = 64
"""Rows of a head that are computed, and blocks of columns to which they are pooled."""
NEIGHBOURS = 8
"""Positions around a query that count as its neighbours, where there are more than twice as many;
otherwise only the next ones do.
"""
METRICS = ("entropy", "effective_keys", "sink", "previous_token", "local", "distance")
"""Metrics of a head that are sent, in this order; `regard.inspect.measure` defines them."""


@dataclass(frozen=True, eq=False)
class HeadOverview:
    """The pooled weights of the sampled rows of one head, and its metrics (NaN for none).

    Args:
        blocks: 64 x 64 blocks; its one peak is the largest far weight.
        notable: mean over the rows of the largest weight on a key that is neither the first one nor
            a neighbour of the query.
    """

    blocks: TileData
    metrics: tuple[float, ...]
    notable: float


def head_overview(tiles: HeadTiles) -> HeadOverview:
    """Compute the overview of a head from at most `SIDE` exact rows, evenly spaced."""
    is_token = tiles.is_token if bool(tiles.is_token.any()) else ~tiles.is_token
    tokens = is_token.nonzero()[:, 0]
    r = min(SIDE, len(tokens))
    rows = tokens[(torch.arange(r) + 1) * len(tokens) // r - 1]
    size = max(1, -(-tiles.N // SIDE))
    observe, metrics = measuring(tiles, rows)
    asked = tiles.place.row_positions[tiles.batch][rows, None]
    keys = tiles.place.column_positions[tiles.batch]
    neighbours = NEIGHBOURS if tiles.N > 2 * NEIGHBOURS else 1
    far, column = torch.zeros(r, dtype=tiles.dtype), torch.zeros(r, dtype=torch.int64)

    def watch(which: Tensor, start: int, p: Tensor) -> None:
        observe(which, start, p)
        own = keys[start : start + p.shape[1]]
        left_out = ((asked[which] - own).abs() <= neighbours) | (own <= 0)
        best, index = p.masked_fill(left_out, 0).max(1)
        larger = best > far[which]
        far[which] = torch.where(larger, best, far[which])
        column[which] = torch.where(larger, start + index, column[which])

    mass, largest, pairs = tiles.row_blocks(rows, 0, tiles.N, size, watch)
    mass = mass.masked_fill(pairs == 0, MASKED)
    values, visible = metrics(), tiles.keys_seen[rows]
    peaks: tuple[Peak, ...] = ()
    if bool((far > 0).any()):
        n = int(far.argmax())
        peaks = (Peak(int(rows[n]), int(column[n]), float(far[n]), float(visible[n])),)
    return HeadOverview(
        TileData(mass.float(), largest.float(), None, visible.float(), peaks),
        tuple(values.get(name, math.nan) for name in METRICS),
        float(far.mean()) if r else 0.0,
    )


def measuring(tiles: HeadTiles, rows: Tensor) -> tuple[Observer, Callable[[], dict[str, float]]]:
    """Return what receives the weights of a head's rows, and what returns their metrics."""
    measured = MeasuredPlace(
        tiles.place, batch=tiles.batch, heads=tiles.recorded_heads, chosen=rows
    )
    accumulators = [make(measured) for make in VALUES]

    def observe(which: Tensor, start: int, p: Tensor) -> None:
        hidden = p < 0
        w = p.masked_fill(hidden, 0)
        # s = ln p + ln denominator; the logarithm of a weight that underflows is that of the
        # smallest number, because the key is visible
        scores = w.clamp(min=torch.finfo(w.dtype).tiny).log_()
        scores += measured.denominators[0, which, None].to(w.dtype)
        columns = slice(start, start + p.shape[1])
        tile = Tile(which, columns, scores.masked_fill_(hidden, -math.inf)[None], w[None])
        for accumulator in accumulators:
            accumulator.add(tile)

    def metrics() -> dict[str, float]:
        results = (accumulator.result() for accumulator in accumulators)
        return {n: float(x) for each in results for n, x in each.items() if x.ndim == 1}

    return observe, metrics


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
        # more threads would wait for each other longer than they compute
        with torch.no_grad(), torch_threads(1):
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
