"""The claim that each dim of an embedding stands for a feature, tested against directions.

A direction is the difference of means w = mean(E[with the feature]) - mean(E[without it]) over one
half of the tokens, the training half. The best single dim is chosen on the same half. Both are
tested on the other half. The embedding is that of the model "tiny".
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import regard
from experiments.claim import OVERVIEW, Claim, Criterion, NoteSection
from regard.compare.experiment import Numbers
from regard.view.charts import Line, Picture

SPLITS = 16
"""The number of random splits of the tokens into halves; accuracies are averaged over them."""
FEATURES: dict[str, Callable[[str], bool]] = {
    "begins a word": lambda text: text.startswith(" "),
    "has a capital": lambda text: any(letter.isupper() for letter in text),
    "has letters": lambda text: any(letter.isalpha() for letter in text),
}
"""Features of the text of a token."""


def _balanced_accuracy(score: Tensor, has: Tensor, train: Tensor) -> float:
    """Return how well a score `[V]` predicts on the test half which tokens have a feature.

    The threshold is halfway between the mean scores with and without it in the training half.
    """
    threshold = (score[train & has].mean() + score[train & ~has].mean()) / 2
    sign = score[train & has].mean() > score[train & ~has].mean()
    predicted = (score > threshold) == sign
    test = ~train
    return float(
        (predicted[test & has].double().mean() + (~predicted[test & ~has]).double().mean()) / 2
    )


def _direction(x: Tensor, has: Tensor) -> Tensor:
    """Return the mean of the rows with the feature minus the mean of those without it."""
    return x[has].mean(0) - x[~has].mean(0)


def _accuracies(table: Tensor, shuffled: Tensor, has: Tensor, train: Tensor) -> dict[str, float]:
    """Return the test accuracies of a direction, of one in shuffled rows, and of the best dim."""
    accuracies = {
        name: _balanced_accuracy(vectors @ _direction(vectors[train], has[train]), has, train)
        for name, vectors in (("direction", table), ("shuffled", shuffled))
    }
    separation = _direction(table[train], has[train]).abs() / table[train].std(0)
    return {
        **accuracies,
        "best_dim": _balanced_accuracy(table[:, int(separation.argmax())], has, train),
    }


def _measure(_budget: float, seed: int) -> Numbers:
    tiny = regard.load("tiny")
    table = tiny.decoder.embed.embedding.weight.detach().double()
    texts = [tiny.tokenizer.decode([i]) for i in range(len(table))]
    plain_tokens = torch.tensor([bool(text) and "\ufffd" not in text for text in texts])
    texts = [text for text, is_plain in zip(texts, plain_tokens.tolist(), strict=True) if is_plain]
    table = table[plain_tokens] - table[plain_tokens].mean(0)
    generator = torch.Generator().manual_seed(seed)
    splits = [torch.rand(len(table), generator=generator) < 0.5 for _ in range(SPLITS)]
    shuffled = table[torch.randperm(len(table), generator=generator)]
    rows = []
    for name, has_feature in FEATURES.items():
        has = torch.tensor([has_feature(text) for text in texts])
        accuracies = [_accuracies(table, shuffled, has, train) for train in splits]
        means = {
            key: sum(split_accuracies[key] for split_accuracies in accuracies) / SPLITS
            for key in accuracies[0]
        }
        rows.append({"name": name, "share": float(has.double().mean()), **means})
    return {"tokens": len(texts), "splits": SPLITS, "dims": table.shape[1], "by_feature": rows}


def _checks(numbers: Numbers) -> list[Criterion]:
    rows = numbers["by_feature"]
    directions = sum(row["direction"] for row in rows) / len(rows)
    return [
        Criterion(
            "balanced accuracy of the best dim on tokens that it was not chosen by, for the best "
            "feature",
            max(row["best_dim"] for row in rows),
            low=0.75,
        ),
        Criterion(
            "mean balanced accuracy of a direction on tokens that it was not computed from (the "
            "features are in the embedding)",
            directions,
            low=0.6,
            role="control",
        ),
        Criterion(
            "balanced accuracy of a direction in shuffled rows: largest difference from one half",
            max(abs(row["shuffled"] - 0.5) for row in rows),
            high=0.15,
            role="control",
        ),
    ]


def _picture(numbers: Numbers) -> Picture:
    lines = tuple(
        Line(name, tuple((float(i), row[key]) for i, row in enumerate(numbers["by_feature"])))
        for name, key in (
            ("a direction", "direction"),
            ("the best dim", "best_dim"),
            ("shuffled rows", "shuffled"),
        )
    )
    names = ", ".join(f"{i} {row['name']}" for i, row in enumerate(numbers["by_feature"]))
    title = "Features of a token predicted from its embedding"
    return Picture(title, names, "balanced accuracy", lines)


CLAIM = Claim(
    id="features",
    sources=(NoteSection(OVERVIEW, "1.2"),),
    statement="Each dim of an embedding stands for a feature of the token.",
    prediction="One dim separates tokens with a feature from tokens without it with an accuracy of "
    "3/4; guessing has 1/2.",
    scope="The model tiny has 256 dims and 1024 tokens: its embedding has features of spelling, "
    "and hardly any features of meaning.",
    measure=_measure,
    checks=_checks,
    picture=_picture,
    takeaway="A direction stands for a feature; which dims it spans is an accident of training.",
)

CLAIMS = (CLAIM,)
