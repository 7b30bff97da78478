"""The outcomes of claims as text for a terminal, as CSV, and as sections of an HTML page."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from regard.claims.claim import VERDICTS, Claim, Criterion, Outcome
from regard.text_table import format_table, line_width, wrap
from regard.units import plural
from regard.view.html_page import Section

COLUMNS = ("claim", "verdict", "check", "value", "least", "most", "low", "high", "answer", "role")


def list_claims(claims: Sequence[Claim]) -> str:
    """Return the id, the sources and the statement of each claim, two lines per claim.

    >>> from regard.claims import find_claim
    >>> list_claims([find_claim("scale-training")]).splitlines()[0]
    '  scale-training        AttnJourney, section 3.1'
    """
    width, hang = line_width(), " " * 24
    lines: list[str] = []
    for claim in claims:
        lines.append(wrap(_sources(claim), width, indent=f"  {claim.id:<22}", hang=hang))
        lines.append(wrap(claim.statement, width, indent=hang, hang=hang))
    return "\n".join(lines)


def outcome_text(outcome: Outcome) -> str:
    """Return a claim, its verdict, and every measured number with its bounds, for a terminal.

    >>> from regard.claims import find_claim
    >>> claim = find_claim("minus-infinity")
    >>> outcome_text(Outcome(claim, claim.measure(1.0, 0))).splitlines()[0]
    'minus-infinity: holds with limits'
    """
    claim = outcome.claim
    reused = " (reused from an earlier run)" if outcome.reused else ""
    lines = [
        f"{claim.id}: {outcome.verdict}{reused}",
        f"  statement   {claim.statement}",
        f"  prediction  {claim.prediction}",
    ]
    for check in outcome.checks:
        measured = f"{_mark(check):<12}{format_value(check):>10}  {check.bounds:<16}"
        lines.append(f"  {measured}  {check.quantity}{_spread(check)}")
    lines += [format_table(outcome.table, indent="    ")] if outcome.table else []
    lines += [f"  scope       {claim.scope}", f"  takeaway    {claim.takeaway}"]
    return "\n".join(lines)


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return how many claims have each verdict, in one line.

    >>> summary([])
    '0 claims: 0 hold, 0 hold with limits, 0 undecided, 0 do not hold'
    """
    verdicts = [outcome.verdict for outcome in outcomes]
    counts = [verdicts.count(verdict) for verdict in VERDICTS]
    return (
        f"{plural(len(verdicts), 'claim')}: {counts[0]} hold, {counts[1]} hold with limits, "
        f"{counts[2]} undecided, {counts[3]} do not hold"
    )


def as_csv(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes as CSV, with one line for each criterion.

    >>> as_csv([]).strip()
    'claim,verdict,check,value,least,most,low,high,answer,role'
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for outcome in outcomes:
        for check in outcome.checks:
            values = check.as_dict()
            values["least"], values["most"] = values["spread"] or (None, None)
            cells = [values["quantity" if name == "check" else name] for name in COLUMNS[2:]]
            writer.writerow([outcome.claim.id, outcome.verdict, *cells])
    return out.getvalue()


def outcome_section(outcome: Outcome) -> Section:
    """Return the outcome of a claim as a section of an HTML page.

    >>> from regard.claims import find_claim
    >>> claim = find_claim("minus-infinity")
    >>> outcome_section(Outcome(claim, claim.measure(1.0, 0))).badge
    'holds with limits'
    """
    claim = outcome.claim
    good = {VERDICTS[0]: True, VERDICTS[3]: False}.get(outcome.verdict)
    rows = [(_mark(c), format_value(c), c.bounds, c.quantity + _spread(c)) for c in outcome.checks]
    texts = {
        "statement": claim.statement,
        "prediction": claim.prediction,
        "scope": claim.scope,
        "takeaway": claim.takeaway,
        "source": _sources(claim),
    }
    return Section(
        claim.id,
        outcome.verdict,
        good,
        texts,
        ("answer", "measured", "expected if the statement is true", "quantity"),
        rows,
        (outcome.picture,),
        outcome.table,
    )


def format_value(check: Criterion) -> str:
    """Return the measured value with four significant digits.

    >>> format_value(Criterion("", 0.000123456))
    '0.0001235'
    """
    return f"{check.value:.4g}"


def _sources(claim: Claim) -> str:
    """Return the sections of the notes that make the statement, separated by semicolons."""
    return "; ".join(map(str, claim.sources))


def _mark(check: Criterion) -> str:
    """Return the answer to a criterion, with its role in front unless the role is "claim"."""
    if check.role == "reported":
        return ""
    return check.answer if check.role == "claim" else f"{check.role} {check.answer}"


def _spread(check: Criterion) -> str:
    """Return the spread of the measurements in parentheses; "" if there is none."""
    return "" if check.spread is None else f" ({check.spread[0]:.4g} to {check.spread[1]:.4g})"
