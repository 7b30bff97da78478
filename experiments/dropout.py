"""Claims about dropout on attention weights: row sums, the mean over draws, and evaluation mode.

d_ij ~ Bernoulli(1 - p) / (1 - p)
E[sum_j d_ij w_ij v_j] = sum_j w_ij v_j,  Var[sum_j d_ij w_ij] = p / (1 - p) sum_j w_ij^2
"""

from __future__ import annotations

import math

import torch

from experiments.claim import (
    ATTN_JOURNEY,
    DEEPSEEK_NOTE,
    RASCHKA_NOTES,
    Claim,
    Criterion,
    NoteSection,
    num_steps,
)
from regard import attend, attention_weights
from regard.compare.experiment import Numbers
from regard.nn.variants import mha
from regard.view.charts import Line, Picture

RATES = (0.1, 0.3, 0.5, 0.8)
T, D = 16, 8


def _measure(budget: float, seed: int) -> Numbers:
    draws = num_steps(budget, 2000, least=200)
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, 1, T, D, generator=generator).expand(draws, 1, T, D) for _ in range(2))
    # with the unit matrix as values the output is the weights
    eye = torch.eye(T).expand(draws, 1, T, T)
    w = attention_weights(q[:1], k[:1])[0, 0].double()
    rows = []
    for rate in RATES:
        dropped = attend(q, k, eye, dropout=rate)[:, 0].double()
        sums = dropped.sum(-1)
        expected = (rate / (1 - rate) * w.square().sum(-1)).sqrt()
        deviations = (dropped.mean(0) - w).abs() / (w * math.sqrt(rate / (1 - rate) / draws))
        rows.append(
            {
                "rate": rate,
                "row_sum_std": float(sums.std(0).mean()),
                "row_sum_std_expected": float(expected.mean()),
                "mean_off_in_deviations": float(deviations.max()),
                "dropped_share": float((dropped == 0).double().mean()),
                "exactly_half": float(((dropped == 0).sum(-1) == T // 2).double().mean()),
            }
        )
    module = mha(32, 4, dropout=0.5)
    x = torch.randn(2, 9, 32, generator=generator)
    with torch.no_grad():
        eval_change = float((module.eval()(x) - module(x)).abs().max())
        train_change = float((module.train()(x) - module(x)).abs().max())
    return {
        "draws": draws,
        "weights": T,
        "by_rate": rows,
        "eval_change": eval_change,
        "train_change": train_change,
    }


def _checks(numbers: Numbers) -> list[Criterion]:
    rows, draws = numbers["by_rate"], numbers["draws"]
    return [
        Criterion(
            "share of dropped weights: largest difference from p, in standard errors",
            _share_off(numbers),
            high=5.0,
        ),
        Criterion(
            "mean weight over the draws: largest difference from the weight without dropout, in "
            "standard errors",
            max(r["mean_off_in_deviations"] for r in rows),
            high=6.0,
        ),
        Criterion(
            "standard deviation of row sums: largest relative difference from sqrt(p / (1 - p) sum "
            "w^2)",
            max(abs(r["row_sum_std"] / r["row_sum_std_expected"] - 1) for r in rows),
            high=5 / math.sqrt(draws),
        ),
        Criterion(
            "two passes in training mode: largest difference", numbers["train_change"], low=1e-3
        ),
        Criterion(
            "two passes in evaluation mode: largest difference", numbers["eval_change"], high=0.0
        ),
    ]


def _share_off(numbers: Numbers) -> float:
    """Return the largest difference of the dropped share from p, in standard errors."""
    count = numbers["draws"] * T * T
    return max(
        float(abs(r["dropped_share"] - r["rate"]) / math.sqrt(r["rate"] * (1 - r["rate"]) / count))
        for r in numbers["by_rate"]
    )


def _half(numbers: Numbers) -> Numbers:
    """Return the row for p = 0.5."""
    return next(r for r in numbers["by_rate"] if r["rate"] == 0.5)


def _checks_sums(numbers: Numbers) -> list[Criterion]:
    return [
        Criterion(
            "standard deviation of row sums at p = 0.5",
            _half(numbers)["row_sum_std"],
            high=1e-6,
        ),
        Criterion(
            "standard deviation of row sums at p = 0.1",
            numbers["by_rate"][0]["row_sum_std"],
            high=1e-6,
        ),
    ]


def _checks_half(numbers: Numbers) -> list[Criterion]:
    half = _half(numbers)
    return [
        Criterion(
            "share of dropped weights at p = 0.5, over all draws",
            half["dropped_share"],
            0.49,
            0.51,
        ),
        Criterion(
            "share of rows that lose exactly half of their weights at p = 0.5",
            half["exactly_half"],
            low=0.99,
        ),
    ]


def _picture(numbers: Numbers) -> Picture:
    lines = tuple(
        Line(name, tuple((r["rate"], r[key]) for r in numbers["by_rate"]))
        for name, key in (
            ("measured", "row_sum_std"),
            ("sqrt(p/(1-p) sum w^2)", "row_sum_std_expected"),
        )
    )
    return Picture(
        "Standard deviation of the row sums of weights after dropout",
        "p",
        "standard deviation",
        lines,
    )


_SMALL = (
    "Statistics of one small layer. Whether dropout on weights reduces over-fitting is not shown: "
    "it needs a large model that over-fits."
)

CLAIM = Claim(
    id="dropout",
    sources=(NoteSection(ATTN_JOURNEY, "3.3"), NoteSection(RASCHKA_NOTES, "6.2")),
    statement="Dropout sets weights to zero at random in training, scales the others by 1/(1-p), "
    "and does nothing in evaluation.",
    prediction="A share p of the weights is dropped, the mean over draws is the weight itself, and "
    "two passes in evaluation mode are identical.",
    scope=_SMALL,
    measure=_measure,
    checks=_checks,
    picture=_picture,
    takeaway="Weights should be shown, and models timed, in evaluation mode.",
)

SUMS = Claim(
    id="dropout-rows",
    sources=(NoteSection(DEEPSEEK_NOTE, "1.1.3"),),
    statement="After dropout the weights of a row are still a probability distribution.",
    prediction="Every row sums to 1.",
    scope=_SMALL,
    measure=_measure,
    checks=_checks_sums,
    picture=_picture,
    measured_with="dropout",
    takeaway="The weights sum to 1 only on average: a row that is printed in training mode is not "
    "a distribution.",
)

HALF = Claim(
    id="dropout-half",
    sources=(NoteSection(RASCHKA_NOTES, "6.2"),),
    statement="Dropout of 50 % sets half of the weights to zero.",
    prediction="Half of all weights are zero, and half of the weights of each row.",
    scope=_SMALL,
    measure=_measure,
    checks=_checks_half,
    picture=_picture,
    measured_with="dropout",
    takeaway="True only in expectation: the number of dropped weights in a row is binomial. In the "
    "draw that the note prints, 15 of 36 weights are dropped.",
)

CLAIMS = (CLAIM, SUMS, HALF)
