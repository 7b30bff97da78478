"""How well each mechanism learns: the same tokens for all, several learning rates where one would
not be fair, and seeds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from regard.compare.experiment import Experiment, Numbers, Tell, silent
from regard.compare.lessons import Lesson
from regard.compare.mechanisms import decoder
from regard.errors import ArgumentError
from regard.models.families.regard import Config
from regard.train.loop import NonFiniteLoss, fit
from regard.train.losses import evaluate
from regard.train.progress import Row
from regard.train.settings import Settings

RATES = (3e-3,)
"""Learning rates of mechanisms with a cache of tokens."""

RATES_OF_STATES = (1e-3, 3e-3, 1e-2)
"""Of those with a state, which are known to depend on it much more; each gets its best, which is in
their favour.
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

    >>> steps_that_fit({"text": 600}, {"text": {"mha": 0.1, "linear": 0.1}}, {"mha": 1, "linear": 3}, 120.0)
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

    def step(self, row: Row) -> None:
        """Nothing for a step."""

    def row(self, row: Row) -> None:
        """Step and loss."""
        self.tell(f"  step {row.step}/{self.steps}, loss {row.loss:.3f}")

    def close(self) -> None:
        """Nothing is open."""


def _loss(model: nn.Module, lesson: Lesson) -> float:
    """On what learning rates are chosen by."""
    return evaluate(model, lesson.selection, loss=lesson.loss)
