"""Claims about minus infinity, or a large negative number, as the score of a masked key.

weights = softmax(scores, with a fill value for masked keys). With -inf the weights of masked keys
are 0; with a number c they are proportional to exp(c - m), where m is the largest score.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from experiments.claim import (
    ATTN_JOURNEY,
    DEEPSEEK_NOTE,
    RASCHKA_NOTES,
    Claim,
    Criterion,
    NoteSection,
)
from regard import attend, attention_weights
from regard.compare.experiment import Numbers
from regard.language import Phrase
from regard.masks import Causal
from regard.masks import Dense as DenseMask
from regard.view.charts import Line, Picture

FILLS = (-1.0, -10.0, -100.0, -1e4, -1e9)
SCALES = (1.0, 10.0, 100.0)
"""Factors for the queries, since the scores of a trained layer may be large."""


def _leak(q: Tensor, k: Tensor, fill: float) -> float:
    """Return the largest weight of a future key when its score is filled with a number."""
    future = ~Causal().allows(torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None])
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(future, fill)
    return float(scores.softmax(-1).masked_select(future).max())


def _measure(_budget: float, seed: int) -> Numbers:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(1, 8, 32, 64, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    leaks = [
        {"scale": s, "fills": [{"fill": f, "weight": _leak(s * q, k, f)} for f in FILLS]}
        for s in SCALES
    ]
    largest_masked_weight = max(
        float(attention_weights(s * q, k, mask=Causal())[0].triu(1).abs().max()) for s in SCALES
    )
    # the first query sees no key, as a padding token does
    visible = torch.ones(32, 32, dtype=torch.bool)
    visible[0] = False
    empty = attend(q, k, v, mask=DenseMask(visible))[:, :, 0]
    scores = (q @ k.mT * 64**-0.5).masked_fill(~visible, -1e9)
    filled_row = (scores.softmax(-1) @ v)[:, :, 0]
    nan_row = (q @ k.mT * 64**-0.5).masked_fill(~visible, -math.inf).softmax(-1)[:, :, 0]
    fill_in_fp16 = torch.tensor(-1e9).to(torch.float16)
    # NaN in a masked value: multiplied by a weight of 0 it is NaN, but if it is selected away it
    # has no effect
    v_with_nan = v.clone()
    v_with_nan[:, :, -1] = math.nan
    last_key_masked = torch.ones(32, 32, dtype=torch.bool)
    last_key_masked[:, -1] = False
    weights_with_zero = attention_weights(q, k, mask=DenseMask(last_key_masked))
    return {
        "leaks": leaks,
        "ours": largest_masked_weight,
        "empty_row": float(empty.abs().max()),
        "filled_row_off_mean": float((filled_row - v.mean(2)).abs().max()),
        "filled_row": float(filled_row.abs().max()),
        "bare_softmax_is_nan": float(nan_row.isnan().all()),
        "fill_is_finite_in_fp16": float(fill_in_fp16.isfinite()),
        "nan_after_multiplying": float((weights_with_zero @ v_with_nan).isnan().float().mean()),
        "nan_after_masking": float(
            attend(q, k, v_with_nan, mask=DenseMask(last_key_masked)).isnan().float().mean()
        ),
    }


def _checks(numbers: Numbers) -> list[Criterion]:
    return [
        Criterion("largest weight of a masked key, over all scales", numbers["ours"], high=0.0),
        Criterion(
            "softmax of a row that is -inf throughout (1 = NaN)",
            numbers["bare_softmax_is_nan"],
            high=0.0,
            role="limit",
        ),
        Criterion(
            "regard: largest output of a row without visible keys",
            numbers["empty_row"],
            role="reported",
        ),
    ]


def _checks_hides(numbers: Numbers) -> list[Criterion]:
    return [
        Criterion("largest weight of a masked key", numbers["ours"], high=0.0),
        Criterion(
            "NaN in a masked value, multiplied by its weight of 0: share of outputs that are NaN",
            numbers["nan_after_multiplying"],
            high=0.0,
        ),
        Criterion(
            "NaN in a masked value that is selected away, as in regard: share of outputs that are "
            "NaN",
            numbers["nan_after_masking"],
            role="reported",
        ),
    ]


def _checks_large(numbers: Numbers) -> list[Criterion]:
    weights = {(r["scale"], f["fill"]): f["weight"] for r in numbers["leaks"] for f in r["fills"]}
    return [
        Criterion(
            "largest weight of a masked key with -1e9, in rows with a visible key, over all scales",
            max(weights[s, -1e9] for s in SCALES),
            high=0.0,
        ),
        Criterion(
            "largest weight of a masked key with -10 at the largest scale (a leak is detected)",
            weights[100.0, -10.0],
            low=1e-3,
            role="control",
        ),
        Criterion(
            "largest output of a row without visible keys with -1e9 (it is the mean of all values)",
            numbers["filled_row"],
            high=1e-6,
            role="limit",
        ),
        Criterion(
            "-1e9 in fp16 (1 = finite)",
            numbers["fill_is_finite_in_fp16"],
            low=1.0,
            role="limit",
        ),
    ]


def _picture(numbers: Numbers) -> Picture:
    lines = tuple(
        Line(
            Phrase("queries x {scale:g}", scale=r["scale"]),
            tuple((-f["fill"], f["weight"]) for f in r["fills"]),
        )
        for r in numbers["leaks"]
    )
    title = (
        "Largest weight of a masked key whose score is a number instead of -inf (0 is not drawn)"
    )
    return Picture(title, "minus the number", "weight", lines, "xy")


_EXACT = "Exact statements about arithmetic, which do not depend on the size of a model."

CLAIM = Claim(
    id="minus-infinity",
    sources=(
        NoteSection(DEEPSEEK_NOTE, "1.1.3"),
        NoteSection(ATTN_JOURNEY, "3.2"),
        NoteSection(RASCHKA_NOTES, "6.1"),
    ),
    statement="A key whose score is minus infinity has a weight of exactly 0.",
    prediction="The weights of masked keys are zero, whatever the size of the other scores.",
    scope=_EXACT,
    measure=_measure,
    checks=_checks,
    picture=_picture,
    takeaway="For a row without visible keys the softmax of minus infinity alone is NaN, not 0. "
    "Such a row needs a definition; in regard its output is 0.",
)

HIDES = Claim(
    id="minus-infinity-hides",
    sources=(NoteSection(ATTN_JOURNEY, "3.2"),),
    statement="Scores of minus infinity remove every effect of the masked positions on the output.",
    prediction="The output does not change with the content of a masked value.",
    scope=_EXACT,
    measure=_measure,
    checks=_checks_hides,
    picture=_picture,
    measured_with="minus-infinity",
    takeaway="A weight of 0 times NaN or infinity is NaN, so masked values must be selected away, "
    "not multiplied by 0.",
)

LARGE = Claim(
    id="large-negative",
    sources=(NoteSection(DEEPSEEK_NOTE, "1.1.3"),),
    statement="A large negative number does the same as minus infinity.",
    prediction="The weights of masked keys are exactly 0, and all other rows are the same.",
    scope=_EXACT,
    measure=_measure,
    checks=_checks_large,
    picture=_picture,
    measured_with="minus-infinity",
    takeaway="The two agree exactly in rows with a visible key. A row without one becomes the mean "
    "of all values, and in fp16 -1e9 is not finite.",
)

CLAIMS = (CLAIM, HIDES, LARGE)
