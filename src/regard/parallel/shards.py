"""`Shards`: which positions each rank holds, and how evenly work is divided."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from regard.argument_checks import check_int
from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks import Full, Mask
from regard.span import Span
from regard.units import plural

CHUNKS = 4
"""The number of runs for each rank in the greedy candidate of `Shards.balanced`."""

PAIRS_PER_KEY = 8
"""The cost of sending one key and value, in query-key pairs; small, as sending overlaps."""


@dataclass(frozen=True)
class Shards:
    """The positions of a sequence, cut into spans, each held by one rank.

    The tensors of a rank hold its spans one after another; every position is held once.

    Args:
        ranks: the spans of each rank, in the order of its tensors.

    Raises:
        ArgumentError, ArgumentTypeError: there is no rank, or spans overlap or leave a gap.

    >>> shards = Shards.zigzag(8, 2)
    >>> shards.take(torch.arange(8), 0, dim=0).tolist()
    [0, 1, 6, 7]
    """

    ranks: tuple[tuple[Span, ...], ...]

    def __post_init__(self) -> None:
        if not isinstance(self.ranks, Sequence) or not self.ranks:
            raise ArgumentTypeError("ranks must be a sequence with the spans of at least one rank")
        ranks = tuple(tuple(x for x in spans if len(x)) for spans in self.ranks)
        object.__setattr__(self, "ranks", ranks)
        spans = sorted((x for spans_of_rank in ranks for x in spans_of_rank), key=lambda x: x.start)
        for span in spans[:1]:
            if span.start < 0:
                raise ArgumentError(f"a shard begins at {span.start}; positions begin at 0")
        for before, after in itertools.pairwise(spans):
            if before.stop != after.start:
                fault = "overlap" if before.stop > after.start else "leave a gap"
                raise ArgumentError(
                    f"the shards {_span_text(before)} and {_span_text(after)} {fault}; every "
                    "position belongs to one rank"
                )

    @classmethod
    def even(cls, S: int, W: int, *, start: int = 0) -> Shards:
        """Cut S positions into W runs of nearly equal length, in order.

        Args:
            S, W: the number of positions, and of ranks.
            start: the first position.

        Returns:
            Shards in which each rank holds one run.

        Raises:
            ArgumentError, ArgumentTypeError: S is below 0, W below 1, or start below 0.
        """
        return cls(tuple((x,) for x in _split_evenly(S, _check_ranks(W), start)))

    @classmethod
    def zigzag(cls, S: int, W: int, *, start: int = 0) -> Shards:
        """Cut S positions into 2 W runs, of which rank r holds r and 2 W - 1 - r: equal causal
        work.

        Args:
            S, W: the number of positions, and of ranks.
            start: the first position.

        Returns:
            Shards in which each rank holds two runs.

        Raises:
            ArgumentError, ArgumentTypeError: S is below 0, W below 1, or start below 0.

        Source: Liu et al. 2023 (arXiv 2310.01889); Llama 3 (arXiv 2407.21783), section 3.3.2.
        """
        runs = _split_evenly(S, 2 * _check_ranks(W), start)
        return cls(tuple(_join_adjacent((runs[r], runs[2 * W - 1 - r])) for r in range(W)))

    @classmethod
    def balanced(cls, S: int, W: int, mask: Mask | None = None, *, start: int = 0) -> Shards:
        """Return the best of even, zigzag and greedily distributed shards for a mask.

        The best has the least work of the busiest rank plus `PAIRS_PER_KEY` times the most keys
        that a rank receives. The greedy candidate gives the run with the most visible pairs to the
        rank with the least work.

        Args:
            S, W: the number of positions, and of ranks.
            mask: the mask; None means that every query sees every key.
            start: the first position.

        Returns:
            The shards with the lowest estimated time.

        Raises:
            ArgumentError, ArgumentTypeError: S is below 0, W below 1, or start below 0.

        >>> from regard.masks import Causal
        >>> round(Shards.even(4096, 8).efficiency(Causal()), 2)
        0.53
        >>> Shards.balanced(4096, 8, Causal()).efficiency(Causal()) > 0.99
        True
        """
        mask = Full() if mask is None else mask
        runs = [x for x in _split_evenly(S, CHUNKS * _check_ranks(W), start) if len(x)]
        work = {x: mask.count(x, Span(start, S)) for x in runs}
        work_of_rank, runs_of_rank = [0] * W, [list[Span]() for _ in range(W)]
        for run in sorted(runs, key=lambda x: (-work[x], x.start)):
            least = min(
                (r for r in range(W) if len(runs_of_rank[r]) < CHUNKS),
                key=lambda r: (work_of_rank[r], r),
            )
            runs_of_rank[least].append(run)
            work_of_rank[least] += work[run]
        greedy = cls(tuple(_join_adjacent(sorted(x, key=lambda x: x.start)) for x in runs_of_rank))
        candidates = (cls.even(S, W, start=start), cls.zigzag(S, W, start=start), greedy)
        return min(candidates, key=lambda shards: shards._time(mask))

    @property
    def world(self) -> int:
        """The number of ranks that the sequence is cut for."""
        return len(self.ranks)

    @property
    def start(self) -> int:
        """The first position; 0 if there are no positions."""
        return min((x.start for spans_of_rank in self.ranks for x in spans_of_rank), default=0)

    @property
    def stop(self) -> int:
        """One past the last position; 0 if there are no positions."""
        return max((x.stop for spans_of_rank in self.ranks for x in spans_of_rank), default=0)

    def __len__(self) -> int:
        return self.stop - self.start

    def spans(self, rank: int) -> tuple[Span, ...]:
        """Return the spans of a rank, in the order of its tensors.

        Args:
            rank: the number of the rank, from 0.

        Returns:
            The spans that the rank holds.

        Raises:
            ArgumentError: there is no such rank.
        """
        if not 0 <= rank < self.world:
            raise ArgumentError(f"rank is {rank}; these shards have ranks 0 to {self.world - 1}")
        return self.ranks[rank]

    def count(self, rank: int) -> int:
        """Return how many positions a rank holds.

        Args:
            rank: the number of the rank, from 0.

        Returns:
            The number of positions.
        """
        return sum(map(len, self.spans(rank)))

    def positions(self, rank: int) -> Tensor:
        """Return the positions of a rank as a tensor.

        Args:
            rank: the number of the rank, from 0.

        Returns:
            The positions, int64 [1, count].
        """
        return torch.cat(
            [
                torch.empty(1, 0, dtype=torch.int64, device="cpu"),
                *(x.tensor() for x in self.spans(rank)),
            ],
            1,
        )

    def take(self, x: Tensor, rank: int, dim: int = 2) -> Tensor:
        """Take the part of a whole tensor that a rank holds.

        Args:
            x: a tensor with one entry for each position along `dim`.
            rank: the number of the rank, from 0.
            dim: the dimension of the positions; 2 for [B, H, S, D].

        Returns:
            The entries of the rank's positions, in the order of its spans.

        Raises:
            ArgumentError: the dimension has another length than the shards.
        """
        if x.shape[dim] != len(self):
            raise ArgumentError(
                f"dimension {dim} has length {x.shape[dim]}; these shards hold "
                f"{plural(len(self), 'position')}"
            )
        return torch.cat(
            [
                x.narrow(dim, 0, 0),
                *(x.narrow(dim, s.start - self.start, len(s)) for s in self.spans(rank)),
            ],
            dim,
        )

    def join(self, parts: Sequence[Tensor], dim: int = 2) -> Tensor:
        """Join the parts of all ranks into the whole tensor: the inverse of `take`.

        Args:
            parts: the part of each rank.
            dim: the dimension of the positions.

        Returns:
            The tensor with all positions in order.

        Raises:
            ArgumentError: there are more or fewer parts than ranks, or a part has another length.

        >>> shards = Shards.zigzag(10, 2)
        >>> x = torch.arange(10)
        >>> torch.equal(shards.join([shards.take(x, r, 0) for r in range(2)], 0), x)
        True
        """
        if len(parts) != self.world:
            raise ArgumentError(
                f"{plural(len(parts), 'part')} given for {plural(self.world, 'rank')}; give one "
                "part for each"
            )
        pieces: list[tuple[int, Tensor]] = []
        for rank, x in enumerate(parts):
            if x.shape[dim] != self.count(rank):
                raise ArgumentError(
                    f"the part of rank {rank} has length {x.shape[dim]} along dimension {dim}; it "
                    f"holds {plural(self.count(rank), 'position')}"
                )
            offset = 0
            for span in self.spans(rank):
                pieces.append((span.start, x.narrow(dim, offset, len(span))))
                offset += len(span)
        if not pieces:
            return parts[0]
        return torch.cat([x for _, x in sorted(pieces, key=lambda piece: piece[0])], dim)

    def work(self, mask: Mask | None = None) -> tuple[int, ...]:
        """Count the visible query-key pairs of each rank's queries with the keys of all ranks.

        Args:
            mask: the mask; None means that every query sees every key.

        Returns:
            The number of pairs of each rank.
        """
        mask = Full() if mask is None else mask
        keys = Span(self.start, len(self))
        return tuple(
            sum(mask.count(x, keys) for x in spans_of_rank) for spans_of_rank in self.ranks
        )

    def efficiency(self, mask: Mask | None = None) -> float:
        """Return the mean work of a rank divided by that of the busiest rank: 1 is perfect balance.

        Args:
            mask: the mask; None means that every query sees every key.

        Returns:
            A number between 1 / W and 1.
        """
        work = self.work(mask)
        return sum(work) / (self.world * max(work)) if any(work) else 1.0

    def _time(self, mask: Mask) -> int:
        """Estimate the time of a call, in query-key pairs: work plus received keys."""
        received_keys = (
            sum(
                stop - first
                for j in range(self.world)
                if j != i
                for _, first, stop in needed_keys(mask, self.spans(i), self.spans(j))
            )
            for i in range(self.world)
        )
        return max(self.work(mask)) + PAIRS_PER_KEY * max(received_keys)

    def __str__(self) -> str:
        lines = [f"{plural(len(self), 'token')} on {plural(self.world, 'rank')}"]
        lines += [
            f"  {rank}: {' '.join(map(_span_text, spans_of_rank)) or 'nothing'}"
            for rank, spans_of_rank in enumerate(self.ranks)
        ]
        return "\n".join(lines)


@lru_cache(maxsize=4096)
def needed_keys(
    mask: Mask, queries: tuple[Span, ...], keys: tuple[Span, ...]
) -> tuple[tuple[int, int, int], ...]:
    """Return, for each span of keys, the shortest run with every key that the queries see."""
    needed = []
    for n, span in enumerate(keys):
        runs = [run for q in queries if (run := _first_and_last_key(mask, q, span)) is not None]
        if runs:
            needed.append((n, min(a for a, _ in runs), max(b for _, b in runs)))
    return tuple(needed)


def _first_and_last_key(mask: Mask, q: Span, k: Span) -> tuple[int, int] | None:
    """Return the first key that some query sees, and one past the last; None if there is none."""
    ranges = mask.intervals(q)
    if ranges is not None:
        starts, stops = ranges.starts.clamp(k.start, k.stop), ranges.stops.clamp(k.start, k.stop)
        has_visible = starts < stops
        if not bool(has_visible.any()):
            return None
        return int(starts[has_visible].min()), int(stops[has_visible].max())
    any_query = torch.zeros(len(k), dtype=torch.bool, device="cpu")
    for i in range(0, len(q), 128):
        block = mask.block(q, k, slice(i, min(i + 128, len(q))))
        any_query |= block.flatten(0, -2).any(0)
    columns = any_query.nonzero()
    if not len(columns):
        return None
    return k.start + int(columns[0]), k.start + int(columns[-1]) + 1


@lru_cache(maxsize=4096)
def needed_queries(mask: Mask, q: Span, k: Span) -> tuple[int, int] | None:
    """Return the shortest run of queries that contains every query that sees a key."""
    ranges = mask.intervals(q)
    if ranges is not None:
        starts, stops = ranges.starts.clamp(k.start, k.stop), ranges.stops.clamp(k.start, k.stop)
        has_visible = (starts < stops).any(-1).flatten(0, -2).any(0)
    else:
        blocks = [mask.block(q, k, slice(i, min(i + 128, len(q)))) for i in range(0, len(q), 128)]
        has_visible = torch.cat([x.any(-1).flatten(0, -2).any(0) for x in blocks])
    rows = has_visible.nonzero()
    return (int(rows[0]), int(rows[-1]) + 1) if len(rows) else None


def _check_ranks(W: int) -> int:
    """Return W; raise an error if it is not an integer of at least 1."""
    return check_int("the number of ranks", W, 1)


def _split_evenly(S: int, n: int, start: int) -> list[Span]:
    """Cut S positions into n runs of nearly equal length; the longer ones come first."""
    check_int("the number of positions", S, 0)
    check_int("start", start, 0)
    size, remainder = divmod(S, n)
    bounds = [start]
    for i in range(n):
        bounds.append(bounds[-1] + size + (i < remainder))
    return [Span(a, b - a) for a, b in itertools.pairwise(bounds)]


def _join_adjacent(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Join spans that touch one another; empty spans are left out."""
    joined: list[Span] = []
    for span in spans:
        if not len(span):
            continue
        if joined and joined[-1].stop == span.start:
            joined[-1] = Span(joined[-1].start, len(joined[-1]) + len(span))
        else:
            joined.append(span)
    return tuple(joined)


def _span_text(span: Span) -> str:
    """Write a span as "3-5", or as "3" if it is one position."""
    return str(span.start) if len(span) == 1 else f"{span.start}-{span.stop - 1}"
