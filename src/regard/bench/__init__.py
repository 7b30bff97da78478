"""Benchmarks of regard against other implementations, in one process, with every output checked.

A `Case` has `ProblemSizes`, which create a `Problem`; a `Peer` is an implementation that solves
problems. `measure` runs every peer that can run, compares its output with a reference, times the
peers in turns, and returns one row per peer, also for peers that are missing or wrong. The cases
in `regard.bench.program_cases` time whole programs. `regard bench` is the command.
"""

from regard.bench.cases import CASES
from regard.bench.interfaces import (
    Case,
    MinimumWork,
    Peer,
    PreparedCall,
    Problem,
    ProblemSizes,
)
from regard.bench.runner import TimingBudget, measure
from regard.timing.machine import Ceilings

__all__ = [
    "CASES",
    "Case",
    "Ceilings",
    "MinimumWork",
    "Peer",
    "PreparedCall",
    "Problem",
    "ProblemSizes",
    "TimingBudget",
    "measure",
]
