"""Infini-attention's memory on recall across segments, against a window of one segment, and against
all keys.

pairs, then silence that is longer than what windows reach together, then the keys again: a window
cannot know the values
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

import torch

from regard.claims.claim import OUTLINE, Claim, Criterion, NoteSection, num_steps
from regard.claims.small_training import answer_accuracy, small_decoder, train_on_task
from regard.compare.experiment import Numbers
from regard.models.decoder import Decoder
from regard.train.tasks.recall_tasks import GAP, causal_example
from regard.train.tasks.task import Example, Task, Vocabulary
from regard.view.charts import Line, Picture

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
    return causal_example([*told, *[GAP] * SILENCE, *again], asked)


LENGTH = 4 * PAIRS + SILENCE - 1
TASK = Task(
    name="across-segments",
    description="Three keys and values, a long silence, and the keys again",
    reference="after Arora et al. 2023 (arXiv 2312.04927), with a silence between",
    kind="causal",
    vocabulary=Vocabulary((*KEYS, *VALUES, GAP)),
    draw=_across,
    lengths=(LENGTH, LENGTH, LENGTH + 1),
)
"""A window of one segment, twice, does not reach over the silence."""


def _gates(model: Decoder) -> list[float]:
    """How far each head's gate is open towards the memory."""
    return [g for layer in model.layers for g in layer.attention.gate.detach().sigmoid().tolist()]  # type: ignore[union-attr,operator]


def _trained(name: str, count: int, rate: float, seed: int) -> Decoder:
    attention, options = KINDS_OF[name]
    torch.manual_seed(seed)
    _, model = small_decoder(
        len(TASK.vocabulary), layers=LAYERS, attention=attention, options=options, seed=seed
    )
    train_on_task(model, TASK, count, lr=rate, seed=seed)
    return model


def _added_to(model: Decoder, seed: int) -> Decoder:
    """A trained model of another mechanism with Infini-attention in its place: every weight that
    both have, a gate that has not been trained.
    """
    attention, options = KINDS_OF["infini"]
    _, fresh = small_decoder(
        len(TASK.vocabulary),
        layers=len(model.layers),
        attention=attention,
        options=options,
        seed=seed,
    )
    left = fresh.load_state_dict(model.state_dict(), strict=False)
    assert not left.unexpected_keys
    assert all(key.endswith("gate") for key in left.missing_keys), left.missing_keys
    return fresh.eval()


def _measure(budget: float, seed: int) -> Numbers:
    count, found = num_steps(budget, STEPS), []
    for name in KINDS_OF:
        tried = []
        for rate in RATES[name]:
            model = _trained(name, count, rate, seed)
            one: dict[str, Any] = {
                "rate": rate,
                "right": answer_accuracy(model, TASK, "validation", 128),
            }
            if name == "infini":
                one["gates"] = _gates(model)
            else:
                one["with_memory"] = answer_accuracy(
                    _added_to(model, seed), TASK, "validation", 128
                )
            tried.append(one)
        found.append({"name": name, "tried": tried, "right": max(one["right"] for one in tried)})
    return {
        "steps": count,
        "pairs": PAIRS,
        "segment": SEGMENT,
        "silence": SILENCE,
        "chance": 1 / KINDS,
        "by_name": found,
    }


def _checks(numbers: Mapping[str, Any]) -> list[Criterion]:
    window, memory, dense = (causal_example["right"] for causal_example in numbers["by_name"])
    return [
        Criterion(
            "values found again across segments: share right, less that of the window alone",
            memory - window,
            low=0.2,
        ),
        Criterion(
            "the window alone cannot know: its share right, by what guessing among the values "
            "gives",
            window / numbers["chance"],
            high=2.0,
            role="control",
        ),
        Criterion(
            "share right of a model that sees all keys, less that with the memory",
            dense - memory,
            role="reported",
        ),
    ]


def _checks_free(numbers: Mapping[str, Any]) -> list[Criterion]:
    window, memory, dense = numbers["by_name"]
    added = window["tried"][0]["with_memory"] - window["right"]
    kept = dense["tried"][0]["with_memory"] - dense["right"]
    return [
        Criterion(
            "a memory added to a trained window, not trained with it: share right, less that of "
            "the window alone",
            added,
            low=0.2,
        ),
        Criterion(
            "put into a trained model that saw all keys: share right, less what it had",
            kept,
            low=-0.05,
        ),
        Criterion(
            "trained with its gate it recalls: share right, less that of the window alone",
            memory["right"] - window["right"],
            low=0.2,
            role="control",
        ),
    ]


def _picture(numbers: Mapping[str, Any]) -> Picture:
    lines = tuple(
        Line(
            causal_example["name"],
            tuple((one["rate"], one["right"]) for one in causal_example["tried"]),
        )
        for causal_example in numbers["by_name"]
    )
    return Picture("Values found again across segments", "learning rate", "share right", lines, "x")


_TOY = (
    "Three pairs in segments of eight, trained for it. At scale others could not reproduce a "
    "needle in an earlier segment: this shows that the memory works, not how much it holds."
)

CLAIM = Claim(
    id="infini",
    sources=(NoteSection(OUTLINE, "Infini-attention"),),
    statement="Infini-attention remembers what lies segments back, in a memory of fixed size.",
    prediction="Trained with its gate, it answers what a window of the same segment cannot know.",
    scope=_TOY,
    measure=_measure,
    checks=_checks,
    picture=_picture,
    measured_with="infini",
    takeaway="The memory adds up outer products of keys and values: it recalls what was stored with "
    "keys that stay apart, and blurs the rest.",
)

FREE = Claim(
    id="infini-free",
    sources=(NoteSection(OUTLINE, "Infini-attention"),),
    statement="Infini-attention is a free addition to a model that is trained already.",
    prediction="Put in place of its attention, with the gate as it begins, it recalls across "
    "segments, and loses nothing that was there.",
    scope=_TOY,
    measure=_measure,
    checks=_checks_free,
    picture=_picture,
    measured_with="infini",
    takeaway="Gates and projections must be trained with it.",
)

CLAIMS = (CLAIM, FREE)
