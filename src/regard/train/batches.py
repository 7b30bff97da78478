"""Batches of token sequences from one stream of tokens, in an order that can be resumed."""

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
from regard.process_state import random_generator
from regard.train.corpus import TextDocument
from regard.units import plural

MIN_PERIOD = 8
"""The shortest period, in tokens, of a row that repeats itself."""

MIN_DISTINCT_TOKENS = 16
"""The smallest number of distinct tokens in a row of random tokens."""

WARMUP_DISTINCT_TOKENS, WARMUP_PERIODS = 64, (4, 24)
"""The easy rows of the first `repeat_first` batches have at most this many distinct tokens, and a
period between these two numbers.
"""


class Batches:
    """Endless random rows of `context + 1` tokens: the inputs are `row[:-1]`, the targets
    `row[1:]`.

    A share `repeat` of the rows repeat themselves, so that the model learns induction heads: such a
    row is a segment of the stream tiled to the row's length, `row[i] == row[i - period]`. The
    period is drawn uniformly from [8, length/2], so that no fixed distance solves the task. In a
    share `repeat_random` of these rows the segment consists of random tokens among the K most
    frequent ones, where K is log-uniform from 16 to the number of distinct tokens: rows of few
    distinct tokens are easy to learn from, rows of many make the head general. To predict a random
    row the model must find the last occurrence of the current token and copy the token after it
    (Olsson et al. 2022, arXiv:2209.11895).

    The first `repeat_first` batches are easier: every row repeats random tokens among the 64 most
    frequent ones with a period of 4 to 24, short periods more often. An induction head forms
    suddenly, and only while there is nothing easier to learn; it then generalizes to more tokens.

    The global random state is neither read nor changed.

    Args:
        tokens: the stream `[N]`, at least context + 1 tokens.
        repeat: the share of rows that repeat themselves, from 0 to 1.
        repeat_random: the share of these that repeat random tokens, from 0 to 1.
        repeat_first: how many easy batches come first.

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
                raise ArgumentError(f"{name} is {share}; it is a share and must be from 0 to 1")
        if len(tokens) < context + 1:
            raise ArgumentError(
                f"the stream has {plural(len(tokens), 'token')}; a row needs context + 1 = "
                f"{context + 1}: give more text or a shorter context"
            )
        self.tokens = tokens.long().contiguous()
        self.batch, self.context, self.seed = batch, context, seed
        self.repeat, self.repeat_random, self.repeat_first = repeat, repeat_random, repeat_first
        self._frequent_tokens = (
            tokens_by_frequency(self.tokens) if repeat or repeat_first else self.tokens[:0]
        )
        self._drawn = 0
        self._generator = random_generator(seed)
        self._offsets = torch.arange(context + 1)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Int[Tensor, "batch row"]:
        """Return the next batch of rows, `[batch, context + 1]`."""
        self._drawn += 1
        if self._drawn <= self.repeat_first:
            return self._warmup_rows()
        length = self.context + 1
        starts = self._integers(0, len(self.tokens) - length + 1)  # [batch]
        if not self.repeat:
            return self.tokens[starts[:, None] + self._offsets]
        longest = max(1, length // 2)
        period = self._integers(min(MIN_PERIOD, longest), longest + 1)
        chance = torch.rand(2, self.batch, generator=self._generator)
        repeats, random_tokens = chance[0] < self.repeat, chance[1] < self.repeat_random
        # the offsets of a row that repeats itself start again at 0 after each period
        offsets = self._offsets % torch.where(repeats, period, length)[:, None]  # [batch, length]
        rows = self.tokens[starts[:, None] + offsets]
        # each row draws how many distinct tokens it has, log-uniformly, and then its tokens
        log_fewest, log_all = (
            math.log(min(MIN_DISTINCT_TOKENS, len(self._frequent_tokens))),
            math.log(len(self._frequent_tokens)),
        )
        fraction = torch.rand(self.batch, 1, generator=self._generator)
        distinct = (log_fewest + (log_all - log_fewest) * fraction).exp()  # [batch, 1]
        ranks = torch.rand(rows.shape, generator=self._generator) * distinct
        random_rows = self._frequent_tokens[
            ranks.long().clamp_(max=len(self._frequent_tokens) - 1)
        ].gather(1, offsets)
        return torch.where((repeats & random_tokens)[:, None], random_rows, rows)

    def _warmup_rows(self) -> Int[Tensor, "batch row"]:
        """Return easy rows `[batch, context + 1]`: few kinds of tokens with short periods."""
        tokens = self._frequent_tokens[:WARMUP_DISTINCT_TOKENS]
        low, high = (math.log(p) for p in (WARMUP_PERIODS[0], WARMUP_PERIODS[1] + 1))
        fraction = torch.rand(self.batch, 1, generator=self._generator)
        period = (low + (high - low) * fraction).exp().long()  # [batch, 1]
        shape = (self.batch, WARMUP_PERIODS[1])
        segment = tokens[torch.randint(0, len(tokens), shape, generator=self._generator)]
        return segment.gather(1, self._offsets % period)

    def state_dict(self) -> dict[str, object]:
        """Return the state of the random generator and a fingerprint of the data.

        Returns:
            Plain values for JSON.
        """
        return {
            "drawn": self._drawn,
            "generator": bytes(self._generator.get_state().tolist()).hex(),
            "drawn_from": self._fingerprint(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch at which `state_dict` was called.

        Args:
            state: the result of `state_dict`.

        Raises:
            ArgumentError: the state belongs to other tokens or settings.
        """
        if state["drawn_from"] != self._fingerprint():
            raise ArgumentError(
                "the saved data order belongs to other tokens, batch, context, seed or repeat; "
                "resume with the settings of the first run"
            )
        self._drawn = state["drawn"]
        self._generator.set_state(
            torch.tensor(list(bytes.fromhex(state["generator"])), dtype=torch.uint8)
        )

    def _integers(self, low: int, high: int) -> Int[Tensor, " batch"]:
        """Return one random integer from low to high - 1 for each row."""
        return torch.randint(low, high, (self.batch,), generator=self._generator)

    def _fingerprint(self) -> str:
        """Return the sha256 of the tokens and of the settings that the rows depend on."""
        digest = hashlib.sha256(self.tokens.numpy().tobytes())
        digest.update(repr([getattr(self, name) for name in _SAMPLING_SETTINGS]).encode())
        return digest.hexdigest()


_SAMPLING_SETTINGS = ("batch", "context", "seed", "repeat", "repeat_random", "repeat_first")


def tokens_by_frequency(tokens: Int[Tensor, " N"]) -> Int[Tensor, " kinds"]:
    """Return the distinct tokens of a stream, the most frequent first.

    >>> tokens_by_frequency(torch.tensor([5, 7, 7, 2, 7, 2])).tolist()
    [7, 2, 5]
    """
    counts = torch.bincount(tokens)
    kinds = counts.nonzero().flatten()
    return kinds[counts[kinds].argsort(descending=True, stable=True)].to(tokens.dtype)


def validation_rows(tokens: Int[Tensor, " N"], context: int, limit: int) -> Int[Tensor, "rows row"]:
    """Return at most `limit` rows that are spread evenly over a stream of tokens.

    Args:
        tokens: the stream `[N]`.
        context: inputs per row.

    Returns:
        The rows, `[rows, context + 1]`.

    Raises:
        ArgumentError: the stream is shorter than one row, or `limit` is less than 1.

    >>> validation_rows(torch.arange(9), context=2, limit=3).tolist()
    [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    """
    length = context + 1
    if limit < 1:
        raise ArgumentError(f"limit is {limit}; it must be 1 or more")
    if len(tokens) < length:
        raise ArgumentError(
            f"the validation stream has {plural(len(tokens), 'token')}; a row needs context + 1 = "
            f"{length}: give more text or a shorter context"
        )
    count = min(limit, len(tokens) // length)
    starts = torch.linspace(0, len(tokens) - length, count).long()
    return tokens.long()[starts[:, None] + torch.arange(length)]


class ExampleBatch(Protocol):
    """The examples of a validation set: a tensor `[N, row]`, or a type like `PaddedBatch`."""

    def __len__(self) -> int: ...

    def to(self, device: torch.device, /) -> Self:
        """Return the examples on a device."""
        ...

    def split(self, size: int, /) -> Iterable[Self]:
        """Return parts of at most `size` examples."""
        ...


class BatchSource(Protocol):
    """Endless batches for `fit`, with a state from which a run resumes."""

    batch: int
    context: int

    def __next__(self) -> Any:
        """Return the next batch, in a form that the loss function accepts."""

    def state_dict(self) -> dict[str, object]:
        """Return the state of the source as plain values for JSON."""
        ...

    def load_state_dict(self, state: dict[str, object], /) -> None:
        """Continue after the batch at which `state_dict` was called."""


def token_stream(documents: Sequence[TextDocument], tokenizer: Tokenizer) -> Int[Tensor, " N"]:
    """Return the token ids of all documents, with an end-of-text token after each."""
    end = tokenizer.end_of_text
    if end is None:
        raise ArgumentError(
            f"the tokenizer has no {END_OF_TEXT} token to separate documents; train a tokenizer "
            "with one"
        )
    rows = tokenizer.encode_batch([document.text for document in documents])
    return torch.tensor([index for row in rows for index in (*row, end)], dtype=torch.long)
