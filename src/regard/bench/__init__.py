"""Ours against other people's implementations, in one process: the same numbers in, equal numbers
out, timed in turns.

A `Case` has `Sizes`, which make a `Problem`; a `Peer` solves problems. `measure` runs what can be
run, checks every output before it is timed, and gives a row for each peer, also for those that are
missing or wrong. `regard bench` is the command.
"""

from regard.bench.case import Case, Peer, Problem, Sizes, Way, Work
from regard.bench.cases import CASES
from regard.bench.machine import Ceilings
from regard.bench.runner import Budget, measure
from regard.bench.timing import interleaved, median, ratio

__all__ = [
    "CASES",
    "Budget",
    "Case",
    "Ceilings",
    "Peer",
    "Problem",
    "Sizes",
    "Way",
    "Work",
    "interleaved",
    "measure",
    "median",
    "ratio",
]
