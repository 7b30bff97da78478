"""The outcomes of claims as text for a terminal, as CSV, and as sections of an HTML page."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence

from experiments.claim import VERDICTS, Claim, Criterion, Outcome
from regard.language import translate, translate_count
from regard.text_table import format_table, line_width, pad_cells, wrap
from regard.view.html_page import Section

COLUMNS = ("claim", "verdict", "check", "value", "least", "most", "low", "high", "answer", "role")


def list_claims(claims: Sequence[Claim]) -> str:
    """Return the id, the sources and the statement of each claim, two lines per claim.

    >>> from experiments import find_claim
    >>> list_claims([find_claim("scale-training")]).splitlines()[0]
    '  scale-training        AttnJourney, section 3.1'
    """
    width, hang = line_width(), " " * 24
    lines: list[str] = []
    for claim in claims:
        sources = _sources(claim)
        lines.append(wrap(sources, width, indent=f"  {claim.id:<22}", hang=hang))
        lines.append(wrap(translate(claim.statement), width, indent=hang, hang=hang))
    return "\n".join(lines)


def outcome_text(outcome: Outcome) -> str:
    """Return a claim, its verdict, and every measured number with its bounds, for a terminal."""
    claim = outcome.claim
    reused = translate(" (reused from an earlier run)") if outcome.reused else ""
    lines = [
        f"{claim.id}{translate(': ')}{translate(outcome.verdict)}{reused}",
        _labelled(translate("statement"), claim.statement),
        _labelled(translate("prediction"), claim.prediction),
    ]
    for check in outcome.checks:
        mark = pad_cells(_mark(check), 12)
        measured = f"{mark}{format_value(check):>10}  {pad_cells(_bounds(check), 16)}"
        quantity = translate(check.quantity) + _spread(check)
        lines.append(wrap(quantity, line_width(), indent=f"  {measured}  ", hang=" " * 14))
    if outcome.table:
        table = [
            [translate(cell) if isinstance(cell, str) else str(cell) for cell in row]
            for row in outcome.table
        ]
        lines.append(format_table(table, indent="    "))
    lines += [
        _labelled(translate("scope"), claim.scope),
        _labelled(translate("takeaway"), claim.takeaway),
    ]
    return "\n".join(lines)


def _labelled(label: str, text: str) -> str:
    """Return lines with a label in front of a text of the claim."""
    hang = " " * 14
    return wrap(translate(text), line_width(), indent=f"  {pad_cells(label, 12)}", hang=hang)


def _bounds(check: Criterion) -> str:
    """Return the bounds of a criterion in the reader's language."""
    low, high = f"{check.low:.4g}", f"{check.high:.4g}"
    if math.isinf(check.low):
        return "" if math.isinf(check.high) else translate("at most {bound}", bound=high)
    if math.isinf(check.high):
        return translate("at least {bound}", bound=low)
    return translate("{low} to {high}", low=low, high=high)


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return how many claims have each verdict, in one line."""
    verdicts = [outcome.verdict for outcome in outcomes]
    counts = [verdicts.count(verdict) for verdict in VERDICTS]
    return translate(
        "{claims}: {hold} hold, {limited} hold with limits, {open} undecided, {false} do not hold",
        claims=translate_count(len(verdicts), "claim"),
        hold=counts[0],
        limited=counts[1],
        open=counts[2],
        false=counts[3],
    )


def as_csv(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes as CSV, with one line for each criterion."""
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
    """Return the outcome of a claim as a section of an HTML page."""
    claim = outcome.claim
    good = {VERDICTS[0]: True, VERDICTS[3]: False}.get(outcome.verdict)
    rows = [
        (_mark(c), format_value(c), _bounds(c), translate(c.quantity) + _spread(c))
        for c in outcome.checks
    ]
    texts = {
        translate("statement"): translate(claim.statement),
        translate("prediction"): translate(claim.prediction),
        translate("scope"): translate(claim.scope),
        translate("takeaway"): translate(claim.takeaway),
        translate("source"): _sources(claim),
    }
    return Section(
        claim.id,
        translate(outcome.verdict),
        good,
        texts,
        (
            translate("answer"),
            translate("measured"),
            translate("expected if the statement is true"),
            translate("quantity"),
        ),
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
    answer = translate(check.answer)
    return answer if check.role == "claim" else f"{translate(check.role)} {answer}"


def _spread(check: Criterion) -> str:
    """Return the spread of the measurements in parentheses; "" if there is none."""
    if check.spread is None:
        return ""
    least, most = (f"{x:.4g}" for x in check.spread)
    return translate(" ({least} to {most})", least=least, most=most)
