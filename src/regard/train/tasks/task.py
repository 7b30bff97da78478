"""What a task is, and batches of its examples in an order that can be repeated and resumed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from regard.errors import ArgumentError
from regard.suggest import suggest

PAD, BOS, EOS = 0, 1, 2
"""An empty slot; in front of a target; behind a source and behind a target."""

SPECIAL = ("<pad>", "<bos>", "<eos>")


@dataclass(frozen=True)
class Vocabulary:
    """Words, each with an id: 0, 1 and 2 are `PAD`, `BOS` and `EOS`, the words follow.

    Raises:
        ArgumentError: a word stands there twice, is empty, or is one of the special ones.

    >>> vocabulary = Vocabulary(("one", "two"))
    >>> vocabulary.encode(["two", "one"]), vocabulary.decode([1, 4, 3, 2, 0])
    ([4, 3], ['two', 'one'])
    """

    words: tuple[str, ...]
    _ids: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ids = {word: i for i, word in enumerate((*SPECIAL, *self.words))}
        if len(ids) != len(self):
            twice = sorted({w for w in self.words if self.words.count(w) > 1 or w in SPECIAL})
            raise ArgumentError(f"words stand in the vocabulary twice: {', '.join(twice)}")
        if "" in ids:
            raise ArgumentError("the empty string is not a word; leave it out")
        object.__setattr__(self, "_ids", ids)

    def __len__(self) -> int:
        return len(SPECIAL) + len(self.words)

    def encode(self, words: Iterable[str]) -> list[int]:
        """The ids of words.

        Raises:
            ArgumentError: a word is not in the vocabulary; names it and its neighbours.
        """
        found = []
        for word in words:
            if word not in self._ids or word in SPECIAL:
                hint = suggest(word, self.words, most=3, otherwise=f"; it has {self._some()}")
                raise ArgumentError(f"{word!r} is not a word of this vocabulary{hint}")
            found.append(self._ids[word])
        return found

    def decode(self, ids: Sequence[int]) -> list[str]:
        """The words of ids, up to the first `EOS`; `PAD` and `BOS` are passed over.

        Raises:
            ArgumentError: an id lies outside the vocabulary.
        """
        found = []
        for i in ids:
            if not 0 <= i < len(self):
                raise ArgumentError(f"id {i} lies outside [0, {len(self)})")
            if i == EOS:
                break
            if i not in (PAD, BOS):
                found.append(self.words[i - len(SPECIAL)])
        return found

    def _some(self, most: int = 12) -> str:
        more = f" and {len(self.words) - most} more" if len(self.words) > most else ""
        return ", ".join(self.words[:most]) + more


SPLITS = ("train", "validation", "longer")
"""What is trained on; as long as that, but never trained on; longer than anything trained on."""

KINDS = ("pairs", "rows")
"""A source and what is to be said about it; or one row, in which some tokens must follow from those
before.
"""

HELD = 10
"""One source of so many belongs to validation."""


@dataclass(frozen=True)
class Example:
    """One example, in words.

    source: what is read.
    target: of pairs, what is to be said. Of rows, one entry per token of the source: the token that
        must come next, or "" where nothing is asked.

    >>> Example(("four", "hundred"), ("四", "百")).length
    2
    """

    source: tuple[str, ...]
    target: tuple[str, ...]

    @property
    def length(self) -> int:
        """Tokens of the source."""
        return len(self.source)


@dataclass(frozen=True)
class Task:
    """What is to be learned, with its words and a way to make examples of any length.

    A source belongs to validation when its sha256 says so, to `longer` when it has more tokens than
    any in training, and to training otherwise: the splits share no source, whatever the seed.

    Args:
        name: of the command.
        sentence: what the task is, in a line.
        origin: where it comes from.
        kind: "pairs" or "rows".
        vocabulary: the words of source and target.
        draw: from a generator and a length to an example of about as many source tokens.
        lengths: source tokens: the fewest, the most in training, the most in `longer`.
        reads, writes: what stands between the words of a source and of a target, " " or "".

    Raises:
        ArgumentError: the kind is unknown, or the lengths do not grow.

    >>> from regard.train.tasks import TASKS
    >>> [example.length > 32 for example in TASKS["translate"].examples("longer", 3)]
    [True, True, True]
    """

    name: str
    sentence: str
    origin: str
    kind: Literal["pairs", "rows"]
    vocabulary: Vocabulary
    draw: Callable[[Random, int], Example] = field(repr=False)
    lengths: tuple[int, int, int] = (1, 32, 64)
    reads: str = " "
    writes: str = " "

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ArgumentError(f"kind is {self.kind!r}; it must be one of {', '.join(KINDS)}")
        shortest, trained, longest = self.lengths
        if not 1 <= shortest <= trained < longest:
            raise ArgumentError(
                f"lengths are {self.lengths}; they must be 1 <= shortest <= longest trained < "
                "longest"
            )

    def split_of(self, source: tuple[str, ...]) -> str | None:
        """The split that a source belongs to; None where it is shorter or longer than any of them.

        >>> from regard.train.tasks import TASKS
        >>> TASKS["translate"].split_of(("seven",) * 40)
        'longer'
        """
        shortest, trained, longest = self.lengths
        if not shortest <= len(source) <= longest:
            return None
        if len(source) > trained:
            return "longer"
        digest = hashlib.sha256("\0".join((self.name, *source)).encode()).digest()
        return "train" if int.from_bytes(digest[:8]) % HELD else "validation"

    def stream(self, split: str, seed: int | str = 0) -> Iterator[Example]:
        """Examples of a split without end: the same ones for the same seed, their lengths drawn
        evenly.

        Raises:
            ArgumentError: there is no such split.
        """
        if split not in SPLITS:
            raise ArgumentError(f"split is {split!r}; it must be one of {', '.join(SPLITS)}")
        shortest, trained, longest = self.lengths
        low, high = (trained + 1, longest) if split == "longer" else (shortest, trained)
        random = Random(f"{self.name} {split} {seed}")  # noqa: S311 (examples are no secrets)
        while True:
            example = self.draw(random, random.randint(low, high))
            if self.split_of(example.source) == split:
                yield example

    def examples(self, split: str, count: int, seed: int | str = 0) -> list[Example]:
        """The first `count` examples of `stream`.

        Raises:
            ArgumentError: there is no such split, or count is less than 1.
        """
        if count < 1:
            raise ArgumentError(f"count is {count}; it must be 1 or more")
        return list(islice(self.stream(split, seed), count))

    def read(self, text: str) -> tuple[str, ...]:
        """A source as a person writes it, as words of the vocabulary.

        Raises:
            ArgumentError: a word is not in the vocabulary, or there is none.

        >>> from regard.train.tasks import TASKS
        >>> TASKS["translate"].read("forty two, seven")
        ('forty', 'two', ',', 'seven')
        """
        words = tuple(text.replace(",", " , ").split()) if self.reads else tuple(text)
        if not words:
            raise ArgumentError(f"the text {text!r} has no words; give at least one")
        self.vocabulary.encode(words)
        return words


IGNORED = -100
"""The label of a slot that counts for nothing, as torch's cross entropy has it."""

POOL = 16
"""Batches that are drawn and sorted by length together."""


@dataclass(frozen=True)
class Padded:
    """Examples as ids, shorter ones padded on the right.

    source: of pairs, words and `EOS`. Of rows, the row.
    target: of pairs, `BOS`, words, `EOS`. Of rows, the token that must come next, or `IGNORED`.

    >>> from regard.train.tasks import TASKS
    >>> examples = [Example(("a",), ("a",)), Example(("b", "c"), ("b", "c"))]
    >>> pad(TASKS["copy"], examples).source.tolist()
    [[3, 2, 0], [4, 5, 2]]
    """

    source: Int[Tensor, "B S"]
    target: Int[Tensor, "B T"]

    def __len__(self) -> int:
        return len(self.source)

    def to(self, device: torch.device | str) -> Padded:
        """The same on a device."""
        return Padded(self.source.to(device), self.target.to(device))

    def split(self, size: int) -> Iterator[Padded]:
        """Parts of `size` examples, without the slots that are padding in a whole part."""
        beside = bool((self.target == IGNORED).any())  # rows: a label for every slot
        for i in range(0, len(self), size):
            source, target = _cut(self.source[i : i + size], PAD), self.target[i : i + size]
            yield Padded(source, target[:, : source.shape[1]] if beside else _cut(target, PAD))


def pad(task: Task, examples: Sequence[Example]) -> Padded:
    """Examples of a task as one batch.

    Raises:
        ArgumentError: a word is not in the task's vocabulary.
    """
    encode = task.vocabulary.encode
    if task.kind == "pairs":
        sources = [[*encode(e.source), EOS] for e in examples]
        targets = [[BOS, *encode(e.target), EOS] for e in examples]
        return Padded(_table(sources, PAD), _table(targets, PAD))
    sources = [encode(e.source) for e in examples]
    targets = [[encode([w])[0] if w else IGNORED for w in e.target] for e in examples]
    return Padded(_table(sources, PAD), _table(targets, IGNORED))


class Made:
    """Endless batches of a task's training examples, a stand-in for `Batches` in `fit`.

    `POOL` batches are drawn together, sorted by the length of source and target, cut, and shuffled,
    so that a batch has little padding. Batch i is a function of the seed and i alone.

    Args:
        task: what is learned.
        batch: examples per step.
        seed: of the examples and their order.
        only: examples to take in place of the task's own, again and again: for tests and for
            overfitting.

    Raises:
        ArgumentError: batch is less than 1; `load_state_dict` meets a state of other data.

    >>> from regard.train.tasks import TASKS
    >>> next(Made(TASKS["copy"], batch=8)).source.shape[0]
    8
    """

    def __init__(
        self, task: Task, *, batch: int, seed: int = 0, only: Sequence[Example] | None = None
    ) -> None:
        if batch < 1:
            raise ArgumentError(f"batch is {batch}; it must be 1 or more")
        self.task, self.batch, self.seed = task, batch, seed
        self.only = None if only is None else tuple(only)
        first = self._pool(0)
        asked = sum(sum(map(bool, e.target)) for part in first for e in part)
        self.context = max(1, round(asked / (POOL * batch)))  # tokens per example that are learned
        self._drawn, self._held = 0, (0, first)

    def __iter__(self) -> Made:
        return self

    def __next__(self) -> Padded:
        """The next batch."""
        pool, i = divmod(self._drawn, POOL)
        if self._held[0] != pool:
            self._held = (pool, self._pool(pool))
        self._drawn += 1
        return pad(self.task, self._held[1][i])

    def state_dict(self) -> dict[str, Any]:
        """Where the drawing stands, and what it is drawn from: plain values, for a JSON file."""
        return {"drawn": self._drawn, "drawn_from": self._fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; refuses a state of another task, batch or seed."""
        if state.get("drawn_from") != self._fingerprint():
            raise ArgumentError(
                "the saved data order was drawn from another task, batch or seed than "
                f"{self.task.name!r}, "
                f"{self.batch}, {self.seed}; resume with the settings of the first run"
            )
        self._drawn = state["drawn"]

    def _pool(self, index: int) -> list[list[Example]]:
        """The batches of a pool."""
        name, count = f"{self.seed} {index}", POOL * self.batch
        random = Random(name)  # noqa: S311 (an order is no secret)
        if self.only is None:
            drawn = list(islice(self.task.stream("train", name), count))
        else:
            drawn = random.choices(self.only, k=count)
        drawn.sort(key=lambda e: (e.length, len(e.target)))
        parts = [drawn[i : i + self.batch] for i in range(0, count, self.batch)]
        random.shuffle(parts)
        return parts

    def _fingerprint(self) -> str:
        words = repr((self.task.name, self.task.lengths, self.batch, self.seed, self.only))
        return hashlib.sha256(words.encode()).hexdigest()


def _table(rows: list[list[int]], filler: int) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[filler] * (width - len(row))] for row in rows])


def _cut(ids: Tensor, filler: int) -> Tensor:
    """Without the columns on the right that hold padding only."""
    used = (ids != filler).any(0).nonzero()
    return ids[:, : int(used[-1]) + 1] if len(used) else ids[:, :1]
