"""How work and time grow with the length, for full, windowed, strided and linear attention:
exponents of n.

pairs:  full n^2 / 2;  a window of w: n w;  a stride of sqrt(n): n^1.5
linear attention:  a state of fixed size per token
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from regard import attend, plan
from regard.claims.claim import OUTLINE, OVERVIEW, Claim, Criterion, NoteSection, median_criterion
from regard.claims.cpu_timing import (
    fit_exponent,
    length_exponents,
    round_ratios,
    time_cases,
    timing_lines,
    timing_settings,
)
from regard.compare.experiment import Numbers
from regard.linear import linear_attention
from regard.masks import Causal, Mask, Strided, Window
from regard.nn.variants import linear_attention as linear_layer
from regard.view.charts import Line, Picture

LENGTHS = (1024, 2048, 4096, 8192)
H, D, WINDOW = 2, 64, 128


def _masks(length: int) -> dict[str, Mask]:
    return {
        "full": Causal(),
        "window": Causal() & Window(WINDOW),
        "strided": Causal() & Strided(round(length**0.5)),
    }


def _measure_pairs(_budget: float, _seed: int) -> Numbers:
    layer = linear_layer(H * D, H)
    rows = []
    for length in LENGTHS:
        pairs = {name: _pairs(mask, length) for name, mask in _masks(length).items()}
        told = layer.describe(length)
        rows.append(
            {
                "length": length,
                "pairs": pairs,
                "linear": told.flops_per_token.value * length,
            }
        )
    return {"heads": H, "head_dim": D, "window": WINDOW, "by_length": rows}


def _pairs(mask: Mask, length: int) -> int:
    """How many pairs the mask allows, 512 rows at a time."""
    keys = torch.arange(length)[None]
    return sum(
        int(mask.allows(torch.arange(at, at + 512)[:, None], keys).sum())
        for at in range(0, length, 512)
    )


def _slope(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return fit_exponent([r["length"] for r in rows], [r["pairs"][name] for r in rows])


def _checks_full(numbers: Mapping[str, Any]) -> list[Criterion]:
    return [
        Criterion(
            "pairs of queries and keys: exponent of n",
            _slope(numbers["by_length"], "full"),
            1.95,
            2.05,
        )
    ]


def _checks_sparse(numbers: Mapping[str, Any]) -> list[Criterion]:
    rows = numbers["by_length"]

    def kept(name: str) -> float:
        """Pairs by n log n at the longest, by the same at the shortest: 1 where they grow as n log
        n.
        """
        first, last = (
            r["pairs"][name] / r["length"] / math.log(r["length"]) for r in (rows[0], rows[-1])
        )
        return float(last / first)

    return [
        Criterion(
            "pairs of a window by n log n, the longest by the shortest", kept("window"), 0.95, 1.05
        ),
        Criterion("pairs of a stride of sqrt(n) by n log n, likewise", kept("strided"), 0.95, 1.05),
        Criterion("pairs of a window: exponent of n", _slope(rows, "window"), role="reported"),
        Criterion(
            "pairs of a stride of sqrt(n): exponent of n", _slope(rows, "strided"), role="reported"
        ),
    ]


def _checks_linear(numbers: Mapping[str, Any]) -> list[Criterion]:
    rows = numbers["by_length"]
    grows = fit_exponent([r["length"] for r in rows], [r["linear"] for r in rows])
    return [Criterion("FLOPs of a layer, as counted: exponent of n", grows, 0.95, 1.05)]


def _picture_pairs(numbers: Mapping[str, Any]) -> Picture:
    lines = tuple(
        Line(
            name, tuple((float(r["length"]), float(r["pairs"][name])) for r in numbers["by_length"])
        )
        for name in ("full", "window", "strided")
    )
    return Picture("Pairs that a mask allows", "n", "pairs", lines, "xy")


_COUNTED = "Counted exactly, from 1024 to 8192 tokens."

FULL = Claim(
    id="full-work",
    sources=(NoteSection(OVERVIEW, "5.2"),),
    statement="The work of full attention grows as n^2.",
    prediction="Pairs of queries and keys with an exponent of 2.",
    scope=_COUNTED,
    measure=_measure_pairs,
    checks=_checks_full,
    picture=_picture_pairs,
    measured_with="full-work",
    takeaway="Quadratic work is not quadratic memory: a tiled kernel's memory grows with n.",
)

SPARSE = Claim(
    id="sparse-work",
    sources=(NoteSection(OVERVIEW, "5.1"), NoteSection(OUTLINE, "sparse attention")),
    statement="The work of sparse attention grows as n log n.",
    prediction="Pairs of windows and of strides that stay in proportion to n log n.",
    scope=_COUNTED
    + " A window is Longformer's without its global tokens, a stride of sqrt(n) the Sparse "
    "Transformer's.",
    measure=_measure_pairs,
    checks=_checks_sparse,
    picture=_picture_pairs,
    measured_with="full-work",
    takeaway="A window is linear and a stride of sqrt(n) has n^1.5; n log n is Reformer's hashing.",
)

LINEAR = Claim(
    id="linear-work",
    sources=(NoteSection(OUTLINE, "linear attention"), NoteSection(OUTLINE, "long contexts")),
    statement="The work of linear attention grows as n.",
    prediction="FLOPs of a layer with an exponent of 1.",
    scope=_COUNTED + " Each token adds to a state of fixed size and reads it.",
    measure=_measure_pairs,
    checks=_checks_linear,
    picture=_picture_pairs,
    measured_with="full-work",
    takeaway="What it pays with is a state of fixed size: it cannot keep every pair apart.",
)


def _measure_time(budget: float, seed: int) -> Numbers:
    make, rows = torch.Generator().manual_seed(seed), []
    for length in LENGTHS:
        q, k, v = torch.randn(3, 1, H, length, D, generator=make).unbind(0)
        masks = _masks(length)
        cases: dict[str, Callable[[], object]] = {
            name: partial(attend, q, k, v, mask=mask) for name, mask in masks.items()
        }
        cases["linear"] = partial(linear_attention, q, k, v)
        where = {name: plan(q, k, v, mask=mask).kernel for name, mask in masks.items()}
        rows.append(
            {
                "length": length,
                "times": time_cases(cases, budget, rounds=5, limit=12.0),
                "kernel": where,
            }
        )
    return {**timing_settings(), "heads": H, "head_dim": D, "window": WINDOW, "by_length": rows}


def _checks_time(numbers: Mapping[str, Any]) -> list[Criterion]:
    rows = numbers["by_length"]
    last = rows[-1]["times"]
    return [
        median_criterion(
            "a window by full attention, at the longest: time",
            round_ratios(last, "window", "full"),
            high=0.5,
        ),
        median_criterion(
            "a stride of sqrt(n) by full attention, at the longest: time",
            round_ratios(last, "strided", "full"),
            high=0.5,
            role="limit",
        ),
        *(
            median_criterion(
                f"time, the three longest: exponent of n, {name}",
                length_exponents(rows[1:], name),
                role="reported",
            )
            for name in ("full", "window", "strided", "linear")
        ),
    ]


def _picture_time(numbers: Mapping[str, Any]) -> Picture:
    lines = timing_lines(numbers, "full", "window", "strided", "linear")
    return Picture("A prompt of n tokens, 2 heads of 64", "n", "milliseconds", lines, "xy")


SPARSE_TIME = Claim(
    id="sparse-time",
    sources=(NoteSection(OVERVIEW, "5.1"), NoteSection(OUTLINE, "long contexts")),
    statement="Sparse attention is faster than full attention on long texts.",
    prediction="Less than half of the time at 8192 tokens.",
    scope="Up to 8192 tokens on this CPU, each with the kernel that regard chooses for it.",
    measure=_measure_time,
    checks=_checks_time,
    picture=_picture_time,
    timed=True,
    takeaway="Time follows the pairs where a kernel can skip whole tiles: a window leaves most of "
    "them empty, a stride none.",
)

CLAIMS = (FULL, SPARSE, LINEAR, SPARSE_TIME)
