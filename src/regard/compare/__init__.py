"""Mechanisms side by side on this machine, under one budget: what each costs, and with training
what each loses.

An `Experiment` is data and a function that gives numbers; a `Session` runs them, keeps each result
as a small JSON file, and goes on where an earlier run has stopped.
"""

from regard.compare.comparison import front
from regard.compare.experiment import Experiment, Session, Store
from regard.compare.mechanisms import (
    NAMES,
    Contestant,
    Shape,
    configs,
    contestants,
    same_parameters,
)

__all__ = [
    "NAMES",
    "Contestant",
    "Experiment",
    "Session",
    "Shape",
    "Store",
    "configs",
    "contestants",
    "front",
    "same_parameters",
]
