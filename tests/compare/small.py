"""A comparison that takes a second: tiny models, short texts."""

from __future__ import annotations

from typing import Any

from regard.compare.comparison import ComparisonPlan
from regard.compare.mechanisms import Shape, candidates, configs
from regard.compare.quality import RecallTask, TrainingSettings
from regard.compare.speed_and_memory import Timing

SHAPE = Shape(dim=32, layers=1, heads=4, window=8)
TIMING = Timing(contexts=(6, 20), length=12, batch=2, rounds=2, seconds=5.0, sample=0.0)
MACHINE = {"processor": "CPU", "cores": 2, "threads": 1, "torch": "2", "regard": "0"}


def plan(*names: str, same: str = "sizes", **more: Any) -> ComparisonPlan:
    found = candidates(names or None, SHAPE)
    return ComparisonPlan(
        found, configs(found, SHAPE, same), SHAPE, same, more.pop("timing", TIMING), **more
    )


def taught(*names: str, seeds: tuple[int, ...] = (0,), **more: Any) -> ComparisonPlan:
    """With one lesson of short rows: sixteen examples to choose by, and as many to judge by."""
    return plan(
        *names,
        tasks=[RecallTask("mqar", 8, 4, validation_rows=4, test_rows=4)],
        training=TrainingSettings(seeds, **more),
    )
