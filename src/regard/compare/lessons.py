"""What mechanisms learn: text as bytes, and recall tasks; with data to choose a learning rate by,
and other data to judge by.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from regard.compare.experiment import Numbers
from regard.errors import ArgumentError
from regard.train.batches import Batches, Feed, Rows, validation_rows
from regard.train.corpus import DEFAULT, Document, read, split
from regard.train.losses import AnswerLoss, Loss, evaluate, next_token_loss
from regard.train.tasks import TASKS
from regard.train.tasks.base import Task
from regard.train.tasks.examples import IGNORED, Made, pad

END = 0
"""The byte that stands behind each document."""

RECALL = {"mqar": 8, "passkey": 4}
"""Tasks with a share of right answers, and the part of a row of text that their longest rows have:
so short that a small model learns them in some hundred steps."""

SELECT, JUDGE = 64, 128
"""Rows of text by which a learning rate is chosen, and by which a model is judged; of examples of
tasks, four times as many.
"""


class Lesson(ABC):
    """Something to be learned.

    Attributes:
        name: what it is called.
        settings: plain values that say which data there is.
        measure: the name of the number in `judge` that plots show.
        better: "lower" or "higher".
        steps: of the optimiser, unless somebody says otherwise or there is no time.
    """

    name: str
    measure: str
    better: str
    steps: int
    loss: Loss

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Which data there is: plain values."""

    @abstractmethod
    def feed(self, seed: int) -> Feed:
        """Batches in an order of their own for each seed."""

    @property
    @abstractmethod
    def selection(self) -> Rows:
        """What is not trained on, and a learning rate is chosen by."""

    @abstractmethod
    def judge(self, model: nn.Module) -> Numbers:
        """How good a model is on what neither trained it nor chose its learning rate."""


@dataclass(frozen=True)
class Text(Lesson):
    """The next byte of a text.

    Args:
        documents: from `regard.train.corpus`.
        context: bytes that a row predicts.
        batch: rows.
        source: what the documents are called.

    Raises:
        ArgumentError: there is too little text.

    >>> lesson = Text([Document("a", "abc " * 400), Document("b", "dcba " * 400)], context=8, batch=2)
    >>> round(lesson.judge(nn.Embedding.from_pretrained(torch.zeros(256, 256)))["bits_per_byte"], 4)
    8.0
    """

    documents: Sequence[Document]
    context: int
    batch: int
    source: str = DEFAULT
    steps: int = 300
    name = "text"
    measure = "bits_per_byte"
    better = "lower"
    loss = staticmethod(next_token_loss)

    @cached_property
    def _streams(self) -> tuple[Tensor, Tensor, Tensor]:
        """Bytes to train on, to choose by, and to judge by."""
        train, held = split(self.documents)
        other = _bytes(held)
        if len(other) < 3 * (self.context + 1):
            raise ArgumentError(
                f"text {self.source} leaves {len(other):,} bytes for validation; rows of "
                f"{self.context} need "
                f"{3 * (self.context + 1):,}: give more text, or a shorter --length"
            )
        third = len(other) // 3
        return _bytes(train), other[:third], other[third:]

    @property
    def settings(self) -> dict[str, Any]:
        """The text by its hash."""
        return {
            "source": self.source,
            "bytes": len(self._streams[0]),
            "sha256": self._digest,
            "context": self.context,
            "batch": self.batch,
        }

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256(b"".join(s.numpy().tobytes() for s in self._streams)).hexdigest()

    def feed(self, seed: int) -> Feed:
        """Random rows."""
        return Batches(self._streams[0], batch=self.batch, context=self.context, seed=seed)

    @property
    def selection(self) -> Rows:
        """Rows spread over the first third of what is held back."""
        return validation_rows(self._streams[1], self.context, SELECT)

    def judge(self, model: nn.Module) -> Numbers:
        """Bits for each byte of rows spread over the rest: the loss by log 2."""
        rows = validation_rows(self._streams[2], self.context, JUDGE)
        return {"bits_per_byte": evaluate(model, rows) / math.log(2), "rows": len(rows)}


@dataclass(frozen=True)
class Recall(Lesson):
    """A task of rows: finding again what was said before.

    Args:
        task: "mqar" or "passkey", or another task of rows.
        length: tokens of the longest row in training.
        batch: rows.
        steps: of the optimiser.

    Raises:
        ArgumentError: the task's rows cannot be so short.

    >>> Recall("mqar", 32, 4).task.lengths
    (7, 32, 64)
    """

    name: str
    length: int
    batch: int
    steps: int = 400
    measure = "accuracy"
    better = "higher"
    loss = AnswerLoss()

    def __post_init__(self) -> None:
        shortest = TASKS[self.name].lengths[0]
        if self.length < shortest:
            raise ArgumentError(
                f"rows of {self.name} have {self.length} tokens at most, and at least {shortest}: "
                "give a --length of "
                f"{shortest * RECALL[self.name]} or more, or leave out --lesson {self.name}"
            )

    @property
    def task(self) -> Task:
        """The task at these lengths."""
        known = TASKS[self.name]
        return replace(known, lengths=(known.lengths[0], self.length, 2 * self.length))

    @property
    def settings(self) -> dict[str, Any]:
        """The task and its lengths."""
        return {"task": self.name, "lengths": list(self.task.lengths), "batch": self.batch}

    def feed(self, seed: int) -> Feed:
        """Examples of the training split."""
        return Made(self.task, batch=self.batch, seed=seed)

    @property
    def selection(self) -> Rows:
        """Examples of the validation split."""
        return pad(self.task, self.task.examples("validation", 4 * SELECT, "select"))

    def judge(self, model: nn.Module) -> Numbers:
        """The share of right answers on other examples of the validation split, each answer given
        the right ones before.
        """
        rows = pad(self.task, self.task.examples("validation", 4 * JUDGE, "judge"))
        answers = right = whole = 0
        with torch.no_grad():
            for part in rows.split(4 * self.batch):
                asked = part.target != IGNORED
                wrong = (model(part.source).argmax(-1) != part.target) & asked
                answers, right = answers + int(asked.sum()), right + int((asked & ~wrong).sum())
                whole += int((~wrong.any(1)).sum())
        return {
            "accuracy": right / answers,
            "whole": whole / len(rows),
            "answers": answers,
            "examples": len(rows),
        }


def lessons(
    names: Sequence[str], *, source: str = DEFAULT, length: int = 256, batch: int = 8
) -> list[Lesson]:
    """The lessons of these names.

    Args:
        names: "text", or tasks of `RECALL`.
        source: of the text: "python-docs", a file or a folder.
        length: bytes that a row of text predicts; rows of tasks have up to so many tokens by the
            number in `RECALL`.
        batch: rows of text; of tasks as many more as they are shorter.

    Raises:
        ArgumentError, FileError: a name is not known, or comes twice; there is no such text, or too
            little.

    >>> [(one.length, one.batch) for one in lessons(["mqar", "passkey"], length=256, batch=8)]
    [(32, 64), (64, 32)]
    """
    known = ("text", *RECALL)
    if unknown := [name for name in names if name not in known]:
        raise ArgumentError(f"there is no lesson {unknown[0]!r}; there are {', '.join(known)}")
    if len(set(names)) < len(names):
        raise ArgumentError(f"lessons are {', '.join(names)}; name each once")
    found: list[Lesson] = []
    for name in names:
        if name == "text":
            found.append(Text(read(source), length, batch, source))
        else:
            found.append(Recall(name, length // RECALL[name], batch * RECALL[name]))
    return found


def _bytes(documents: Sequence[Document]) -> Tensor:
    text = b"".join(one.text.encode("utf-8") + bytes([END]) for one in documents)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
