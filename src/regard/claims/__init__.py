"""Statements about attention, each tested by an experiment that anyone can run.

A `Claim` is one sentence from the public notes that this project began from. It says what would be
measured if the sentence were true, measures it, and holds the numbers against the bounds in its
file. The sentence then holds, holds with limits, does not hold, or stays undecided. All experiments
are small, and each claim says what its size can and cannot show.
"""

from __future__ import annotations

from regard.claims.claim import VERDICTS, Check, Claim, Outcome
from regard.claims.registry import CLAIMS, experiments, find_claim, run

__all__ = ["CLAIMS", "VERDICTS", "Check", "Claim", "Outcome", "experiments", "find_claim", "run"]
