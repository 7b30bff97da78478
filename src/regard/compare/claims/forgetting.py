"""Translation of numbers in words: an encoder that must put all into one state, against one that is looked at again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from regard.compare.claims.base import Check, Claim, steps
from regard.compare.claims.training import learn
from regard.compare.experiment import Numbers
from regard.train.seq2seq import PairLoss
from regard.train.tasks import TASKS
from regard.train.tasks.answers import by_length, outcomes
from regard.train.tasks.models import Recipe, build
from regard.view.curves import Line, Picture

TASK = replace(TASKS["translate"], lengths=(1, 24, 48))
"""Shorter than `regard train --task translate`, so that minutes are enough."""
MODELS = ("lstm", "lstm+bahdanau")
SIZES = Recipe(dim=48, hidden=96, layers=1)
STEPS, BATCH = 700, 48


def _measure(budget: float, seed: int) -> Numbers:
    count, asked = steps(budget, STEPS), steps(budget, 160, least=24)
    found = []
    for name in MODELS:
        torch.manual_seed(seed)
        model = build(TASK, name, SIZES)
        loss = learn(model, TASK, count, batch=BATCH, seed=seed, loss=PairLoss())
        row: dict[str, Any] = {"model": name, "loss": loss, "bins": []}
        for split in ("validation", "longer"):
            part = outcomes(model, TASK, TASK.examples(split, asked, seed))
            bins = by_length(TASK, split, part)
            row[split] = sum(b.right for b in bins) / sum(b.examples for b in bins)
            row["bins"] += [
                {"low": b.low, "high": b.high, "right": b.right, "examples": b.examples}
                for b in bins
            ]
        found.append(row)
    return {"steps": count, "batch": BATCH, "asked": asked, "trained": TASK.lengths[1], "models": found}  # fmt: skip


def _shares(row: Mapping[str, Any], low: int, high: int) -> float:
    inside = [b for b in row["bins"] if b["low"] >= low and b["high"] <= high]
    return sum(b["right"] for b in inside) / max(1, sum(b["examples"] for b in inside))


def _checks(numbers: Mapping[str, Any]) -> list[Check]:
    state, attention = numbers["models"]
    trained = numbers["trained"]
    half = trained // 2
    drop = _shares(state, 1, half) - _shares(state, half + 1, trained)
    return [
        Check("with attention more is right, at lengths that were trained: difference of shares", attention["validation"] - state["validation"], low=0.15),
        Check("without it long sources suffer: share right of short minus long ones, as trained", drop, low=0.15),
        Check("with attention long sources are right as well, as trained: share", _shares(attention, half + 1, trained), low=0.9, essential=False),
        Check("attention holds beyond the trained length: share", attention["longer"], low=0.5, essential=False),
    ]  # fmt: skip


def _picture(numbers: Mapping[str, Any]) -> Picture:
    lines = tuple(
        Line(r["model"], tuple(((b["low"] + b["high"]) / 2, b["right"] / b["examples"]) for b in r["bins"] if b["examples"]))
        for r in numbers["models"]
    )  # fmt: skip
    return Picture("Number words to numerals: every word right", "tokens of the source", "share", lines, edge=numbers["trained"] + 0.5)  # fmt: skip


CLAIM = Claim(
    id="forgetting",
    seeds=("S1.2", "S1.4", "S3.5", "S4.6", "E1.7"),
    says="A recurrent network squeezes the past into one state and forgets how a long sentence began; attention looks back.",
    predicts="The same LSTM, with attention and without: without it the share of right translations falls with the length.",
    scale="Made sentences of number words, states of 96 numbers, minutes of training: more training moves the curve to the right, it does not lift its end.",
    measure=_measure,
    checks=_checks,
    picture=_picture,
    lesson="What fades forward is not what vanishes backward: forgetting and vanishing gradients are two things (E1.7).",
)
"""S1.2."""
