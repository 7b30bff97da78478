"""Mechanisms side by side on this machine, under one budget: what each costs, and with training
what each loses.

An `Experiment` is data and a function that gives numbers; a `Session` runs them, keeps each result
as a small JSON file, and goes on where an earlier run has stopped.
"""

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
