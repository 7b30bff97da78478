"""A comparison from beginning to end, and its results: speed, memory, quality, the Pareto front."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from regard.compare import memory, quality, speed
from regard.compare.experiment import Experiment, Numbers, Session, format_duration
from regard.compare.mechanisms import Candidate, Shape, count_parameters
from regard.compare.memory import METHOD
from regard.compare.quality import EvalTask, TrainConfig, TrainingSettings, run_name
from regard.compare.speed import Timing
from regard.models.families.regard import Config

TRAINING_SHARE = 0.9
"""The share of the remaining time that training may take; validation and judging need the rest."""


def summarize_quality(
    lesson: EvalTask,
    name: str,
    pupil: TrainConfig,
    seeds: Sequence[int],
    done: Mapping[str, Numbers],
) -> Numbers | None:
    """What came of a mechanism in a lesson: its best rate by the mean validation loss, and there
    the measure over seeds.

    Returns:
        `rate`, `validation` (rate -> mean loss; None where a seed diverged), `mean`, `low`, `high`,
        `seeds`, `steps`, `tokens`; None while a run is missing; `diverged` where no rate was
        survived.
    """
    runs = {
        rate: [done.get(run_name(lesson.name, name, rate, seed)) for seed in seeds]
        for rate in pupil.rates
    }
    if any(one is None for found in runs.values() for one in found):
        return None
    whole = {rate: [one for one in found if one is not None] for rate, found in runs.items()}
    losses = {
        rate: None
        if any("diverged" in one for one in found)
        else statistics.fmean(one["validation"] for one in found)
        for rate, found in whole.items()
    }
    told = {
        "validation": {f"{rate:g}": loss for rate, loss in losses.items()},
        "seeds": list(seeds),
    }
    alive = {rate: loss for rate, loss in losses.items() if loss is not None}
    if not alive:
        return {**told, "diverged": True}
    best = min(alive, key=lambda rate: alive[rate])
    values = [one[lesson.measure] for one in whole[best]]
    return {
        **told,
        "rate": best,
        "mean": statistics.fmean(values),
        "low": min(values),
        "high": max(values),
        "steps": whole[best][0]["steps"],
        "tokens": whole[best][0]["tokens"],
    }


def pareto(points: Sequence[tuple[float, ...]]) -> list[int]:
    """The indices of points that no other dominates; less is better in every number.

    a dominates b  <=>  a_i <= b_i for all i, and a_i < b_i for one

    Equal points stand on the front together.

    >>> pareto([(1.0, 5.0), (2.0, 2.0), (3.0, 3.0), (9.0, 1.0)])
    [0, 1, 3]

    Source: Pareto 1906, Manuale di economia politica, chapter III.
    """

    def dominates(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
        return a != b and all(x <= y for x, y in zip(a, b, strict=True))

    return [i for i, b in enumerate(points) if not any(dominates(a, b) for a in points)]


SCHEMA = 1
"""Version of the JSON; it rises when a name in it changes its meaning or goes away."""

COSTS = ("kv_bytes", "decode_seconds")
"""What quality is drawn against."""

MIN_ROUNDS = 4
"""Rounds below which no two times are told apart: of two rounds each, one in three is all below the
other by chance.
"""


@dataclass(frozen=True)
class ComparisonPlan:
    """All that is compared.

    Attributes:
        contestants: the mechanisms, the first of which is the measure of the others.
        configs: their models by name.
        shape, same: the sizes, and what all have in common.
        timing: how long is measured.
        lessons, training: what is learned and how; without lessons nothing is trained.
    """

    contestants: Sequence[Candidate]
    configs: Mapping[str, Config]
    shape: Shape
    same: str
    timing: Timing
    lessons: Sequence[EvalTask] = ()
    training: TrainingSettings = field(default_factory=TrainingSettings)

    @property
    def pupils(self) -> dict[str, TrainConfig]:
        """The mechanisms as they are trained."""
        return {
            one.name: TrainConfig(
                self.configs[one.name], self.training.rates_of(recurrent=one.recurrent)
            )
            for one in self.contestants
        }


def collect_entries(plan: ComparisonPlan, done: Mapping[str, Numbers]) -> list[Numbers]:
    """One entry for each mechanism, with what is known so far: None, or nothing, stands for what
    was not measured.

    Args:
        plan: what is compared.
        done: numbers of experiments by name (`Session.done`).
    """
    found, pupils = [], plan.pupils
    for one in plan.contestants:
        config = plan.configs[one.name]
        entry: Numbers = {
            "name": one.name,
            "attention": one.attention,
            "options": dict(one.options),
            "parameters": count_parameters(config),
            "hidden": config.intermediate_size,
        }
        for kind in ("prefill", "decode"):
            entry[kind] = {
                str(c): with_overlap(done[f"{kind}/{c}"]["rows"], one.name)
                for c in plan.timing.contexts
                if f"{kind}/{c}" in done
            }
        trained = done.get(f"training/{plan.timing.length}", {}).get("rows", {})
        entry["training"] = with_overlap(trained, one.name) if one.name in trained else None
        entry["memory"] = done.get(f"memory/{one.name}")
        entry["quality"] = {}
        for lesson in plan.lessons:
            told = summarize_quality(lesson, one.name, pupils[one.name], plan.training.seeds, done)
            if told is not None:
                entry["quality"][lesson.name] = told
        found.append(entry)
    return found


def with_overlap(rows: Mapping[str, Numbers], name: str) -> Numbers:
    """A row of times, and whether it overlaps that of the first mechanism: `overlaps_first`, None
    of that one itself.

    Two times overlap where the ranges between their quartiles do, or where either has fewer than
    `MIN_ROUNDS` rounds.

    >>> first = {"seconds": 2.0, "quartiles": [1, 3], "rounds": 7}
    >>> rows = {"a": first, "b": {"seconds": 4.0, "quartiles": [3, 5], "rounds": 7}}
    >>> with_overlap(rows, "b")["overlaps_first"]
    True
    >>> with_overlap({**rows, "a": {**first, "quartiles": [1, 2]}}, "b")["overlaps_first"]
    False
    """
    row, first = rows[name], next(iter(rows))
    if "seconds" not in row:
        return row
    one, other = rows[first], row
    if name == first or "seconds" not in one:
        return {**row, "overlaps_first": None}
    few = min(x.get("rounds", 0) for x in (one, other)) < MIN_ROUNDS
    (a, b), (c, d) = (x.get("quartiles", (x["seconds"],) * 2) for x in (one, other))
    return {**row, "overlaps_first": bool(few or (a <= d and c <= b))}


def cost_of(entry: Mapping[str, Any], cost: str, context: int) -> float | None:
    """A cost of `COSTS` of an entry at a context, or None where it was not measured.

    >>> cost_of({"decode": {"512": {"kv_bytes": 64, "seconds": 0.5}}}, "kv_bytes", 512)
    64
    """
    row = entry["decode"].get(str(context), {})
    found: float | None = row.get("kv_bytes" if cost == "kv_bytes" else "seconds")
    return found


def pareto_names(
    entries: Sequence[Mapping[str, Any]], lesson: EvalTask, cost: str, context: int
) -> list[str]:
    """The names of mechanisms that no other beats in both cost and quality; those without both
    numbers take no part.
    """
    sign = 1.0 if lesson.better == "lower" else -1.0
    points: dict[str, tuple[float, float]] = {}
    for entry in entries:
        x = cost_of(entry, cost, context)
        y = entry["quality"].get(lesson.name, {}).get("mean")
        if x is not None and y is not None:
            points[entry["name"]] = (x, sign * y)
    names = list(points)
    return [names[i] for i in pareto(list(points.values()))]


def as_json(
    plan: ComparisonPlan,
    done: Mapping[str, Numbers],
    machine: Mapping[str, Any],
    command: str,
    *,
    interrupted: bool = False,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """The whole comparison; every number is finite or null, times are seconds, sizes are bytes."""
    entries, at = collect_entries(plan, done), max(plan.timing.contexts)
    return {
        "schema": SCHEMA,
        "command": command,
        "machine": dict(machine),
        "interrupted": interrupted,
        "same": plan.same,
        "shape": {**asdict(plan.shape), "hidden": plan.shape.width},
        "timing": asdict(plan.timing),
        "memory": METHOD,
        "training": {
            **asdict(plan.training),
            "lessons": {one.name: one.settings for one in plan.lessons},
        },
        "notes": list(notes),
        "mechanisms": entries,
        "fronts": {
            f"{lesson.name} against {cost}": pareto_names(entries, lesson, cost, at)
            for lesson in plan.lessons
            for cost in COSTS
        },
    }


def as_csv(plan: ComparisonPlan, done: Mapping[str, Numbers]) -> str:
    """A line for each mechanism; what was not measured is empty.

    Columns: name, attention, parameters, hidden; kv_bytes, prefill_seconds and decode_seconds at
        each context; training_seconds; of each time its quartiles, _q1 and _q3, behind it;
        prefill_peak_bytes, training_peak_bytes; of each lesson its measure, low, high, rate, and
        steps.
    """
    entries = [_flat(entry, plan) for entry in collect_entries(plan, done)]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(entries[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(entries)
    return text.getvalue()


def _times(name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """A median and its quartiles."""
    low, high = row.get("quartiles", (None, None))
    return {name: row.get("seconds"), f"{name}_q1": low, f"{name}_q3": high}


def _flat(entry: Numbers, plan: ComparisonPlan) -> dict[str, Any]:
    """An entry as a line of a table."""
    line = {name: entry[name] for name in ("name", "attention", "parameters", "hidden")}
    for context in plan.timing.contexts:
        decode = entry["decode"].get(str(context), {})
        line[f"kv_bytes_{context}"] = decode.get("kv_bytes")
        line |= _times(f"prefill_seconds_{context}", entry["prefill"].get(str(context), {}))
        line |= _times(f"decode_seconds_{context}", decode)
    line |= _times("training_seconds", entry["training"] or {})
    for work in ("prefill", "training"):
        line[f"{work}_peak_bytes"] = (entry["memory"] or {}).get(work)
    for lesson in plan.lessons:
        told = entry["quality"].get(lesson.name, {})
        line[f"{lesson.name}_{lesson.measure}"] = told.get("mean")
        for name in ("low", "high", "rate", "steps"):
            line[f"{lesson.name}_{name}"] = told.get(name)
    return line


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
    >>> plan = ComparisonPlan(found, configs(found, shape), shape, "sizes", timing)
    >>> session = Session(Store(None))
    >>> Comparison(plan, session, {}, with_memory=False).run()
    >>> sorted(session.done)
    ['decode/4', 'prefill/4', 'training/4']
    """

    def __init__(
        self,
        plan: ComparisonPlan,
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
        session.run(speed.timing_experiments(plan.configs, plan.timing, self.machine))
        if self.with_memory:
            session.run(memory.memory_experiments(plan.configs, plan.timing, self.machine))
        if not plan.lessons:
            return
        pilots = session.run(quality.pilot_experiments(plan.pupils, plan.lessons))
        seconds = {name.partition("/")[2]: found["seconds"] for name, found in pilots.items()}
        steps = self._steps(seconds)
        session.run(
            quality.training_experiments(
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
            room = TRAINING_SHARE * (60 * self.minutes - session.elapsed)
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
            self.note(
                f"steps: {told}; training was expected to take {format_duration(found['whole'])}"
            )
        else:
            self.note(
                f"steps: {told}; all of {', '.join(f'{name} {n}' for name, n in wanted.items())} "
                "would take about "
                f"{format_duration(found['whole'])}, and --minutes is {self.minutes:g}: every mechanism is "
                "trained so much less"
            )
        return steps

    def note(self, text: str) -> None:
        """Add a note, and tell it."""
        self.notes.append(text)
        self.session.tell(text)
