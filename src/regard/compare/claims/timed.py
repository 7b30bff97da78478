"""What the timed claims share: the fastest of interleaved rounds, and the exponent of a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from regard.bench.timing import interleaved
from regard.compare.claims.base import steps
from regard.view.curves import Line


def seconds(
    cases: Mapping[str, Callable[[], object]], budget: float, *, rounds: int = 25, sample: float = 0.01, limit: float = 20.0
) -> dict[str, list[float]]:  # fmt: skip
    """Seconds of each case, round by round, all in this process and in turns.

    Args:
        cases: name -> what is timed.
        budget: more of it is more rounds.
        rounds: at a budget of 1.
        sample: seconds of one timing.
        limit: seconds of all rounds together, at a budget of 1.

    >>> [len(found) for found in seconds({"a": lambda: 1}, 0.01, sample=0.0).values()]
    [3]
    """
    with torch.inference_mode():
        return interleaved(cases, rounds=steps(budget, rounds, least=3), sample=sample, limit=limit * budget)  # fmt: skip


def fastest(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The fastest round of each: what else the machine does can only add to it.

    >>> fastest({"a": [1.0, 3.0, 2.0]})
    {'a': 1.0}
    """
    return {name: min(found) for name, found in times.items()}


def ratios(times: Mapping[str, Sequence[float]], to: str) -> dict[str, float]:
    """The fastest round of each by the fastest of one of them.

    >>> ratios({"a": [1.0, 3.0], "b": [5.0, 2.0]}, "a")
    {'a': 1.0, 'b': 2.0}
    """
    best = fastest(times)
    return {name: value / best[to] for name, value in best.items()}


def exponent(lengths: Sequence[float], values: Sequence[float]) -> float:
    """The slope of log value over log length, by least squares: values ~ length^slope.

    >>> round(exponent([1, 2, 4], [3.0, 12.0, 48.0]), 6)
    2.0
    """
    x, y = [math.log(n) for n in lengths], [math.log(v) for v in values]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)  # fmt: skip


def setting() -> dict[str, Any]:
    """How it was timed: threads, and that nothing is dropped.

    >>> setting()["dropout"]
    0.0
    """
    return {"threads": torch.get_num_threads(), "dropout": 0.0, "dtype": "float32", "mode": "evaluation, no gradients"}  # fmt: skip


def by_length(numbers: Mapping[str, Any], *names: str) -> tuple[Line, ...]:
    """A curve for each way that was timed: milliseconds by length.

    >>> by_length({"by_length": [{"length": 8, "seconds": {"a": 0.5}}]}, "a")
    (Line(name='a', points=((8.0, 500.0),)),)
    """
    rows = numbers["by_length"]
    return tuple(
        Line(name, tuple((float(row["length"]), 1e3 * row["seconds"][name]) for row in rows))
        for name in names
    )
