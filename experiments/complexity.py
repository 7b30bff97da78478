"""Claims about how work and time grow with the length n, for four kinds of attention.

The query-key pairs grow as n^2 / 2 for full attention, n w for a window of w, and n^1.5 for a
stride of sqrt(n). Linear attention has a state of fixed size per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from experiments.claim import OUTLINE, OVERVIEW, Claim, Criterion, NoteSection, median_criterion
from experiments.cpu_timing import (
    fit_exponent,
    length_exponents,
    round_ratios,
    time_cases,
    timing_lines,
    timing_settings,
)
from regard import attend, plan
from regard.compare.experiment import Numbers
from regard.language import Phrase
from regard.linear import linear_attention
from regard.masks import Causal, Mask, Strided, Window
from regard.nn.variants import linear_attention as linear_layer
from regard.view.charts import Line, Picture

LENGTHS = (1024, 2048, 4096, 8192)
H, D, WINDOW = 2, 64, 128


def _masks(length: int) -> dict[str, Mask]:
    """Return the masks that are compared, by name."""
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
        description = layer.describe(length)
        rows.append(
            {
                "length": length,
                "pairs": pairs,
                "linear": description.flops_per_token.value * length,
            }
        )
    return {"heads": H, "head_dim": D, "window": WINDOW, "by_length": rows}


def _pairs(mask: Mask, length: int) -> int:
    """Return how many query-key pairs the mask allows, counted 512 rows at a time."""
    keys = torch.arange(length)[None]
    return sum(
        int(mask.allows(torch.arange(start, start + 512)[:, None], keys).sum())
        for start in range(0, length, 512)
    )


def _slope(rows: Sequence[Numbers], name: str) -> float:
    """Return the exponent of n in the number of pairs of a mask."""
    return fit_exponent([r["length"] for r in rows], [r["pairs"][name] for r in rows])


def _checks_full(numbers: Numbers) -> list[Criterion]:
    return [
        Criterion(
            "query-key pairs: exponent of n",
            _slope(numbers["by_length"], "full"),
            1.95,
            2.05,
        )
    ]


def _checks_sparse(numbers: Numbers) -> list[Criterion]:
    rows = numbers["by_length"]

    def growth(name: str) -> float:
        """Return pairs / (n log n) at the largest n, divided by the same at the smallest n."""
        first, last = (
            r["pairs"][name] / r["length"] / math.log(r["length"]) for r in (rows[0], rows[-1])
        )
        return float(last / first)

    return [
        Criterion(
            "pairs of a window / (n log n): largest n / smallest n", growth("window"), 0.95, 1.05
        ),
        Criterion(
            "pairs of a stride of sqrt(n) / (n log n): largest n / smallest n",
            growth("strided"),
            0.95,
            1.05,
        ),
        Criterion("pairs of a window: exponent of n", _slope(rows, "window"), role="reported"),
        Criterion(
            "pairs of a stride of sqrt(n): exponent of n", _slope(rows, "strided"), role="reported"
        ),
    ]


def _checks_linear(numbers: Numbers) -> list[Criterion]:
    rows = numbers["by_length"]
    grows = fit_exponent([r["length"] for r in rows], [r["linear"] for r in rows])
    return [Criterion("counted FLOPs of a layer: exponent of n", grows, 0.95, 1.05)]


def _picture_pairs(numbers: Numbers) -> Picture:
    lines = tuple(
        Line(
            name, tuple((float(r["length"]), float(r["pairs"][name])) for r in numbers["by_length"])
        )
        for name in ("full", "window", "strided")
    )
    return Picture("Query-key pairs that a mask allows", "n", "pairs", lines, "xy")


_COUNTED = "Counted exactly, from 1024 to 8192 tokens."

FULL = Claim(
    id="full-work",
    sources=(NoteSection(OVERVIEW, "5.2"),),
    statement="The work of full attention grows as n^2.",
    prediction="The number of query-key pairs grows with an exponent of 2.",
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
    prediction="The pairs of a window and of a stride grow in proportion to n log n.",
    scope=Phrase(
        "{counted} The window is Longformer's without its global tokens; the stride of sqrt(n) is "
        "the Sparse Transformer's.",
        counted=Phrase(_COUNTED),
    ),
    measure=_measure_pairs,
    checks=_checks_sparse,
    picture=_picture_pairs,
    measured_with="full-work",
    takeaway="The work of a window grows as n and that of a stride of sqrt(n) as n^1.5; n log n is "
    "the work of Reformer's hashing.",
)

LINEAR = Claim(
    id="linear-work",
    sources=(NoteSection(OUTLINE, "linear attention"), NoteSection(OUTLINE, "long contexts")),
    statement="The work of linear attention grows as n.",
    prediction="The FLOPs of a layer grow with an exponent of 1.",
    scope=Phrase(
        "{counted} Each token adds to a state of fixed size and reads it.", counted=Phrase(_COUNTED)
    ),
    measure=_measure_pairs,
    checks=_checks_linear,
    picture=_picture_pairs,
    measured_with="full-work",
    takeaway="The price is a state of fixed size, which cannot store every key and value "
    "separately.",
)


def _measure_time(budget: float, seed: int) -> Numbers:
    generator, rows = torch.Generator().manual_seed(seed), []
    for length in LENGTHS:
        q, k, v = torch.randn(3, 1, H, length, D, generator=generator).unbind(0)
        masks = _masks(length)
        cases: dict[str, Callable[[], object]] = {
            name: partial(attend, q, k, v, mask=mask) for name, mask in masks.items()
        }
        cases["linear"] = partial(linear_attention, q, k, v)
        kernels = {name: plan(q, k, v, mask=mask).kernel for name, mask in masks.items()}
        rows.append(
            {
                "length": length,
                "times": time_cases(cases, budget, rounds=5, limit=12.0),
                "kernel": kernels,
            }
        )
    return {**timing_settings(), "heads": H, "head_dim": D, "window": WINDOW, "by_length": rows}


def _checks_time(numbers: Numbers) -> list[Criterion]:
    rows = numbers["by_length"]
    last = rows[-1]["times"]
    return [
        median_criterion(
            "largest n: time of a window / time of full attention",
            round_ratios(last, "window", "full"),
            high=0.5,
        ),
        median_criterion(
            "largest n: time of a stride of sqrt(n) / time of full attention",
            round_ratios(last, "strided", "full"),
            high=0.5,
            role="limit",
        ),
        *(
            median_criterion(
                Phrase("time over the three largest n, {name}: exponent of n", name=name),
                length_exponents(rows[1:], name),
                role="reported",
            )
            for name in ("full", "window", "strided", "linear")
        ),
    ]


def _picture_time(numbers: Numbers) -> Picture:
    lines = timing_lines(numbers, "full", "window", "strided", "linear")
    return Picture("A prompt of n tokens, 2 heads of 64", "n", "milliseconds", lines, "xy")


SPARSE_TIME = Claim(
    id="sparse-time",
    sources=(NoteSection(OVERVIEW, "5.1"), NoteSection(OUTLINE, "long contexts")),
    statement="Sparse attention is faster than full attention on long texts.",
    prediction="Sparse attention takes less than half of the time at 8192 tokens.",
    scope="Up to 8192 tokens on this CPU; each runs on the kernel that regard chooses for it.",
    measure=_measure_time,
    checks=_checks_time,
    picture=_picture_time,
    timed=True,
    takeaway="The time falls with the number of pairs only if a kernel can skip whole tiles: with "
    "a window most tiles are empty, with a stride none are.",
)

CLAIMS = (FULL, SPARSE, LINEAR, SPARSE_TIME)
