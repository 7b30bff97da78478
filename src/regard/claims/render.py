"""The outcomes of claims as text for a terminal, as lines of CSV, and as sections of a page."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from regard.claims.claim import VERDICTS, Check, Claim, Outcome
from regard.text_table import format_table
from regard.view.html_page import Section

COLUMNS = ("claim", "verdict", "check", "value", "least", "most", "low", "high", "answer", "role")


def listing(claims: Sequence[Claim]) -> str:
    """Each claim with what it says and the sections of the notes that say it.

    >>> from regard.claims import find_claim
    >>> listing([find_claim("scale-training")]).splitlines()[0]
    '  scale-training        AttnJourney, section 3.1'
    """
    return "\n".join(f"  {c.id:<22}{_sources(c)}\n  {'':<22}{c.says}" for c in claims)


def text(outcome: Outcome) -> str:
    """A claim, its verdict, and every number with the bounds that decided.

    >>> from regard.claims import find_claim
    >>> claim = find_claim("minus-infinity")
    >>> text(Outcome(claim, claim.measure(1.0, 0))).splitlines()[0]
    'minus-infinity: holds with limits'
    """
    claim = outcome.claim
    kept = " (kept from an earlier run)" if outcome.reused else ""
    lines = [
        f"{claim.id}: {outcome.verdict}{kept}",
        f"  says      {claim.says}",
        f"  predicts  {claim.predicts}",
    ]
    lines += [
        f"  {_mark(check):<10}{value(check):>10}  {check.bounds:<16}  {check.says}{_spread(check)}"
        for check in outcome.checks
    ]
    lines += [format_table(outcome.table, indent="    ")] if outcome.table else []
    lines += [f"  scale     {claim.scale}", f"  lesson    {claim.lesson}"]
    return "\n".join(lines)


def summary(outcomes: Sequence[Outcome]) -> str:
    """How many of each verdict.

    >>> summary([])
    '0 claims: 0 hold, 0 hold with limits, 0 undecided, 0 do not hold'
    """
    words = [outcome.verdict for outcome in outcomes]
    counts = [words.count(word) for word in VERDICTS]
    return (
        f"{len(words)} claims: {counts[0]} hold, {counts[1]} hold with limits, {counts[2]} "
        f"undecided, {counts[3]} do not hold"
    )


def as_csv(outcomes: Sequence[Outcome]) -> str:
    """A line for each check.

    >>> as_csv([]).strip()
    'claim,verdict,check,value,least,most,low,high,answer,role'
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for outcome in outcomes:
        for check in outcome.checks:
            told = check.as_dict()
            told["least"], told["most"] = told["spread"] or (None, None)
            cells = [told["says" if name == "check" else name] for name in COLUMNS[2:]]
            writer.writerow([outcome.claim.id, outcome.verdict, *cells])
    return out.getvalue()


def section(outcome: Outcome) -> Section:
    """A claim as a section of a page.

    >>> from regard.claims import find_claim
    >>> claim = find_claim("minus-infinity")
    >>> section(Outcome(claim, claim.measure(1.0, 0))).badge
    'holds with limits'
    """
    claim = outcome.claim
    good = {VERDICTS[0]: True, VERDICTS[3]: False}.get(outcome.verdict)
    rows = [(_mark(c), value(c), c.bounds, c.says + _spread(c)) for c in outcome.checks]
    texts = {
        "says": claim.says,
        "predicts": claim.predicts,
        "scale": claim.scale,
        "lesson": claim.lesson,
        "said in": _sources(claim),
    }
    return Section(
        claim.id,
        outcome.verdict,
        good,
        texts,
        ("", "measured", "if it is so", "what"),
        rows,
        (outcome.picture,),
        outcome.table,
    )


def value(check: Check) -> str:
    """What was measured, in four digits.

    >>> value(Check("", 0.000123456))
    '0.0001235'
    """
    return f"{check.value:.4g}"


def _sources(claim: Claim) -> str:
    return "; ".join(map(str, claim.sources))


def _mark(check: Check) -> str:
    """The answer to a check of the claim; what the others are for stands in front of theirs."""
    if check.role == "told":
        return ""
    return check.answer if check.role == "claim" else f"{check.role} {check.answer}"


def _spread(check: Check) -> str:
    """How far the measurements scatter, behind what was measured."""
    return "" if check.spread is None else f" ({check.spread[0]:.4g} to {check.spread[1]:.4g})"
