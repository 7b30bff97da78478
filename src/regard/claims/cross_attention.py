"""Claims about attention between two sequences: a translation, and an image with its caption.

The translation of numbers in words compares an encoder that must put all into one state with one
whose every state the decoder attends to. Between an image and a text, cross-attention gives a row
for each query, so that the shape of the output says who asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from regard.claims.claim import (
    ATTN_JOURNEY,
    DEEPSEEK_NOTE,
    OVERVIEW,
    RASCHKA_NOTES,
    Claim,
    Criterion,
    NoteSection,
    num_steps,
)
from regard.claims.small_training import train_on_task
from regard.compare.experiment import Numbers
from regard.nn.variants import cross_attention
from regard.train.losses import Seq2SeqLoss, padded_positions
from regard.train.tasks import TASKS
from regard.train.tasks.evaluate import accuracy_by_length, answer_examples
from regard.train.tasks.task import EOS, Example, pad
from regard.train.tasks.task_models import Recipe, build
from regard.view.charts import Line, Picture

TASK = replace(TASKS["translate"], lengths=(1, 24, 48))
"""Shorter than `regard train --task translate`, so that minutes are enough."""
MODELS = ("lstm", "lstm+bahdanau")
SIZES = Recipe(dim=48, hidden=96, layers=1)
STEPS, BATCH = 700, 48


def _measure(budget: float, seed: int) -> Numbers:
    count, asked = num_steps(budget, STEPS), num_steps(budget, 160, least=24)
    found = []
    for name in MODELS:
        torch.manual_seed(seed)
        model = build(TASK, name, SIZES)
        loss = train_on_task(model, TASK, count, batch=BATCH, seed=seed, loss=Seq2SeqLoss())
        row: dict[str, Any] = {"model": name, "loss": loss, "bins": []}
        for split in ("validation", "longer"):
            part = answer_examples(model, TASK, TASK.examples(split, asked, seed))
            bins = accuracy_by_length(TASK, split, part)
            row[split] = sum(b.correct for b in bins) / sum(b.examples for b in bins)
            row["bins"] += [
                {"low": b.low, "high": b.high, "right": b.correct, "examples": b.examples}
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
        best = model(rows.source, rows.target[:, :-1], padded_positions(rows.source)).argmax(-1)
        for said, wanted in zip(best.tolist(), rows.target[:, 1:].tolist(), strict=True):
            words = wanted[: wanted.index(EOS)]
            for i, word in enumerate(words):
                third = found[min(2, 3 * i // len(words))]
                third[0] += said[i] == word
                third[1] += 1
    return found


def _shares(row: Mapping[str, Any], low: int, high: int) -> float:
    inside = [b for b in row["bins"] if b["low"] >= low and b["high"] <= high]
    return float(sum(b["right"] for b in inside) / max(1, sum(b["examples"] for b in inside)))


def _drop(row: Mapping[str, Any], trained: int) -> float:
    """The share right of short sources less that of long ones, within the lengths that were
    trained.
    """
    return _shares(row, 1, trained // 2) - _shares(row, trained // 2 + 1, trained)


def _checks(numbers: Mapping[str, Any]) -> list[Criterion]:
    state, _ = numbers["models"]
    return [
        Criterion(
            "share right of short sources less that of long ones, as trained",
            _drop(state, numbers["trained"]),
            low=0.15,
        ),
        Criterion(
            "it has learned the task at short lengths: share right",
            _shares(state, 1, 6),
            low=0.3,
            role="control",
        ),
    ]


def _checks_back(numbers: Mapping[str, Any]) -> list[Criterion]:
    state, attention = numbers["models"]
    trained = numbers["trained"]
    return [
        Criterion(
            "with attention: share right of long sources, as trained",
            _shares(attention, trained // 2 + 1, trained),
            low=0.7,
        ),
        Criterion(
            "... and share right of short sources less that of long ones",
            _drop(attention, trained),
            high=0.15,
        ),
        Criterion(
            "without it the same lengths are hard: share right of short less that of long ones",
            _drop(state, trained),
            low=0.15,
            role="control",
        ),
        Criterion(
            "beyond the trained length: share right", attention["longer"], low=0.5, role="limit"
        ),
    ]


def _checks_beginning(numbers: Mapping[str, Any]) -> list[Criterion]:
    first, _, last = (right / max(1, count) for right, count in numbers["models"][0]["thirds"])
    return [
        Criterion(
            "words right in the last third of a long translation less those in the first, each "
            "given the right words before it",
            last - first,
            low=0.05,
        ),
        Criterion("words right in the first third", first, role="reported"),
        Criterion("words right in the last third", last, role="reported"),
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

FORGETTING = Claim(
    id="forgetting",
    sources=(
        NoteSection(DEEPSEEK_NOTE, "1.1.1"),
        NoteSection(RASCHKA_NOTES, "2"),
        NoteSection(OVERVIEW, "2.1"),
    ),
    statement="A recurrent encoder and decoder without attention translate long sentences worse than "
    "short ones.",
    prediction="The share of right translations falls with the length of the source.",
    scope=_MADE,
    measure=_measure,
    checks=_checks,
    picture=_picture,
    measured_with="forgetting",
    takeaway="What fades forward is not what vanishes backward: forgetting and vanishing gradients "
    "are two things.",
)

BEGINNING = Claim(
    id="forgetting-beginning",
    sources=(NoteSection(DEEPSEEK_NOTE, "1.1.1"),),
    statement="What a recurrent translator loses of a long sentence is its beginning.",
    prediction="With all earlier words given right, fewer words are right at the beginning of a "
    "long translation than at its end.",
    scope=_MADE
    + " A word late in a translation also needs to know how far the translation has come, which "
    "this does not take apart.",
    measure=_measure,
    checks=_checks_beginning,
    picture=_picture,
    measured_with="forgetting",
    takeaway="A state is dominated by recent input unless a gate keeps it; what a decoder "
    "makes of it is another question.",
)

BACK = Claim(
    id="looking-back",
    sources=(
        NoteSection(DEEPSEEK_NOTE, "1.1.2"),
        NoteSection(RASCHKA_NOTES, "3"),
        NoteSection(OVERVIEW, "2.1"),
    ),
    statement="With attention long sentences are translated as well as short ones.",
    prediction="The same network with attention: hardly a difference between short and long sources.",
    scope=_MADE,
    measure=_measure,
    checks=_checks_back,
    picture=_picture,
    measured_with="forgetting",
    takeaway="At the lengths that it was trained on: beyond them attention fails too.",
)


TEXT, IMAGE, DIM, HEADS = 7, 64, 32, 4
"""Seven tokens of a text, and an image of 8 x 8 places."""


@torch.no_grad()
def _measure_image(_budget: float, seed: int) -> Numbers:
    torch.manual_seed(seed)
    layer = cross_attention(DIM, HEADS).eval()
    text, image = torch.randn(1, TEXT, DIM), torch.randn(1, IMAGE, DIM)
    rows = {"text": layer(text, memory=image).shape[1], "image": layer(image, memory=text).shape[1]}
    return {"text": TEXT, "image": IMAGE, "rows": rows}


def _checks_image(numbers: Mapping[str, Any]) -> list[Criterion]:
    rows = numbers["rows"]["text"]  # as it is said: queries from the text
    return [
        Criterion(
            "captioning: rows that come out, by the tokens of the text that is made",
            rows / numbers["text"],
            1.0,
            1.0,
        ),
        Criterion(
            "text to image: rows that come out, by the places of the image that is made",
            rows / numbers["image"],
            1.0,
            1.0,
            role="limit",
        ),
        Criterion(
            "... with queries from the image and keys and values from the text",
            numbers["rows"]["image"] / numbers["image"],
            role="reported",
        ),
    ]


def _picture_image(numbers: Mapping[str, Any]) -> Picture:
    lines = tuple(
        Line(f"queries from the {name}", ((0.0, float(rows)), (1.0, float(rows))))
        for name, rows in numbers["rows"].items()
    )
    return Picture(
        "Rows that cross-attention gives: 7 tokens of text, 64 places of an image",
        "",
        "rows",
        lines,
    )


IMAGE_TEXT = Claim(
    id="image-text",
    sources=(NoteSection(OVERVIEW, "5.1"), NoteSection(ATTN_JOURNEY, "5.3")),
    statement="Between image and text, the image gives keys and values and the text gives the queries.",
    prediction="A row comes out for everything that is made: tokens of a caption, places of a "
    "picture.",
    scope="Exact: a matter of shapes. Which models do which: Flamingo (2204.14198) asks an image "
    "from the text, Stable Diffusion (2112.10752, section 3.3) a text from the image.",
    measure=_measure_image,
    checks=_checks_image,
    picture=_picture_image,
    takeaway="What is made asks, and what it is made from answers: right for captioning, reversed "
    "for text to image.",
)

CLAIMS = (FORGETTING, BEGINNING, BACK, IMAGE_TEXT)
