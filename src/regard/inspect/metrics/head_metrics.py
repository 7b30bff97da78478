"""Metrics of heads: from dense patterns `[*H, T, T]`, and accumulated over the tiles of a pattern
in less than T x N memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import ArgumentError
from regard.inspect.record.recorded_place import ALL, Place
from regard.inspect.record.tiles import Tile
from regard.process_state import random_generator
from regard.units import plural

NUM_SINKS = 4
"""Number of first keys that count as sinks."""


def copies(ids: Int[Tensor, " T"]) -> Int[Tensor, "n 2"]:
    """Return the pairs (i, j) with id_j = id_i and j < i, in the order of i.

    >>> copies(torch.tensor([7, 8, 7, 7])).tolist()
    [[2, 0], [3, 0], [3, 2]]
    """
    earlier: dict[int, list[int]] = {}
    pairs = []
    for i, index in enumerate(ids.tolist()):
        pairs += [(i, j) for j in earlier.get(index, [])]
        earlier.setdefault(index, []).append(i)
    return torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)


def after_copies(ids: Int[Tensor, " T"]) -> Int[Tensor, "n 2"]:
    """Return the pairs (i, j + 1) for which id_j = id_i and j + 1 < i, in the order of i.

    A key that is the query itself is left out, because it says nothing about induction.

    >>> after_copies(torch.tensor([7, 8, 7, 7])).tolist()
    [[2, 1], [3, 1]]
    """
    pairs = copies(ids)
    pairs = torch.stack([pairs[:, 0], pairs[:, 1] + 1], 1)
    return pairs[pairs[:, 1] < pairs[:, 0]]


def repeated_ids(
    vocabulary: int, length: int, *, batch: int = 4, seed: int = 0
) -> Int[Tensor, "B T"]:
    """Draw random ids and write each row twice.

    The first half of a row has no token twice if the vocabulary is large enough.

    Args:
        vocabulary: number of tokens to draw from.
        length: number of ids before the repetition.

    Returns:
        Ids, `[batch, 2 length]`.

    Raises:
        ArgumentError: a number is less than 1.

    >>> repeated_ids(9, 3, batch=1).shape
    torch.Size([1, 6])
    """
    if min(vocabulary, length, batch) < 1:
        raise ArgumentError(
            f"repeated_ids({vocabulary}, {length}, batch={batch}): each number must be at least 1"
        )
    own = random_generator(seed)
    if length <= vocabulary:
        rows = [torch.randperm(vocabulary, generator=own)[:length] for _ in range(batch)]
        half = torch.stack(rows)
    else:
        half = torch.randint(vocabulary, (batch, length), generator=own)
    return half.repeat(1, 2)


def previous_token_score(pattern: Float[Tensor, "*H T T"]) -> Float[Tensor, "*H"]:
    """Compute the mean weight on the key just before the query.

    mean over i >= 1 of p_{i,i-1}

    Args:
        pattern: attention weights, each row a query and each column a key.

    Returns:
        The score of each head.

    Raises:
        ArgumentError: the pattern is not square, or has fewer than 2 rows.

    >>> previous_token_score(torch.eye(4).roll(-1, 1)[None]).tolist()
    [1.0]

    Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".
    """
    _check_pattern(pattern, least=2)
    return pattern.diagonal(-1, -2, -1).mean(-1)


def induction_score(
    pattern: Float[Tensor, "*H T T"], ids: Int[Tensor, " T"]
) -> Float[Tensor, "*H"]:
    """Compute the mean weight on the tokens that followed earlier copies of the query's token.

    mean over i of sum_j p_{i,j+1}, over all j < i - 1 with id_j = id_i; rows i without such a j are
    left out

    The pairs are found from lists of indices, in T steps rather than T x T comparisons.

    Args:
        pattern: attention weights, each row a query and each column a key.

    Returns:
        The score of each head.

    Raises:
        ArgumentError: no token occurs twice, at least two apart, or `ids` and `pattern` differ in
            length.

    >>> pattern = torch.zeros(4, 4)
    >>> pattern[2, 1], pattern[3, 2] = 0.75, 0.25  # a b a b: the second a attends to the first b
    >>> induction_score(pattern, torch.tensor([7, 8, 7, 8])).item()
    0.5

    Source: Olsson et al. 2022 (arXiv 2209.11895), section "definition: prefix matching".
    """
    _check_pattern(pattern, least=1, ids=ids)
    return _mean_weight(pattern, after_copies(ids))


def duplicate_score(
    pattern: Float[Tensor, "*H T T"], ids: Int[Tensor, " T"]
) -> Float[Tensor, "*H"]:
    """Compute the mean weight on earlier copies of the query's token.

    mean over i of sum_j p_ij, over all j < i with id_j = id_i; rows i without such a j are left out

    Args:
        pattern: attention weights, each row a query and each column a key.

    Returns:
        The score of each head.

    Raises:
        ArgumentError: no token occurs twice, or `ids` and `pattern` differ in length.

    >>> duplicate_score(torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([3, 3])).item()
    0.5

    Source: Wang et al. 2022 (arXiv 2211.00593), section 3.1.
    """
    _check_pattern(pattern, least=1, ids=ids)
    return _mean_weight(pattern, copies(ids))


def entropy(pattern: Float[Tensor, "*H T S"]) -> Float[Tensor, "*H T"]:
    """Compute the entropy of each row, in nats: 0 for one key, ln n for n keys of equal weight.

    H_i = - sum_j p_ij ln p_ij

    Args:
        pattern: attention weights, each row a query and each column a key.

    Returns:
        The entropy of each row.

    >>> entropy(torch.tensor([[1.0, 0.0], [0.5, 0.5]])).exp().tolist()
    [1.0, 2.0]
    """
    terms: Tensor = torch.special.entr(pattern)
    return terms.sum(-1)


def sink_share(pattern: Float[Tensor, "*H T T"], first: int = NUM_SINKS) -> Float[Tensor, "*H"]:
    """Compute the mean weight on the first keys, over the queries after them.

    mean over i >= first of sum over j < first of p_ij

    Args:
        pattern: attention weights, each row a query and each column a key.

    Returns:
        The share of each head.

    Raises:
        ArgumentError: there is no query after the first keys, or `first` is less than 1.

    >>> sink_share(torch.tensor([[1.0, 0.0], [0.5, 0.5]]), first=1).item()
    0.5

    Source: Xiao et al. 2023 (arXiv 2309.17453), section 3.1.
    """
    if first < 1:
        raise ArgumentError(f"first is {first}; it must be at least 1")
    _check_pattern(pattern, least=first + 1)
    return pattern[..., first:, :first].sum(-1).mean(-1)


def _mean_weight(pattern: Tensor, pairs: Tensor) -> Tensor:
    """Return the mean over rows of the total weight of the listed pairs."""
    if not len(pairs):
        raise ArgumentError(
            "in ids no token occurs twice, far enough apart; use ids with repetitions, such as "
            "repeated_ids(...)"
        )
    rows, keys = pairs.T
    return pattern[..., rows, keys].sum(-1) / len(torch.unique(rows))


def _check_pattern(pattern: Tensor, least: int, ids: Tensor | None = None) -> None:
    """Refuse a pattern that is not square or too small, or ids of another length."""
    if pattern.ndim < 2 or pattern.shape[-1] != pattern.shape[-2]:
        raise ArgumentError(f"pattern is {tuple(pattern.shape)}; it must be [..., T, T]")
    if pattern.shape[-1] < least:
        raise ArgumentError(
            f"pattern has {plural(pattern.shape[-1], 'row')}; this score needs at least {least}"
        )
    if ids is not None and tuple(ids.shape) != (pattern.shape[-1],):
        raise ArgumentError(
            f"ids are {tuple(ids.shape)}; the pattern has {plural(pattern.shape[-1], 'row')}, "
            "and there must be one id for each"
        )


@dataclass(frozen=True, eq=False)
class MeasuredPlace:
    """A place whose heads are measured: rows are the chosen queries, columns are its keys."""

    place: Place
    ids: Tensor | None = None
    batch: int = 0
    sinks: int = 4
    local_distance: int = 32
    padding: Tensor | None = None
    heads: slice = field(default_factory=lambda: ALL)
    chosen: Tensor | slice = field(default_factory=lambda: ALL)

    @property
    def h(self) -> int:
        """Return the number of measured heads."""
        return len(self.place.heads[self.heads])

    @property
    def num_rows(self) -> int:
        """Return the number of measured rows."""
        return len(self.rows)

    @cached_property
    def rows(self) -> Tensor:
        """Return the positions of the rows, `[T]`."""
        return self.place.row_positions[self.batch][self.chosen]

    @cached_property
    def columns(self) -> Tensor:
        """Return the positions of the columns, `[N]`."""
        return self.place.column_positions[self.batch]

    @cached_property
    def tokens(self) -> Tensor:
        """Return the index of each row among the queries of the run, `[T]`."""
        return torch.tensor(self.place.tokens)[self.chosen]

    @cached_property
    def sink_logits(self) -> Tensor:
        """Return the sink logit of each row, `[h, T]`; -inf without a sink."""
        parts = [
            torch.full((self.h, step.T), -math.inf, dtype=torch.float64)
            if step.sink is None
            else step.sink[self.heads].double()[:, None].expand(-1, step.T)
            for step in self.place.steps
        ]
        return torch.cat(parts, 1)[:, self.chosen]

    @cached_property
    def denominators(self) -> Tensor:
        """Return the natural log of the softmax denominators, `[h, T]`."""
        parts = [step.lse[self.batch, self.heads].double() for step in self.place.steps]
        return torch.logaddexp(torch.cat(parts, 1)[:, self.chosen], self.sink_logits)

    @cached_property
    def sink_weights(self) -> Tensor:
        """Return P_sink = exp(sink - ln denominator), `[h, T]`; 0 without a sink."""
        return torch.where(
            self.sink_logits.isneginf(), 0, torch.exp(self.sink_logits - self.denominators)
        )

    def mean(self, x: Tensor, over: Tensor) -> Tensor:
        """Return the mean of x `[h, T]` over some rows."""
        over = over.expand(x.shape)
        return torch.where(over, x, 0).sum(1) / over.sum(1)


class Accumulator(Protocol):
    """Accumulates metrics of heads, one tile at a time."""

    def add(self, tile: Tile) -> None:
        """Add the weights of one tile."""

    def result(self) -> Mapping[str, Tensor]:
        """Return each metric by name: `[h]`, or `[h, n]` for a curve."""


class EntropyAccumulator:
    """Entropy H_i = sum_j p_ij (ln denominator_i - s_ij) / ln n_i, exp(H_i), the largest score.

    A sink counts as one more key. The shorter form
    lse_i - sum_j p_ij s_ij is not used: there, the size of the scores multiplies a rounding error
    of the lse.
    """

    def __init__(self, measured: MeasuredPlace) -> None:
        self._measured = measured
        shape = (measured.h, measured.num_rows)
        self._entropy = torch.zeros(shape, dtype=torch.float64)
        self._denominator = measured.denominators
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
        """Return entropy (of rows that see several keys), effective_keys and max_logit."""
        measured = self._measured
        share, sink = measured.sink_weights, measured.sink_logits
        h = self._entropy + torch.where(share > 0, share * (self._denominator - sink), 0)
        n, h = self._visible + (~sink.isneginf()), h.clamp(min=0)
        return {
            "entropy": measured.mean(h / n.clamp(min=2).double().log(), n > 1),
            "effective_keys": measured.mean(h.exp(), self._visible > 0),
            "max_logit": self._max_score,
        }


class DistanceAccumulator:
    """Mean distance sum_j p_ij (i - j), and weight below `local_distance`, of real tokens."""

    def __init__(self, measured: MeasuredPlace) -> None:
        self._measured = measured
        self._distance, self._local = (
            torch.zeros(measured.h, measured.num_rows, dtype=torch.float64) for _ in range(2)
        )

    def add(self, tile: Tile) -> None:
        """Add the distances and the near weights of a tile."""
        w, limit = tile.weights, self._measured.local_distance
        q, k = self._measured.rows[tile.rows], self._measured.columns[tile.columns]
        is_key = k >= 0
        if not bool(is_key.all()):
            w, k = w[:, :, is_key], k[is_key]
        if not len(k):
            return
        # sum_j p_ij (i - j), with j counted from the lowest key of the tile: small numbers
        first = int(k.min())
        offsets = (k - first).to(w.dtype)
        distance = (q - first) * w.sum(2).double() - (w @ offsets).double()
        self._distance[:, tile.rows] += torch.where(q >= 0, distance, 0)
        is_close = (q >= 0) & (q > first - limit) & (q < int(k.max()) + limit)
        if bool(is_close.any()):
            is_local = (q[is_close, None] - k).abs() < limit
            local = torch.zeros(w.shape[:2], dtype=torch.float64)
            local[:, is_close] = (w[:, is_close] * is_local).sum(2).double()
            self._local[:, tile.rows] += local

    def result(self) -> Mapping[str, Tensor]:
        """Return the mean distance of what a row reads, and its share within the local distance."""
        measured, is_token = self._measured, self._measured.rows >= 0
        return {
            "distance": measured.mean(self._distance, is_token),
            "local": measured.mean(self._local, is_token),
        }


class OffsetAccumulator:
    """Mean weight at each distance, D(d) = mean_i p_{i,i-d}."""

    def __init__(self, measured: MeasuredPlace) -> None:
        self._measured = measured
        lowest = torch.where(measured.columns >= 0, measured.columns, 1 << 40).min()
        longest = int(measured.rows.max() - lowest) + 1
        self._sums = torch.zeros(
            measured.h, max(1, longest) + 1, dtype=torch.float64
        )  # the last bin: later keys, and empty slots

    def add(self, tile: Tile) -> None:
        """Add the weights of a tile by their distance."""
        q, k = self._measured.rows[tile.rows], self._measured.columns[tile.columns]
        last = self._sums.shape[1] - 1
        if _is_run(q) and _is_run(k):
            lowest = int(q[0] - k[-1])
            sums = _diagonal_sums(tile.weights)
            distance = torch.arange(lowest, lowest + sums.shape[1])
            bins = torch.where(distance >= 0, distance, last).clamp(max=last)
            self._sums.index_add_(1, bins, sums.double())
            return
        distance = q[:, None] - k
        is_pair = (q >= 0)[:, None] & (k >= 0)
        bins = torch.where(is_pair & (distance >= 0), distance, last).clamp(max=last)
        self._sums.index_add_(1, bins.flatten(), tile.weights.double().flatten(1))

    def result(self) -> Mapping[str, Tensor]:
        """Return the curve offsets, `[h, largest distance + 1]`."""
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
        return {"offsets": self._sums[:, :-1] / pairs.clamp(min=1)}


def _diagonal_sums(weights: Tensor) -> Tensor:
    """Return the sum of each diagonal of `[h, t, n]`, the top right first: `[h, n + t - 1]`.

    Read with one number less per row, the zero-padded rows shift by one, and diagonals are columns.
    """
    h, t, n = weights.shape
    padded = torch.nn.functional.pad(weights.flip(2), (0, t))
    diagonals = padded.flatten(1)[:, : t * (n + t - 1)].view(h, t, n + t - 1)
    return diagonals.sum(1)


def _is_run(positions: Tensor) -> bool:
    """Return whether positions are consecutive and at least 0."""
    first, n = int(positions[0]), len(positions)
    return first >= 0 and torch.equal(positions, torch.arange(first, first + n))


class PairAccumulator:
    """Mean weights on the previous token, on earlier copies, and on what followed these."""

    def __init__(self, measured: MeasuredPlace) -> None:
        self._measured = measured
        self._lists = {
            name: pairs for name, pairs in _pairs_by_metric(measured).items() if len(pairs)
        }
        self._sums = {name: torch.zeros(measured.h, dtype=torch.float64) for name in self._lists}

    def add(self, tile: Tile) -> None:
        """Add the weights of the listed pairs that lie in a tile."""
        rows = tile.rows
        if isinstance(rows, slice):
            rows = torch.arange(rows.start, rows.stop)
        limits = torch.stack([rows[0], rows[-1] + 1])
        for name, pairs in self._lists.items():
            start, stop = torch.searchsorted(pairs[:, 0].contiguous(), limits).tolist()
            i, j = pairs[start:stop].T.contiguous()
            inside = (j >= tile.columns.start) & (j < tile.columns.stop) & torch.isin(i, rows)
            i, j = torch.searchsorted(rows, i[inside]), j[inside] - tile.columns.start
            self._sums[name] += tile.weights[:, i, j].sum(1)

    def result(self) -> Mapping[str, Tensor]:
        """Return previous_token, duplicate and induction, as far as the tokens allow them."""
        return {
            name: total / len(torch.unique(self._lists[name][:, 0]))
            for name, total in self._sums.items()
        }


def _pairs_by_metric(measured: MeasuredPlace) -> dict[str, Tensor]:
    """Return the (row, column) pairs whose weights each metric sums, `[n, 2]`, sorted by row."""
    columns, wanted = measured.columns, measured.rows - 1
    order = columns.argsort(stable=True)
    # the last column at or before the position before each row
    place = torch.searchsorted(columns[order], wanted, right=True) - 1
    column = order[place.clamp(min=0)]
    has_previous = (wanted >= 0) & (place >= 0) & (columns[column] == wanted)
    previous = torch.stack([has_previous.nonzero()[:, 0], column[has_previous]], 1)
    pairs_by_metric = {"previous_token": previous}
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
    """How much weight the first keys, each column, and forbidden cells receive."""

    def __init__(self, measured: MeasuredPlace) -> None:
        self._measured = measured
        self._on_sinks, self._row_sum = (
            torch.zeros(measured.h, measured.num_rows, dtype=torch.float64) for _ in range(2)
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
        """Return sink, learned_sink, missing, future, empty, padding, and received `[h, N]`."""
        measured = self._measured
        share = measured.sink_weights
        sees = self._row_sum > 0
        return {
            "sink": measured.mean(self._on_sinks, measured.rows >= measured.sinks),
            "learned_sink": measured.mean(share, sees),
            "missing": torch.where(sees, 1 - self._row_sum - share, 0).abs().amax(1),
            **self._leaks,
            "received": self._columns,
        }


VALUES = (EntropyAccumulator, DistanceAccumulator, PairAccumulator, MassAccumulator)
"""What accumulates the metrics of a head; any rows of its pattern may be measured."""
ACCUMULATORS = (*VALUES, OffsetAccumulator)
