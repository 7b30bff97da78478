"""Fewer keys and values, or latents: what a cache holds, and what the model loses on text and on recall."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import mean
from typing import Any

import torch

from regard.compare.claims.base import Check, Claim, steps
from regard.compare.claims.training import BYTES, byte_loss, decoder, learn, read_bytes, right
from regard.compare.experiment import Numbers
from regard.compare.work import cache_bytes
from regard.train.tasks import TASKS
from regard.view.curves import Line, Picture

DIM, HEADS, SEEDS, CONTEXT = 64, 4, 1, 96
STEPS, RECALL = 400, 300
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mha": ("gqa", {"groups": HEADS}),
    "gqa": ("gqa", {"groups": 2}),
    "mqa": ("mqa", {}),
    "mla": ("mla", {"kv_rank": 24, "nope_dim": 16, "rope_dim": 8, "value_dim": 16}),
}
TASK = replace(TASKS["mqar"], lengths=(7, 32, 64))


def _measure(budget: float, seed: int) -> Numbers:
    rows = []
    for name, (attention, options) in KINDS.items():
        row: dict[str, Any] = {"name": name, "text": [], "recall": []}
        for trial in range(seed, seed + SEEDS):
            config, model = decoder(BYTES, dim=DIM, heads=HEADS, attention=attention, options=options, seed=trial)  # fmt: skip
            row["bytes"] = cache_bytes(model, config, 64)
            row["score_flops"] = _score_flops(model)
            read_bytes(model, steps(budget, STEPS), context=CONTEXT, seed=trial)
            row["text"].append(byte_loss(model, CONTEXT, rows=32))
            _, other = decoder(len(TASK.vocabulary), dim=DIM, heads=HEADS, attention=attention, options=options, seed=trial)  # fmt: skip
            learn(other, TASK, steps(budget, RECALL), seed=trial)
            row["recall"].append(right(other, TASK, "validation", 96))
        rows.append(row)
    return {"dim": DIM, "heads": HEADS, "layers": 2, "tokens": 64, "seeds": SEEDS, "steps": steps(budget, STEPS), "by_name": rows}  # fmt: skip


@torch.no_grad()
def _score_flops(model: Any) -> int:
    """FLOPs of scores and mixing, per pair of query and key, all layers and heads."""
    total = 0
    for layer in model.layers:
        H, _, D, E, _ = layer.attention.project.shape
        total += 2 * H * (D + E)
    return total


def _checks(numbers: Mapping[str, Any]) -> list[Check]:
    by = {row["name"]: row for row in numbers["by_name"]}
    mha = by["mha"]

    def saved(name: str) -> float:
        return float(mha["bytes"] / by[name]["bytes"])

    def lost(name: str) -> float:
        return mean(by[name]["text"]) - mean(mha["text"])

    heads = numbers["heads"]
    recall = max(mean(mha["recall"]) - mean(by[name]["recall"]) for name in ("gqa", "mla"))
    return [
        Check("MQA's cache is smaller by the number of heads", saved("mqa"), heads, heads),
        Check("GQA's with half the groups by two", saved("gqa"), 2.0, 2.0),
        Check("MLA's is smaller as well", saved("mla"), low=2.0),
        Check("the score work of MQA stays MHA's: FLOPs by FLOPs", by["mqa"]["score_flops"] / mha["score_flops"], 1.0, 1.0),
        Check("GQA loses little on text: nats per byte", lost("gqa"), high=0.05),
        Check("MLA loses little on text: nats per byte", lost("mla"), high=0.05),
        Check("MQA loses little too: nats per byte", lost("mqa"), high=0.05, essential=False),
        Check("GQA and MLA recall as much: most that is lost of the share right", recall, high=0.1, essential=False),
    ]  # fmt: skip


def _picture(numbers: Mapping[str, Any]) -> Picture:
    tokens = numbers["tokens"]
    lines = tuple(
        Line(row["name"], ((row["bytes"] / tokens, mean(row["text"])),))
        for row in numbers["by_name"]
    )
    return Picture("Cache and loss, 2 layers of width 64, 4 heads", "bytes per token of context", "nats per byte of text", lines, "x")  # fmt: skip


CLAIM = Claim(
    id="groups",
    seeds=("S4.19", "S4.20", "S5.14", "E4.7"),
    says="MQA, GQA and MLA save memory at little loss of quality.",
    predicts="The cache shrinks by the formula; on text the loss moves by hundredths; the work of the scores does not shrink.",
    scale="Two layers of width 64 with four heads, one seed, a minute: it shows the bytes exactly and the quality roughly. `regard compare --quality` has more.",
    measure=_measure,
    checks=_checks,
    picture=_picture,
    lesson="Memory and traffic are saved, the score work is not (E4.7).",
)
"""S5.14."""
