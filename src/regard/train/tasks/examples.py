"""Batches of generated examples, in an order that can be repeated and resumed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from regard.errors import ArgumentError
from regard.train.tasks.base import BOS, EOS, PAD, Example, Task

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
    >>> pad(TASKS["copy"], [Example(("a",), ("a",)), Example(("b", "c"), ("b", "c"))]).source.tolist()
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
