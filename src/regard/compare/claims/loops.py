"""All scores by two loops, and by one matrix product: the same numbers, timed in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.compare.claims.base import Check, Claim, scattered
from regard.compare.claims.timed import by_length, ratios, seconds, setting, slopes
from regard.compare.experiment import Numbers
from regard.view.charts import Picture

LENGTHS, DIM = (6, 16, 48), 3
"""Six words of three numbers are the notes' own example."""


def looped(x: Tensor) -> Tensor:
    """s_ij = x_i . x_j, one after another.

    >>> x = torch.arange(6.0).view(2, 3)
    >>> torch.equal(looped(x), x @ x.T)
    True
    """
    scores = x.new_zeros(len(x), len(x))
    for i, one in enumerate(x):
        for j, other in enumerate(x):
            scores[i, j] = torch.dot(one, other)
    return scores


def _measure(budget: float, seed: int) -> Numbers:
    make, rows = torch.Generator().manual_seed(seed), []
    for length in LENGTHS:
        x = torch.randn(length, DIM, generator=make)
        cases: dict[str, Callable[[], object]] = {
            "loops": partial(looped, x),
            "product": partial(torch.matmul, x, x.T),
        }
        error = float((looped(x.double()) - x.double() @ x.double().T).abs().max())
        rows.append({"length": length, "error": error, "times": seconds(cases, budget, rounds=9)})
    return {**setting(), "dim": DIM, "by_length": rows}


def _checks(numbers: Mapping[str, Any]) -> list[Check]:
    rows = numbers["by_length"]
    return [
        Check(
            "both give the same scores: largest difference, in fp64",
            max(r["error"] for r in rows),
            high=1e-12,
        ),
        *(
            scattered(
                f"{r['length']} words: time of the loops by that of the product",
                ratios(r["times"], "loops", "product"),
                low=2.0,
            )
            for r in rows
        ),
        scattered("the loops' time: exponent of n", slopes(rows, "loops"), role="told"),
    ]


def _picture(numbers: Mapping[str, Any]) -> Picture:
    lines = by_length(numbers, "loops", "product")
    return Picture("All scores of n words of three numbers", "words", "milliseconds", lines, "xy")


CLAIM = Claim(
    id="loops",
    seeds=("S3.15",),
    says="A matrix product computes all scores faster than two loops do.",
    predicts="The same scores, and more than twice the time for the loops at every length.",
    scale="Python's loops over torch's numbers, as the note has them: most of their time is the "
    "call of each small operation.",
    measure=_measure,
    checks=_checks,
    picture=_picture,
    timed=True,
    lesson="The arithmetic is the same; what is saved is n^2 calls.",
)
"""S3.15."""
