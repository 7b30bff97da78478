"""Measurements kept as lines of JSON beside the page that shows them: one line a measurement, so
that an interrupted run loses nothing, and a later run measures only what is missing.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from regard.compare.experiment import Experiment, ExperimentStore, Numbers
from regard.timing import describe_machine

DOCS = Path(__file__).parents[3] / "docs"
QUALITY, SPEED = DOCS / "mechanisms-quality.jsonl", DOCS / "mechanisms-speed.jsonl"


def machine() -> dict[str, object]:
    """Where and when a measurement was made."""
    facts = describe_machine(torch.device("cpu"))
    kept = {name: facts[name] for name in ("processor", "cores", "threads")}
    versions = {name: facts[name].partition("+")[0] for name in ("python", "torch", "regard")}
    return {"date": datetime.now(UTC).date().isoformat(), **kept, **versions}


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; none if there is no file."""
    return (
        [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    )


def append(path: Path, line: dict[str, Any]) -> None:
    """Add a line to a file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, allow_nan=False) + "\n")


class LineStore(ExperimentStore):
    """Experiments whose results are the lines of one file."""

    def __init__(self, path: Path) -> None:
        super().__init__(None, machine())
        self.path = path
        self._kept = {line["key"]: line["numbers"] for line in read(path)}

    def read(self, experiment: Experiment) -> Numbers | None:
        """The numbers of an experiment with these settings, or None."""
        return self._kept.get(experiment.key)

    def write(self, experiment: Experiment, numbers: Numbers, seconds: float) -> None:
        """Add the line of an experiment."""
        line = {"key": experiment.key, "name": experiment.name, "numbers": numbers}
        append(self.path, {**line, "settings": dict(experiment.settings), **self.metadata})
        self._kept[experiment.key] = numbers
