"""A whole comparison and its results: speed, memory, quality and the Pareto front."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias, TypedDict

from regard.compare import quality, speed_and_memory
from regard.compare.experiment import Experiment, Numbers, Session, format_duration
from regard.compare.mechanisms import Candidate, Shape, count_parameters
from regard.compare.quality import EvalTask, TrainConfig, TrainingSettings, run_name
from regard.compare.speed_and_memory import MEMORY_METHOD, Timing
from regard.models.families.regard import Config
from regard.timing import MachineFacts

TRAINING_SHARE = 0.9
"""The share of the remaining time that training may take; validation and testing need the rest."""


def summarize_quality(
    task: EvalTask,
    name: str,
    train_config: TrainConfig,
    seeds: Sequence[int],
    done: Mapping[str, Numbers],
) -> QualityRow | None:
    """Return a mechanism's rate of lowest validation loss, and its test metric over seeds."""
    names = {
        rate: [run_name(task.name, name, rate, seed) for seed in seeds]
        for rate in train_config.learning_rates
    }
    if not done.keys() >= {x for names_of_rate in names.values() for x in names_of_rate}:
        return None
    runs = {rate: [done[x] for x in names_of_rate] for rate, names_of_rate in names.items()}
    losses = {
        rate: None
        if any("diverged" in one for one in runs_of_rate)
        else statistics.fmean(one["validation"] for one in runs_of_rate)
        for rate, runs_of_rate in runs.items()
    }
    summary: QualityRow = {
        "validation": {f"{rate:g}": loss for rate, loss in losses.items()},
        "seeds": list(seeds),
    }
    finite_losses = {rate: loss for rate, loss in losses.items() if loss is not None}
    if not finite_losses:
        return {**summary, "diverged": True}
    best = min(finite_losses, key=lambda rate: finite_losses[rate])
    values = [one[task.metric] for one in runs[best]]
    return {
        **summary,
        "rate": best,
        "mean": statistics.fmean(values),
        "low": min(values),
        "high": max(values),
        "steps": runs[best][0]["steps"],
        "tokens": runs[best][0]["tokens"],
    }


def pareto(points: Sequence[tuple[float, ...]]) -> list[int]:
    """Return the indices of the points that no other point dominates; smaller is better in every
    coordinate.

    a dominates b  <=>  a_i <= b_i for all i, and a_i < b_i for one

    Equal points do not dominate each other.

    Args:
        points: points with the same number of coordinates.

    Returns:
        The indices of the Pareto front, in increasing order.

    >>> pareto([(1.0, 5.0), (2.0, 2.0), (3.0, 3.0), (9.0, 1.0)])
    [0, 1, 3]

    Source: Pareto 1906, Manuale di economia politica, chapter III.
    """

    def dominates(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
        return a != b and all(x <= y for x, y in zip(a, b, strict=True))

    return [i for i, b in enumerate(points) if not any(dominates(a, b) for a in points)]


TimeKind: TypeAlias = Literal["prefill", "decode"]
TimeFigure: TypeAlias = Literal["seconds", "kv_bytes"]
TIME_KINDS: tuple[TimeKind, ...] = ("prefill", "decode")
"""The measurements that are made at each context."""


class TimeRow(TypedDict, total=False):
    """The times of one mechanism in one measurement, or why it could not be run."""

    seconds: float
    quartiles: Sequence[float]
    rounds: int
    kernels: Sequence[str]
    kv_bytes: int
    overlaps_first: bool | None
    why: str


class QualityRow(TypedDict, total=False):
    """The quality of one mechanism in one task; without a mean if its training diverged."""

    mean: float
    low: float
    high: float
    rate: float
    steps: int
    tokens: int
    seeds: Sequence[int]
    diverged: bool
    validation: Mapping[str, float | None]


class ComparisonEntry(TypedDict):
    """The results of one mechanism; times by context, quality by task."""

    name: str
    attention: str
    options: Mapping[str, object]
    parameters: int
    hidden: int
    prefill: Mapping[str, TimeRow]
    decode: Mapping[str, TimeRow]
    training: TimeRow | None
    memory: Mapping[str, int] | None
    quality: Mapping[str, QualityRow]


class ComparisonData(TypedDict):
    """A whole comparison, as `as_json` returns it."""

    schema: int
    command: str
    machine: MachineFacts
    interrupted: bool
    same: str
    shape: Mapping[str, int]
    timing: Mapping[str, Any]
    memory: str
    training: Mapping[str, Any]
    notes: Sequence[str]
    mechanisms: Sequence[ComparisonEntry]
    fronts: Mapping[str, Sequence[str]]


SCHEMA = 1
"""Version of the JSON; it is increased when a name in it changes its meaning or is removed."""

COSTS = ("kv_bytes", "decode_seconds")
"""The costs against which quality is plotted."""

MIN_ROUNDS = 4
"""With fewer rounds than this, two times are never called different: with two rounds each, the
chance that all times of one lie below all times of the other is one in three.
"""


@dataclass(frozen=True)
class ComparisonPlan:
    """Everything that one run compares, and under which budget."""

    candidates: Sequence[Candidate]
    configs: Mapping[str, Config]
    shape: Shape
    matched_by: str
    timing: Timing
    tasks: Sequence[EvalTask] = ()
    training: TrainingSettings = field(default_factory=TrainingSettings)

    @property
    def train_configs(self) -> dict[str, TrainConfig]:
        """Each mechanism's config and learning rates, by name."""
        return {
            one.name: TrainConfig(
                self.configs[one.name], self.training.learning_rates_for(recurrent=one.recurrent)
            )
            for one in self.candidates
        }


def collect_entries(plan: ComparisonPlan, done: Mapping[str, Numbers]) -> list[ComparisonEntry]:
    """Return one entry for each mechanism; values that are not measured are None or missing."""
    entries: list[ComparisonEntry] = []
    train_configs = plan.train_configs
    for candidate in plan.candidates:
        config = plan.configs[candidate.name]
        times: dict[TimeKind, dict[str, TimeRow]] = {
            kind: {
                str(c): with_overlap(done[f"{kind}/{c}"]["rows"], candidate.name)
                for c in plan.timing.contexts
                if f"{kind}/{c}" in done
            }
            for kind in TIME_KINDS
        }
        trained = done.get(f"training/{plan.timing.length}", {}).get("rows", {})
        quality_by_task: dict[str, QualityRow] = {}
        for task in plan.tasks:
            quality = summarize_quality(
                task, candidate.name, train_configs[candidate.name], plan.training.seeds, done
            )
            if quality is not None:
                quality_by_task[task.name] = quality
        entries.append(
            {
                "name": candidate.name,
                "attention": candidate.attention,
                "options": dict(candidate.options),
                "parameters": count_parameters(config),
                "hidden": config.intermediate_size,
                "prefill": times["prefill"],
                "decode": times["decode"],
                "training": with_overlap(trained, candidate.name)
                if candidate.name in trained
                else None,
                "memory": done.get(f"memory/{candidate.name}"),
                "quality": quality_by_task,
            }
        )
    return entries


def with_overlap(rows: Mapping[str, TimeRow], name: str) -> TimeRow:
    """Return a row of times with `overlaps_first`; None for the first mechanism itself.

    Two times overlap if the ranges between their quartiles do, or if either has fewer than
    `MIN_ROUNDS` rounds.
    """
    row, first = rows[name], next(iter(rows))
    if "seconds" not in row:
        return row
    one, other = rows[first], row
    if name == first or "seconds" not in one:
        return {**row, "overlaps_first": None}
    too_few_rounds = min(x.get("rounds", 0) for x in (one, other)) < MIN_ROUNDS
    (a, b), (c, d) = (x.get("quartiles", (x["seconds"],) * 2) for x in (one, other))
    return {**row, "overlaps_first": bool(too_few_rounds or (a <= d and c <= b))}


def cost_of(entry: ComparisonEntry, cost: str, context: int) -> float | None:
    """Return a cost in `COSTS` of an entry at a context, or None if it was not measured."""
    row = entry["decode"].get(str(context), {})
    return row.get("kv_bytes") if cost == "kv_bytes" else row.get("seconds")


def pareto_names(
    entries: Sequence[ComparisonEntry], task: EvalTask, cost: str, context: int
) -> list[str]:
    """Return the mechanisms on the Pareto front of cost and quality that have both numbers."""
    sign = 1.0 if task.better == "lower" else -1.0
    points: dict[str, tuple[float, float]] = {}
    for entry in entries:
        x = cost_of(entry, cost, context)
        y = entry["quality"].get(task.name, {}).get("mean")
        if x is not None and y is not None:
            points[entry["name"]] = (x, sign * y)
    names = list(points)
    return [names[i] for i in pareto(list(points.values()))]


def as_json(
    plan: ComparisonPlan,
    done: Mapping[str, Numbers],
    machine: MachineFacts,
    command: str,
    *,
    interrupted: bool = False,
    notes: Sequence[str] = (),
) -> ComparisonData:
    """Return plain values: finite numbers or null, times in seconds, sizes in bytes."""
    entries, longest_context = collect_entries(plan, done), max(plan.timing.contexts)
    return {
        "schema": SCHEMA,
        "command": command,
        "machine": machine,
        "interrupted": interrupted,
        "same": plan.matched_by,
        "shape": {**asdict(plan.shape), "hidden": plan.shape.width},
        "timing": asdict(plan.timing),
        "memory": MEMORY_METHOD,
        "training": {
            **asdict(plan.training),
            "tasks": {task.name: task.settings for task in plan.tasks},
        },
        "notes": list(notes),
        "mechanisms": entries,
        "fronts": {
            f"{task.name} against {cost}": pareto_names(entries, task, cost, longest_context)
            for task in plan.tasks
            for cost in COSTS
        },
    }


def as_csv(plan: ComparisonPlan, done: Mapping[str, Numbers]) -> str:
    """Return a line of CSV for each mechanism; values that were not measured are empty.

    After each time stand its quartiles, _q1 and _q3; for each task low, high, rate and steps.
    """
    entries = [_csv_columns(entry, plan) for entry in collect_entries(plan, done)]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(entries[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(entries)
    return text.getvalue()


def _time_columns(name: str, row: TimeRow) -> dict[str, object]:
    """Return the columns of a median and its quartiles."""
    low, high = row.get("quartiles", (None, None))
    return {name: row.get("seconds"), f"{name}_q1": low, f"{name}_q3": high}


def _csv_columns(entry: ComparisonEntry, plan: ComparisonPlan) -> dict[str, object]:
    """Return the entry of a mechanism as the columns of its line of CSV."""
    line: dict[str, object] = {
        "name": entry["name"],
        "attention": entry["attention"],
        "parameters": entry["parameters"],
        "hidden": entry["hidden"],
    }
    for context in plan.timing.contexts:
        decode = entry["decode"].get(str(context), {})
        line[f"kv_bytes_{context}"] = decode.get("kv_bytes")
        line |= _time_columns(f"prefill_seconds_{context}", entry["prefill"].get(str(context), {}))
        line |= _time_columns(f"decode_seconds_{context}", decode)
    line |= _time_columns("training_seconds", entry["training"] or {})
    for work in ("prefill", "training"):
        line[f"{work}_peak_bytes"] = (entry["memory"] or {}).get(work)
    for task in plan.tasks:
        quality = entry["quality"].get(task.name, {})
        line[f"{task.name}_{task.metric}"] = quality.get("mean")
        for name in ("low", "high", "rate", "steps"):
            line[f"{task.name}_{name}"] = quality.get(name)
    return line


class Comparison:
    """A comparison that measures everything in a plan; `notes` has remarks about the results."""

    def __init__(
        self,
        plan: ComparisonPlan,
        session: Session,
        machine: MachineFacts,
        *,
        minutes: float = 30.0,
        steps: int | None = None,
        with_memory: bool = True,
    ) -> None:
        self.plan, self.session, self.machine = plan, session, machine
        self.minutes, self.steps, self.with_memory = minutes, steps, with_memory
        self.notes: list[str] = []

    def run(self) -> None:
        """Measure what the session lacks; after an interrupt it has what was finished."""
        plan, session = self.plan, self.session
        session.run(speed_and_memory.timing_experiments(plan.configs, plan.timing, self.machine))
        if self.with_memory:
            session.run(
                speed_and_memory.memory_experiments(plan.configs, plan.timing, self.machine)
            )
        if not plan.tasks:
            return
        pilots = session.run(
            quality.pilot_experiments(plan.train_configs, plan.tasks, plan.training.device)
        )
        seconds = {name.partition("/")[2]: numbers["seconds"] for name, numbers in pilots.items()}
        steps = self._steps(seconds)
        session.run(
            quality.training_experiments(
                plan.train_configs, plan.tasks, plan.training, steps, seconds, session.report
            )
        )

    def _steps(self, seconds: Mapping[str, Mapping[str, float]]) -> dict[str, int]:
        """Return the steps of each task, and add a note about them."""
        plan, session = self.plan, self.session
        wanted = {one.name: self.steps or one.steps for one in plan.tasks}
        runs = {
            name: len(train_config.learning_rates) * len(plan.training.seeds)
            for name, train_config in plan.train_configs.items()
        }
        seconds_left = float("inf")
        if self.steps is None:
            seconds_left = TRAINING_SHARE * (60 * self.minutes - session.elapsed)
        settings = {
            "models": {name: asdict(config) for name, config in plan.configs.items()},
            "wanted": wanted,
            "runs": runs,
            "minutes": None if self.steps else self.minutes,
            "tasks": {one.name: one.settings for one in plan.tasks},
        }

        def choose() -> Numbers:
            steps, total_seconds = quality.steps_that_fit(wanted, seconds, runs, seconds_left)
            return {"steps": steps, "whole": total_seconds}

        # saved, so that a run that continues trains as many steps as the one that stopped
        choice = session.run([Experiment("steps", settings, choose)])["steps"]
        steps: dict[str, int] = choice["steps"]
        listed = ", ".join(f"{name} {n}" for name, n in steps.items())
        if steps == wanted:
            self.note(
                f"steps: {listed}; the estimated training time is "
                f"{format_duration(choice['whole'])}"
            )
        else:
            self.note(
                f"steps: {listed}; all of {', '.join(f'{name} {n}' for name, n in wanted.items())} "
                f"would take about {format_duration(choice['whole'])}, but --minutes is "
                f"{self.minutes:g}, so every mechanism is trained for fewer steps"
            )
        return steps

    def note(self, text: str) -> None:
        """Add a note, and report it as progress."""
        self.notes.append(text)
        self.session.report(text)
