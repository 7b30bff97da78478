"""A claim: one sentence about attention, its measurement, and the bounds that decide."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from regard.bench.timing import quartiles
from regard.compare.experiment import Numbers
from regard.view.charts import Picture

Role: TypeAlias = Literal["claim", "limit", "control", "told"]

VERDICTS = ("holds", "holds with limits", "undecided", "does not hold")
"""What can come of a claim, from the best to the worst for it."""


@dataclass(frozen=True)
class Check:
    """One measured number, and the bounds that it keeps if the sentence is true.

    Attributes:
        says: what the number is, in words.
        value: what was measured.
        low, high: the bounds; a value on one of them is inside, NaN never is.
        role: "claim" where the sentence falls with it; "limit" where it is a case in which a
            sentence that is true in general may fail; "control" where it says whether the
            measurement can decide at all; "told" decides nothing.
        spread: the range that the measurements scatter over (quartiles of rounds, least and largest
            of seeds), or None. A bound that lies inside it cannot be decided.

    >>> Check("twice as fast", 2.4, low=2.0).answer, Check("no slower", 2.4, high=1.0).answer
    ('yes', 'no')
    >>> Check("no slower", 1.02, high=1.0, spread=(0.97, 1.06)).answer
    'undecided'
    """

    says: str
    value: float
    low: float = -math.inf
    high: float = math.inf
    role: Role = "claim"
    spread: tuple[float, float] | None = None

    @property
    def answer(self) -> str:
        """What it says: "yes" when all of the spread lies inside the bounds, "no" when none does,
        else "undecided"; or "told".
        """
        if self.role == "told":
            return "told"
        least, most = self.spread or (self.value, self.value)
        if self.low <= least and most <= self.high:
            return "yes"
        return "undecided" if self.low <= most and least <= self.high else "no"

    @property
    def bounds(self) -> str:
        """The bounds in words; a number that is only told has none.

        >>> Check("", 0.0, low=1.0).bounds, Check("", 0.0, high=3e-7).bounds
        ('at least 1', 'at most 3e-07')
        >>> Check("", 0.0, 1.0, 2.0).bounds
        '1 to 2'
        """
        if math.isinf(self.low) and math.isinf(self.high):
            return ""
        if math.isinf(self.high):
            return f"at least {self.low:.4g}"
        if math.isinf(self.low):
            return f"at most {self.high:.4g}"
        return f"{self.low:.4g} to {self.high:.4g}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values; a bound or a value that is not finite is None."""
        finite = {
            name: value if math.isfinite(value) else None
            for name, value in (("value", self.value), ("low", self.low), ("high", self.high))
        }
        spread = None if self.spread is None else list(self.spread)
        return {
            "says": self.says,
            **finite,
            "spread": spread,
            "answer": self.answer,
            "role": self.role,
        }


def scattered(
    says: str,
    values: Sequence[float],
    low: float = -math.inf,
    high: float = math.inf,
    role: Role = "claim",
) -> Check:
    """A check of the median of several measurements, whose spread runs from the first to the third
    quartile.

    Up to three measurements (seeds, say) have no quartiles worth the name: their spread is all of
    them.

    >>> scattered("seeds", [0.2, 0.4]).spread
    (0.2, 0.4)
    >>> scattered("rounds", [1.0, 2.0, 3.0, 4.0, 50.0]).spread
    (2.0, 4.0)
    """
    spread = (min(values), max(values)) if len(values) < 4 else quartiles(values)
    return Check(says, median(values), low, high, role, spread)


def verdict(checks: Sequence[Check]) -> str:
    """A word of `VERDICTS`, by the answers to the checks.

    A control that fails leaves the claim undecided; a check of the claim itself that fails makes it
    fall, and one that is undecided leaves it so; else it holds, and with limits if a limit is not
    kept.

    >>> verdict([Check("a", 1.0, low=0.0), Check("b", 1.0, low=2.0, role="limit")])
    'holds with limits'
    """
    answers = {role: {c.answer for c in checks if c.role == role} for role in get_args(Role)}
    if answers["control"] - {"yes"}:
        return VERDICTS[2]
    if "no" in answers["claim"]:
        return VERDICTS[3]
    if "undecided" in answers["claim"]:
        return VERDICTS[2]
    return VERDICTS[1] if answers["limit"] - {"yes"} else VERDICTS[0]


DEEPSEEK_NOTE = "Deepseek_based_llm_note"
ATTN_JOURNEY = "AttnJourney"
RASCHKA_NOTES = "x-jeff's chapter 3"
OVERVIEW = "the overview"
OUTLINE = "the outline"
"""Short names of the public notes whose statements are tested; docs/claims.md has their titles."""


class Source(NamedTuple):
    """A note, and the section of it that says what a claim says.

    >>> str(Source(ATTN_JOURNEY, "3.1")), str(Source(OUTLINE, "long contexts"))
    ('AttnJourney, section 3.1', 'the outline, long contexts')
    """

    note: str
    section: str

    def __str__(self) -> str:
        return f"{self.note}, {'section ' * self.section[0].isdigit()}{self.section}"


Measure = Callable[[float, int], Numbers]
"""From a budget (1 is the default, 2 is twice the training or the timing) and a seed to plain
numbers.
"""


@dataclass(frozen=True)
class Claim:
    """One statement as an experiment. The verdict is about `says`, and about nothing else.

    Attributes:
        id: how it is asked for.
        sources: the sections of the notes that say it.
        says: what is said, as the notes say it, in one sentence.
        predicts: what would be measured if that sentence were true.
        scale: what an experiment of this size can and cannot show.
        measure: budget and seed -> numbers, as JSON can hold them.
        checks: numbers -> what decides; the same numbers give the same verdict.
        picture: numbers -> what is drawn.
        timed: whether times decide it, which differ from machine to machine.
        lesson: what is right, in a sentence, whatever comes out.
        shares: the claim whose numbers it is decided by, where several sentences are about one
            experiment; "" is its own.
        table: numbers -> a table that is shown with it, heads first; None is none.
    """

    id: str
    sources: tuple[Source, ...]
    says: str
    predicts: str
    scale: str
    measure: Measure = field(repr=False, compare=False)
    checks: Callable[[Mapping[str, Any]], list[Check]] = field(repr=False, compare=False)
    picture: Callable[[Mapping[str, Any]], Picture] = field(repr=False, compare=False)
    timed: bool = False
    lesson: str = ""
    shares: str = ""
    table: Callable[[Mapping[str, Any]], list[list[str]]] | None = field(
        default=None, repr=False, compare=False
    )


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

    @property
    def table(self) -> list[list[str]]:
        """The table that is shown with it, heads first; [] is none."""
        return [] if self.claim.table is None else self.claim.table(self.numbers)

    def as_dict(self) -> dict[str, Any]:
        """Return the claim and its outcome as plain values."""
        claim = self.claim
        said = {
            name: getattr(claim, name)
            for name in ("id", "says", "predicts", "scale", "lesson", "timed")
        }
        return said | {
            "sources": [str(source) for source in claim.sources],
            "verdict": self.verdict,
            "budget": self.budget,
            "seed": self.seed,
            "checks": [check.as_dict() for check in self.checks],
            "numbers": self.numbers,
            "table": self.table,
            "picture": self.picture.as_dict(),
        }


def trials(budget: float, count: int) -> int:
    """How many seeds a budget has: `count` from a budget of 1 on, fewer below, and at least one.

    >>> trials(4.0, 3), trials(1.0, 3), trials(0.01, 3)
    (3, 3, 1)
    """
    return max(1, min(count, round(count * budget)))


def steps(budget: float, count: int, least: int = 2) -> int:
    """How many steps a budget has: count times the budget, and at least `least`.

    >>> steps(2.0, 300), steps(0.001, 300)
    (600, 2)
    """
    return max(least, round(count * budget))
