"""What a task is: examples generated in three splits that never share a question, and the
vocabulary that encodes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import Literal

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
