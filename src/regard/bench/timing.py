"""Timing of several functions in one process, in turns."""

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
    """Time functions in turns: each round times each function once, so that a change of the
    machine's speed affects all of them.

    Each function is called twice before the first round. Each round begins with another function,
    so that none always follows the same one.

    Args:
        cases: the functions by name.
        rounds: how many rounds; at least one.
        sample: seconds that one timing takes; short calls are repeated until it does.
        limit: no new round begins after this many seconds; None is no limit.
        into: a dict that receives the times; after an interrupt it has those of complete rounds.
        synchronise: called before the clock is read, for devices that work asynchronously.
        clock: returns seconds. None is the wall clock; `time.process_time` counts the processor
            time and excludes waiting.

    Returns:
        Seconds per call, for each function and round.

    >>> times = interleaved({"a": lambda: None, "b": lambda: None}, rounds=3, sample=0.0)
    >>> {name: len(rounds) for name, rounds in times.items()}
    {'a': 3, 'b': 3}
    """
    clock = time.perf_counter if clock is None else clock
    times = {} if into is None else into
    times.update({name: [] for name in cases})
    repeats = {
        name: _calibrate_repeats(case, sample, synchronise, clock) for name, case in cases.items()
    }
    names, start = list(cases), time.perf_counter()
    try:
        for index in range(rounds):
            if index and limit is not None and time.perf_counter() - start > limit:
                break
            for name in rotated_order(names, index):
                times[name].append(_time_calls(cases[name], repeats[name], synchronise, clock))
    finally:
        complete = min(map(len, times.values()), default=0)
        for seconds in times.values():
            del seconds[complete:]
    return times


def rotated_order(names: Sequence[str], by: int) -> list[str]:
    """Return the order of the names in round `by`.

    Each round starts at the next name. After every name has been first once, the direction is
    reversed.

    >>> [rotated_order("abc", i) for i in range(4)]
    [['a', 'b', 'c'], ['b', 'c', 'a'], ['c', 'a', 'b'], ['a', 'c', 'b']]
    """
    if not names:
        return []
    turn, first = divmod(by, len(names))
    step = -1 if turn % 2 else 1
    return [names[(first + step * i) % len(names)] for i in range(len(names))]


def median_ratio(times: Mapping[str, Sequence[float]], of: str, to: str) -> float:
    """Return the median over rounds of the ratio of two functions' times.

    Args:
        times: the result of `interleaved`.
        of, to: the names of the two functions.

    Returns:
        The median of `times[of][i] / times[to][i]`.

    >>> median_ratio({"a": [2.0, 4.0, 9.0], "b": [1.0, 2.0, 3.0]}, "a", "b")
    2.0
    """
    return statistics.median(a / b for a, b in zip(times[of], times[to], strict=True))


def median(times: Sequence[float]) -> float:
    """Return the median of times in seconds.

    Args:
        times: at least one number.

    Returns:
        The median.

    >>> median([1.0, 9.0, 2.0])
    2.0
    """
    return statistics.median(times)


def quartiles(times: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile; a single number is both.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
    (2.0, 4.0)
    """
    if len(times) < 2:
        return times[0], times[0]
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, high


def _calibrate_repeats(
    case: Callable[[], object],
    sample: float,
    synchronise: Callable[[], object],
    clock: Callable[[], float],
) -> int:
    """Return how many calls take about `sample` seconds."""
    case()
    return max(1, int(sample / max(_time_calls(case, 1, synchronise, clock), 1e-9)))


def _time_calls(
    case: Callable[[], object],
    repeats: int,
    synchronise: Callable[[], object],
    clock: Callable[[], float],
) -> float:
    """Return the seconds of one call, averaged over `repeats` calls."""
    synchronise()
    start = clock()
    for _ in range(repeats):
        case()
    synchronise()
    return (clock() - start) / repeats
