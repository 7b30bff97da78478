"""Fewer keys and values, or latents: what a cache holds, and what the model loses on text and on
recall.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from regard.claims.claim import (
    OUTLINE,
    OVERVIEW,
    Claim,
    Criterion,
    NoteSection,
    median_criterion,
    num_seeds,
    num_steps,
)
from regard.claims.cpu_timing import fit_exponent
from regard.claims.small_training import (
    BYTES,
    answer_accuracy,
    byte_loss,
    small_decoder,
    train_on_bytes,
    train_on_task,
)
from regard.compare.experiment import Numbers
from regard.compare.speed import cache_bytes
from regard.train.tasks import TASKS
from regard.view.charts import Line, Picture

DIM, HEADS, SEEDS, CONTEXT = 64, 4, 2, 96
TOKENS, LENGTHS = 64, (64, 256, 1024)
STEPS, RECALL = 400, 300
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mha": ("gqa", {"groups": HEADS}),
    "gqa": ("gqa", {"groups": 2}),
    "mqa": ("mqa", {}),
    "mla": ("mla", {"kv_rank": 24, "nope_dim": 16, "rope_dim": 8, "value_dim": 16}),
}
TASK = replace(TASKS["mqar"], lengths=(7, 32, 64))


def _decoder(name: str, vocabulary: int, seed: int) -> tuple[Any, Any]:
    attention, options = KINDS[name]
    return small_decoder(
        vocabulary, dim=DIM, heads=HEADS, attention=attention, options=options, seed=seed
    )


def _measure_counts(_budget: float, seed: int) -> Numbers:
    rows = []
    for name in KINDS:
        config, model = _decoder(name, BYTES, seed)
        rows.append(
            {
                "name": name,
                "bytes": cache_bytes(model, config, TOKENS),
                "score_flops": [_score_flops(model) * n * (n + 1) // 2 for n in LENGTHS],
            }
        )
    return {
        "dim": DIM,
        "heads": HEADS,
        "layers": 2,
        "tokens": TOKENS,
        "lengths": list(LENGTHS),
        "by_name": rows,
    }


def _measure(budget: float, seed: int) -> Numbers:
    rows = []
    for name in KINDS:
        row: dict[str, Any] = {"name": name, "text": [], "recall": []}
        for trial in range(seed, seed + num_seeds(budget, SEEDS)):
            _, model = _decoder(name, BYTES, trial)
            train_on_bytes(model, num_steps(budget, STEPS), context=CONTEXT, seed=trial)
            row["text"].append(byte_loss(model, CONTEXT, rows=32))
        _, other = _decoder(name, len(TASK.vocabulary), seed)
        train_on_task(other, TASK, num_steps(budget, RECALL), seed=seed)
        row["recall"].append(answer_accuracy(other, TASK, "validation", 96))
        rows.append(row)
    return {
        "dim": DIM,
        "heads": HEADS,
        "layers": 2,
        "seeds": num_seeds(budget, SEEDS),
        "steps": num_steps(budget, STEPS),
        "by_name": rows,
    }


@torch.no_grad()
def _score_flops(model: Any) -> int:
    """FLOPs of scores and mixing, per pair of query and key, all layers and heads."""
    total = 0
    for layer in model.layers:
        H, _, D, E, _ = layer.attention.project.shape
        total += 2 * H * (D + E)
    return total


def _by_name(numbers: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {row["name"]: row for row in numbers["by_name"]}


def _checks_cache(numbers: Mapping[str, Any]) -> list[Criterion]:
    by, heads = _by_name(numbers), numbers["heads"]

    def saved(name: str) -> float:
        return float(by["mha"]["bytes"] / by[name]["bytes"])

    return [
        Criterion(
            "MQA's cache: MHA's bytes by its bytes, the number of heads", saved("mqa"), heads, heads
        ),
        Criterion("GQA's, with half as many groups as heads", saved("gqa"), 2.0, 2.0),
        Criterion("MLA's", saved("mla"), low=2.0),
    ]


def _checks_linear(numbers: Mapping[str, Any]) -> list[Criterion]:
    by = _by_name(numbers)
    lengths = [float(n) for n in numbers["lengths"]]
    return [
        Criterion(
            "FLOPs of MQA's scores and mixing over a prompt of n tokens: exponent of n",
            fit_exponent(lengths, by["mqa"]["score_flops"]),
            0.95,
            1.05,
        ),
        Criterion(
            "... by MHA's at the longest",
            by["mqa"]["score_flops"][-1] / by["mha"]["score_flops"][-1],
            role="reported",
        ),
    ]


def _lost(numbers: Mapping[str, Any], name: str) -> list[float]:
    """Nats per byte more than MHA, seed by seed: both of a seed read the same text in the same
    order.
    """
    by = _by_name(numbers)
    return [a - b for a, b in zip(by[name]["text"], by["mha"]["text"], strict=True)]


def _checks_quality(numbers: Mapping[str, Any]) -> list[Criterion]:
    by = _by_name(numbers)

    def forgotten(name: str) -> float:
        return float(by["mha"]["recall"][0] - by[name]["recall"][0])

    return [
        median_criterion(
            "GQA on text: nats per byte lost against MHA, seed by seed",
            _lost(numbers, "gqa"),
            high=0.05,
        ),
        Criterion("GQA on recall: lost of the share right", forgotten("gqa"), high=0.1),
        *(
            median_criterion(
                f"{name.upper()} on text: nats per byte lost", _lost(numbers, name), role="reported"
            )
            for name in ("mqa", "mla")
        ),
        *(
            Criterion(
                f"{name.upper()} on recall: lost of the share right",
                forgotten(name),
                role="reported",
            )
            for name in ("mqa", "mla")
        ),
    ]


def _picture_bytes(numbers: Mapping[str, Any]) -> Picture:
    lines = tuple(
        Line(row["name"], ((0.0, 0.0), (float(numbers["tokens"]), float(row["bytes"]))))
        for row in numbers["by_name"]
    )
    return Picture("The cache of 2 layers of width 64, 4 heads", "tokens", "bytes", lines)


def _picture(numbers: Mapping[str, Any]) -> Picture:
    lines = tuple(
        Line(row["name"], tuple((float(i), loss) for i, loss in enumerate(row["text"])))
        for row in numbers["by_name"]
    )
    return Picture(
        "Loss on text that was not trained on, 2 layers of width 64, 4 heads",
        "seed",
        "nats per byte",
        lines,
    )


CACHE = Claim(
    id="groups-cache",
    sources=(NoteSection(OVERVIEW, "5.1"), NoteSection(OUTLINE, "MHA, MQA, GQA")),
    statement="Multi-query, grouped-query and latent attention have smaller caches than multi-head "
    "attention.",
    prediction="The cache of MQA by the number of heads, that of GQA by the heads in a group, that "
    "of MLA by two at least.",
    scope="Counted in real caches of a decoder of width 64 with four heads.",
    measure=_measure_counts,
    checks=_checks_cache,
    picture=_picture_bytes,
    measured_with="groups-cache",
    takeaway="Memory and traffic fall by the factor; the work of the scores does not.",
)

LINEAR = Claim(
    id="mqa-linear",
    sources=(NoteSection(OVERVIEW, "5.1"),),
    statement="Multi-query attention lowers the complexity to O(n).",
    prediction="Work of the scores that grows as the prompt, not as its square.",
    scope="Counted, for prompts of 64 to 1024 tokens.",
    measure=_measure_counts,
    checks=_checks_linear,
    picture=_picture_bytes,
    measured_with="groups-cache",
    takeaway="The scores are n^2 per head in prefill and n per step for every variant; what falls "
    "is the cache.",
)

QUALITY = Claim(
    id="groups-quality",
    sources=(NoteSection(OVERVIEW, "5.1"),),
    statement="Grouped-query attention keeps the quality of multi-head attention.",
    prediction="At most 0.05 nats per byte lost on text, by the same steps on the same data, and as "
    "much recalled.",
    scope="Two layers of width 64 with four heads, two seeds and 400 steps: hundredths of a nat "
    "say nothing of large models. `regard compare --quality` has more.",
    measure=_measure,
    checks=_checks_quality,
    picture=_picture,
    takeaway="At this size a few steps more weigh as much as the heads that are shared.",
)

CLAIMS = (CACHE, LINEAR, QUALITY)
