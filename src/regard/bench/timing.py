"""Timing of alternatives against each other, in one process, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence


def interleaved(
    cases: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 25,
    sample: float = 0.02,
    limit: float | None = None,
    into: dict[str, list[float]] | None = None,
    synchronise: Callable[[], object] = lambda: None,
    clock: Callable[[], float] | None = None,
) -> dict[str, list[float]]:
    """Seconds per call of each case: every round times each once, so that a drift of the machine
    hits all.

    Two calls of each warm up. Round r begins with case r, so that none always follows the same
    other.

    Args:
        cases: name -> what is timed.
        rounds: how many; at least one.
        sample: seconds that one timing should take; short calls are repeated until it does.
        limit: no new round begins after so many seconds of rounds.
        into: filled and returned: what a caller still has when it is interrupted. Incomplete rounds
            are taken out.
        synchronise: called before the clock is read, for devices that work on their own.
        clock: in seconds; None is the wall clock; `time.process_time` counts what this process
            computes, and not what it waits for.

    >>> times = interleaved({"a": lambda: None, "b": lambda: None}, rounds=3, sample=0.0)
    >>> {name: len(found) for name, found in times.items()}
    {'a': 3, 'b': 3}
    """
    clock = time.perf_counter if clock is None else clock
    times = {} if into is None else into
    times.update({name: [] for name in cases})
    repeats = {name: _repeats(case, sample, synchronise, clock) for name, case in cases.items()}
    names, start = list(cases), time.perf_counter()
    try:
        for round_ in range(rounds):
            if round_ and limit is not None and time.perf_counter() - start > limit:
                break
            for name in rotated(names, round_):
                times[name].append(_time(cases[name], repeats[name], synchronise, clock))
    finally:
        complete = min(map(len, times.values()), default=0)
        for found in times.values():
            del found[complete:]
    return times


def rotated(names: Sequence[str], by: int) -> list[str]:
    """The names, beginning with the one at `by`, and backwards every other time around.

    >>> [rotated("abc", i) for i in range(4)]
    [['a', 'b', 'c'], ['b', 'c', 'a'], ['c', 'a', 'b'], ['a', 'c', 'b']]
    """
    if not names:
        return []
    turn, first = divmod(by, len(names))
    step = -1 if turn % 2 else 1
    return [names[(first + step * i) % len(names)] for i in range(len(names))]


def ratio(times: Mapping[str, Sequence[float]], of: str, to: str) -> float:
    """The median of the round-by-round ratios.

    >>> ratio({"a": [2.0, 4.0, 9.0], "b": [1.0, 2.0, 3.0]}, "a", "b")
    2.0
    """
    return statistics.median(a / b for a, b in zip(times[of], times[to], strict=True))


def median(times: Sequence[float]) -> float:
    """The median.

    >>> median([1.0, 9.0, 2.0])
    2.0
    """
    return statistics.median(times)


def quartiles(times: Sequence[float]) -> tuple[float, float]:
    """The first and the third quartile; a single number is both.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
    (2.0, 4.0)
    """
    if len(times) < 2:
        return times[0], times[0]
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, high


def _repeats(
    case: Callable[[], object],
    sample: float,
    synchronise: Callable[[], object],
    clock: Callable[[], float],
) -> int:
    case()
    return max(1, int(sample / max(_time(case, 1, synchronise, clock), 1e-9)))


def _time(
    case: Callable[[], object],
    repeats: int,
    synchronise: Callable[[], object],
    clock: Callable[[], float],
) -> float:
    synchronise()
    start = clock()
    for _ in range(repeats):
        case()
    synchronise()
    return (clock() - start) / repeats
