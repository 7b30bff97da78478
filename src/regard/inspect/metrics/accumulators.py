"""Metrics of heads that are accumulated over the tiles of a pattern, in less than T x N memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from regard.inspect.metrics.pattern_scores import after_copies, copies
from regard.inspect.record.recorded_place import Place
from regard.inspect.record.tiles import Tile


@dataclass(frozen=True, eq=False)
class MeasuredPlace:
    """A place of a recording whose heads are measured, with the parameters of the metrics.

    Rows are the recorded queries of the place, columns are its keys.

    Args:
        place: a place of a recording.
        ids: token ids of its columns, `[N]`, or None.
        batch: row of the batch.
        sinks: number of first positions that count as sinks.
        local_distance: a key at a smaller distance is local.
        padding: which columns are padding, bool `[N]`, or None.
    """

    place: Place
    ids: Tensor | None
    batch: int = 0
    sinks: int = 4
    local_distance: int = 32
    padding: Tensor | None = None

    @property
    def h(self) -> int:
        """Return the number of recorded heads."""
        return len(self.place.heads)

    @cached_property
    def rows(self) -> Tensor:
        """Return the positions of the rows, `[T]`."""
        return self.place.row_positions[self.batch]

    @cached_property
    def columns(self) -> Tensor:
        """Return the positions of the columns, `[N]`."""
        return self.place.column_positions[self.batch]

    @cached_property
    def tokens(self) -> Tensor:
        """Return the index of each row among the queries of the run, `[T]`."""
        return torch.tensor([i for step in self.place.steps for i in step.tokens()])

    def sink_weights(self) -> Tensor:
        """Compute P_sink = exp(sink - ln denominator), `[h, T]`; 0 without a sink."""
        parts = [
            torch.zeros(self.h, step.T, dtype=torch.float64)
            if step.sink is None
            else torch.exp(step.sink.double()[:, None] - step.denominator[self.batch])
            for step in self.place.steps
        ]
        return torch.cat(parts, 1)

    def sink_logits(self) -> Tensor:
        """Return the sink logit of each row, `[h, T]`; -inf without a sink."""
        parts = [
            torch.full((self.h, step.T), -math.inf, dtype=torch.float64)
            if step.sink is None
            else step.sink.double()[:, None].expand(-1, step.T)
            for step in self.place.steps
        ]
        return torch.cat(parts, 1)

    def denominators(self) -> Tensor:
        """Return the natural log of the softmax denominators, `[h, T]`."""
        return torch.cat([step.denominator[self.batch] for step in self.place.steps], 1)

    def mean(self, x: Tensor, over: Tensor) -> Tensor:
        """Return the mean of x `[h, T]` over some rows.

        Args:
            x: a number for each head and row.
            over: which rows, bool `[T]` or `[h, T]`.

        Returns:
            The means, `[h]`; NaN where no row is selected.
        """
        over = over.expand(x.shape)
        return torch.where(over, x, 0).sum(1) / over.sum(1)


class Accumulator(Protocol):
    """Accumulates metrics of heads, one tile at a time."""

    def add(self, tile: Tile) -> None:
        """Add the weights of one tile."""

    def result(self) -> Mapping[str, Tensor]:
        """Return each metric by name: `[h]`, or `[h, n]` for a curve."""


class EntropyAccumulator:
    """Entropy H_i = sum_j p_ij (ln denominator_i - s_ij), divided by ln n_i; effective keys
    exp(H_i); the largest score.

    This equals -sum_j p_ij ln p_ij, where a sink counts as one more key. The shorter form
    lse_i - sum_j p_ij s_ij is not used: there, the size of the scores multiplies a rounding error
    of the lse.
    """

    def __init__(self, measured: MeasuredPlace) -> None:
        self._measured = measured
        shape = (measured.h, measured.place.T)
        self._entropy = torch.zeros(shape, dtype=torch.float64)
        self._denominator = measured.denominators()
        self._visible = torch.zeros(shape, dtype=torch.int64)
        self._max_score = torch.full((measured.h,), -math.inf, dtype=torch.float64)

    def add(self, tile: Tile) -> None:
        """Add the entropy terms, the visible keys and the largest score of a tile."""
        hidden = tile.scores.isneginf()
        log_ratio = self._denominator[:, tile.rows, None].to(tile.scores.dtype) - tile.scores
        if bool(hidden.any()):
            log_ratio = log_ratio.masked_fill_(hidden, 0)
        self._entropy[:, tile.rows] += (tile.weights * log_ratio).sum(2)
        self._visible[:, tile.rows] += (~hidden).sum(2)
        self._max_score = torch.maximum(self._max_score, tile.scores.amax((1, 2)))

    def result(self) -> Mapping[str, Tensor]:
        """Return entropy (0 to 1, over rows that see more than one key), effective_keys and
        max_logit.
        """
        measured = self._measured
        share, sink = measured.sink_weights(), measured.sink_logits()
        h = self._entropy + torch.where(share > 0, share * (self._denominator - sink), 0)
        n, h = self._visible + (~sink.isneginf()), h.clamp(min=0)
        return {
            "entropy": measured.mean(h / n.clamp(min=2).double().log(), n > 1),
            "effective_keys": measured.mean(h.exp(), self._visible > 0),
            "max_logit": self._max_score,
        }


class DistanceAccumulator:
    """Mean weight at each distance, D(d) = mean_i p_{i,i-d}; mean distance sum_j p_ij (i - j) in
    positions; and weight of the keys at a distance below `local_distance`.
    """

    def __init__(self, measured: MeasuredPlace) -> None:
        self._measured = measured
        longest = (
            int(
                measured.rows.max()
                - torch.where(measured.columns >= 0, measured.columns, 1 << 40).min()
            )
            + 1
        )
        self._sums = torch.zeros(
            measured.h, max(1, longest) + 1, dtype=torch.float64
        )  # the last bin: later keys, and empty slots
        self._distance, self._local = (
            torch.zeros(measured.h, measured.place.T, dtype=torch.float64) for _ in range(2)
        )

    def add(self, tile: Tile) -> None:
        """Add the weights of a tile by their distance."""
        q, k = self._measured.rows[tile.rows], self._measured.columns[tile.columns]
        distance = q[:, None] - k
        if _is_run(q) and _is_run(k):
            self._add_run(tile, int(q[0]), int(k[0]))
            return
        is_pair = (q >= 0)[:, None] & (k >= 0)
        last = self._sums.shape[1] - 1
        bins = torch.where(is_pair & (distance >= 0), distance, last).clamp(max=last)
        self._sums.index_add_(1, bins.flatten(), tile.weights.double().flatten(1))
        self._distance[:, tile.rows] += (tile.weights * distance).masked_fill(~is_pair, 0).sum(2)
        local = is_pair & (distance.abs() < self._measured.local_distance)
        self._local[:, tile.rows] += (tile.weights * local).sum(2)

    def _add_run(self, tile: Tile, first_query: int, first_key: int) -> None:
        """Add a tile whose queries and keys stand at consecutive positions.

        With n zeros after each row of n + t numbers, the rows of a matrix that is one shorter are
        shifted by one each, so that its columns are the diagonals of the tile.
        """
        h, t, n = tile.weights.shape
        padded = torch.nn.functional.pad(tile.weights.flip(2), (0, t))
        diagonals = padded.flatten(1)[:, : t * (n + t - 1)].view(h, t, n + t - 1)
        sums = diagonals.sum(1)  # [h,n+t-1]: the distance of the last key first
        lowest = first_query - first_key - (n - 1)
        distance = torch.arange(lowest, lowest + n + t - 1)
        last = self._sums.shape[1] - 1
        bins = torch.where(distance >= 0, distance, last).clamp(max=last)
        self._sums.index_add_(1, bins, sums.double())
        # sum_j p_ij (i - j), with j counted from the first key of the tile: small integers
        total = tile.weights.sum(2)
        rows = torch.arange(first_query - first_key, first_query - first_key + t)
        keys = torch.arange(n, dtype=tile.weights.dtype)
        self._distance[:, tile.rows] += rows * total.double() - (tile.weights @ keys).double()
        local_distance = self._measured.local_distance
        if lowest >= local_distance or lowest + n + t - 2 <= -local_distance:
            return
        offsets = rows[:, None] - torch.arange(n)
        self._local[:, tile.rows] += (tile.weights * (offsets.abs() < local_distance)).sum(2)

    def result(self) -> Mapping[str, Tensor]:
        """Return distance, local, and the curve offsets, `[h, largest distance + 1]`."""
        measured = self._measured
        is_token = measured.rows >= 0
        row_counts = torch.bincount(measured.rows[is_token], minlength=self._sums.shape[1] - 1)
        has_key = torch.zeros(
            int(max(measured.columns.max(), measured.rows.max())) + 1, dtype=torch.int64
        )
        has_key[measured.columns[measured.columns >= 0]] = 1
        # pairs(d) = sum_i rows(i) keys(i - d), for all d at once: exact integers after rounding
        n = 2 * max(len(row_counts), len(has_key))
        both = torch.fft.rfft(row_counts.double(), n), torch.fft.rfft(has_key.double(), n)
        pairs = torch.fft.irfft(both[0] * both[1].conj(), n)[: self._sums.shape[1] - 1].round()
        return {
            "distance": measured.mean(self._distance, is_token),
            "local": measured.mean(self._local, is_token),
            "offsets": self._sums[:, :-1] / pairs.clamp(min=1),
        }


def _is_run(positions: Tensor) -> bool:
    """Return whether positions are consecutive and at least 0."""
    first, n = int(positions[0]), len(positions)
    return first >= 0 and torch.equal(positions, torch.arange(first, first + n))


class PairAccumulator:
    """Mean weights on listed pairs: the previous token, earlier copies of the row's token, and
    the tokens that followed these copies.
    """

    def __init__(self, measured: MeasuredPlace) -> None:
        self._measured = measured
        self._lists = {
            name: pairs for name, pairs in _pairs_by_metric(measured).items() if len(pairs)
        }
        self._sums = {name: torch.zeros(measured.h, dtype=torch.float64) for name in self._lists}

    def add(self, tile: Tile) -> None:
        """Add the weights of the listed pairs that lie in a tile."""
        for name, pairs in self._lists.items():
            limits = torch.tensor([tile.rows.start, tile.rows.stop])
            start, stop = torch.searchsorted(pairs[:, 0].contiguous(), limits).tolist()
            in_rows = pairs[start:stop]
            inside = (in_rows[:, 1] >= tile.columns.start) & (in_rows[:, 1] < tile.columns.stop)
            i, j = (in_rows[inside] - torch.tensor([tile.rows.start, tile.columns.start])).T
            self._sums[name] += tile.weights[:, i, j].sum(1)

    def result(self) -> Mapping[str, Tensor]:
        """Return previous_token, duplicate and induction, as far as the tokens allow them."""
        return {
            name: total / len(torch.unique(self._lists[name][:, 0]))
            for name, total in self._sums.items()
        }


def _pairs_by_metric(measured: MeasuredPlace) -> dict[str, Tensor]:
    """Return the (row, column) pairs whose weights each metric sums, `[n, 2]`, sorted by row."""
    column_at_position = {int(p): c for c, p in enumerate(measured.columns.tolist()) if p >= 0}
    previous = [
        (r, column_at_position[p - 1])
        for r, p in enumerate(measured.rows.tolist())
        if p - 1 in column_at_position
    ]
    pairs_by_metric = {"previous_token": torch.tensor(previous, dtype=torch.int64).reshape(-1, 2)}
    if measured.ids is None:
        return pairs_by_metric
    token_columns = (measured.columns >= 0).nonzero()[:, 0]
    row_of = torch.full((max(measured.place.N, int(measured.tokens.max()) + 1),), -1)
    row_of[measured.tokens] = torch.arange(len(measured.tokens))
    for name, find_pairs in (("duplicate", copies), ("induction", after_copies)):
        pairs = token_columns[find_pairs(measured.ids[token_columns])]
        rows = row_of[pairs[:, 0]]
        pairs = torch.stack([rows, pairs[:, 1]], 1)[rows >= 0]
        pairs_by_metric[name] = pairs[pairs[:, 0].argsort(stable=True)]
    return pairs_by_metric


class MassAccumulator:
    """How much weight the first keys and each column receive, and how much goes to forbidden
    cells.
    """

    def __init__(self, measured: MeasuredPlace) -> None:
        self._measured = measured
        self._on_sinks, self._row_sum = (
            torch.zeros(measured.h, measured.place.T, dtype=torch.float64) for _ in range(2)
        )
        self._columns = torch.zeros(measured.h, measured.place.N, dtype=torch.float64)
        self._leaks = {
            name: torch.zeros(measured.h, dtype=torch.float64)
            for name in ("future", "empty", "padding")
        }

    def add(self, tile: Tile) -> None:
        """Add the weights of a tile to the sums of its rows and columns."""
        measured, w = self._measured, tile.weights
        q, k = measured.rows[tile.rows], measured.columns[tile.columns]
        self._row_sum[:, tile.rows] += w.sum(2)
        self._columns[:, tile.columns] += w.sum(1)
        on_sinks = (k >= 0) & (k < measured.sinks)
        if bool(on_sinks.any()):
            self._on_sinks[:, tile.rows] += w[:, :, on_sinks].sum(2)
        wrong = {"empty": (k < 0).expand(len(q), -1)}
        if int(k.max()) > int(q.min()):
            wrong["future"] = k > q[:, None]
        if measured.padding is not None:
            wrong["padding"] = measured.padding[tile.columns].expand(len(q), -1)
        for name, cells in wrong.items():
            if bool(cells.any()):
                self._leaks[name] += (w * cells).sum((1, 2))

    def result(self) -> Mapping[str, Tensor]:
        """Return sink, learned_sink, missing, future, empty, padding, and the curve received,
        `[h, N]`.
        """
        measured = self._measured
        share = measured.sink_weights()
        sees = self._row_sum > 0
        return {
            "sink": measured.mean(self._on_sinks, measured.rows >= measured.sinks),
            "learned_sink": measured.mean(share, sees),
            "missing": torch.where(sees, 1 - self._row_sum - share, 0).abs().amax(1),
            **self._leaks,
            "received": self._columns,
        }


ACCUMULATORS = (EntropyAccumulator, DistanceAccumulator, PairAccumulator, MassAccumulator)
