"""How well each mechanism learns: lessons of text and recall, and training that is fair to all.

A lesson is a task with data to train on, data to choose a learning rate by, and data to be judged
on: text as bytes, or recall. All mechanisms see the same tokens in the same order. Where one
learning rate for all would not be fair, each is trained at several, and the validation data choose.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from regard.compare.experiment import Experiment, Numbers, Tell, silent
from regard.compare.mechanisms import decoder
from regard.errors import ArgumentError
from regard.models.families.regard import Config
from regard.train.batches import Batches, BatchSource, ExampleBatch, validation_rows
from regard.train.corpus import DEFAULT_SOURCE, TextDocument, load_documents, split_documents
from regard.train.loop import NonFiniteLoss, fit
from regard.train.losses import AnswerLoss, Loss, evaluate, next_token_loss
from regard.train.progress import LogRow
from regard.train.settings import Settings
from regard.train.tasks import TASKS
from regard.train.tasks.task import IGNORE_INDEX, Task, TaskBatches, pad

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
    def feed(self, seed: int) -> BatchSource:
        """Batches in an order of their own for each seed."""

    @property
    @abstractmethod
    def selection(self) -> ExampleBatch:
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
        select, judged: rows by which a learning rate is chosen, and the model is judged.

    Raises:
        ArgumentError: there is too little text.

    >>> documents = [TextDocument("a", "abc " * 400), TextDocument("b", "dcba " * 400)]
    >>> lesson = Text(documents, context=8, batch=2)
    >>> round(lesson.judge(nn.Embedding.from_pretrained(torch.zeros(256, 256)))["bits_per_byte"], 4)
    8.0
    """

    documents: Sequence[TextDocument]
    context: int
    batch: int
    source: str = DEFAULT_SOURCE
    steps: int = 300
    select: int = SELECT
    judged: int = JUDGE
    name = "text"
    measure = "bits_per_byte"
    better = "lower"
    loss = staticmethod(next_token_loss)

    @cached_property
    def _streams(self) -> tuple[Tensor, Tensor, Tensor]:
        """Bytes to train on, to choose by, and to judge by."""
        train, held = split_documents(self.documents)
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
            "rows": [self.select, self.judged],
        }

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256(b"".join(s.numpy().tobytes() for s in self._streams)).hexdigest()

    def feed(self, seed: int) -> BatchSource:
        """Random rows."""
        return Batches(self._streams[0], batch=self.batch, context=self.context, seed=seed)

    @property
    def selection(self) -> ExampleBatch:
        """Rows spread over the first third of what is held back."""
        return validation_rows(self._streams[1], self.context, self.select)

    def judge(self, model: nn.Module) -> Numbers:
        """Bits for each byte of rows spread over the rest: the loss by log 2."""
        rows = validation_rows(self._streams[2], self.context, self.judged)
        return {"bits_per_byte": evaluate(model, rows) / math.log(2), "rows": len(rows)}


@dataclass(frozen=True)
class Recall(Lesson):
    """A task of rows: finding again what was said before.

    Args:
        task: "mqar" or "passkey", or another task of rows.
        length: tokens of the longest row in training.
        batch: rows.
        steps: of the optimiser.
        select, judged: a quarter of the examples by which a learning rate is chosen, and the model
            is judged.

    Raises:
        ArgumentError: the task's rows cannot be so short.

    >>> Recall("mqar", 32, 4).task.lengths
    (7, 32, 64)
    """

    name: str
    length: int
    batch: int
    steps: int = 400
    select: int = SELECT
    judged: int = JUDGE
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
        return {
            "task": self.name,
            "lengths": list(self.task.lengths),
            "batch": self.batch,
            "rows": [self.select, self.judged],
        }

    def feed(self, seed: int) -> BatchSource:
        """Examples of the training split."""
        return TaskBatches(self.task, batch=self.batch, seed=seed)

    @property
    def selection(self) -> ExampleBatch:
        """Examples of the validation split."""
        return pad(self.task, self.task.examples("validation", 4 * self.select, "select"))

    def judge(self, model: nn.Module) -> Numbers:
        """The share of right answers on other examples of the validation split, each answer given
        the right ones before.
        """
        rows = pad(self.task, self.task.examples("validation", 4 * self.judged, "judge"))
        answers = right = whole = 0
        with torch.no_grad():
            for part in rows.split(4 * self.batch):
                asked = part.target != IGNORE_INDEX
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
    names: Sequence[str], *, source: str = DEFAULT_SOURCE, length: int = 256, batch: int = 8
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
            found.append(Text(load_documents(source), length, batch, source))
        else:
            found.append(Recall(name, length // RECALL[name], batch * RECALL[name]))
    return found


def _bytes(documents: Sequence[TextDocument]) -> Tensor:
    text = b"".join(one.text.encode("utf-8") + bytes([END]) for one in documents)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


RATES = (3e-3,)
"""Learning rates of mechanisms with a cache of tokens."""

RATES_OF_STATES = (1e-3, 3e-3, 1e-2)
"""Learning rates for mechanisms with a state. They depend on the rate much more than the others, so
each is trained at all three and counts at its best, which favours them.
"""

PILOT = 5
"""Steps whose median time tells how long training will take; one more comes first, and is not
timed.
"""

LEAST = 20
"""Fewer steps say nothing: rather the time is exceeded."""


@dataclass(frozen=True)
class Training:
    """How all are trained.

    Attributes:
        seeds: of weights and data order; each trains anew.
        rates: learning rates for all; None is `RATES`, and `RATES_OF_STATES` where the memory is a
            state.
        weight_decay, clip: of AdamW, and the most that a gradient's norm may be.

    Raises:
        ArgumentError: there is no seed or rate, or one comes twice.

    >>> Training().rates_of(recurrent=True)
    (0.001, 0.003, 0.01)
    """

    seeds: tuple[int, ...] = (0,)
    rates: tuple[float, ...] | None = None
    weight_decay: float = 0.01
    clip: float = 1.0

    def __post_init__(self) -> None:
        for name in ("seeds", "rates"):
            values = getattr(self, name)
            if values is not None and (not values or len(set(values)) < len(values)):
                raise ArgumentError(f"{name} are {values}; give at least one, each once")

    def rates_of(self, *, recurrent: bool) -> tuple[float, ...]:
        """The learning rates that a mechanism is trained with."""
        return self.rates or (RATES_OF_STATES if recurrent else RATES)


@dataclass(frozen=True)
class Pupil:
    """A mechanism as it is trained: its config, and the rates that it is tried with."""

    config: Config
    rates: tuple[float, ...]


def pilot(pupils: Mapping[str, Pupil], lessons: Sequence[Lesson]) -> list[Experiment]:
    """Seconds of a training step of each mechanism in each lesson: `seconds` by mechanism."""
    found = []
    for lesson in lessons:
        models = {name: asdict(one.config) for name, one in pupils.items()}
        settings = {"models": models, "lesson": lesson.settings, "steps": PILOT}

        def measure(lesson: Lesson = lesson) -> Numbers:
            return {
                "seconds": {name: _per_step(one.config, lesson) for name, one in pupils.items()}
            }

        found.append(Experiment(f"pilot/{lesson.name}", settings, measure))
    return found


def _per_step(config: Config, lesson: Lesson) -> float:
    """The median of some steps: a stall of the machine must not shorten all training."""
    model, feed, taken = decoder(config), lesson.feed(0), []
    for _ in range(1 + PILOT):
        rows = next(feed)
        start = time.perf_counter()
        torch.autograd.backward(lesson.loss(model, rows))
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def steps_that_fit(
    wanted: Mapping[str, int],
    seconds: Mapping[str, Mapping[str, float]],
    runs: Mapping[str, int],
    room: float,
) -> tuple[dict[str, int], float]:
    """Steps of each lesson so that all training ends in time: the same share of what is wanted in
    each.

    f = min(1, room / sum_{lesson, mechanism} steps seconds runs),  steps' = max(20, floor(f steps))

    Args:
        wanted: lesson -> steps.
        seconds: lesson -> mechanism -> seconds of a step.
        runs: mechanism -> how often it is trained in each lesson: rates times seeds.
        room: seconds that are left.

    Returns:
        steps by lesson, and the seconds that all wanted steps would take.

    >>> seconds, runs = {"text": {"mha": 0.1, "linear": 0.1}}, {"mha": 1, "linear": 3}
    >>> steps_that_fit({"text": 600}, seconds, runs, 120.0)
    ({'text': 300}, 240.0)
    """
    whole = sum(
        steps * seconds[lesson][name] * runs[name]
        for lesson, steps in wanted.items()
        for name in seconds[lesson]
    )
    share = min(1.0, max(0.0, room) / whole) if whole else 1.0
    return {
        lesson: steps if share == 1.0 else max(min(LEAST, steps), int(share * steps))
        for lesson, steps in wanted.items()
    }, whole


def experiments(
    pupils: Mapping[str, Pupil],
    lessons: Sequence[Lesson],
    training: Training,
    steps: Mapping[str, int],
    seconds: Mapping[str, Mapping[str, float]],
    tell: Tell = silent,
) -> list[Experiment]:
    """A training run for each lesson, mechanism, rate and seed; one lesson behind the other, so
    that an interrupt leaves whole ones.
    """
    found = []
    for lesson in lessons:
        for name, pupil in pupils.items():
            for rate in pupil.rates:
                for seed in training.seeds:
                    job = _Job(pupil.config, lesson, training, steps[lesson.name], rate, seed, tell)
                    guess = seconds[lesson.name][name] * steps[lesson.name]
                    found.append(
                        Experiment(
                            job_name(lesson.name, name, rate, seed), job.settings, job.run, guess
                        )
                    )
    return found


def job_name(lesson: str, name: str, rate: float, seed: int) -> str:
    """What a training run is called.

    >>> job_name("text", "mha", 0.003, 0)
    'text/mha/lr 0.003/seed 0'
    """
    return f"{lesson}/{name}/lr {rate:g}/seed {seed}"


@dataclass(frozen=True)
class _Job:
    """One training run."""

    config: Config
    lesson: Lesson
    training: Training
    steps: int
    rate: float
    seed: int
    tell: Tell

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "model": asdict(self.config),
            "lesson": self.lesson.settings,
            "steps": self.steps,
            "rate": self.rate,
            "seed": self.seed,
            "weight_decay": self.training.weight_decay,
            "clip": self.training.clip,
        }

    def run(self) -> Numbers:
        """Train, and judge; `diverged` where the loss became infinite."""
        model, feed = decoder(self.config, self.seed), self.lesson.feed(self.seed)
        settings = Settings(
            steps=self.steps,
            lr=self.rate,
            warmup=max(1, self.steps // 10),
            clip=self.training.clip,
            weight_decay=self.training.weight_decay,
            log_every=max(1, self.steps // 10),
        )
        start = time.perf_counter()
        try:
            result = fit(
                model, feed, settings, loss=self.lesson.loss, progress=_Told(self.tell, self.steps)
            )
        except NonFiniteLoss:
            return {"diverged": True, "seconds": time.perf_counter() - start}
        if result.stopped_by is not None:  # `fit` ends its step first, and gives no other sign
            raise KeyboardInterrupt
        taken = time.perf_counter() - start
        model.eval()
        return {
            "loss": result.loss,
            "validation": _loss(model, self.lesson),
            **self.lesson.judge(model),
            "steps": self.steps,
            "tokens": self.steps * feed.batch * feed.context,
            "seconds": taken,
        }


@dataclass
class _Told:
    """Tells where a run stands, every tenth of it."""

    tell: Tell
    steps: int

    def step(self, row: LogRow) -> None:
        """Nothing for a step."""

    def row(self, row: LogRow) -> None:
        """Step and loss."""
        self.tell(f"  step {row.step}/{self.steps}, loss {row.loss:.3f}")

    def close(self) -> None:
        """Nothing is open."""


def _loss(model: nn.Module, lesson: Lesson) -> float:
    """On what learning rates are chosen by."""
    return evaluate(model, lesson.selection, loss=lesson.loss)
