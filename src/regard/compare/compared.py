"""What a comparison is, and what came of it, as data: for a table, JSON, CSV, and a page."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from regard.compare.experiment import Numbers
from regard.compare.front import front
from regard.compare.judged import judged
from regard.compare.lessons import Lesson
from regard.compare.mechanisms import Contestant, Shape, parameters
from regard.compare.memory import HOW
from regard.compare.quality import Pupil, Training
from regard.compare.speed import Timing
from regard.models.families.regard import Config

SCHEMA = 1
"""Of the JSON; it rises when a name in it changes its meaning or goes away."""

COSTS = ("kv_bytes", "decode_seconds")
"""What quality is drawn against."""


@dataclass(frozen=True)
class Plan:
    """All that is compared.

    Attributes:
        contestants: the mechanisms, the first of which is the measure of the others.
        configs: their models by name.
        shape, same: the sizes, and what all have in common.
        timing: how long is measured.
        lessons, training: what is learned and how; without lessons nothing is trained.
    """

    contestants: Sequence[Contestant]
    configs: Mapping[str, Config]
    shape: Shape
    same: str
    timing: Timing
    lessons: Sequence[Lesson] = ()
    training: Training = field(default_factory=Training)

    @property
    def pupils(self) -> dict[str, Pupil]:
        """The mechanisms as they are trained."""
        return {
            one.name: Pupil(self.configs[one.name], self.training.rates_of(recurrent=one.recurrent))
            for one in self.contestants
        }


def gather(plan: Plan, done: Mapping[str, Numbers]) -> list[Numbers]:
    """One entry for each mechanism, with what is known so far: None, or nothing, stands for what was not measured.

    Args:
        plan: what is compared.
        done: numbers of experiments by name (`Session.done`).
    """
    found, pupils = [], plan.pupils
    for one in plan.contestants:
        config = plan.configs[one.name]
        entry: Numbers = {
            "name": one.name, "attention": one.attention, "options": dict(one.options),
            "parameters": parameters(config), "hidden": config.intermediate_size,
        }  # fmt: skip
        for kind in ("prefill", "decode"):
            entry[kind] = {
                str(c): done[f"{kind}/{c}"]["rows"][one.name]
                for c in plan.timing.contexts if f"{kind}/{c}" in done
            }  # fmt: skip
        entry["training"] = (
            done.get(f"training/{plan.timing.length}", {}).get("rows", {}).get(one.name)
        )
        entry["memory"] = done.get(f"memory/{one.name}")
        entry["quality"] = {}
        for lesson in plan.lessons:
            told = judged(lesson, one.name, pupils[one.name], plan.training.seeds, done)
            if told is not None:
                entry["quality"][lesson.name] = told
        found.append(entry)
    return found


def cost_of(entry: Mapping[str, Any], cost: str, context: int) -> float | None:
    """A cost of `COSTS` of an entry at a context, or None where it was not measured.

    >>> cost_of({"decode": {"512": {"kv_bytes": 64, "seconds": 0.5}}}, "kv_bytes", 512)
    64
    """
    row = entry["decode"].get(str(context), {})
    found: float | None = row.get("kv_bytes" if cost == "kv_bytes" else "seconds")
    return found


def on_front(
    entries: Sequence[Mapping[str, Any]], lesson: Lesson, cost: str, context: int
) -> list[str]:
    """The names of mechanisms that no other beats in both cost and quality; those without both numbers take no part."""
    sign = 1.0 if lesson.better == "lower" else -1.0
    points: dict[str, tuple[float, float]] = {}
    for entry in entries:
        x = cost_of(entry, cost, context)
        y = entry["quality"].get(lesson.name, {}).get("mean")
        if x is not None and y is not None:
            points[entry["name"]] = (x, sign * y)
    names = list(points)
    return [names[i] for i in front(list(points.values()))]


def as_json(
    plan: Plan,
    done: Mapping[str, Numbers],
    machine: Mapping[str, Any],
    command: str,
    *,
    interrupted: bool = False,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """The whole comparison; every number is finite or null, times are seconds, sizes are bytes."""
    entries, at = gather(plan, done), max(plan.timing.contexts)
    return {
        "schema": SCHEMA,
        "command": command,
        "machine": dict(machine),
        "interrupted": interrupted,
        "same": plan.same,
        "shape": {**asdict(plan.shape), "hidden": plan.shape.width},
        "timing": asdict(plan.timing),
        "memory": HOW,
        "training": {**asdict(plan.training), "lessons": {one.name: one.settings for one in plan.lessons}},
        "notes": list(notes),
        "mechanisms": entries,
        "fronts": {
            f"{lesson.name} against {cost}": on_front(entries, lesson, cost, at)
            for lesson in plan.lessons for cost in COSTS
        },
    }  # fmt: skip


def as_csv(plan: Plan, done: Mapping[str, Numbers]) -> str:
    """A line for each mechanism; what was not measured is empty.

    Columns: name, attention, parameters, hidden; kv_bytes, prefill_seconds and decode_seconds at each context;
    training_seconds; prefill_peak_bytes, training_peak_bytes; of each lesson its measure, low, high, rate, and steps.
    """
    entries = [_flat(entry, plan) for entry in gather(plan, done)]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(entries[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(entries)
    return text.getvalue()


def _flat(entry: Numbers, plan: Plan) -> dict[str, Any]:
    """An entry as a line of a table."""
    line = {name: entry[name] for name in ("name", "attention", "parameters", "hidden")}
    for context in plan.timing.contexts:
        decode = entry["decode"].get(str(context), {})
        line[f"kv_bytes_{context}"] = decode.get("kv_bytes")
        line[f"prefill_seconds_{context}"] = entry["prefill"].get(str(context), {}).get("seconds")
        line[f"decode_seconds_{context}"] = decode.get("seconds")
    line["training_seconds"] = (entry["training"] or {}).get("seconds")
    for work in ("prefill", "training"):
        line[f"{work}_peak_bytes"] = (entry["memory"] or {}).get(work)
    for lesson in plan.lessons:
        told = entry["quality"].get(lesson.name, {})
        line[f"{lesson.name}_{lesson.measure}"] = told.get("mean")
        for name in ("low", "high", "rate", "steps"):
            line[f"{lesson.name}_{name}"] = told.get(name)
    return line
