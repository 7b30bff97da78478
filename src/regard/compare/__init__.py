"""Compare attention mechanisms on this machine under one budget: the cost of each, and with
training also its quality.

An `Experiment` is data and a function that measures numbers. A `Session` runs experiments, saves
each result as a small JSON file, and continues where an earlier run stopped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regard.registry import import_when_used

if TYPE_CHECKING:
    from regard.compare.comparison import pareto
    from regard.compare.experiment import Experiment, ExperimentStore, Session
    from regard.compare.mechanisms import (
        DEFAULT_NAMES,
        Candidate,
        Shape,
        candidates,
        configs,
        same_parameters,
    )

__all__ = [
    "DEFAULT_NAMES",
    "Candidate",
    "Experiment",
    "ExperimentStore",
    "Session",
    "Shape",
    "candidates",
    "configs",
    "pareto",
    "same_parameters",
]

__getattr__ = import_when_used(
    __name__,
    {
        "regard.compare.comparison": "pareto",
        "regard.compare.experiment": "Experiment ExperimentStore Session",
        "regard.compare.mechanisms": (
            "DEFAULT_NAMES Candidate Shape candidates configs same_parameters"
        ),
    },
)
