"""Minus infinity against a large negative number, as what a hidden key scores.

weights = softmax(s + fill on hidden keys)
with -inf they are 0;  with a number c they are exp(c - m) against the visible ones
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from regard import attend, attention_weights
from regard.claims.claim import (
    ATTN_JOURNEY,
    DEEPSEEK_NOTE,
    RASCHKA_NOTES,
    Claim,
    Criterion,
    NoteSection,
)
from regard.compare.experiment import Numbers
from regard.masks import Causal
from regard.masks import Dense as DenseMask
from regard.view.charts import Line, Picture

FILLS = (-1.0, -10.0, -100.0, -1e4, -1e9)
SCALES = (1.0, 10.0, 100.0)
"""What queries are multiplied with: scores of a trained layer may be large."""


def _leak(q: Tensor, k: Tensor, fill: float) -> float:
    """The largest weight of a key in the future, when it is filled with a number."""
    future = ~Causal().allows(torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None])
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(future, fill)
    return float(scores.softmax(-1).masked_select(future).max())


def _measure(_budget: float, seed: int) -> Numbers:
    make = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 8, 32, 64, generator=make, dtype=torch.float64) for _ in range(3))
    leaks = [
        {"scale": s, "fills": [{"fill": f, "weight": _leak(s * q, k, f)} for f in FILLS]}
        for s in SCALES
    ]
    ours = max(
        float(attention_weights(s * q, k, mask=Causal())[0].triu(1).abs().max()) for s in SCALES
    )
    # a row that may see nothing: padding in front, say
    nothing = torch.ones(32, 32, dtype=torch.bool)
    nothing[0] = False
    empty = attend(q, k, v, mask=DenseMask(nothing))[:, :, 0]
    scores = (q @ k.mT * 64**-0.5).masked_fill(~nothing, -1e9)
    averaged = (scores.softmax(-1) @ v)[:, :, 0]
    bare = (q @ k.mT * 64**-0.5).masked_fill(~nothing, -math.inf).softmax(-1)[:, :, 0]
    half = torch.tensor(-1e9).to(torch.float16)
    # garbage behind the mask: multiplied by a weight of 0 it is NaN, selected away it is nothing
    bad = v.clone()
    bad[:, :, -1] = math.nan
    hidden = torch.ones(32, 32, dtype=torch.bool)
    hidden[:, -1] = False
    zeros = attention_weights(q, k, mask=DenseMask(hidden))
    return {
        "leaks": leaks,
        "ours": ours,
        "empty_row": float(empty.abs().max()),
        "filled_row_off_mean": float((averaged - v.mean(2)).abs().max()),
        "filled_row": float(averaged.abs().max()),
        "bare_softmax_is_nan": float(bare.isnan().all()),
        "fill_is_finite_in_fp16": float(half.isfinite()),
        "nan_after_multiplying": float((zeros @ bad).isnan().float().mean()),
        "nan_after_masking": float(
            attend(q, k, bad, mask=DenseMask(hidden)).isnan().float().mean()
        ),
    }


def _checks(numbers: Mapping[str, Any]) -> list[Criterion]:
    return [
        Criterion(
            "the largest weight behind the mask, at any of the scales", numbers["ours"], high=0.0
        ),
        Criterion(
            "softmax over -inf alone gives weights too (1 = it is NaN)",
            numbers["bare_softmax_is_nan"],
            high=0.0,
            role="limit",
        ),
        Criterion(
            "a row that sees nothing, behind regard's masks", numbers["empty_row"], role="reported"
        ),
    ]


def _checks_hides(numbers: Mapping[str, Any]) -> list[Criterion]:
    return [
        Criterion("the largest weight behind the mask", numbers["ours"], high=0.0),
        Criterion(
            "a NaN in a hidden value stays hidden: share of the outputs that it reaches when its "
            "weight of 0 is multiplied",
            numbers["nan_after_multiplying"],
            high=0.0,
        ),
        Criterion(
            "the same, where what is masked is selected away, as regard does",
            numbers["nan_after_masking"],
            role="reported",
        ),
    ]


def _checks_large(numbers: Mapping[str, Any]) -> list[Criterion]:
    at = {(r["scale"], f["fill"]): f["weight"] for r in numbers["leaks"] for f in r["fills"]}
    return [
        Criterion(
            "-1e9 gives weights of 0 where something is seen, at any of the scales",
            max(at[s, -1e9] for s in SCALES),
            high=0.0,
        ),
        Criterion(
            "the measure sees a leak where there is one: the weight with -10, at the largest scale",
            at[100.0, -10.0],
            low=1e-3,
            role="control",
        ),
        Criterion(
            "a row that sees nothing gives 0 as well (it is the mean of all values)",
            numbers["filled_row"],
            high=1e-6,
            role="limit",
        ),
        Criterion(
            "-1e9 is a finite number in fp16 too (1 = it is)",
            numbers["fill_is_finite_in_fp16"],
            low=1.0,
            role="limit",
        ),
    ]


def _picture(numbers: Mapping[str, Any]) -> Picture:
    lines = tuple(
        Line(f"queries x {r['scale']:g}", tuple((-f["fill"], f["weight"]) for f in r["fills"]))
        for r in numbers["leaks"]
    )
    title = (
        "The largest weight of a hidden key, when it scores a number instead of -inf (0 is "
        "not drawn)"
    )
    return Picture(title, "minus the number", "weight", lines, "xy")


_EXACT = "Exact statements about arithmetic: they do not depend on the scale."

CLAIM = Claim(
    id="minus-infinity",
    sources=(
        NoteSection(DEEPSEEK_NOTE, "1.1.3"),
        NoteSection(ATTN_JOURNEY, "3.2"),
        NoteSection(RASCHKA_NOTES, "6.1"),
    ),
    statement="A key that scores minus infinity has a weight of exactly 0.",
    prediction="Zeros behind the mask, whatever the size of the other scores.",
    scope=_EXACT,
    measure=_measure,
    checks=_checks,
    picture=_picture,
    takeaway="Where a row sees nothing, softmax of minus infinity alone is NaN, not 0: the "
    "empty row wants a definition, and ours is 0.",
)

HIDES = Claim(
    id="minus-infinity-hides",
    sources=(NoteSection(ATTN_JOURNEY, "3.2"),),
    statement="Scores of minus infinity keep every trace of the masked positions out of the output.",
    prediction="Whatever stands in a masked value, the output does not change.",
    scope=_EXACT,
    measure=_measure,
    checks=_checks_hides,
    picture=_picture,
    measured_with="minus-infinity",
    takeaway="A weight of 0 times NaN or infinity is NaN: what is masked must be selected away, not "
    "multiplied.",
)

LARGE = Claim(
    id="large-negative",
    sources=(NoteSection(DEEPSEEK_NOTE, "1.1.3"),),
    statement="A large negative number does the same as minus infinity.",
    prediction="Weights of exactly 0 behind the mask, and the same rows everywhere else.",
    scope=_EXACT,
    measure=_measure,
    checks=_checks_large,
    picture=_picture,
    measured_with="minus-infinity",
    takeaway="The two agree exactly where something is seen; an empty row becomes a silent average, "
    "and in fp16 -1e9 is no number.",
)

CLAIMS = (CLAIM, HIDES, LARGE)
