"""Compare attention mechanisms on this machine under one budget: the cost of each, and with
training also its quality.

An `Experiment` is data and a function that measures numbers. A `Session` runs experiments, saves
each result as a small JSON file, and continues where an earlier run stopped.
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
