"""Shards: which positions of a sequence each rank holds, and how well they share the work of a
mask.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks import Full, Mask
from regard.masks.base import check_int
from regard.span import Span

CHUNKS = 4
"""Chunks a rank in the greedy candidate of `Shards.balanced`."""

PAIRS_PER_KEY = 8
"""How many query-key pairs of a head moving one key and value counts as, in a choice between
sharding schemes. Moving overlaps with computing, so balance counts first, and fewer messages where
it is equal.
"""


@dataclass(frozen=True)
class Shards:
    """The positions of a sequence, cut into spans, each held by one rank.

    A rank's tensors hold its spans one after another. Every position from `start` to `stop` is held
    by exactly one rank; a rank may hold none.

    Args:
        ranks: the spans of each rank, in the order of its tensors.

    Raises:
        ArgumentError, ArgumentTypeError: no rank; spans that overlap, leave a gap, or begin below
            0.

    >>> shards = Shards.zigzag(8, 2)
    >>> print(shards)
    8 tokens on 2 ranks
      0: 0-1 6-7
      1: 2-5
    >>> shards.take(torch.arange(8), 0, dim=0).tolist()
    [0, 1, 6, 7]
    """

    ranks: tuple[tuple[Span, ...], ...]

    def __post_init__(self) -> None:
        if not isinstance(self.ranks, Sequence) or not self.ranks:
            raise ArgumentTypeError("ranks must be a sequence with the spans of at least one rank")
        ranks = tuple(tuple(x for x in spans if len(x)) for spans in self.ranks)
        object.__setattr__(self, "ranks", ranks)
        spans = sorted((x for held in ranks for x in held), key=lambda x: x.start)
        for span in spans[:1]:
            if span.start < 0:
                raise ArgumentError(f"a shard begins at {span.start}; positions begin at 0")
        for before, after in itertools.pairwise(spans):
            if before.stop != after.start:
                fault = "overlap" if before.stop > after.start else "leave a gap"
                raise ArgumentError(
                    f"the shards {_shown(before)} and {_shown(after)} {fault}; every position "
                    "belongs to one rank"
                )

    @classmethod
    def even(cls, S: int, W: int, *, start: int = 0) -> Shards:
        """W runs of nearly equal length, in order.

        Args:
            S, W: the number of positions and of ranks.
            start: the first position.

        Raises:
            ArgumentError, ArgumentTypeError: S is below 0, W below 1, or start below 0.

        >>> print(Shards.even(7, 3))
        7 tokens on 3 ranks
          0: 0-2
          1: 3-4
          2: 5-6
        """
        return cls(tuple((x,) for x in _cut(S, _ranks(W), start)))

    @classmethod
    def zigzag(cls, S: int, W: int, *, start: int = 0) -> Shards:
        """2 W runs; rank r holds run r and run 2 W - 1 - r, so that causal work is equal.

        Args:
            S, W: the number of positions and of ranks.
            start: the first position.

        Raises:
            ArgumentError, ArgumentTypeError: S is below 0, W below 1, or start below 0.

        Source: Liu et al. 2023 (arXiv 2310.01889), with the order of Llama 3 (arXiv 2407.21783),
        section 3.3.2.
        """
        runs = _cut(S, 2 * _ranks(W), start)
        return cls(tuple(_joined((runs[r], runs[2 * W - 1 - r])) for r in range(W)))

    @classmethod
    def balanced(cls, S: int, W: int, mask: Mask | None = None, *, start: int = 0) -> Shards:
        """The best of even, zigzag and greedily distributed runs for a mask.

        The best has the least work of the busiest rank plus `PAIRS_PER_KEY` times the keys that
        arrive at any one rank. The greedy candidate cuts `CHUNKS` runs a rank and gives the run
        with the most visible pairs to the rank with the least work so far.

        Args:
            S, W: the number of positions and of ranks.
            mask: None sees everything.
            start: the first position.

        Raises:
            ArgumentError, ArgumentTypeError: S is below 0, W below 1, or start below 0.

        >>> from regard.masks import Causal
        >>> round(Shards.even(4096, 8).efficiency(Causal()), 2)
        0.53
        >>> Shards.balanced(4096, 8, Causal()).efficiency(Causal()) > 0.99
        True
        """
        mask = Full() if mask is None else mask
        runs = [x for x in _cut(S, CHUNKS * _ranks(W), start) if len(x)]
        work = {x: mask.count(x, Span(start, S)) for x in runs}
        load, held = [0] * W, [list[Span]() for _ in range(W)]
        for run in sorted(runs, key=lambda x: (-work[x], x.start)):
            least = min((r for r in range(W) if len(held[r]) < CHUNKS), key=lambda r: (load[r], r))
            held[least].append(run)
            load[least] += work[run]
        greedy = cls(tuple(_joined(sorted(x, key=lambda x: x.start)) for x in held))
        found = (cls.even(S, W, start=start), cls.zigzag(S, W, start=start), greedy)
        return min(found, key=lambda shards: shards._time(mask))

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def start(self) -> int:
        """The first position; 0 where there is none."""
        return min((x.start for held in self.ranks for x in held), default=0)

    @property
    def stop(self) -> int:
        """One past the last position."""
        return max((x.stop for held in self.ranks for x in held), default=0)

    def __len__(self) -> int:
        return self.stop - self.start

    def spans(self, rank: int) -> tuple[Span, ...]:
        """The spans of a rank, in the order of its tensors.

        Raises:
            ArgumentError: there is no such rank.
        """
        if not 0 <= rank < self.world:
            raise ArgumentError(f"rank is {rank}; these shards have ranks 0 to {self.world - 1}")
        return self.ranks[rank]

    def count(self, rank: int) -> int:
        """How many positions a rank holds."""
        return sum(map(len, self.spans(rank)))

    def positions(self, rank: int) -> Tensor:
        """The positions of a rank, int64 [1, count]."""
        return torch.cat(
            [torch.empty(1, 0, dtype=torch.int64), *(x.tensor() for x in self.spans(rank))], 1
        )

    def take(self, x: Tensor, rank: int, dim: int = 2) -> Tensor:
        """The part of a whole tensor that a rank holds.

        Args:
            x: a tensor with one entry for each position along `dim`.
            rank: whose part.
            dim: the dimension of the positions; 2 for [B, H, S, D].

        Raises:
            ArgumentError: the dimension has another length.
        """
        if x.shape[dim] != len(self):
            raise ArgumentError(
                f"dimension {dim} has length {x.shape[dim]}; these shards hold {len(self)} "
                "positions"
            )
        return torch.cat(
            [
                x.narrow(dim, 0, 0),
                *(x.narrow(dim, s.start - self.start, len(s)) for s in self.spans(rank)),
            ],
            dim,
        )

    def join(self, parts: Sequence[Tensor], dim: int = 2) -> Tensor:
        """The whole tensor from every rank's part: the inverse of `take`.

        Raises:
            ArgumentError: another number of parts, or a part of another length.

        >>> shards = Shards.zigzag(10, 2)
        >>> x = torch.arange(10)
        >>> torch.equal(shards.join([shards.take(x, r, 0) for r in range(2)], 0), x)
        True
        """
        if len(parts) != self.world:
            raise ArgumentError(f"{len(parts)} parts for {self.world} ranks")
        pieces: list[tuple[int, Tensor]] = []
        for rank, x in enumerate(parts):
            if x.shape[dim] != self.count(rank):
                raise ArgumentError(
                    f"the part of rank {rank} has length {x.shape[dim]} along dimension {dim}; it "
                    f"holds {self.count(rank)} positions"
                )
            at = 0
            for span in self.spans(rank):
                pieces.append((span.start, x.narrow(dim, at, len(span))))
                at += len(span)
        if not pieces:
            return parts[0]
        return torch.cat([x for _, x in sorted(pieces, key=lambda piece: piece[0])], dim)

    def work(self, mask: Mask | None = None) -> tuple[int, ...]:
        """The visible query-key pairs of each rank, whose queries see the keys of all ranks."""
        mask = Full() if mask is None else mask
        keys = Span(self.start, len(self))
        return tuple(sum(mask.count(x, keys) for x in held) for held in self.ranks)

    def efficiency(self, mask: Mask | None = None) -> float:
        """The mean work of a rank over that of the busiest one: 1 is perfect balance."""
        work = self.work(mask)
        return sum(work) / (self.world * max(work)) if any(work) else 1.0

    def _time(self, mask: Mask) -> int:
        moved = (
            sum(
                stop - first
                for j in range(self.world)
                if j != i
                for _, first, stop in needed(mask, self.spans(i), self.spans(j))
            )
            for i in range(self.world)
        )
        return max(self.work(mask)) + PAIRS_PER_KEY * max(moved)

    def __str__(self) -> str:
        lines = [f"{len(self)} tokens on {self.world} ranks"]
        lines += [
            f"  {rank}: {' '.join(map(_shown, held)) or 'nothing'}"
            for rank, held in enumerate(self.ranks)
        ]
        return "\n".join(lines)


@lru_cache(maxsize=4096)
def needed(
    mask: Mask, queries: tuple[Span, ...], keys: tuple[Span, ...]
) -> tuple[tuple[int, int, int], ...]:
    """The keys of some spans that some queries see: for each span, the shortest run that holds
    them.

    Args:
        mask: the rule.
        queries: spans of the rank that receives.
        keys: spans of the rank that sends.

    Returns:
        For each span of which a key is seen: its number, the first position, and one past the last.

    >>> from regard.masks import Causal, Window
    >>> needed(Causal() & Window(3), (Span(8, 4),), (Span(0, 8),))
    ((0, 6, 8),)
    """
    found = []
    for n, span in enumerate(keys):
        runs = [run for q in queries if (run := _hull(mask, q, span)) is not None]
        if runs:
            found.append((n, min(a for a, _ in runs), max(b for _, b in runs)))
    return tuple(found)


def _hull(mask: Mask, q: Span, k: Span) -> tuple[int, int] | None:
    """The first key that some query sees, and one past the last; None if none is seen."""
    ranges = mask.intervals(q)
    if ranges is not None:
        starts, stops = ranges.starts.clamp(k.start, k.stop), ranges.stops.clamp(k.start, k.stop)
        seen = starts < stops
        if not bool(seen.any()):
            return None
        return int(starts[seen].min()), int(stops[seen].max())
    any_query = torch.zeros(len(k), dtype=torch.bool)
    for i in range(0, len(q), 128):
        block = mask.block(q, k, slice(i, min(i + 128, len(q))))
        any_query |= block.flatten(0, -2).any(0)
    columns = any_query.nonzero()
    if not len(columns):
        return None
    return k.start + int(columns[0]), k.start + int(columns[-1]) + 1


def _ranks(W: int) -> int:
    return check_int("the number of ranks", W, 1)


def _cut(S: int, n: int, start: int) -> list[Span]:
    """n runs of nearly equal length; the longer ones come first."""
    check_int("the number of positions", S, 0)
    check_int("start", start, 0)
    size, more = divmod(S, n)
    bounds = [start]
    for i in range(n):
        bounds.append(bounds[-1] + size + (i < more))
    return [Span(a, b - a) for a, b in itertools.pairwise(bounds)]


def _joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Spans in order, those that touch as one."""
    found: list[Span] = []
    for span in spans:
        if not len(span):
            continue
        if found and found[-1].stop == span.start:
            found[-1] = Span(found[-1].start, len(found[-1]) + len(span))
        else:
            found.append(span)
    return tuple(found)


def _shown(span: Span) -> str:
    return str(span.start) if len(span) == 1 else f"{span.start}-{span.stop - 1}"
