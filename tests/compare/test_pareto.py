"""The Pareto front against its definition, point by point."""

from __future__ import annotations

import random

import pytest

from regard.compare.comparison import pareto


def brute(points: list[tuple[float, ...]]) -> list[int]:
    found = []
    for i, b in enumerate(points):
        beaten = False
        for a in points:
            no_worse = sum(1 for n in range(len(b)) if a[n] <= b[n]) == len(b)
            better = sum(1 for n in range(len(b)) if a[n] < b[n]) > 0
            beaten = beaten or (no_worse and better)
        if not beaten:
            found.append(i)
    return found


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_is_what_nobody_dominates(seed: int, width: int) -> None:
    rng = random.Random(seed)
    # few values, so that ties and equal points come often
    points = [
        tuple(float(rng.randint(0, 5)) for _ in range(width)) for _ in range(rng.randint(0, 14))
    ]
    assert pareto(points) == brute(points)


def test_edges() -> None:
    assert pareto([]) == []
    assert pareto([(1.0, 1.0), (1.0, 1.0)]) == [0, 1]
    assert pareto([(1.0, 2.0), (1.0, 1.0)]) == [1]
    assert pareto([(0.0, float("inf")), (1.0, 0.0)]) == [0, 1]
