"""A claim: what is said, what it predicts, how it is measured, and the bounds that decide."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from regard.compare.experiment import Numbers
from regard.view.curves import Picture

VERDICTS = ("holds", "holds with limits", "does not hold")
"""All bounds are kept; those that the claim stands on are; one that it stands on is not."""


@dataclass(frozen=True)
class Check:
    """One number and the bounds that the claim predicts for it.

    Attributes:
        says: what is predicted, in words.
        value: what was measured.
        low, high: the bounds; a value on one of them is inside, NaN never is.
        essential: whether the claim falls with it; else it is a limit of the claim.

    >>> Check("twice as fast", 2.4, low=2.0).passed, Check("no slower", 2.4, high=1.0).passed
    (True, False)
    """

    says: str
    value: float
    low: float = -math.inf
    high: float = math.inf
    essential: bool = True

    @property
    def passed(self) -> bool:
        """Whether the value lies between the bounds."""
        return self.low <= self.value <= self.high

    @property
    def bounds(self) -> str:
        """The bounds in words.

        >>> Check("", 0.0, low=1.0).bounds, Check("", 0.0, 1.0, 2.0).bounds, Check("", 0.0, high=3e-7).bounds
        ('at least 1', '1 to 2', 'at most 3e-07')
        """
        if math.isinf(self.high):
            return f"at least {self.low:.4g}"
        return f"{self.low:.4g} to {self.high:.4g}" if math.isfinite(self.low) else f"at most {self.high:.4g}"  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """As plain values; a bound or a value that is not finite is None."""
        finite = {
            name: value if math.isfinite(value) else None
            for name, value in (("value", self.value), ("low", self.low), ("high", self.high))
        }
        return {"says": self.says, **finite, "passed": self.passed, "essential": self.essential}


def verdict(checks: Sequence[Check]) -> str:
    """A word of `VERDICTS`: "does not hold" when an essential check fails, "holds with limits" when only others do.

    >>> verdict([Check("a", 1.0, low=0.0), Check("b", 1.0, low=2.0, essential=False)])
    'holds with limits'
    """
    if not all(check.passed for check in checks if check.essential):
        return VERDICTS[2]
    return VERDICTS[0] if all(check.passed for check in checks) else VERDICTS[1]


Measure = Callable[[float, int], Numbers]
"""From a budget (1 is the default, 2 is twice the training or the timing) and a seed to plain numbers."""


@dataclass(frozen=True)
class Claim:
    """A statement as an experiment.

    Attributes:
        id: how it is asked for.
        seeds: the lines of docs/seeds.md that it belongs to.
        says: what is said, as the notes say it.
        predicts: what the numbers should be if it is so.
        scale: what an experiment of this size can and cannot show.
        measure: budget and seed -> numbers, as JSON can hold them.
        checks: numbers -> what decides; the same numbers give the same verdict.
        picture: numbers -> what is drawn.
        timed: whether its numbers are times, which differ from machine to machine.
        lesson: what is right, in a sentence, whatever comes out.
    """

    id: str
    seeds: tuple[str, ...]
    says: str
    predicts: str
    scale: str
    measure: Measure = field(repr=False, compare=False)
    checks: Callable[[Mapping[str, Any]], list[Check]] = field(repr=False, compare=False)
    picture: Callable[[Mapping[str, Any]], Picture] = field(repr=False, compare=False)
    timed: bool = False
    lesson: str = ""


@dataclass(frozen=True)
class Outcome:
    """A claim and what was measured.

    Attributes:
        claim: the claim.
        numbers: what its `measure` gave.
        budget, seed: with which it was run.
        reused: whether the numbers come from an earlier run.
    """

    claim: Claim
    numbers: Numbers
    budget: float = 1.0
    seed: int = 0
    reused: bool = False

    @property
    def checks(self) -> list[Check]:
        """The bounds, with the values measured."""
        return self.claim.checks(self.numbers)

    @property
    def verdict(self) -> str:
        """A word of `VERDICTS`."""
        return verdict(self.checks)

    @property
    def picture(self) -> Picture:
        """What is drawn."""
        return self.claim.picture(self.numbers)

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        claim = self.claim
        said = {name: getattr(claim, name) for name in ("id", "says", "predicts", "scale", "lesson", "timed")}  # fmt: skip
        return said | {
            "seeds": list(claim.seeds), "verdict": self.verdict, "budget": self.budget, "seed": self.seed,
            "checks": [check.as_dict() for check in self.checks], "numbers": self.numbers,
            "picture": self.picture.as_dict(),
        }  # fmt: skip


def steps(budget: float, count: int, least: int = 2) -> int:
    """How many steps a budget has: count times the budget, and at least `least`.

    >>> steps(2.0, 300), steps(0.001, 300)
    (600, 2)
    """
    return max(least, round(count * budget))
