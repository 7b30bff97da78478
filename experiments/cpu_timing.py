"""Timing for claims: rounds in turns, ratios round by round, and exponents of time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import geometric_mean

import torch

from experiments.claim import num_steps
from regard.compare.experiment import Numbers
from regard.timing import interleaved, torch_threads
from regard.view.charts import Line


def time_cases(
    cases: Mapping[str, Callable[[], object]],
    budget: float,
    *,
    rounds: int = 25,
    sample: float = 0.01,
    limit: float = 20.0,
) -> dict[str, list[float]]:
    """Time functions in turns on one thread, in processor time, which other work leaves alone.

    At a budget of 1 there are `rounds` rounds, or fewer in `limit` seconds.
    """
    with torch.inference_mode(), torch_threads(1):
        return interleaved(
            cases,
            rounds=num_steps(budget, rounds, least=3),
            sample=sample,
            limit=limit * budget,
            clock=time.process_time,
        )


def round_ratios(times: Mapping[str, Sequence[float]], of: str, to: str) -> list[float]:
    """Return the ratio of two times in each round, where the machine's speed is the same."""
    return [x / y for x, y in zip(times[of], times[to], strict=True)]


def combine_rounds(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the geometric mean over rows, such as lengths, for each round that all rows have."""
    return [geometric_mean(values) for values in zip(*rows, strict=False)]


def fit_exponent(lengths: Sequence[float], values: Sequence[float]) -> float:
    """Return the least-squares slope of log(value) over log(length): values ~ length^slope."""
    x, y = [math.log(n) for n in lengths], [math.log(v) for v in values]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum(
        (a - mx) ** 2 for a in x
    )


def timing_settings() -> Numbers:
    """Return the settings of the timing: one thread, processor time, no dropout.

    >>> timing_settings()["dropout"]
    0.0
    """
    return {
        "threads": 1,
        "clock": "processor time",
        "dropout": 0.0,
        "dtype": "float32",
        "mode": "evaluation, no gradients",
    }


def timing_lines(numbers: Numbers, *names: str) -> tuple[Line, ...]:
    """Return a curve for each function: the milliseconds of its fastest round, by length.

    >>> timing_lines({"by_length": [{"length": 8, "times": {"a": [0.5, 0.7]}}]}, "a")[0].points
    ((8.0, 500.0),)
    """
    rows = numbers["by_length"]
    return tuple(
        Line(name, tuple((float(row["length"]), 1e3 * min(row["times"][name])) for row in rows))
        for name in names
    )


def length_exponents(rows: Sequence[Numbers], name: str) -> list[float]:
    """Return the exponent of the length in a function's times, for each round."""
    lengths = [float(row["length"]) for row in rows]
    return [
        round(fit_exponent(lengths, times), 12)
        for times in zip(*(row["times"][name] for row in rows), strict=False)
    ]
