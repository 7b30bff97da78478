"""Several heads against one wide head: the same width, parameters and FLOPs, trained on text and on a task of two places.

two places: y_t = (x_{t-1} - x_{t-4}) mod V: what is asked for stands at two places at once
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from statistics import mean
from typing import Any

from regard.compare.claims.base import Check, Claim, steps
from regard.compare.claims.training import BYTES, byte_loss, decoder, learn, read_bytes, right
from regard.compare.experiment import Numbers
from regard.train.tasks.base import Example, Task
from regard.train.tasks.vocabulary import Vocabulary
from regard.view.curves import Line, Picture

KINDS, BACK = 8, (1, 4)
SYMBOLS = tuple(f"d{i}" for i in range(KINDS))
HEADS = (1, 2, 8)
DIM, SEEDS = 64, 2
STEPS, PLACES_STEPS = 160, 700


def _places(random: Random, length: int) -> Example:
    drawn = [random.randrange(KINDS) for _ in range(length)]
    near, far = BACK
    asked = ["" if t < far else SYMBOLS[(drawn[t - near] - drawn[t - far]) % KINDS] for t in range(length)]  # fmt: skip
    return Example(tuple(SYMBOLS[i] for i in drawn), tuple(asked))


PLACES = Task(
    name="two-places",
    sentence="Say the difference of the symbols one and four places back",
    origin="made here, for the claim of several heads",
    kind="rows",
    vocabulary=Vocabulary(SYMBOLS),
    draw=_places,
    lengths=(16, 32, 48),
)
"""What one distribution over places has to mix, two can hold apart."""


def _measure(budget: float, seed: int) -> Numbers:
    rows = []
    for heads in HEADS:
        one: dict[str, Any] = {"heads": heads, "text": [], "places": []}
        for trial in range(seed, seed + SEEDS):
            _, model = decoder(BYTES, dim=DIM, layers=1, heads=heads, seed=trial)
            read_bytes(model, steps(budget, STEPS), context=96, seed=trial)
            one["text"].append(byte_loss(model, 96, rows=32))
            one["parameters"] = sum(p.numel() for p in model.layers[0].attention.parameters())  # type: ignore[union-attr,misc]
            one["flops"] = model.layers[0].attention.describe(96).flops_per_token.value  # type: ignore[union-attr,operator]
            _, small = decoder(len(PLACES.vocabulary), dim=DIM, layers=1, heads=heads, seed=trial)
            learn(small, PLACES, steps(budget, PLACES_STEPS), lr=5e-3, seed=trial)
            one["places"].append(right(small, PLACES, "validation", 64))
        rows.append(one)
    return {"dim": DIM, "seeds": SEEDS, "steps": steps(budget, STEPS), "by_heads": rows}


def _checks(numbers: Mapping[str, Any]) -> list[Check]:
    one, *several = numbers["by_heads"]
    text = [row["text"] for row in several]
    best = min(text, key=mean)
    spread = max(max(v) - min(v) for v in (one["text"], best))
    places = max(mean(row["places"]) for row in several) - mean(one["places"])
    same = {(r["parameters"], r["flops"]) for r in numbers["by_heads"]}
    return [
        Check("they cost the same: kinds of parameters and FLOPs among them", len(same), high=1),
        Check("several heads answer more of two places: difference of shares right", places, low=0.05),
        Check("several heads predict text better: nats per byte less than one head", mean(one["text"]) - mean(best), low=0.01),
        Check("... by more than seeds differ: gain by spread", (mean(one["text"]) - mean(best)) / max(spread, 1e-9), low=1.0, essential=False),
        Check("more heads are always better: loss of the most heads minus that of the second most", mean(text[-1]) - mean(text[-2]), high=0.0, essential=False),
    ]  # fmt: skip


def _picture(numbers: Mapping[str, Any]) -> Picture:
    lines = (
        Line("text: nats per byte", tuple((float(r["heads"]), mean(r["text"])) for r in numbers["by_heads"])),
        Line("two places: share right", tuple((float(r["heads"]), mean(r["places"])) for r in numbers["by_heads"])),
    )  # fmt: skip
    return Picture("One layer of width 64, its heads cut from the same width", "heads", "nats, share", lines, "x")  # fmt: skip


CLAIM = Claim(
    id="heads",
    seeds=("S1.15", "S2.10", "S4.16", "S4.26", "E4.14"),
    says="Several heads look at different things at once, which one wide head cannot; and one wide head costs more.",
    predicts="At one width the cost is the same (so much of the claim is wrong); two distributions answer what stands at two places better than one.",
    scale="One layer of width 64 for a minute: it shows what a second distribution is good for, not how many heads a large model wants.",
    measure=_measure,
    checks=_checks,
    picture=_picture,
    lesson="One wide head costs what several do; what several buy is several distributions (E4.14).",
)
"""S4.16."""
