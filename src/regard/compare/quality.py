"""How well each mechanism learns text and recall, trained under equal conditions.

All mechanisms see the same tokens in the same order. Validation data choose among the learning
rates of those that are sensitive to it.
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

import torch
from torch import Tensor, nn

from regard.compare.experiment import Experiment, Numbers, ReportProgress, ignore_progress
from regard.compare.mechanisms import RECALL_TASKS, build_decoder
from regard.errors import ArgumentError
from regard.models.families.regard import Config
from regard.nn.weights import device_of
from regard.timing import wait_for
from regard.train.batches import Batches, BatchSource, ExampleBatch, validation_rows
from regard.train.corpus import DEFAULT_SOURCE, TextDocument, load_documents, split_documents
from regard.train.loop import NonFiniteLoss, fit
from regard.train.losses import AnswerLoss, Loss, evaluate, next_token_loss
from regard.train.progress import LogRow
from regard.train.settings import Settings
from regard.train.tasks import TASKS
from regard.train.tasks.task import IGNORE_INDEX, Task, TaskBatches, pad
from regard.units import plural

END_OF_DOCUMENT = 0
"""The byte after each document."""

VALIDATION_ROWS, TEST_ROWS = 64, 128
"""The numbers of rows of text on which a learning rate is chosen, and on which a model is tested.
Recall tasks have four times as many examples.
"""


class EvalTask(ABC):
    """Something that models are trained on and tested with."""

    name: str
    metric: str
    better: str
    steps: int
    loss: Loss

    @property
    @abstractmethod
    def settings(self) -> dict[str, object]:
        """Plain values that identify the data."""

    @abstractmethod
    def batches(self, seed: int) -> BatchSource:
        """Return the training batches, in an order of its own for each seed."""

    @property
    @abstractmethod
    def validation(self) -> ExampleBatch:
        """The rows by which a learning rate is chosen; they are not trained on."""

    @abstractmethod
    def score(self, model: nn.Module) -> Numbers:
        """Return the results on test data, which chose neither weights nor learning rate."""


@dataclass(frozen=True)
class TextTask(EvalTask):
    """Prediction of the next byte of a text."""

    documents: Sequence[TextDocument]
    context: int
    batch: int
    source: str = DEFAULT_SOURCE
    steps: int = 300
    validation_rows: int = VALIDATION_ROWS
    test_rows: int = TEST_ROWS
    name = "text"
    metric = "bits_per_byte"
    better = "lower"
    loss = staticmethod(next_token_loss)

    @cached_property
    def _streams(self) -> tuple[Tensor, Tensor, Tensor]:
        """The bytes for training, for validation and for testing."""
        train, held_out = split_documents(self.documents)
        held_out_bytes = _bytes(held_out)
        if len(held_out_bytes) < 3 * (self.context + 1):
            raise ArgumentError(
                f"text {self.source} leaves {len(held_out_bytes):,} bytes for validation, but "
                f"rows of {self.context} bytes need {3 * (self.context + 1):,}; give more text, or "
                "a shorter --length"
            )
        third = len(held_out_bytes) // 3
        return _bytes(train), held_out_bytes[:third], held_out_bytes[third:]

    @property
    def settings(self) -> dict[str, object]:
        """The sizes of the task, and the text by its hash."""
        return {
            "source": self.source,
            "bytes": len(self._streams[0]),
            "sha256": self._digest,
            "context": self.context,
            "batch": self.batch,
            "rows": [self.validation_rows, self.test_rows],
        }

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256(b"".join(s.numpy().tobytes() for s in self._streams)).hexdigest()

    def batches(self, seed: int) -> BatchSource:
        """Return random rows of the training text."""
        return Batches(self._streams[0], batch=self.batch, context=self.context, seed=seed)

    @property
    def validation(self) -> ExampleBatch:
        """Rows spread over the first third of the held-out text."""
        return validation_rows(self._streams[1], self.context, self.validation_rows)

    def score(self, model: nn.Module) -> Numbers:
        """Return the bits per byte, loss / log 2, on rows of the last third of held-out text."""
        rows = validation_rows(self._streams[2], self.context, self.test_rows)
        rows = rows.to(device_of(model))
        return {"bits_per_byte": evaluate(model, rows) / math.log(2), "rows": len(rows)}


@dataclass(frozen=True)
class RecallTask(EvalTask):
    """A task in which the model must repeat what the row contains at an earlier place."""

    name: str
    length: int
    batch: int
    steps: int = 400
    validation_rows: int = VALIDATION_ROWS
    test_rows: int = TEST_ROWS
    metric = "accuracy"
    better = "higher"
    loss = AnswerLoss()

    def __post_init__(self) -> None:
        shortest = TASKS[self.name].lengths[0]
        if self.length < shortest:
            raise ArgumentError(
                f"rows of {self.name} need at least {plural(shortest, 'token')}, but the longest "
                f"row has {self.length}; give a --length of {shortest * RECALL_TASKS[self.name]} "
                f"or more, or leave out --task {self.name}"
            )

    @property
    def task(self) -> Task:
        """The task with rows of these lengths."""
        known = TASKS[self.name]
        return replace(known, lengths=(known.lengths[0], self.length, 2 * self.length))

    @property
    def settings(self) -> dict[str, object]:
        """The name of the task and its sizes."""
        return {
            "task": self.name,
            "lengths": list(self.task.lengths),
            "batch": self.batch,
            "rows": [self.validation_rows, self.test_rows],
        }

    def batches(self, seed: int) -> BatchSource:
        """Return batches of examples of the training split."""
        return TaskBatches(self.task, batch=self.batch, seed=seed)

    @property
    def validation(self) -> ExampleBatch:
        """Examples of the validation split, by which a learning rate is chosen."""
        return pad(self.task, self.task.examples("validation", 4 * self.validation_rows, "select"))

    def score(self, model: nn.Module) -> Numbers:
        """Return the share of right answers on other examples, with teacher forcing."""
        rows = pad(self.task, self.task.examples("validation", 4 * self.test_rows, "judge"))
        answers = right = fully_right = 0
        with torch.no_grad():
            for batch in rows.to(device_of(model)).split(4 * self.batch):
                is_answer = batch.target != IGNORE_INDEX
                wrong = (model(batch.source).argmax(-1) != batch.target) & is_answer
                answers += int(is_answer.sum())
                right += int((is_answer & ~wrong).sum())
                fully_right += int((~wrong.any(1)).sum())
        return {
            "accuracy": right / answers,
            "whole": fully_right / len(rows),
            "answers": answers,
            "examples": len(rows),
        }


def eval_tasks(
    names: Sequence[str], *, source: str = DEFAULT_SOURCE, length: int = 256, batch: int = 8
) -> list[EvalTask]:
    """Return the evaluation tasks of these names."""
    known = ("text", *RECALL_TASKS)
    if unknown := [name for name in names if name not in known]:
        raise ArgumentError(
            f"there is no evaluation task {unknown[0]!r}; the tasks are {', '.join(known)}",
            argument="task",
        )
    if len(set(names)) < len(names):
        raise ArgumentError(f"the tasks are {', '.join(names)}; name each task once")
    tasks: list[EvalTask] = []
    for name in names:
        if name == "text":
            tasks.append(TextTask(load_documents(source), length, batch, source))
        else:
            tasks.append(RecallTask(name, length // RECALL_TASKS[name], batch * RECALL_TASKS[name]))
    return tasks


def _bytes(documents: Sequence[TextDocument]) -> Tensor:
    text = b"".join(one.text.encode("utf-8") + bytes([END_OF_DOCUMENT]) for one in documents)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


LEARNING_RATES = (3e-3,)
"""Learning rates of mechanisms with a KV cache."""

RECURRENT_LEARNING_RATES = (1e-3, 3e-3, 1e-2)
"""Learning rates of mechanisms with a recurrent state. They are more sensitive to the rate than the
others, so each is trained with all three and its best result counts, which is in their favour.
"""

PILOT_STEPS = 5
"""How many training steps are timed to estimate the time of training; one more step comes first and
is not timed.
"""

MIN_STEPS = 20
"""The least number of steps; with fewer, results mean nothing, so the time limit is exceeded
instead.
"""


@dataclass(frozen=True)
class TrainingSettings:
    """How all models are trained."""

    seeds: tuple[int, ...] = (0,)
    rates: tuple[float, ...] | None = None
    weight_decay: float = 0.01
    clip: float = 1.0
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("seeds", "rates"):
            values = getattr(self, name)
            if values is not None and (not values or len(set(values)) < len(values)):
                raise ArgumentError(f"{name} are {values}; give at least one, and each only once")

    def learning_rates_for(self, *, recurrent: bool) -> tuple[float, ...]:
        """Return the learning rates that a mechanism is trained with."""
        return self.rates or (RECURRENT_LEARNING_RATES if recurrent else LEARNING_RATES)


@dataclass(frozen=True)
class TrainConfig:
    """The config of a model that is trained, and the learning rates that are tried."""

    config: Config
    learning_rates: tuple[float, ...]


def pilot_experiments(
    train_configs: Mapping[str, TrainConfig], tasks: Sequence[EvalTask], device: str = "cpu"
) -> list[Experiment]:
    """Return an experiment per task that measures `seconds` of a step by mechanism."""
    experiments = []
    for task in tasks:
        models = {name: asdict(one.config) for name, one in train_configs.items()}
        settings = {"models": models, "lesson": task.settings, "steps": PILOT_STEPS}
        settings |= {} if device == "cpu" else {"device": device}

        def measure(task: EvalTask = task) -> Numbers:
            return {
                "seconds": {
                    name: _seconds_per_step(one.config, task, device)
                    for name, one in train_configs.items()
                }
            }

        experiments.append(Experiment(f"pilot/{task.name}", settings, measure))
    return experiments


def _seconds_per_step(config: Config, task: EvalTask, device: str) -> float:
    """Return the median seconds of a few training steps, on which a pause has little effect."""
    where = torch.device(device)
    model, batches, seconds = build_decoder(config).to(where), task.batches(0), []
    for _ in range(1 + PILOT_STEPS):
        rows = next(batches).to(where)
        start = time.perf_counter()
        torch.autograd.backward(task.loss(model, rows))
        wait_for(where)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def steps_that_fit(
    wanted: Mapping[str, int],
    seconds: Mapping[str, Mapping[str, float]],
    runs: Mapping[str, int],
    seconds_left: float,
) -> tuple[dict[str, int], float]:
    """Return the steps of each task, in equal shares, with which training ends in time.

    f = min(1, seconds_left / sum_{task, mechanism} steps seconds runs) steps' = max(20, floor(f
    steps))
    """
    total_seconds = sum(
        steps * seconds[task][name] * runs[name]
        for task, steps in wanted.items()
        for name in seconds[task]
    )
    share = min(1.0, max(0.0, seconds_left) / total_seconds) if total_seconds else 1.0
    return {
        task: steps if share == 1.0 else max(min(MIN_STEPS, steps), int(share * steps))
        for task, steps in wanted.items()
    }, total_seconds


def training_experiments(
    train_configs: Mapping[str, TrainConfig],
    tasks: Sequence[EvalTask],
    training: TrainingSettings,
    steps: Mapping[str, int],
    seconds: Mapping[str, Mapping[str, float]],
    report: ReportProgress = ignore_progress,
) -> list[Experiment]:
    """Return the experiments that train a model for each task, mechanism, rate and seed.

    An interrupt leaves complete tasks, because they come one after the other.
    """
    experiments = []
    for task in tasks:
        for name, train_config in train_configs.items():
            for rate in train_config.learning_rates:
                for seed in training.seeds:
                    count = steps[task.name]
                    run = _TrainingRun(
                        train_config.config, task, training, count, rate, seed, report
                    )
                    title = run_name(task.name, name, rate, seed)
                    estimate = seconds[task.name][name] * count
                    experiments.append(Experiment(title, run.settings, run.run, estimate))
    return experiments


def run_name(task: str, name: str, rate: float, seed: int) -> str:
    """Return the name of a training run."""
    return f"{task}/{name}/lr {rate:g}/seed {seed}"


@dataclass(frozen=True)
class _TrainingRun:
    """One training run of one model with one learning rate and one seed."""

    config: Config
    task: EvalTask
    training: TrainingSettings
    steps: int
    rate: float
    seed: int
    report: ReportProgress

    @property
    def settings(self) -> dict[str, object]:
        return {
            "model": asdict(self.config),
            "lesson": self.task.settings,
            "steps": self.steps,
            "rate": self.rate,
            "seed": self.seed,
            "weight_decay": self.training.weight_decay,
            "clip": self.training.clip,
            **({} if self.training.device == "cpu" else {"device": self.training.device}),
        }

    def run(self) -> Numbers:
        """Train and test the model; `diverged` if the loss became infinite or NaN."""
        model = build_decoder(self.config, self.seed).to(self.training.device)
        batches = self.task.batches(self.seed)
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
            progress = _ProgressLines(self.report, self.steps)
            result = fit(model, batches, settings, loss=self.task.loss, progress=progress)
        except NonFiniteLoss:
            return {"diverged": True, "seconds": time.perf_counter() - start}
        # `fit` catches the interrupt, finishes its step and returns
        if result.stopped_by is not None:
            raise KeyboardInterrupt
        seconds = time.perf_counter() - start
        model.eval()
        return {
            "loss": result.loss,
            "validation": _validation_loss(model, self.task),
            **self.task.score(model),
            "steps": self.steps,
            "tokens": self.steps * batches.batch * batches.context,
            "seconds": seconds,
        }


@dataclass
class _ProgressLines:
    """Reports the step and the loss after every tenth of a training run."""

    report: ReportProgress
    steps: int

    def step(self, row: LogRow) -> None:
        """Ignore a single step, as only rows are reported."""

    def row(self, row: LogRow) -> None:
        """Report the step and the loss of a row."""
        self.report(f"  step {row.step}/{self.steps}, loss {row.loss:.3f}")

    def close(self) -> None:
        """Do nothing, as no file is open."""


def _validation_loss(model: nn.Module, task: EvalTask) -> float:
    """Return the loss on the validation data, by which learning rates are chosen."""
    return evaluate(model, task.validation.to(device_of(model)), loss=task.loss)
