"""Benchmarks of regard against other implementations, in one process, with every output checked.

A `Case` has `ProblemSizes`, which create a `Problem`; a `Peer` is an implementation that solves
problems. `measure` runs every peer that can run, compares its output with a reference, times the
peers in turns, and returns one row per peer, also for peers that are missing or wrong. The cases
in `benchmarks.programs` time whole programs. `python -m benchmarks` is the command; it runs in
a checkout and is no part of the installed package.
"""

from pathlib import Path

from benchmarks.cases import CASES
from benchmarks.interfaces import (
    Case,
    MinimumWork,
    Peer,
    PreparedCall,
    Problem,
    ProblemSizes,
)
from benchmarks.runner import TimingBudget, measure
from regard.language import add_texts
from regard.timing import Ceilings

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

add_texts(Path(__file__).with_name("strings"))
