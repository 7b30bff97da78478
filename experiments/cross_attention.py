"""Claims about attention between two sequences: a translation, and an image with its caption.

The translation of number words compares an encoder that compresses the source into one state with
one whose states the decoder attends to. Between an image and a text, cross-attention returns one
row per query, so that the shape of the output shows which of the two gives the queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from experiments.claim import (
    ATTN_JOURNEY,
    DEEPSEEK_NOTE,
    OVERVIEW,
    RASCHKA_NOTES,
    Claim,
    Criterion,
    NoteSection,
    num_steps,
)
from experiments.small_training import train_on_task
from regard.compare.experiment import Numbers
from regard.language import Phrase
from regard.nn.variants import cross_attention
from regard.train.losses import Seq2SeqLoss, padded_positions
from regard.train.tasks import TASKS
from regard.train.tasks.evaluate import accuracy_by_length, answer_examples
from regard.train.tasks.task import EOS, Example, pad
from regard.train.tasks.task_training import Recipe, build
from regard.view.charts import Line, Picture

TASK = replace(TASKS["translate"], lengths=(1, 24, 48))
"""The task of `regard train --task translate` with shorter sources, to be learned in minutes."""
MODELS = ("lstm", "lstm+bahdanau")
SIZES = Recipe(dim=48, hidden=96, layers=1)
STEPS, BATCH = 700, 48


def _measure(budget: float, seed: int) -> Numbers:
    count, examples = num_steps(budget, STEPS), num_steps(budget, 160, least=24)
    rows = []
    for name in MODELS:
        torch.manual_seed(seed)
        model = build(TASK, name, SIZES)
        loss = train_on_task(model, TASK, count, batch=BATCH, seed=seed, loss=Seq2SeqLoss())
        row: Numbers = {"model": name, "loss": loss, "bins": []}
        for split in ("validation", "longer"):
            answers = answer_examples(model, TASK, TASK.examples(split, examples, seed))
            bins = accuracy_by_length(TASK, split, answers)
            row[split] = sum(b.correct for b in bins) / sum(b.examples for b in bins)
            row["bins"] += [
                {"low": b.low, "high": b.high, "right": b.correct, "examples": b.examples}
                for b in bins
            ]
        row["thirds"] = _thirds(
            model,
            [
                e
                for e in TASK.examples("validation", examples, seed)
                if e.length > TASK.lengths[1] // 2
            ],
        )
        rows.append(row)
    return {
        "steps": count,
        "batch": BATCH,
        "asked": examples,
        "trained": TASK.lengths[1],
        "models": rows,
    }


@torch.no_grad()
def _thirds(model: nn.Module, examples: Sequence[Example]) -> list[list[int]]:
    """Return [correct, total] words, after right ones, by thirds of long targets."""
    thirds = [[0, 0], [0, 0], [0, 0]]
    for rows in pad(TASK, examples).split(32):
        best = model(rows.source, rows.target[:, :-1], padded_positions(rows.source)).argmax(-1)
        for predicted, expected in zip(best.tolist(), rows.target[:, 1:].tolist(), strict=True):
            words = expected[: expected.index(EOS)]
            for i, word in enumerate(words):
                third = thirds[min(2, 3 * i // len(words))]
                third[0] += predicted[i] == word
                third[1] += 1
    return thirds


def _shares(row: Numbers, low: int, high: int) -> float:
    """Return the share of correct translations of sources with `low` to `high` tokens."""
    inside = [b for b in row["bins"] if b["low"] >= low and b["high"] <= high]
    return float(sum(b["right"] for b in inside) / max(1, sum(b["examples"] for b in inside)))


def _drop(row: Numbers, trained: int) -> float:
    """Return the accuracy on short sources minus that on long ones, within the trained lengths."""
    return _shares(row, 1, trained // 2) - _shares(row, trained // 2 + 1, trained)


def _checks(numbers: Numbers) -> list[Criterion]:
    no_attention, _ = numbers["models"]
    return [
        Criterion(
            "accuracy on short sources minus accuracy on long ones, within the trained lengths",
            _drop(no_attention, numbers["trained"]),
            low=0.15,
        ),
        Criterion(
            "accuracy on sources of up to 6 tokens (the model has learned the task)",
            _shares(no_attention, 1, 6),
            low=0.3,
            role="control",
        ),
    ]


def _checks_back(numbers: Numbers) -> list[Criterion]:
    no_attention, attention = numbers["models"]
    trained = numbers["trained"]
    return [
        Criterion(
            "with attention: accuracy on long sources, within the trained lengths",
            _shares(attention, trained // 2 + 1, trained),
            low=0.7,
        ),
        Criterion(
            "with attention: accuracy on short sources minus accuracy on long ones",
            _drop(attention, trained),
            high=0.15,
        ),
        Criterion(
            "without attention: accuracy on short sources minus accuracy on long ones",
            _drop(no_attention, trained),
            low=0.15,
            role="control",
        ),
        Criterion(
            "with attention: accuracy beyond the trained length",
            attention["longer"],
            low=0.5,
            role="limit",
        ),
    ]


def _checks_beginning(numbers: Numbers) -> list[Criterion]:
    first, _, last = (right / max(1, count) for right, count in numbers["models"][0]["thirds"])
    return [
        Criterion(
            "share of correct words in the last third of a long translation minus that in the "
            "first third, each predicted after the right words before it",
            last - first,
            low=0.05,
        ),
        Criterion("share of correct words in the first third", first, role="reported"),
        Criterion("share of correct words in the last third", last, role="reported"),
    ]


def _picture(numbers: Numbers) -> Picture:
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
        "Number words to numerals: share of translations with every word right",
        "tokens of the source",
        "share",
        lines,
        edge=numbers["trained"] + 0.5,
    )


_GENERATED = (
    "Generated sentences of number words, states of dim 96, minutes of training. More training "
    "moves the drop to longer sources and does not remove it."
)

FORGETTING = Claim(
    id="forgetting",
    sources=(
        NoteSection(DEEPSEEK_NOTE, "1.1.1"),
        NoteSection(RASCHKA_NOTES, "2"),
        NoteSection(OVERVIEW, "2.1"),
    ),
    statement="A recurrent encoder and decoder without attention translate long sentences worse "
    "than short ones.",
    prediction="The share of right translations falls with the length of the source.",
    scope=_GENERATED,
    measure=_measure,
    checks=_checks,
    picture=_picture,
    measured_with="forgetting",
    takeaway="A state that forgets its early inputs and gradients that vanish are two different "
    "effects.",
)

BEGINNING = Claim(
    id="forgetting-beginning",
    sources=(NoteSection(DEEPSEEK_NOTE, "1.1.1"),),
    statement="A recurrent translation model without attention forgets the beginning of a long "
    "sentence first.",
    prediction="After the right earlier words, fewer words are predicted correctly at the "
    "beginning of a long translation than at its end.",
    scope=Phrase(
        "{generated} A late word of a translation also depends on how far the translation has "
        "come; this experiment does not separate the two.",
        generated=Phrase(_GENERATED),
    ),
    measure=_measure,
    checks=_checks_beginning,
    picture=_picture,
    measured_with="forgetting",
    takeaway="A state mostly reflects recent inputs unless a gate preserves older ones; how a "
    "decoder uses the state is another question.",
)

BACK = Claim(
    id="looking-back",
    sources=(
        NoteSection(DEEPSEEK_NOTE, "1.1.2"),
        NoteSection(RASCHKA_NOTES, "3"),
        NoteSection(OVERVIEW, "2.1"),
    ),
    statement="With attention long sentences are translated as well as short ones.",
    prediction="With attention, the same network translates short and long sources about equally "
    "well.",
    scope=_GENERATED,
    measure=_measure,
    checks=_checks_back,
    picture=_picture,
    measured_with="forgetting",
    takeaway="This is true of the lengths that the model was trained on; beyond them attention "
    "fails too.",
)


TEXT, IMAGE, DIM, HEADS = 7, 64, 32, 4
"""The sizes: seven tokens of text, an image of 8 x 8 positions, the dim, and the heads."""


@torch.no_grad()
def _measure_image(_budget: float, seed: int) -> Numbers:
    torch.manual_seed(seed)
    layer = cross_attention(DIM, HEADS).eval()
    text, image = torch.randn(1, TEXT, DIM), torch.randn(1, IMAGE, DIM)
    rows = {"text": layer(text, memory=image).shape[1], "image": layer(image, memory=text).shape[1]}
    return {"text": TEXT, "image": IMAGE, "rows": rows}


def _checks_image(numbers: Numbers) -> list[Criterion]:
    rows = numbers["rows"]["text"]  # the statement of the note: the text gives the queries
    return [
        Criterion(
            "captioning: output rows / tokens of the generated text",
            rows / numbers["text"],
            1.0,
            1.0,
        ),
        Criterion(
            "text to image: output rows / positions of the generated image",
            rows / numbers["image"],
            1.0,
            1.0,
            role="limit",
        ),
        Criterion(
            "text to image, with queries from the image and keys and values from the text: output "
            "rows / positions",
            numbers["rows"]["image"] / numbers["image"],
            role="reported",
        ),
    ]


def _picture_image(numbers: Numbers) -> Picture:
    lines = tuple(
        Line(
            Phrase("queries from the {name}", name=Phrase(name)),
            ((0.0, float(rows)), (1.0, float(rows))),
        )
        for name, rows in numbers["rows"].items()
    )
    return Picture(
        "Output rows of cross-attention: 7 tokens of text, 64 positions of an image",
        "",
        "rows",
        lines,
    )


IMAGE_TEXT = Claim(
    id="image-text",
    sources=(NoteSection(OVERVIEW, "5.1"), NoteSection(ATTN_JOURNEY, "5.3")),
    statement="Between image and text, the image gives keys and values and the text gives the "
    "queries.",
    prediction="There is one output row for each token of a caption, and for each position of a "
    "generated image.",
    scope="Exact, since only shapes matter. In Flamingo (2204.14198) the text gives the queries "
    "and the image the keys; in Stable Diffusion (2112.10752, section 3.3) it is the other way "
    "round.",
    measure=_measure_image,
    checks=_checks_image,
    picture=_picture_image,
    takeaway="The generated sequence gives the queries, and the sequence that it is generated from "
    "gives keys and values: true of captioning, and the reverse for text to image.",
)

CLAIMS = (FORGETTING, BEGINNING, BACK, IMAGE_TEXT)
