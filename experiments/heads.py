"""Claims about several heads against one wide head of the same width, parameters and FLOPs.

The models are trained on text and on a task with two places: y_t = (x_{t-1} - x_{t-4}) mod V, in
which each answer depends on tokens at two places at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from statistics import mean

from experiments.claim import (
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
from experiments.small_training import (
    BYTES,
    answer_accuracy,
    byte_loss,
    small_decoder,
    train_on_bytes,
    train_on_task,
)
from regard.compare.experiment import Numbers
from regard.language import Phrase, counted
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
    """Return random symbols, with the difference of two earlier ones as the target."""
    symbols = [random.randrange(KINDS) for _ in range(length)]
    near_offset, far_offset = BACK
    targets = [
        ""
        if t < far_offset
        else SYMBOLS[(symbols[t - near_offset] - symbols[t - far_offset]) % KINDS]
        for t in range(length)
    ]
    return Example(tuple(SYMBOLS[i] for i in symbols), tuple(targets))


PLACES = Task(
    name="two-places",
    description="Compute the difference of the symbols one and four places back",
    reference="designed for this claim",
    kind="causal",
    vocabulary=Vocabulary(SYMBOLS),
    draw=_places,
    lengths=(16, 32, 48),
)
"""A task in which one attention distribution has to mix two places, and two can separate them."""


def _measure_places(budget: float, seed: int) -> Numbers:
    rows = []
    for heads in HEADS:
        accuracies = []
        for trial in range(seed, seed + num_seeds(budget, PLACES_SEEDS)):
            _, model = small_decoder(
                len(PLACES.vocabulary), dim=DIM, layers=1, heads=heads, seed=trial
            )
            train_on_task(model, PLACES, num_steps(budget, PLACES_STEPS), lr=5e-3, seed=trial)
            accuracies.append(answer_accuracy(model, PLACES, "validation", 64))
        rows.append({"heads": heads, "places": accuracies})
    return {
        "dim": DIM,
        "chance": 1 / KINDS,
        "steps": num_steps(budget, PLACES_STEPS),
        "by_heads": rows,
    }


def _checks_places(numbers: Numbers) -> list[Criterion]:
    one, *several = numbers["by_heads"]
    best = max(several, key=lambda row: max(row["places"]))
    return [
        Criterion(
            "one wide head: best accuracy / accuracy of guessing",
            max(one["places"]) / numbers["chance"],
            high=2.0,
        ),
        Criterion(
            Phrase("{heads}: best accuracy", heads=counted(best["heads"], "head")),
            max(best["places"]),
            low=0.5,
        ),
        *(
            median_criterion(
                Phrase("{heads}: accuracy over the seeds", heads=counted(r["heads"], "head")),
                r["places"],
                role="reported",
            )
            for r in numbers["by_heads"]
        ),
    ]


def _picture_places(numbers: Numbers) -> Picture:
    lines = tuple(
        Line(name, tuple((float(r["heads"]), take(r["places"])) for r in numbers["by_heads"]))
        for name, take in (("best", max), ("mean", mean), ("worst", min))
    )
    return Picture(
        "Task with two places at once, one layer of width 64",
        "heads",
        "accuracy",
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
    statement="Several heads attend to several places at once, which one head as wide as all of "
    "them cannot.",
    prediction="Several heads learn a task whose answers depend on two places, and one wide head "
    "is no better than guessing.",
    scope="One layer of width 64, three seeds and 700 steps. 'Cannot' means: did not learn it in "
    "this time. One head may still mix two places with different weights, so that later layers can "
    "separate them.",
    measure=_measure_places,
    checks=_checks_places,
    picture=_picture_places,
    takeaway="The advantage of several heads is that they have several attention distributions.",
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


def _gains(first: Numbers, second: Numbers) -> list[float]:
    """Return the first loss minus the second in nats per byte, for each seed."""
    return [a - b for a, b in zip(first["text"], second["text"], strict=True)]


def _checks_text(numbers: Numbers) -> list[Criterion]:
    one, *several = numbers["by_heads"]
    return [
        *(
            median_criterion(
                Phrase(
                    "{heads}: loss of one head minus loss, nats per byte, for each seed",
                    heads=counted(row["heads"], "head"),
                ),
                _gains(one, row),
                low=0.01,
            )
            for row in several
        ),
        median_criterion(
            Phrase(
                "{heads}: loss minus the loss of {heads2}, nats per byte, for each seed",
                heads=counted(several[-2]["heads"], "head"),
                heads2=counted(several[-1]["heads"], "head"),
            ),
            _gains(several[-2], several[-1]),
            role="reported",
        ),
    ]


def _picture_text(numbers: Numbers) -> Picture:
    line = Line(
        "text: nats per byte",
        tuple((float(r["heads"]), mean(r["text"])) for r in numbers["by_heads"]),
    )
    return Picture(
        "One layer of width 64 that is split into heads",
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
    prediction="With the same parameters, data and steps, the loss is lower by more than the seeds "
    "differ.",
    scope="One layer of width 64, three seeds and 160 steps; this does not show how many heads are "
    "best for a large model.",
    measure=_measure_text,
    checks=_checks_text,
    picture=_picture_text,
    takeaway="More heads are not always better: here 8 heads have a dim of only 8.",
)


def _measure_cost(_budget: float, _seed: int) -> Numbers:
    rows = []
    for heads in HEADS:
        split, listed = mha(DIM, heads), mha_per_head(DIM, heads, head_dim=DIM)
        row: Numbers = {"heads": heads}
        for name, module in (("split", split), ("list", listed)):
            description = module.describe(CONTEXT)
            row[name] = {
                "parameters": description.parameters.value,
                "flops": description.flops_per_token.value,
            }
        rows.append(row)
    return {"dim": DIM, "context": CONTEXT, "by_heads": rows}


def _ratio_to_one_head(rows: Sequence[Numbers], way: str, quantity: str) -> float:
    """Return the value for the largest number of heads divided by the value for one head."""
    return float(rows[-1][way][quantity] / rows[0][way][quantity])


def _checks_cost(numbers: Numbers) -> list[Criterion]:
    rows = numbers["by_heads"]
    return [
        Criterion(
            "FLOPs of one wide head / FLOPs of 8 heads that split its width",
            1 / _ratio_to_one_head(rows, "split", "flops"),
            low=1.01,
        ),
        Criterion(
            "parameters of one wide head / parameters of 8 heads that split its width",
            1 / _ratio_to_one_head(rows, "split", "parameters"),
            low=1.01,
        ),
    ]


def _checks_more(numbers: Numbers) -> list[Criterion]:
    rows = numbers["by_heads"]
    return [
        Criterion(
            "a list of heads of the same dim: FLOPs of 8 heads / FLOPs of one",
            _ratio_to_one_head(rows, "list", "flops"),
            low=1.01,
        ),
        Criterion(
            "heads that split a fixed width: FLOPs of 8 heads / FLOPs of one",
            _ratio_to_one_head(rows, "split", "flops"),
            low=1.01,
            role="limit",
        ),
    ]


def _picture_cost(numbers: Numbers) -> Picture:
    lines = tuple(
        Line(title, tuple((float(r["heads"]), float(r[way]["flops"])) for r in numbers["by_heads"]))
        for way, title in (("split", "heads that split a width"), ("list", "heads of the same dim"))
    )
    return Picture("FLOPs per token of one layer of width 64", "heads", "FLOPs", lines, "xy")


WIDE = Claim(
    id="heads-wide",
    sources=(NoteSection(OVERVIEW, "6"),),
    statement="One wide head costs more than several heads that share its width.",
    prediction="The one wide head has more FLOPs or more parameters.",
    scope="Counted exactly, at width 64 and 96 tokens; the same at any size.",
    measure=_measure_cost,
    checks=_checks_cost,
    picture=_picture_cost,
    measured_with="heads-wide",
    takeaway="One wide head costs the same as several heads; the advantage of several is that they "
    "have several attention distributions.",
)

MORE = Claim(
    id="heads-more",
    sources=(NoteSection(RASCHKA_NOTES, "7"),),
    statement="More heads cost more.",
    prediction="The FLOPs grow with the number of heads.",
    scope="Counted exactly, at width 64 and 96 tokens; the same at any size.",
    measure=_measure_cost,
    checks=_checks_more,
    picture=_picture_cost,
    measured_with="heads-wide",
    takeaway="True of a list of heads, each with matrices of its own; false if the heads split a "
    "fixed width.",
)

CLAIMS = (CLAIM, TEXT, WIDE, MORE)
