"""The claim that a causal row of n tokens sees n keys, counted."""

from __future__ import annotations

from experiments.claim import OVERVIEW, Claim, Criterion, NoteSection
from regard.compare.experiment import Numbers
from regard.masks import Causal
from regard.span import Span
from regard.view.charts import Line, Picture

TOKENS = 4


def _measure(_budget: float, _seed: int) -> Numbers:
    positions = Span(0, TOKENS)
    return {"seen": Causal().block(positions, positions)[0, 0].sum(-1).tolist()}


def _checks(numbers: Numbers) -> list[Criterion]:
    return [Criterion("keys that the last row sees", numbers["seen"][-1], TOKENS, TOKENS)]


def _picture(numbers: Numbers) -> Picture:
    points = tuple((float(i), float(n)) for i, n in enumerate(numbers["seen"]))
    return Picture("Keys that a row sees", "row", "keys", (Line("causal", points),))


CLAIM = Claim(
    id="counting",
    sources=(NoteSection(OVERVIEW, "1.2"),),
    statement="The last of n tokens sees n keys.",
    prediction="The last row of a causal mask has as many keys as there are tokens.",
    scope="Four tokens, counted exactly.",
    measure=_measure,
    checks=_checks,
    picture=_picture,
    takeaway="A token sees itself and all tokens before it.",
)

CLAIMS = (CLAIM,)
