"""Timing of alternatives against each other, in one process, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def interleaved(
    cases: dict[str, Callable[[], object]], *, rounds: int = 25, seconds: float = 0.02
) -> dict[str, list[float]]:
    """Seconds per call of each case: every round times each once, in turns, so that a drift of the machine hits all."""
    repeats = {}
    for name, case in cases.items():
        case()
        start = time.perf_counter()
        case()
        repeats[name] = max(1, int(seconds / (time.perf_counter() - start)))
    times: dict[str, list[float]] = {name: [] for name in cases}
    for round_ in range(rounds):
        order = list(cases) if round_ % 2 else list(cases)[::-1]
        for name in order:
            start = time.perf_counter()
            for _ in range(repeats[name]):
                cases[name]()
            times[name].append((time.perf_counter() - start) / repeats[name])
    return times


def ratio(times: dict[str, list[float]], of: str, to: str) -> float:
    """The median of the round-by-round ratios."""
    return statistics.median(a / b for a, b in zip(times[of], times[to], strict=True))


def median(times: list[float]) -> float:
    """The median."""
    return statistics.median(times)
