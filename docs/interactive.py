"""The numbers of the interactive figures, docs/interactive.json: `python -m docs.interactive`.

They are the queries, keys and values of two trained heads on one sentence each, and the memories of
some cards. docs/interactive.js computes the rest, in the page.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import regard
from regard.cost.roofline import MACHINES

FILE = Path(__file__).with_suffix(".json")
CARDS = ("rtx-4090", "rtx-5090", "l40s", "a100-80gb", "h200-sxm", "b200")
DIGITS = 5
"""Significant digits of each number: the weights differ from the model's by less than 1e-4."""


class Head(NamedTuple):
    """One head of a trained model on a sentence, and where a figure begins."""

    model: str
    sentence: str
    layer: int
    head: int
    query: int
    key: int


HEADS = (
    Head("minilm", "a fluffy blue creature roamed the verdant forest", 0, 1, query=4, key=2),
    Head(
        "smollm2",
        "When Mary and John went to the store, John gave a drink to",
        23,
        0,
        query=13,
        key=1,
    ),
    Head("gemma3", "妈妈和爸爸去了商店，爸爸把一瓶水递给了", 12, 1, query=13, key=1),
)


class Traced(NamedTuple):
    """What one head computed: words, its queries, keys and values [T, D], and weights [T, T]."""

    words: list[str]
    q: Tensor
    k: Tensor
    v: Tensor
    pattern: Tensor


def trace(head: Head) -> Traced:
    """Run the model on the sentence, and take the tensors of the head."""
    model: Any = regard.load(head.model)
    encoded = model.encode(head.sentence)
    inputs = (encoded,) if isinstance(encoded, Tensor) else encoded
    names = [f"layers.{head.layer}.{name}" for name in ("q", "k", "v", "pattern")]
    with regard.Trace(*names) as found, torch.no_grad():
        model(*inputs)
    q, k, v, pattern = (found[name][0] for name in names)
    shared = head.head // (len(q) // len(k))  # GQA: the key/value head of this query head
    words = [piece.strip("·") for piece in model.tokenizer.pieces(inputs[0][0].tolist())]
    return Traced(words, q[head.head], k[shared], v[shared], pattern[head.head])


def _rounded(x: Tensor) -> list[list[float]]:
    return [[float(f"{value:.{DIGITS}g}") for value in row] for row in x.tolist()]


def figures() -> dict[str, Any]:
    """Return what docs/interactive.json contains."""
    heads = {}
    for head in HEADS:
        words, q, k, v, pattern = trace(head)
        heads[head.model] = {
            "words": words,
            "query": head.query,
            "key": head.key,
            "causal": bool((pattern.triu(1) == 0).all()),
            "scale": q.shape[-1] ** -0.5,
            "q": _rounded(q),
            "k": _rounded(k),
            "v": _rounded(v),
        }
    return {"heads": heads, "cards": {name: MACHINES[name].memory for name in CARDS}}


if __name__ == "__main__":
    FILE.write_text(json.dumps(figures(), ensure_ascii=False) + "\n", "utf-8")
