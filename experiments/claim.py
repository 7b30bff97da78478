"""The class of claims: a statement about attention, its measurement, and the bounds that decide."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal, NamedTuple, TypeAlias, get_args

from regard.compare.experiment import Numbers
from regard.language import Phrase
from regard.timing import quartiles
from regard.view.charts import Picture

Role: TypeAlias = Literal["claim", "limit", "control", "reported"]

VERDICTS = ("holds", "holds with limits", "undecided", "does not hold")
"""The possible verdicts on a claim, from the most to the least favourable."""


@dataclass(frozen=True)
class Criterion:
    """One measured number, and the bounds within which it lies if the statement is true.

    Args:
        low, high: the bounds. A value equal to a bound is inside; NaN is always outside.
        role: "claim": the statement is false if this criterion fails. "limit": a special case; if
            it fails, the statement holds with limits. "control": if it fails, the measurement
            cannot decide. "reported": the number is shown and decides nothing.
        spread: the range of the repeated measurements (the quartiles of the rounds, or the least
            and the largest value over the seeds), or None. A bound inside the range leaves the
            criterion undecided.
    """

    quantity: str
    value: float
    low: float = -math.inf
    high: float = math.inf
    role: Role = "claim"
    spread: tuple[float, float] | None = None

    @property
    def answer(self) -> str:
        """The answer: "yes", "no" or "undecided" as the spread lies inside, or "reported"."""
        if self.role == "reported":
            return "reported"
        least, most = self.spread or (self.value, self.value)
        if self.low <= least and most <= self.high:
            return "yes"
        return "undecided" if self.low <= most and least <= self.high else "no"

    @property
    def bounds(self) -> str:
        """The bounds in words; empty for a number without bounds.

        >>> Criterion("", 0.0, low=1.0).bounds, Criterion("", 0.0, high=3e-7).bounds
        ('at least 1', 'at most 3e-07')
        >>> Criterion("", 0.0, 1.0, 2.0).bounds
        '1 to 2'
        """
        if math.isinf(self.low) and math.isinf(self.high):
            return ""
        if math.isinf(self.high):
            return Phrase("at least {low:.4g}", low=self.low)
        if math.isinf(self.low):
            return Phrase("at most {high:.4g}", high=self.high)
        return f"{self.low:.4g} to {self.high:.4g}"

    def as_dict(self) -> Numbers:
        """Return the criterion as plain values for JSON."""
        finite = {
            name: value if math.isfinite(value) else None
            for name, value in (("value", self.value), ("low", self.low), ("high", self.high))
        }
        spread = None if self.spread is None else list(self.spread)
        return {
            "quantity": self.quantity,
            **finite,
            "spread": spread,
            "answer": self.answer,
            "role": self.role,
        }


def median_criterion(
    quantity: str,
    values: Sequence[float],
    low: float = -math.inf,
    high: float = math.inf,
    role: Role = "claim",
) -> Criterion:
    """Return a criterion for the median of repeated measurements."""
    spread = (min(values), max(values)) if len(values) < 4 else quartiles(values)
    return Criterion(quantity, median(values), low, high, role, spread)


def verdict(criteria: Sequence[Criterion]) -> str:
    """Return the verdict that follows from the answers to the criteria.

    A failed control decides nothing; else a failed criterion of its own refutes the claim, an
    undecided one leaves it undecided; else it holds, with limits if a limit is not met.
    """
    answers = {role: {c.answer for c in criteria if c.role == role} for role in get_args(Role)}
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


class NoteSection(NamedTuple):
    """A section of a public note that makes the statement of a claim."""

    note: str
    section: str

    def __str__(self) -> str:
        return f"{self.note}, {'section ' * self.section[0].isdigit()}{self.section}"


MeasureFunction = Callable[[float, int], Numbers]
"""A function of a budget (1 is the default; 2 doubles the training or the timing) and a random
seed. It returns plain numbers.
"""


@dataclass(frozen=True)
class Claim:
    """One statement, with the experiment that tests it. The verdict is about `statement` alone.

    Args:
        sources: the sections of the notes that make the statement.
        prediction: the measurements that would confirm the statement.
        scope: what an experiment of this size can and cannot show.
        measure: a function of budget and seed; returns numbers that JSON can hold.
        checks: a function of the numbers; returns the criteria that decide.
        picture: a function of the numbers; returns the plot.
        timed: whether the verdict depends on times, which differ between machines.
        takeaway: what is right, in one sentence, whatever the verdict is.
        measured_with: the id of the claim whose measurement this one uses, where several statements
            are about one experiment; "" is its own measurement.
        table: a function of the numbers; returns a table, header first. None is no table.
    """

    id: str
    sources: tuple[NoteSection, ...]
    statement: str
    prediction: str
    scope: str
    measure: MeasureFunction = field(repr=False, compare=False)
    checks: Callable[[Numbers], list[Criterion]] = field(repr=False, compare=False)
    picture: Callable[[Numbers], Picture] = field(repr=False, compare=False)
    timed: bool = False
    takeaway: str = ""
    measured_with: str = ""
    table: Callable[[Numbers], list[list[str]]] | None = field(
        default=None, repr=False, compare=False
    )


@dataclass(frozen=True)
class Outcome:
    """A claim with its measured numbers."""

    claim: Claim
    numbers: Numbers
    budget: float = 1.0
    seed: int = 0
    reused: bool = False

    @property
    def checks(self) -> list[Criterion]:
        """The criteria with the measured values."""
        return self.claim.checks(self.numbers)

    @property
    def verdict(self) -> str:
        """The verdict, one of `VERDICTS`."""
        return verdict(self.checks)

    @property
    def picture(self) -> Picture:
        """The plot of the measured numbers."""
        return self.claim.picture(self.numbers)

    @property
    def table(self) -> list[list[str]]:
        """The table of the measured numbers, header first; [] if the claim has no table."""
        return [] if self.claim.table is None else self.claim.table(self.numbers)

    def as_dict(self) -> Numbers:
        """Return the claim and its outcome as plain values for JSON."""
        claim = self.claim
        texts = {
            name: getattr(claim, name)
            for name in ("id", "statement", "prediction", "scope", "takeaway", "timed")
        }
        return texts | {
            "sources": [str(source) for source in claim.sources],
            "verdict": self.verdict,
            "budget": self.budget,
            "seed": self.seed,
            "checks": [check.as_dict() for check in self.checks],
            "numbers": self.numbers,
            "table": self.table,
            "picture": self.picture.as_dict(),
        }


def num_seeds(budget: float, count: int) -> int:
    """Return how many seeds are trained: `count * budget`, at least 1 and at most `count`.

    >>> num_seeds(4.0, 3), num_seeds(1.0, 3), num_seeds(0.01, 3)
    (3, 3, 1)
    """
    return max(1, min(count, round(count * budget)))


def num_steps(budget: float, count: int, least: int = 2) -> int:
    """Return how many steps or rounds are run: `count * budget`, and at least `least`.

    >>> num_steps(2.0, 300), num_steps(0.001, 300)
    (600, 2)
    """
    return max(least, round(count * budget))
