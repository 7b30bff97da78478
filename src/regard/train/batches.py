"""Batches from one stream of tokens, in an order that can be repeated and resumed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, Self

import torch
from jaxtyping import Int
from torch import Tensor

from regard.errors import ArgumentError
from regard.models.tokenizer import END_OF_TEXT, Tokenizer
from regard.train.corpus import Document

SHORTEST = 8
"""The shortest period of a row that repeats."""

FEWEST = 16
"""The fewest kinds of random tokens in a row."""

LESSON_KINDS, LESSON_PERIODS = 64, (4, 24)
"""The rows of the first batches: how many kinds of tokens they are made of, and their shortest and
longest period.
"""


class Batches:
    """Endless random rows of `context + 1` tokens: inputs are `row[:-1]`, targets `row[1:]`.

    `repeat` mixes in rows that say something again and again: that share of the rows is a segment
    tiled to the row's length, `row[i] == row[i - period]`, with the period drawn from
    [8, length/2] so that no fixed distance solves the task. `repeat_random` of those rows hold
    random tokens in place of a segment, drawn from the K most frequent ones, with K anew for each
    row, log-uniform from 16 to all: rows of few kinds show the trick, rows of many make it general.
    Such rows can only be predicted by finding the last occurrence of the present token and copying
    what followed: an induction head (Olsson et al. 2022, arXiv:2209.11895), which forms at small
    scale when the data pays for it.

    `repeat_first` batches come before all others and are easier: every row is random tokens of the
    64 most frequent kinds, said again and again with a period of 4 to 24, short ones more often.
    The step from no induction head to one is sudden and comes only if nothing easier is to be
    learnt meanwhile; what was learnt on 64 kinds then carries over.

    The global random state is neither read nor changed.

    Raises:
        ArgumentError: the stream is shorter than a row, or a number is out of range.

    >>> batches = Batches(torch.arange(100), batch=2, context=7, seed=0)
    >>> rows = next(batches)
    >>> rows.shape, bool((rows.diff() == 1).all())
    (torch.Size([2, 8]), True)
    """

    def __init__(
        self,
        tokens: Int[Tensor, " N"],
        *,
        batch: int,
        context: int,
        seed: int = 0,
        repeat: float = 0.0,
        repeat_random: float = 0.5,
        repeat_first: int = 0,
    ) -> None:
        for name, count, least in (
            ("batch", batch, 1),
            ("context", context, 1),
            ("repeat_first", repeat_first, 0),
        ):
            if count < least:
                raise ArgumentError(f"{name} is {count}; it must be {least} or more")
        for name, share in (("repeat", repeat), ("repeat_random", repeat_random)):
            if not 0 <= share <= 1:
                raise ArgumentError(f"{name} is {share}; it is a share, between 0 and 1")
        if len(tokens) < context + 1:
            raise ArgumentError(
                f"tokens has {len(tokens)} tokens; a row needs context + 1 = {context + 1}: "
                "give more text or a shorter context"
            )
        self.tokens = tokens.long().contiguous()
        self.batch, self.context, self.seed = batch, context, seed
        self.repeat, self.repeat_random, self.repeat_first = repeat, repeat_random, repeat_first
        self._kinds = by_frequency(self.tokens) if repeat or repeat_first else self.tokens[:0]
        self._drawn = 0
        self._generator = torch.Generator().manual_seed(seed)
        self._steps = torch.arange(context + 1)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Int[Tensor, "batch row"]:
        """The next batch [batch, context + 1]."""
        self._drawn += 1
        if self._drawn <= self.repeat_first:
            return self._lesson()
        length = self.context + 1
        starts = self._integers(0, len(self.tokens) - length + 1)
        if not self.repeat:
            return self.tokens[starts[:, None] + self._steps]
        longest = max(1, length // 2)
        period = self._integers(min(SHORTEST, longest), longest + 1)
        chance = torch.rand(2, self.batch, generator=self._generator)
        twice, random = chance[0] < self.repeat, chance[1] < self.repeat_random
        within = self._steps % torch.where(twice, period, length)[:, None]
        rows = self.tokens[starts[:, None] + within]
        few, all_ = math.log(min(FEWEST, len(self._kinds))), math.log(len(self._kinds))
        share = torch.rand(self.batch, 1, generator=self._generator)
        kinds = (few + (all_ - few) * share).exp()  # [batch, 1]
        draw = torch.rand(rows.shape, generator=self._generator) * kinds
        singles = self._kinds[draw.long().clamp_(max=len(self._kinds) - 1)].gather(1, within)
        return torch.where((twice & random)[:, None], singles, rows)

    def _lesson(self) -> Int[Tensor, "batch row"]:
        """Rows of few kinds with short periods."""
        kinds = self._kinds[:LESSON_KINDS]
        low, high = (math.log(p) for p in (LESSON_PERIODS[0], LESSON_PERIODS[1] + 1))
        share = torch.rand(self.batch, 1, generator=self._generator)
        period = (low + (high - low) * share).exp().long()
        shape = (self.batch, LESSON_PERIODS[1])
        segment = kinds[torch.randint(0, len(kinds), shape, generator=self._generator)]
        return segment.gather(1, self._steps % period)

    def state_dict(self) -> dict[str, Any]:
        """Where the drawing stands, and what it is drawn from: plain values, for a JSON file."""
        return {
            "drawn": self._drawn,
            "generator": bytes(self._generator.get_state().tolist()).hex(),
            "drawn_from": self._fingerprint(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; refuses a state of other tokens or settings."""
        if state["drawn_from"] != self._fingerprint():
            raise ArgumentError(
                "the saved data order was drawn from other tokens, batch, context, seed or repeat; "
                "resume with the settings of the first run"
            )
        self._drawn = state["drawn"]
        self._generator.set_state(
            torch.tensor(list(bytes.fromhex(state["generator"])), dtype=torch.uint8)
        )

    def _integers(self, low: int, high: int) -> Int[Tensor, " batch"]:
        return torch.randint(low, high, (self.batch,), generator=self._generator)

    def _fingerprint(self) -> str:
        digest = hashlib.sha256(self.tokens.numpy().tobytes())
        digest.update(repr([getattr(self, name) for name in _DRAWN_FROM]).encode())
        return digest.hexdigest()


_DRAWN_FROM = ("batch", "context", "seed", "repeat", "repeat_random", "repeat_first")


def by_frequency(tokens: Int[Tensor, " N"]) -> Int[Tensor, " kinds"]:
    """The different tokens of a stream, the most frequent first.

    >>> by_frequency(torch.tensor([5, 7, 7, 2, 7, 2])).tolist()
    [7, 2, 5]
    """
    kinds: Tensor
    kinds, counts = torch.unique(tokens, return_counts=True)
    return kinds[counts.argsort(descending=True, stable=True)]


def validation_rows(tokens: Int[Tensor, " N"], context: int, limit: int) -> Int[Tensor, "rows row"]:
    """At most `limit` rows [rows, context + 1], spread evenly over the stream.

    Raises:
        ArgumentError: the stream is shorter than one row, or `limit` is not positive.

    >>> validation_rows(torch.arange(9), context=2, limit=3).tolist()
    [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    """
    length = context + 1
    if limit < 1:
        raise ArgumentError(f"limit is {limit}; it must be 1 or more")
    if len(tokens) < length:
        raise ArgumentError(
            f"tokens has {len(tokens)} tokens of validation; a row needs context + 1 = {length}"
        )
    count = min(limit, len(tokens) // length)
    starts = torch.linspace(0, len(tokens) - length, count).long()
    return tokens.long()[starts[:, None] + torch.arange(length)]


class Rows(Protocol):
    """Some examples: a tensor [N, row] is one, and so is anything that moves, splits and counts
    like it.
    """

    def __len__(self) -> int: ...

    def to(self, device: torch.device, /) -> Self:
        """The same on a device."""
        ...

    def split(self, size: int, /) -> Iterable[Self]:
        """Parts of at most `size` examples."""
        ...


class Feed(Protocol):
    """Endless batches of `batch` examples, each with about `context` tokens to be predicted."""

    batch: int
    context: int

    def __next__(self) -> Any:
        """The next batch, `Rows` that the loss understands."""

    def state_dict(self) -> dict[str, Any]:
        """Where the drawing stands, and what it is drawn from: plain values, for a JSON file."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Go on where `state_dict` was taken; refuses a state of other data."""


def stream(documents: Sequence[Document], tokenizer: Tokenizer) -> Int[Tensor, " N"]:
    """The ids of all documents in their order, int64 [N]; special tokens in a text stay literal.

    Raises:
        ArgumentError: the tokenizer has no end-of-text token.

    >>> tokenizer = Tokenizer.train(["ab"], vocab_size=257)
    >>> stream([Document("1", "a"), Document("2", "b")], tokenizer).tolist()
    [65, 0, 66, 0]
    """
    end = tokenizer.end_of_text
    if end is None:
        raise ArgumentError(
            f"tokenizer has no {END_OF_TEXT} token to stand between documents; train one with it"
        )
    rows = tokenizer.encode_batch([document.text for document in documents])
    return torch.tensor([index for row in rows for index in (*row, end)], dtype=torch.long)
