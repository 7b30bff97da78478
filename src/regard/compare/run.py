"""A comparison from beginning to end: speed, memory, how many steps there is time for, and
training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from regard.compare import memory, quality, speed
from regard.compare.experiment import Experiment, Numbers, Session, clock
from regard.compare.results import Plan

MARGIN = 0.9
"""Of the time that is left: validation and judging take some of it."""


class Comparison:
    """One comparison; `notes` has what a reader must know, as far as it has come.

    Args:
        plan: what is compared.
        session: where measurements are kept.
        machine: `regard.bench.machine.machine`.
        minutes: for everything; training is shortened to fit, for all alike, and a note says so.
        steps: of the optimiser in every lesson, whatever time they take; None is each lesson's own,
            if there is time.
        with_memory: whether peak memory is measured.

    >>> from regard.compare.experiment import Store
    >>> from regard.compare.mechanisms import Shape, contestants
    >>> from regard.compare.mechanisms import configs
    >>> shape = Shape(dim=16, layers=1, heads=2, window=8)
    >>> found = contestants(["mqa"], shape)
    >>> timing = speed.Timing(contexts=(4,), length=4, batch=1, rounds=1, sample=0.0)
    >>> plan, session = Plan(found, configs(found, shape), shape, "sizes", timing), Session(Store(None))
    >>> Comparison(plan, session, {}, with_memory=False).run()
    >>> sorted(session.done)
    ['decode/4', 'prefill/4', 'training/4']
    """

    def __init__(
        self,
        plan: Plan,
        session: Session,
        machine: Mapping[str, Any],
        *,
        minutes: float = 30.0,
        steps: int | None = None,
        with_memory: bool = True,
    ) -> None:
        self.plan, self.session, self.machine = plan, session, machine
        self.minutes, self.steps, self.with_memory = minutes, steps, with_memory
        self.notes: list[str] = []

    def run(self) -> None:
        """Measure what the session does not have yet; an interrupt leaves what is done in the
        session.
        """
        plan, session = self.plan, self.session
        session.run(speed.experiments(plan.configs, plan.timing, self.machine))
        if self.with_memory:
            session.run(memory.experiments(plan.configs, plan.timing, self.machine))
        if not plan.lessons:
            return
        pilots = session.run(quality.pilot(plan.pupils, plan.lessons))
        seconds = {name.partition("/")[2]: found["seconds"] for name, found in pilots.items()}
        steps = self._steps(seconds)
        session.run(
            quality.experiments(
                plan.pupils, plan.lessons, plan.training, steps, seconds, session.tell
            )
        )

    def _steps(self, seconds: Mapping[str, Mapping[str, float]]) -> dict[str, int]:
        """Steps of each lesson, with a note about what that means."""
        plan, session = self.plan, self.session
        wanted = {one.name: self.steps or one.steps for one in plan.lessons}
        runs = {
            name: len(pupil.rates) * len(plan.training.seeds) for name, pupil in plan.pupils.items()
        }
        room = float("inf")
        if self.steps is None:
            room = MARGIN * (60 * self.minutes - session.elapsed)
        settings = {
            "models": {name: asdict(config) for name, config in plan.configs.items()},
            "wanted": wanted,
            "runs": runs,
            "minutes": None if self.steps else self.minutes,
            "lessons": {one.name: one.settings for one in plan.lessons},
        }

        def choose() -> Numbers:
            steps, whole = quality.steps_that_fit(wanted, seconds, runs, room)
            return {"steps": steps, "whole": whole}

        # kept, so that a run that goes on trains as many steps as the one that stopped
        found = session.run([Experiment("steps", settings, choose)])["steps"]
        steps: dict[str, int] = found["steps"]
        told = ", ".join(f"{name} {n}" for name, n in steps.items())
        if steps == wanted:
            self.note(f"steps: {told}; training was expected to take {clock(found['whole'])}")
        else:
            self.note(
                f"steps: {told}; all of {', '.join(f'{name} {n}' for name, n in wanted.items())} "
                "would take about "
                f"{clock(found['whole'])}, and --minutes is {self.minutes:g}: every mechanism is "
                "trained so much less"
            )
        return steps

    def note(self, text: str) -> None:
        """Add a note, and tell it."""
        self.notes.append(text)
        self.session.tell(text)
