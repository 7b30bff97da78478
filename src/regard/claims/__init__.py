"""Statements about attention, each tested by an experiment that anyone can run.

A `Claim` is one sentence from the public notes that this project began from. It names the
measurement that would confirm the sentence, runs it, and compares the numbers with bounds that are
written in the same file. The verdict is one of: holds, holds with limits, undecided, does not hold.
All experiments are small, and each claim says what an experiment of its size can and cannot show.
"""

from __future__ import annotations

from regard.claims.claim import VERDICTS, Claim, Criterion, Outcome
from regard.claims.registry import CLAIMS, experiments, find_claim, run_claims
from regard.deprecation import renamed

__all__ = [
    "CLAIMS",
    "VERDICTS",
    "Claim",
    "Criterion",
    "Outcome",
    "experiments",
    "find_claim",
    "run_claims",
]
__getattr__ = renamed(__name__, {"Check": "Criterion", "run": "run_claims"})
