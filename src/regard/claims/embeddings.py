"""Do dims of an embedding stand for features of a token? One dim against a direction, on the
embedding of tiny.

a direction is the difference of means, w = mean(E[has it]) - mean(E[has it not]), of one half of
the tokens; the other half is asked
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import regard
from regard.claims.claim import OVERVIEW, Claim, Criterion, NoteSection
from regard.compare.experiment import Numbers
from regard.view.charts import Line, Picture

SPLITS = 16
"""Ways to part the tokens in two, over which shares are averaged."""
FEATURES: dict[str, Callable[[str], bool]] = {
    "begins a word": lambda text: text.startswith(" "),
    "has a capital": lambda text: any(letter.isupper() for letter in text),
    "has letters": lambda text: any(letter.isalpha() for letter in text),
}
"""What the text of a token shows without any model."""


def _sides(score: Tensor, has: Tensor, known: Tensor) -> float:
    """Balanced accuracy on the unknown half, the threshold halfway between the means of the known
    half.
    """
    middle = (score[known & has].mean() + score[known & ~has].mean()) / 2
    sign = score[known & has].mean() > score[known & ~has].mean()
    said = (score > middle) == sign
    asked = ~known
    return float((said[asked & has].double().mean() + (~said[asked & ~has]).double().mean()) / 2)


def _direction(x: Tensor, has: Tensor) -> Tensor:
    """From the mean of those that have it not to the mean of those that have it."""
    return x[has].mean(0) - x[~has].mean(0)


def _told(table: Tensor, shuffled: Tensor, has: Tensor, known: Tensor) -> dict[str, float]:
    """The shares right on the unknown half: of a direction, of one made of other tokens' rows, of
    the best dim.
    """
    found = {
        what: _sides(vectors @ _direction(vectors[known], has[known]), has, known)
        for what, vectors in (("direction", table), ("shuffled", shuffled))
    }
    apart = _direction(table[known], has[known]).abs() / table[known].std(0)
    return {**found, "best_dim": _sides(table[:, int(apart.argmax())], has, known)}


def _measure(_budget: float, seed: int) -> Numbers:
    tiny = regard.load("tiny")
    table = tiny.decoder.embed.embedding.weight.detach().double()
    texts = [tiny.tokenizer.decode([i]) for i in range(len(table))]
    plain = torch.tensor([bool(text) and "\ufffd" not in text for text in texts])
    texts = [text for text, good in zip(texts, plain.tolist(), strict=True) if good]
    table = table[plain] - table[plain].mean(0)
    make = torch.Generator().manual_seed(seed)
    splits = [torch.rand(len(table), generator=make) < 0.5 for _ in range(SPLITS)]
    shuffled = table[torch.randperm(len(table), generator=make)]
    rows = []
    for name, rule in FEATURES.items():
        has = torch.tensor([rule(text) for text in texts])
        told = [_told(table, shuffled, has, known) for known in splits]
        means = {key: sum(one[key] for one in told) / SPLITS for key in told[0]}
        rows.append({"name": name, "share": float(has.double().mean()), **means})
    return {"tokens": len(texts), "splits": SPLITS, "dims": table.shape[1], "by_feature": rows}


def _checks(numbers: Mapping[str, Any]) -> list[Criterion]:
    rows = numbers["by_feature"]
    directions = sum(row["direction"] for row in rows) / len(rows)
    return [
        Criterion(
            "the best dim tells a feature of tokens that it was not chosen by: share right, the "
            "best of the features",
            max(row["best_dim"] for row in rows),
            low=0.75,
        ),
        Criterion(
            "the features are in the embedding: mean share right of a direction, on tokens that "
            "it was not made of",
            directions,
            low=0.6,
            role="control",
        ),
        Criterion(
            "... and nothing is told by shuffled rows: largest distance from one half",
            max(abs(row["shuffled"] - 0.5) for row in rows),
            high=0.15,
            role="control",
        ),
    ]


def _picture(numbers: Mapping[str, Any]) -> Picture:
    lines = tuple(
        Line(name, tuple((float(i), row[key]) for i, row in enumerate(numbers["by_feature"])))
        for name, key in (
            ("a direction", "direction"),
            ("the best dim", "best_dim"),
            ("shuffled rows", "shuffled"),
        )
    )
    names = ", ".join(f"{i} {row['name']}" for i, row in enumerate(numbers["by_feature"]))
    return Picture("Told from the embedding of a token", names, "share right (balanced)", lines)


CLAIM = Claim(
    id="features",
    sources=(NoteSection(OVERVIEW, "1.2"),),
    statement="Each dim of an embedding stands for a feature of the token.",
    prediction="One dim tells three of four tokens that have a feature from those that have not; "
    "guessing tells half.",
    scope="tiny has 256 dims and 1024 tokens: features of spelling are within its reach, those of "
    "meaning hardly.",
    measure=_measure,
    checks=_checks,
    picture=_picture,
    takeaway="What stands for a feature is a direction; which dims carry it is an accident of "
    "training.",
)

CLAIMS = (CLAIM,)
