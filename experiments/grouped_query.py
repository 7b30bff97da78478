"""Claims about grouped-query, multi-query and latent attention: cache, work, and quality."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from experiments.claim import (
    OUTLINE,
    OVERVIEW,
    Claim,
    Criterion,
    NoteSection,
    median_criterion,
    num_seeds,
    num_steps,
)
from experiments.cpu_timing import fit_exponent
from experiments.small_training import (
    BYTES,
    answer_accuracy,
    byte_loss,
    small_decoder,
    train_on_bytes,
    train_on_task,
)
from regard.compare.experiment import Numbers
from regard.compare.speed_and_memory import cache_bytes
from regard.language import Phrase
from regard.models.decoder import Decoder
from regard.models.families.regard import Config
from regard.train.tasks import TASKS
from regard.view.charts import Line, Picture

DIM, HEADS, SEEDS, CONTEXT = 64, 4, 2, 96
TOKENS, LENGTHS = 64, (64, 256, 1024)
TEXT_STEPS, RECALL_STEPS = 400, 300
KINDS: dict[str, tuple[str, dict[str, int]]] = {
    "mha": ("gqa", {"groups": HEADS}),
    "gqa": ("gqa", {"groups": 2}),
    "mqa": ("mqa", {}),
    "mla": ("mla", {"kv_rank": 24, "nope_dim": 16, "rope_dim": 8, "value_dim": 16}),
}
TASK = replace(TASKS["mqar"], lengths=(7, 32, 64))


def _decoder(name: str, vocabulary: int, seed: int) -> tuple[Config, Decoder]:
    """Return the config and a decoder of a kind of attention."""
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
        row: Numbers = {"name": name, "text": [], "recall": []}
        for trial in range(seed, seed + num_seeds(budget, SEEDS)):
            _, model = _decoder(name, BYTES, trial)
            train_on_bytes(model, num_steps(budget, TEXT_STEPS), context=CONTEXT, seed=trial)
            row["text"].append(byte_loss(model, CONTEXT, rows=32))
        _, recall_model = _decoder(name, len(TASK.vocabulary), seed)
        train_on_task(recall_model, TASK, num_steps(budget, RECALL_STEPS), seed=seed)
        row["recall"].append(answer_accuracy(recall_model, TASK, "validation", 96))
        rows.append(row)
    return {
        "dim": DIM,
        "heads": HEADS,
        "layers": 2,
        "seeds": num_seeds(budget, SEEDS),
        "steps": num_steps(budget, TEXT_STEPS),
        "by_name": rows,
    }


@torch.no_grad()
def _score_flops(model: Any) -> int:
    """Return the FLOPs of scores and mixing per query-key pair, over all layers and heads."""
    total = 0
    for layer in model.layers:
        H, _, D, E, _ = layer.attention.project.shape
        total += 2 * H * (D + E)
    return total


def _by_name(numbers: Numbers) -> dict[str, Numbers]:
    """Return the rows by the name of the attention."""
    return {row["name"]: row for row in numbers["by_name"]}


def _checks_cache(numbers: Numbers) -> list[Criterion]:
    by, heads = _by_name(numbers), numbers["heads"]

    def saved(name: str) -> float:
        return float(by["mha"]["bytes"] / by[name]["bytes"])

    return [
        Criterion(
            "MHA's cache / MQA's cache, in bytes (the number of heads is expected)",
            saved("mqa"),
            heads,
            heads,
        ),
        Criterion(
            "MHA's cache / GQA's cache with two heads per group, in bytes", saved("gqa"), 2.0, 2.0
        ),
        Criterion("MHA's cache / MLA's cache, in bytes", saved("mla"), low=2.0),
    ]


def _checks_linear(numbers: Numbers) -> list[Criterion]:
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
            "FLOPs of MQA's scores and mixing / those of MHA, at the largest n",
            by["mqa"]["score_flops"][-1] / by["mha"]["score_flops"][-1],
            role="reported",
        ),
    ]


def _extra_loss(numbers: Numbers, name: str) -> list[float]:
    """Return the loss minus MHA's in nats per byte, for each seed, on the same text."""
    by = _by_name(numbers)
    return [a - b for a, b in zip(by[name]["text"], by["mha"]["text"], strict=True)]


def _checks_quality(numbers: Numbers) -> list[Criterion]:
    by = _by_name(numbers)

    def lost_recall(name: str) -> float:
        return float(by["mha"]["recall"][0] - by[name]["recall"][0])

    return [
        median_criterion(
            "GQA on text: loss minus MHA's loss for each seed, nats per byte",
            _extra_loss(numbers, "gqa"),
            high=0.05,
        ),
        Criterion("GQA on recall: MHA's accuracy minus its accuracy", lost_recall("gqa"), high=0.1),
        *(
            median_criterion(
                Phrase("{name} on text: loss minus MHA's loss, nats per byte", name=name.upper()),
                _extra_loss(numbers, name),
                role="reported",
            )
            for name in ("mqa", "mla")
        ),
        *(
            Criterion(
                Phrase("{name} on recall: MHA's accuracy minus its accuracy", name=name.upper()),
                lost_recall(name),
                role="reported",
            )
            for name in ("mqa", "mla")
        ),
    ]


def _picture_bytes(numbers: Numbers) -> Picture:
    lines = tuple(
        Line(row["name"], ((0.0, 0.0), (float(numbers["tokens"]), float(row["bytes"]))))
        for row in numbers["by_name"]
    )
    return Picture("The cache of 2 layers of width 64, 4 heads", "tokens", "bytes", lines)


def _picture(numbers: Numbers) -> Picture:
    lines = tuple(
        Line(row["name"], tuple((float(i), loss) for i, loss in enumerate(row["text"])))
        for row in numbers["by_name"]
    )
    return Picture(
        "Loss on validation text, 2 layers of width 64, 4 heads",
        "seed",
        "nats per byte",
        lines,
    )


CACHE = Claim(
    id="groups-cache",
    sources=(NoteSection(OVERVIEW, "5.1"), NoteSection(OUTLINE, "MHA, MQA, GQA")),
    statement="Multi-query, grouped-query and latent attention have smaller caches than multi-head "
    "attention.",
    prediction="The cache of MQA is smaller by the number of heads, that of GQA by the number of "
    "heads in a group, and that of MLA by a factor of at least two.",
    scope="Measured in the caches of a decoder of width 64 with four heads.",
    measure=_measure_counts,
    checks=_checks_cache,
    picture=_picture_bytes,
    measured_with="groups-cache",
    takeaway="Memory and memory traffic fall by this factor; the work of the scores does not.",
)

LINEAR = Claim(
    id="mqa-linear",
    sources=(NoteSection(OVERVIEW, "5.1"),),
    statement="Multi-query attention lowers the complexity to O(n).",
    prediction="The work of the scores grows as the length of the prompt, not as its square.",
    scope="Counted, for prompts of 64 to 1024 tokens.",
    measure=_measure_counts,
    checks=_checks_linear,
    picture=_picture_bytes,
    measured_with="groups-cache",
    takeaway="For every variant a head computes n^2 scores in prefill and n scores per decoding "
    "step; only the cache is smaller.",
)

QUALITY = Claim(
    id="groups-quality",
    sources=(NoteSection(OVERVIEW, "5.1"),),
    statement="Grouped-query attention keeps the quality of multi-head attention.",
    prediction="After the same steps on the same data, the loss on text is at most 0.05 nats per "
    "byte higher, and the accuracy on recall is the same.",
    scope="Two layers of width 64 with four heads, two seeds and 400 steps. Differences of 0.01 "
    "nats do not carry over to large models. `regard compare --quality` measures more.",
    measure=_measure,
    checks=_checks_quality,
    picture=_picture,
    takeaway="At this size a few more training steps matter as much as separate key/value heads.",
)

CLAIMS = (CACHE, LINEAR, QUALITY)
