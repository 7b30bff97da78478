"""What is said of attention, each as an experiment that anyone can run: a prediction, numbers, a
plot, and a verdict.

A `Claim` says what the seed notes say, measures it, and holds the numbers against the bounds in its
file: it holds, holds with limits, or does not hold. All run at toy scale, and each says what that
can and cannot show.
"""

from __future__ import annotations

from regard.claims.claim import VERDICTS, Check, Claim, Outcome
from regard.claims.registry import CLAIMS, experiments, find_claim, run

__all__ = ["CLAIMS", "VERDICTS", "Check", "Claim", "Outcome", "experiments", "find_claim", "run"]
