"""Infini-attention's memory on recall across segments, against a window of one segment, and against all keys.

pairs, then silence that is longer than what windows reach together, then the keys again: a window cannot know the values
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

import torch

from regard.compare.claims.base import Check, Claim, steps
from regard.compare.claims.training import decoder, learn, right
from regard.compare.experiment import Numbers
from regard.models.decoder import Decoder
from regard.train.tasks.base import Example, Task
from regard.train.tasks.recall import GAP, row
from regard.train.tasks.vocabulary import Vocabulary
from regard.view.curves import Line, Picture

KINDS, PAIRS, SEGMENT, LAYERS = 8, 3, 8, 2
SILENCE = LAYERS * SEGMENT
KEYS, VALUES = (tuple(f"{letter}{i}" for i in range(KINDS)) for letter in "kv")
KINDS_OF: dict[str, tuple[str, dict[str, Any]]] = {
    "window": ("sliding_window", {"groups": 4, "window": SEGMENT}),
    "infini": ("infini", {"segment": SEGMENT}),
    "all keys": ("gqa", {"groups": 4}),
}
RATES = {"window": (3e-3,), "infini": (1e-3, 3e-3, 1e-2), "all keys": (3e-3,)}
"""A recurrence learns in a narrow range of rates: three are tried."""
STEPS = 400


def _across(random: Random, _: int) -> Example:
    """Pairs, silence, and the pairs again in another order."""
    keys = random.sample(KEYS, PAIRS)
    values = {key: random.choice(VALUES) for key in keys}
    told = [token for key in keys for token in (key, values[key])]
    again = [token for key in random.sample(keys, PAIRS) for token in (key, values[key])]
    start = len(told) + SILENCE
    asked = {start + 2 * i + 1 for i in range(PAIRS)}
    return row([*told, *[GAP] * SILENCE, *again], asked)


LENGTH = 4 * PAIRS + SILENCE - 1
TASK = Task(
    name="across-segments",
    sentence="Three keys and values, a long silence, and the keys again",
    origin="after Arora et al. 2023 (arXiv 2312.04927), with a silence between",
    kind="rows",
    vocabulary=Vocabulary((*KEYS, *VALUES, GAP)),
    draw=_across,
    lengths=(LENGTH, LENGTH, LENGTH + 1),
)
"""A window of one segment, twice, does not reach over the silence."""


def _gates(model: Decoder) -> list[float]:
    """How far each head's gate is open towards the memory."""
    return [g for layer in model.layers for g in layer.attention.gate.detach().sigmoid().tolist()]  # type: ignore[union-attr,operator]


def _measure(budget: float, seed: int) -> Numbers:
    count, found = steps(budget, STEPS), []
    for name, (attention, options) in KINDS_OF.items():
        tried = []
        for rate in RATES[name]:
            torch.manual_seed(seed)
            _, model = decoder(len(TASK.vocabulary), layers=LAYERS, attention=attention, options=options, seed=seed)  # fmt: skip
            learn(model, TASK, count, lr=rate, seed=seed)
            one: dict[str, Any] = {"rate": rate, "right": right(model, TASK, "validation", 128)}
            if name == "infini":
                one["gates"] = _gates(model)
            tried.append(one)
        found.append({"name": name, "tried": tried, "right": max(one["right"] for one in tried)})
    return {"steps": count, "pairs": PAIRS, "segment": SEGMENT, "silence": SILENCE, "chance": 1 / KINDS, "by_name": found}  # fmt: skip


def _checks(numbers: Mapping[str, Any]) -> list[Check]:
    window, memory, dense = (row["right"] for row in numbers["by_name"])
    return [
        Check("the window alone cannot know: its share right, by what guessing among the values gives", window / numbers["chance"], high=2.0),
        Check("the memory recalls across segments: share more than the window's", memory - window, low=0.2),
        Check("... as much as all keys do: share less", dense - memory, high=0.05, essential=False),
    ]  # fmt: skip


def _picture(numbers: Mapping[str, Any]) -> Picture:
    lines = tuple(
        Line(row["name"], tuple((one["rate"], one["right"]) for one in row["tried"]))
        for row in numbers["by_name"]
    )
    return Picture("Values found again across segments", "learning rate", "share right", lines, "x")


CLAIM = Claim(
    id="infini",
    seeds=("S5.16", "E5.3", "E5.10"),
    says="Infini-attention remembers what lies segments back, in a memory of fixed size, and is a free addition.",
    predicts="Trained with its gate, its memory answers what a window of the same segment cannot; all keys answer more.",
    scale="Three pairs in segments of eight, trained for it. At scale others could not reproduce a needle in an earlier segment: this shows that the memory works, not how much it holds.",
    measure=_measure,
    checks=_checks,
    picture=_picture,
    lesson="If it does not beat the window, the memory is unused: gates and projections must be trained with it (E5.10).",
)
"""S5.16."""
