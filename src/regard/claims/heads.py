"""Several heads against one wide head: the same width, parameters and FLOPs, trained on text and on
a task of two places.

two places: y_t = (x_{t-1} - x_{t-4}) mod V: what is asked for stands at two places at once
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from statistics import mean
from typing import Any

from regard.claims.claim import (
    ATTN_JOURNEY,
    DEEPSEEK_NOTE,
    OUTLINE,
    OVERVIEW,
    RASCHKA_NOTES,
    Claim,
    Criterion,
    NoteSection,
    median_criterion,
    num_seeds,
    num_steps,
)
from regard.claims.small_training import (
    BYTES,
    answer_accuracy,
    byte_loss,
    small_decoder,
    train_on_bytes,
    train_on_task,
)
from regard.compare.experiment import Numbers
from regard.nn.variants import mha, mha_per_head
from regard.train.tasks.task import Example, Task, Vocabulary
from regard.view.charts import Line, Picture

KINDS, BACK = 8, (1, 4)
SYMBOLS = tuple(f"d{i}" for i in range(KINDS))
HEADS = (1, 2, 8)
DIM, CONTEXT = 64, 96
PLACES_STEPS, PLACES_SEEDS = 700, 3
TEXT_STEPS, TEXT_SEEDS = 160, 3


def _places(random: Random, length: int) -> Example:
    drawn = [random.randrange(KINDS) for _ in range(length)]
    near, far = BACK
    asked = [
        "" if t < far else SYMBOLS[(drawn[t - near] - drawn[t - far]) % KINDS]
        for t in range(length)
    ]
    return Example(tuple(SYMBOLS[i] for i in drawn), tuple(asked))


PLACES = Task(
    name="two-places",
    description="Say the difference of the symbols one and four places back",
    reference="made here, for the claim of several heads",
    kind="causal",
    vocabulary=Vocabulary(SYMBOLS),
    draw=_places,
    lengths=(16, 32, 48),
)
"""What one distribution over places has to mix, two can hold apart."""


def _measure_places(budget: float, seed: int) -> Numbers:
    rows = []
    for heads in HEADS:
        shares = []
        for trial in range(seed, seed + num_seeds(budget, PLACES_SEEDS)):
            _, small = small_decoder(
                len(PLACES.vocabulary), dim=DIM, layers=1, heads=heads, seed=trial
            )
            train_on_task(small, PLACES, num_steps(budget, PLACES_STEPS), lr=5e-3, seed=trial)
            shares.append(answer_accuracy(small, PLACES, "validation", 64))
        rows.append({"heads": heads, "places": shares})
    return {
        "dim": DIM,
        "chance": 1 / KINDS,
        "steps": num_steps(budget, PLACES_STEPS),
        "by_heads": rows,
    }


def _checks_places(numbers: Mapping[str, Any]) -> list[Criterion]:
    one, *several = numbers["by_heads"]
    best = max(several, key=lambda row: max(row["places"]))
    return [
        Criterion(
            "one wide head answers what stands at two places: its best share right, by what "
            "guessing gives",
            max(one["places"]) / numbers["chance"],
            high=2.0,
        ),
        Criterion(
            f"{best['heads']} heads do: their best share right", max(best["places"]), low=0.5
        ),
        *(
            median_criterion(
                f"share right of {r['heads']} heads, over the seeds", r["places"], role="reported"
            )
            for r in numbers["by_heads"]
        ),
    ]


def _picture_places(numbers: Mapping[str, Any]) -> Picture:
    lines = tuple(
        Line(name, tuple((float(r["heads"]), take(r["places"])) for r in numbers["by_heads"]))
        for name, take in (("best", max), ("mean", mean), ("worst", min))
    )
    return Picture(
        "What stands at two places at once, one layer of width 64",
        "heads",
        "share right",
        lines,
        "x",
    )


CLAIM = Claim(
    id="heads",
    sources=(
        NoteSection(DEEPSEEK_NOTE, "1.1.4"),
        NoteSection(ATTN_JOURNEY, "4"),
        NoteSection(OVERVIEW, "4"),
        NoteSection(OVERVIEW, "4.2"),
        NoteSection(OUTLINE, "3"),
    ),
    statement="Several heads look at several places at once, which one head as wide as all of them "
    "cannot.",
    prediction="What stands at two places is answered by several heads, and by one wide head no "
    "better than by guessing.",
    scope="One layer of width 64, three seeds and 700 steps. 'Cannot' means: did not learn to in "
    "that time; one head may still mix two places unevenly and take them apart behind it.",
    measure=_measure_places,
    checks=_checks_places,
    picture=_picture_places,
    takeaway="What several heads buy is several distributions.",
)


def _measure_text(budget: float, seed: int) -> Numbers:
    rows = []
    for heads in HEADS:
        losses = []
        for trial in range(seed, seed + num_seeds(budget, TEXT_SEEDS)):
            _, model = small_decoder(BYTES, dim=DIM, layers=1, heads=heads, seed=trial)
            train_on_bytes(model, num_steps(budget, TEXT_STEPS), context=96, seed=trial)
            losses.append(byte_loss(model, 96, rows=32))
        rows.append({"heads": heads, "text": losses})
    return {"dim": DIM, "steps": num_steps(budget, TEXT_STEPS), "by_heads": rows}


def _gains(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[float]:
    """Nats per byte that the second is better, seed by seed: both of a seed read the same text in
    the same order.
    """
    return [a - b for a, b in zip(one["text"], other["text"], strict=True)]


def _checks_text(numbers: Mapping[str, Any]) -> list[Criterion]:
    one, *several = numbers["by_heads"]
    return [
        *(
            median_criterion(
                f"{row['heads']} heads: nats per byte better than one head, seed by seed",
                _gains(one, row),
                low=0.01,
            )
            for row in several
        ),
        median_criterion(
            "the most heads are better still than the second most",
            _gains(several[-2], several[-1]),
            role="reported",
        ),
    ]


def _picture_text(numbers: Mapping[str, Any]) -> Picture:
    line = Line(
        "text: nats per byte",
        tuple((float(r["heads"]), mean(r["text"])) for r in numbers["by_heads"]),
    )
    return Picture(
        "One layer of width 64, its heads cut from the same width",
        "heads",
        "nats per byte",
        (line,),
        "x",
    )


TEXT = Claim(
    id="heads-text",
    sources=(
        NoteSection(ATTN_JOURNEY, "4"),
        NoteSection(OVERVIEW, "4.2"),
        NoteSection(OUTLINE, "3"),
    ),
    statement="Several heads model text better than one head as wide as all of them.",
    prediction="Less loss with the same parameters, data and steps, by more than the seeds differ.",
    scope="One layer of width 64, three seeds and 160 steps: it does not say how many heads a "
    "large model wants.",
    measure=_measure_text,
    checks=_checks_text,
    picture=_picture_text,
    takeaway="Heads of 8 numbers are small: more heads are not always better.",
)


def _measure_cost(_budget: float, _seed: int) -> Numbers:
    rows = []
    for heads in HEADS:
        split, listed = mha(DIM, heads), mha_per_head(DIM, heads, head_dim=DIM)
        row: dict[str, Any] = {"heads": heads}
        for name, module in (("split", split), ("list", listed)):
            told = module.describe(CONTEXT)
            row[name] = {"parameters": told.parameters.value, "flops": told.flops_per_token.value}
        rows.append(row)
    return {"dim": DIM, "context": CONTEXT, "by_heads": rows}


def _most(rows: Sequence[Mapping[str, Any]], way: str, what: str) -> float:
    """What the most heads need by what one needs."""
    return float(rows[-1][way][what] / rows[0][way][what])


def _checks_cost(numbers: Mapping[str, Any]) -> list[Criterion]:
    rows = numbers["by_heads"]
    return [
        Criterion(
            "FLOPs of one wide head by those of several that share its width",
            1 / _most(rows, "split", "flops"),
            low=1.01,
        ),
        Criterion("parameters, likewise", 1 / _most(rows, "split", "parameters"), low=1.01),
    ]


def _checks_more(numbers: Mapping[str, Any]) -> list[Criterion]:
    rows = numbers["by_heads"]
    return [
        Criterion(
            "a list of heads of one size: FLOPs of the most heads by those of one",
            _most(rows, "list", "flops"),
            low=1.01,
        ),
        Criterion(
            "heads cut from a fixed width: likewise",
            _most(rows, "split", "flops"),
            low=1.01,
            role="limit",
        ),
    ]


def _picture_cost(numbers: Mapping[str, Any]) -> Picture:
    lines = tuple(
        Line(title, tuple((float(r["heads"]), float(r[way]["flops"])) for r in numbers["by_heads"]))
        for way, title in (("split", "cut from one width"), ("list", "a list of heads of one size"))
    )
    return Picture("FLOPs per token of one layer of width 64", "heads", "FLOPs", lines, "xy")


WIDE = Claim(
    id="heads-wide",
    sources=(NoteSection(OVERVIEW, "6"),),
    statement="One wide head costs more than several heads that share its width.",
    prediction="More FLOPs or more parameters for the one.",
    scope="Counted exactly, at width 64 and 96 tokens; the same at any size.",
    measure=_measure_cost,
    checks=_checks_cost,
    picture=_picture_cost,
    measured_with="heads-wide",
    takeaway="One wide head costs what several do; what several buy is several distributions.",
)

MORE = Claim(
    id="heads-more",
    sources=(NoteSection(RASCHKA_NOTES, "7"),),
    statement="More heads cost more.",
    prediction="FLOPs that grow with the number of heads.",
    scope="Counted exactly, at width 64 and 96 tokens; the same at any size.",
    measure=_measure_cost,
    checks=_checks_more,
    picture=_picture_cost,
    measured_with="heads-wide",
    takeaway="In a list, where each head brings matrices of its own; not where a fixed width is cut.",
)

CLAIMS = (CLAIM, TEXT, WIDE, MORE)
