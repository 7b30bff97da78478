"""The class of tasks, with vocabulary and examples, and batches in an order that can be resumed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import TYPE_CHECKING, Any, Literal

from regard.did_you_mean import suggest
from regard.errors import ArgumentError

if TYPE_CHECKING:
    import torch
    from jaxtyping import Int
    from torch import Tensor

PAD, BOS, EOS = 0, 1, 2
"""The token ids of padding, of the beginning of a target, and of the end of any sequence."""

SPECIAL = ("<pad>", "<bos>", "<eos>")


@dataclass(frozen=True)
class Vocabulary:
    """The words of a task and their ids: 0, 1 and 2 are `PAD`, `BOS` and `EOS`, and the words
    follow.

    Args:
        words: the words, in the order of their ids from 3.

    Raises:
        ArgumentError: a word is empty, occurs twice, or is one of the special tokens.

    >>> vocabulary = Vocabulary(("one", "two"))
    >>> vocabulary.encode(["two", "one"]), vocabulary.decode([1, 4, 3, 2, 0])
    ([4, 3], ['two', 'one'])
    """

    words: tuple[str, ...]
    _ids: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ids = {word: i for i, word in enumerate((*SPECIAL, *self.words))}
        if len(ids) != len(self):
            repeated = sorted({w for w in self.words if self.words.count(w) > 1 or w in SPECIAL})
            raise ArgumentError(
                f"words occur twice in the vocabulary or are special tokens: {', '.join(repeated)}"
            )
        if "" in ids:
            raise ArgumentError("the vocabulary has the empty string as a word; leave it out")
        object.__setattr__(self, "_ids", ids)

    def __len__(self) -> int:
        return len(SPECIAL) + len(self.words)

    def encode(self, words: Iterable[str]) -> list[int]:
        """Return the ids of words.

        Args:
            words: words of the vocabulary; special tokens are not allowed.

        Returns:
            One id per word.

        Raises:
            ArgumentError: a word is not in the vocabulary; the message suggests similar words.
        """
        ids = []
        for word in words:
            if word not in self._ids or word in SPECIAL:
                hint = suggest(word, self.words, most=3, otherwise=f"; it has {self._excerpt()}")
                raise ArgumentError(f"{word!r} is not a word of this vocabulary{hint}")
            ids.append(self._ids[word])
        return ids

    def decode(self, ids: Sequence[int]) -> list[str]:
        """Return the words of ids, up to the first `EOS`, without `PAD` and `BOS`.

        Args:
            ids: ids in `[0, len(self))`.

        Returns:
            The words.

        Raises:
            ArgumentError: an id is outside the vocabulary.
        """
        words = []
        for i in ids:
            if not 0 <= i < len(self):
                raise ArgumentError(
                    f"id {i} is outside the vocabulary; allowed is [0, {len(self)})"
                )
            if i == EOS:
                break
            if i not in (PAD, BOS):
                words.append(self.words[i - len(SPECIAL)])
        return words

    def _excerpt(self, most: int = 12) -> str:
        """Return the first words, and how many more there are, for a message."""
        more = f" and {len(self.words) - most} more" if len(self.words) > most else ""
        return ", ".join(self.words[:most]) + more


SPLITS = ("train", "validation", "longer")
"""The splits: "train" for training, "validation" with held-out examples of the same lengths, and
"longer" with held-out examples that are longer than any in training.
"""

KINDS = ("seq2seq", "causal")
"""The kinds of task: "seq2seq" maps a source sequence to a target sequence; "causal" is one
sequence in which some tokens can be predicted from the tokens before them.
"""

VALIDATION_DIVISOR = 10
"""One source in this many belongs to the validation split."""


@dataclass(frozen=True)
class Example:
    """One example of a task, in words.

    Args:
        source: the input sequence.
        target: for a "seq2seq" task the output sequence. For a "causal" task one entry per source
            token: the token that must come next, or "" where no prediction is asked for.

    >>> Example(("four", "hundred"), ("四", "百")).length
    2
    """

    source: tuple[str, ...]
    target: tuple[str, ...]

    @property
    def length(self) -> int:
        """The number of tokens of the source."""
        return len(self.source)


@dataclass(frozen=True)
class Task:
    """A problem to learn, with its vocabulary and a generator of examples of any length.

    The sha256 of a source decides whether it belongs to training or to validation; a source with
    more tokens than any in training belongs to "longer". Thus no source is in two splits, whatever
    the seed.

    Args:
        name: the name for `--task`.
        description: what the task is, in one line.
        reference: the paper that the task comes from.
        kind: "seq2seq" or "causal", see `KINDS`.
        vocabulary: the words of sources and targets.
        draw: a function of a random generator and a length; returns an example with about that many
            source tokens.
        lengths: numbers of source tokens: the fewest, the most in training, the most in "longer".
        source_separator, target_separator: the text between two words, " " or "".

    Raises:
        ArgumentError: the kind is unknown, or the lengths do not increase.

    >>> from regard.train.tasks import TASKS
    >>> [example.length > 32 for example in TASKS["translate"].examples("longer", 3)]
    [True, True, True]
    """

    name: str
    description: str
    reference: str
    kind: Literal["seq2seq", "causal"]
    vocabulary: Vocabulary
    draw: Callable[[Random, int], Example] = field(repr=False)
    lengths: tuple[int, int, int] = (1, 32, 64)
    source_separator: str = " "
    target_separator: str = " "

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ArgumentError(
                f"kind is {self.kind!r}; it must be one of {', '.join(KINDS)}", argument="kind"
            )
        shortest, trained, longest = self.lengths
        if not 1 <= shortest <= trained < longest:
            raise ArgumentError(
                f"lengths are {self.lengths}; they must be 1 <= shortest <= longest in training < "
                "longest",
                argument="lengths",
            )

    def split_of(self, source: tuple[str, ...]) -> str | None:
        """Return the split that a source belongs to.

        Args:
            source: the words of a source.

        Returns:
            One of `SPLITS`; None if the source is shorter or longer than in any split.
        """
        shortest, trained, longest = self.lengths
        if not shortest <= len(source) <= longest:
            return None
        if len(source) > trained:
            return "longer"
        digest = hashlib.sha256("\0".join((self.name, *source)).encode()).digest()
        return "train" if int.from_bytes(digest[:8]) % VALIDATION_DIVISOR else "validation"

    def stream(self, split: str, seed: int | str = 0) -> Iterator[Example]:
        """Yield examples of a split without end: the same ones for the same seed.

        Args:
            split: one of `SPLITS`.
            seed: the seed of the random generator. The lengths are uniformly distributed.

        Yields:
            Examples whose source belongs to the split.

        Raises:
            ArgumentError: the split is unknown.
        """
        if split not in SPLITS:
            raise ArgumentError(
                f"split is {split!r}; it must be one of {', '.join(SPLITS)}", argument="split"
            )
        shortest, trained, longest = self.lengths
        low, high = (trained + 1, longest) if split == "longer" else (shortest, trained)
        random = Random(f"{self.name} {split} {seed}")  # noqa: S311 (not for cryptography)
        while True:
            example = self.draw(random, random.randint(low, high))
            if self.split_of(example.source) == split:
                yield example

    def examples(self, split: str, count: int, seed: int | str = 0) -> list[Example]:
        """Return the first `count` examples of `stream`.

        Args:
            split: one of `SPLITS`.
            count: how many examples.

        Returns:
            The examples.

        Raises:
            ArgumentError: the split is unknown, or count is less than 1.
        """
        if count < 1:
            raise ArgumentError(f"count is {count}; it must be 1 or more", argument="count")
        return list(islice(self.stream(split, seed), count))

    def tokenize(self, text: str) -> tuple[str, ...]:
        """Split a text that a user typed into words of the vocabulary.

        Args:
            text: a source.

        Returns:
            The words.

        Raises:
            ArgumentError: a word is not in the vocabulary, or the text has no words.
        """
        words = tuple(text.replace(",", " , ").split()) if self.source_separator else tuple(text)
        if not words:
            raise ArgumentError(f"the text {text!r} has no words; give at least one")
        self.vocabulary.encode(words)
        return words


IGNORE_INDEX = -100
"""The label of a position that the loss ignores, the `ignore_index` of torch's cross entropy."""

POOL_BATCHES = 16
"""How many batches are drawn and sorted by length together."""


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """Examples as token ids, padded on the right."""

    source: Int[Tensor, "B S"]
    target: Int[Tensor, "B T"]

    def __len__(self) -> int:
        return len(self.source)

    def to(self, device: torch.device | str) -> PaddedBatch:
        """Return the batch on a device."""
        return PaddedBatch(self.source.to(device), self.target.to(device))

    def split(self, size: int) -> Iterator[PaddedBatch]:
        """Yield parts of `size` examples, without columns that are padding for the whole part."""
        # a causal task has one label for every source token
        is_causal = bool((self.target == IGNORE_INDEX).any())
        for i in range(0, len(self), size):
            source, target = (
                _trim_padding(self.source[i : i + size], PAD),
                self.target[i : i + size],
            )
            target = target[:, : source.shape[1]] if is_causal else _trim_padding(target, PAD)
            yield PaddedBatch(source, target)


def pad(task: Task, examples: Sequence[Example]) -> PaddedBatch:
    """Return examples of a task as one padded batch of token ids."""
    encode = task.vocabulary.encode
    if task.kind == "seq2seq":
        sources = [[*encode(e.source), EOS] for e in examples]
        targets = [[BOS, *encode(e.target), EOS] for e in examples]
        return PaddedBatch(_pad_rows(sources, PAD), _pad_rows(targets, PAD))
    sources = [encode(e.source) for e in examples]
    targets = [[encode([w])[0] if w else IGNORE_INDEX for w in e.target] for e in examples]
    return PaddedBatch(_pad_rows(sources, PAD), _pad_rows(targets, IGNORE_INDEX))


class TaskBatches:
    """Endless batches of a task's training examples, for `fit` in place of `Batches`.

    `POOL_BATCHES` batches are drawn together and sorted by length, so that there is little padding.
    Batch i depends only on the seed and i.
    """

    def __init__(
        self, task: Task, *, batch: int, seed: int = 0, examples: Sequence[Example] | None = None
    ) -> None:
        if batch < 1:
            raise ArgumentError(f"batch is {batch}; it must be 1 or more", argument="batch")
        self.task, self.batch, self.seed = task, batch, seed
        self.examples = None if examples is None else tuple(examples)
        first_pool = self._pool(0)
        predicted = sum(sum(map(bool, e.target)) for part in first_pool for e in part)
        self.context = max(1, round(predicted / (POOL_BATCHES * batch)))
        self._drawn, self._current_pool = 0, (0, first_pool)

    def __iter__(self) -> TaskBatches:
        return self

    def __next__(self) -> PaddedBatch:
        """Return the next batch of examples."""
        pool, i = divmod(self._drawn, POOL_BATCHES)
        if self._current_pool[0] != pool:
            self._current_pool = (pool, self._pool(pool))
        self._drawn += 1
        return pad(self.task, self._current_pool[1][i])

    def state_dict(self) -> dict[str, object]:
        """Return the number of batches drawn, and a fingerprint of the data."""
        return {"drawn": self._drawn, "drawn_from": self._fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch at which `state_dict` was called."""
        if state.get("drawn_from") != self._fingerprint():
            raise ArgumentError(
                "the saved data order belongs to another task, batch size or seed than "
                f"{self.task.name!r}, {self.batch} and {self.seed}; resume with the settings of "
                "the first run"
            )
        self._drawn = state["drawn"]

    def _pool(self, index: int) -> list[list[Example]]:
        """Return the batches of pool `index`, in their shuffled order."""
        name, count = f"{self.seed} {index}", POOL_BATCHES * self.batch
        random = Random(name)  # noqa: S311 (not for cryptography)
        if self.examples is None:
            drawn = list(islice(self.task.stream("train", name), count))
        else:
            drawn = random.choices(self.examples, k=count)
        drawn.sort(key=lambda e: (e.length, len(e.target)))
        batches = [drawn[i : i + self.batch] for i in range(0, count, self.batch)]
        random.shuffle(batches)
        return batches

    def _fingerprint(self) -> str:
        words = repr((self.task.name, self.task.lengths, self.batch, self.seed, self.examples))
        return hashlib.sha256(words.encode()).hexdigest()


def _pad_rows(rows: list[list[int]], filler: int) -> Tensor:
    """Return lists of ids as one tensor `[B, L]`, padded on the right."""
    import torch

    width = max(map(len, rows))
    return torch.tensor([[*row, *[filler] * (width - len(row))] for row in rows])


def _trim_padding(ids: Tensor, filler: int) -> Tensor:
    """Return ids `[B, L]` without the last columns that are padding in every row."""
    used = (ids != filler).any(0).nonzero()
    return ids[:, : int(used[-1]) + 1] if len(used) else ids[:, :1]
