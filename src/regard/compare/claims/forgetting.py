"""Translation of numbers in words: an encoder that must put all into one state, against one that is
looked at again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from regard.compare.claims.base import Check, Claim, steps
from regard.compare.claims.training import learn
from regard.compare.experiment import Numbers
from regard.train.losses import PairLoss, where
from regard.train.tasks import TASKS
from regard.train.tasks.base import EOS, Example
from regard.train.tasks.evaluate import by_length, outcomes
from regard.train.tasks.examples import pad
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
        row["thirds"] = _thirds(
            model,
            [
                e
                for e in TASK.examples("validation", asked, seed)
                if e.length > TASK.lengths[1] // 2
            ],
        )
        found.append(row)
    return {
        "steps": count,
        "batch": BATCH,
        "asked": asked,
        "trained": TASK.lengths[1],
        "models": found,
    }


@torch.no_grad()
def _thirds(model: nn.Module, examples: Sequence[Example]) -> list[list[int]]:
    """Right words and words of the first, second and last third of long targets, each word given
    the right ones before it.
    """
    found = [[0, 0], [0, 0], [0, 0]]
    for rows in pad(TASK, examples).split(32):
        best = model(rows.source, rows.target[:, :-1], where(rows.source)).argmax(-1)
        for said, wanted in zip(best.tolist(), rows.target[:, 1:].tolist(), strict=True):
            words = wanted[: wanted.index(EOS)]
            for i, word in enumerate(words):
                third = found[min(2, 3 * i // len(words))]
                third[0] += said[i] == word
                third[1] += 1
    return found


def _shares(row: Mapping[str, Any], low: int, high: int) -> float:
    inside = [b for b in row["bins"] if b["low"] >= low and b["high"] <= high]
    right, examples = (sum(int(b[name]) for b in inside) for name in ("right", "examples"))
    return right / max(1, examples)


def _drop(row: Mapping[str, Any], trained: int) -> float:
    """The share right of short sources less that of long ones, within the lengths that were
    trained.
    """
    return _shares(row, 1, trained // 2) - _shares(row, trained // 2 + 1, trained)


def _checks(numbers: Mapping[str, Any]) -> list[Check]:
    state, _ = numbers["models"]
    return [
        Check(
            "share right of short sources less that of long ones, as trained",
            _drop(state, numbers["trained"]),
            low=0.15,
        ),
        Check(
            "it has learned the task at short lengths: share right",
            _shares(state, 1, 6),
            low=0.3,
            role="control",
        ),
    ]


def _checks_back(numbers: Mapping[str, Any]) -> list[Check]:
    state, attention = numbers["models"]
    trained = numbers["trained"]
    return [
        Check(
            "with attention: share right of long sources, as trained",
            _shares(attention, trained // 2 + 1, trained),
            low=0.7,
        ),
        Check(
            "... and share right of short sources less that of long ones",
            _drop(attention, trained),
            high=0.15,
        ),
        Check(
            "without it the same lengths are hard: share right of short less that of long ones",
            _drop(state, trained),
            low=0.15,
            role="control",
        ),
        Check("beyond the trained length: share right", attention["longer"], low=0.5, role="limit"),
    ]


def _checks_beginning(numbers: Mapping[str, Any]) -> list[Check]:
    first, _, last = (right / max(1, count) for right, count in numbers["models"][0]["thirds"])
    return [
        Check(
            "words right in the last third of a long translation less those in the first, each "
            "given the right words before it",
            last - first,
            low=0.05,
        ),
        Check("words right in the first third", first, role="told"),
        Check("words right in the last third", last, role="told"),
    ]


def _picture(numbers: Mapping[str, Any]) -> Picture:
    lines = tuple(
        Line(
            r["model"],
            tuple(
                ((b["low"] + b["high"]) / 2, b["right"] / b["examples"])
                for b in r["bins"]
                if b["examples"]
            ),
        )
        for r in numbers["models"]
    )
    return Picture(
        "Number words to numerals: every word right",
        "tokens of the source",
        "share",
        lines,
        edge=numbers["trained"] + 0.5,
    )


_MADE = (
    "Made sentences of number words, states of 96 numbers, minutes of training: more training "
    "moves the curve to the right, it does not lift its end."
)

CLAIM = Claim(
    id="forgetting",
    seeds=("S1.2", "S3.5", "S4.6", "E1.7"),
    says="A recurrent encoder and decoder without attention translate long sentences worse than "
    "short ones.",
    predicts="The share of right translations falls with the length of the source.",
    scale=_MADE,
    measure=_measure,
    checks=_checks,
    picture=_picture,
    shares="forgetting",
    lesson="What fades forward is not what vanishes backward: forgetting and vanishing gradients "
    "are two things (E1.7).",
)
"""S1.2."""

BEGINNING = Claim(
    id="forgetting-beginning",
    seeds=("S1.4",),
    says="What a recurrent translator loses of a long sentence is its beginning.",
    predicts="With all earlier words given right, fewer words are right at the beginning of a "
    "long translation than at its end.",
    scale=_MADE
    + " A word late in a translation also needs to know how far the translation has come, which "
    "this does not take apart.",
    measure=_measure,
    checks=_checks_beginning,
    picture=_picture,
    shares="forgetting",
    lesson="A state is dominated by recent input unless a gate keeps it (E1.8); what a decoder "
    "makes of it is another question.",
)
"""S1.4."""

BACK = Claim(
    id="looking-back",
    seeds=("S1.5", "S3.6", "S4.7"),
    says="With attention long sentences are translated as well as short ones.",
    predicts="The same network with attention: hardly a difference between short and long sources.",
    scale=_MADE,
    measure=_measure,
    checks=_checks_back,
    picture=_picture,
    shares="forgetting",
    lesson="At the lengths that it was trained on: beyond them attention fails too.",
)
"""S3.6."""
