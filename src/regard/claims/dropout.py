"""Dropout on weights: rows no longer sum to 1, the mean over draws is the undropped output, and in
evaluation there is none.

d_ij ~ Bernoulli(1 - p) / (1 - p)
E[sum_j d_ij w_ij v_j] = sum_j w_ij v_j,  Var[sum_j d_ij w_ij] = p / (1 - p) sum_j w_ij^2
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from regard import attend, attention_weights
from regard.claims.claim import (
    ATTN_JOURNEY,
    DEEPSEEK_NOTE,
    RASCHKA_NOTES,
    Claim,
    Criterion,
    NoteSection,
    num_steps,
)
from regard.compare.experiment import Numbers
from regard.nn.variants import mha
from regard.view.charts import Line, Picture

RATES = (0.1, 0.3, 0.5, 0.8)
T, D = 16, 8


def _measure(budget: float, seed: int) -> Numbers:
    draws = num_steps(budget, 2000, least=200)
    make = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, 1, T, D, generator=make).expand(draws, 1, T, D) for _ in range(2))
    eye = torch.eye(T).expand(draws, 1, T, T)  # values that show the weights themselves
    w = attention_weights(q[:1], k[:1])[0, 0].double()
    found = []
    for rate in RATES:
        dropped = attend(q, k, eye, dropout=rate)[:, 0].double()
        sums = dropped.sum(-1)
        expected = (rate / (1 - rate) * w.square().sum(-1)).sqrt()
        off = (dropped.mean(0) - w).abs() / (w * math.sqrt(rate / (1 - rate) / draws))
        found.append(
            {
                "rate": rate,
                "row_sum_std": float(sums.std(0).mean()),
                "row_sum_std_expected": float(expected.mean()),
                "mean_off_in_deviations": float(off.max()),
                "dropped_share": float((dropped == 0).double().mean()),
                "exactly_half": float(((dropped == 0).sum(-1) == T // 2).double().mean()),
            }
        )
    module = mha(32, 4, dropout=0.5)
    x = torch.randn(2, 9, 32, generator=make)
    with torch.no_grad():
        eval_change = float((module.eval()(x) - module(x)).abs().max())
        train_change = float((module.train()(x) - module(x)).abs().max())
    return {
        "draws": draws,
        "weights": T,
        "by_rate": found,
        "eval_change": eval_change,
        "train_change": train_change,
    }


def _checks(numbers: Mapping[str, Any]) -> list[Criterion]:
    rows, draws = numbers["by_rate"], numbers["draws"]
    return [
        Criterion(
            "the share that is dropped is p: largest distance, in standard errors",
            _share_off(numbers),
            high=5.0,
        ),
        Criterion(
            "the mean over draws is the weight without dropout: largest distance, in standard "
            "errors",
            max(r["mean_off_in_deviations"] for r in rows),
            high=6.0,
        ),
        Criterion(
            "row sums scatter as p / (1 - p) sum w^2 says: largest relative distance",
            max(abs(r["row_sum_std"] / r["row_sum_std_expected"] - 1) for r in rows),
            high=5 / math.sqrt(draws),
        ),
        Criterion("in training two passes differ", numbers["train_change"], low=1e-3),
        Criterion(
            "in evaluation they are the same to the last bit", numbers["eval_change"], high=0.0
        ),
    ]


def _share_off(numbers: Mapping[str, Any]) -> float:
    count = numbers["draws"] * T * T
    return max(
        float(abs(r["dropped_share"] - r["rate"]) / math.sqrt(r["rate"] * (1 - r["rate"]) / count))
        for r in numbers["by_rate"]
    )


def _half(numbers: Mapping[str, Any]) -> Mapping[str, Any]:
    return next(r for r in numbers["by_rate"] if r["rate"] == 0.5)


def _checks_sums(numbers: Mapping[str, Any]) -> list[Criterion]:
    return [
        Criterion(
            "the weights of a row sum to 1: deviation of their sum at p = 0.5",
            _half(numbers)["row_sum_std"],
            high=1e-6,
        ),
        Criterion("... at p = 0.1", numbers["by_rate"][0]["row_sum_std"], high=1e-6),
    ]


def _checks_half(numbers: Mapping[str, Any]) -> list[Criterion]:
    half = _half(numbers)
    return [
        Criterion(
            "the share that is dropped at p = 0.5, over all draws",
            half["dropped_share"],
            0.49,
            0.51,
        ),
        Criterion(
            "of one row it is half as well: share of rows that lose exactly half of their weights",
            half["exactly_half"],
            low=0.99,
        ),
    ]


def _picture(numbers: Mapping[str, Any]) -> Picture:
    lines = tuple(
        Line(name, tuple((r["rate"], r[key]) for r in numbers["by_rate"]))
        for name, key in (
            ("measured", "row_sum_std"),
            ("sqrt(p/(1-p) sum w^2)", "row_sum_std_expected"),
        )
    )
    return Picture(
        "How far row sums of dropped weights scatter around 1", "p", "standard deviation", lines
    )


_SMALL = (
    "Statistics of one small layer. Whether dropout on weights curbs over-fitting needs a "
    "large model that over-fits, and is not shown here."
)

CLAIM = Claim(
    id="dropout",
    sources=(NoteSection(ATTN_JOURNEY, "3.3"), NoteSection(RASCHKA_NOTES, "6.2")),
    statement="Dropout sets weights to zero at random in training, scales the others by 1/(1-p), and "
    "does nothing in evaluation.",
    prediction="A share of p is dropped, the mean over draws is kept, and two evaluations agree to "
    "the bit.",
    scope=_SMALL,
    measure=_measure,
    checks=_checks,
    picture=_picture,
    takeaway="What is shown or timed runs without it.",
)

SUMS = Claim(
    id="dropout-rows",
    sources=(NoteSection(DEEPSEEK_NOTE, "1.1.3"),),
    statement="Behind dropout the weights of a row are still a probability distribution.",
    prediction="Every row sums to 1.",
    scope=_SMALL,
    measure=_measure,
    checks=_checks_sums,
    picture=_picture,
    measured_with="dropout",
    takeaway="They sum to 1 only on average: a row that is printed in training is no distribution.",
)

HALF = Claim(
    id="dropout-half",
    sources=(NoteSection(RASCHKA_NOTES, "6.2"),),
    statement="Dropout of 50 % sets half of the weights to zero.",
    prediction="Half of all weights, and half of each row.",
    scope=_SMALL,
    measure=_measure,
    checks=_checks_half,
    picture=_picture,
    measured_with="dropout",
    takeaway="In expectation only: how many a row loses is binomial, and the printed draw took 15 "
    "of 36.",
)

CLAIMS = (CLAIM, SUMS, HALF)
