"""Benchmarks: regard against other implementations in one process, each answer checked before it is
timed.

A `Case` has `Sizes`, which make a `Problem`; a `Peer` solves problems. `measure` runs what can be
run, checks every output, times the peers in turns, and gives a row for each, also for those that
are missing or wrong. Cases of whole programs (`regard.bench.program_cases`) time this package itself.
`regard bench` is the command.
"""

from regard.bench.cases import CASES
from regard.bench.interfaces import Case, Peer, Problem, Sizes, Way, Work
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
