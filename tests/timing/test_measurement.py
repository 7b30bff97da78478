"""Rounds in turns: the order, the warm-up, the limit, what an interrupt leaves, and ratios."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from regard.timing import (
    interleaved,
    median,
    median_ratio,
    quartiles,
    resident_bytes,
    rotated_order,
    wait_until_idle,
)


def recorded(names: str, **options: object) -> tuple[list[str], dict[str, list[float]]]:
    calls: list[str] = []
    cases = {name: (lambda n=name: calls.append(n)) for name in names}
    return calls, interleaved(cases, sample=0.0, **options)  # type: ignore[arg-type]


def test_every_round_calls_each_once_and_begins_with_another() -> None:
    calls, times = recorded("abc", rounds=6)
    assert calls[:6] == list("aabbcc")  # two calls each to warm up
    rounds = ["".join(calls[i : i + 3]) for i in range(6, len(calls), 3)]
    assert rounds == ["abc", "bca", "cab", "acb", "bac", "cba"]
    assert {name: len(found) for name, found in times.items()} == {"a": 6, "b": 6, "c": 6}


def test_over_two_turns_each_follows_each_equally_often() -> None:
    orders = [rotated_order("abcd", i) for i in range(8)]
    assert all(sorted(order) == list("abcd") for order in orders)
    firsts = Counter(order[0] for order in orders)
    assert set(firsts.values()) == {2}
    follows = Counter((a, b) for order in orders for a, b in pairwise(order))
    assert follows["a", "b"] == follows["b", "a"]
    assert rotated_order([], 3) == []


class Clock:
    """A clock that stands still but for what sleeps by it, in whole milliseconds; other threads of
    the process compute until the time `busy_until`.
    """

    def __init__(self) -> None:
        self.now = self.busy_until = 0.0

    def perf_counter(self) -> float:
        return self.now

    def process_time(self) -> float:
        return min(self.now, self.busy_until)

    def sleep(self, seconds: float) -> None:
        self.now = round(self.now + seconds, 6)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("regard.timing.time", clock)
    return clock


def test_short_calls_are_repeated_and_the_time_is_of_one(clock: Clock) -> None:
    count = 0

    def short() -> None:
        nonlocal count
        count += 1
        clock.sleep(0.001)

    times = interleaved({"short": short}, rounds=2, sample=0.01, clock=clock.perf_counter)
    assert count > 2 + 2
    assert times["short"] == pytest.approx([0.001, 0.001])


def test_no_round_begins_behind_the_limit_but_one_always_runs(clock: Clock) -> None:
    options = {"sample": 0.0, "clock": clock.perf_counter, "settle": lambda: None}
    for limit, rounds in ((0.055, 6), (0.0, 1)):
        times = interleaved({"a": lambda: clock.sleep(0.01)}, rounds=1000, limit=limit, **options)  # type: ignore[arg-type]
        assert len(times["a"]) == rounds


def test_each_is_timed_when_the_threads_of_the_one_before_sleep(clock: Clock) -> None:
    starts: list[float] = []

    def leaves_threads_that_look_for_work() -> None:
        starts.append(clock.now)
        clock.sleep(0.01)
        clock.busy_until = clock.now + 0.2

    cases = {"a": leaves_threads_that_look_for_work, "b": leaves_threads_that_look_for_work}
    times = interleaved(cases, rounds=2, sample=0.0, clock=clock.perf_counter)
    assert times == {"a": pytest.approx([0.01] * 2), "b": pytest.approx([0.01] * 2)}
    assert all(0.2 < b - a - 0.01 < 0.21 for a, b in pairwise(starts[4:]))
    starts.clear()
    interleaved(cases, rounds=2, sample=0.0, clock=clock.perf_counter, settle=lambda: None)
    assert all(b - a - 0.01 < 1e-9 for a, b in pairwise(starts[4:]))


def test_the_wait_for_threads_ends_at_its_limit(clock: Clock) -> None:
    clock.busy_until = 1e9
    wait_until_idle(0.01, 0.5)
    assert clock.now == pytest.approx(0.5)


def test_an_interrupt_leaves_complete_rounds() -> None:
    calls = 0

    def third_round() -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt

    kept: dict[str, list[float]] = {}
    cases = {"a": lambda: None, "b": third_round, "c": lambda: None}
    with pytest.raises(KeyboardInterrupt):
        interleaved(cases, rounds=9, sample=0.0, into=kept)
    assert {len(found) for found in kept.values()} == {2}


def test_the_device_is_waited_for_before_each_look_at_the_clock() -> None:
    waits: list[None] = []
    interleaved({"a": lambda: None}, rounds=3, sample=0.0, synchronize=lambda: waits.append(None))
    assert len(waits) == 2 * (1 + 3)


def test_ratios_are_taken_round_by_round() -> None:
    # the machine is ten times slower in the last round: medians apart would say 1.5
    times = {"a": [3.0, 3.0, 40.0], "b": [1.0, 2.0, 20.0]}
    assert median_ratio(times, "a", "b") == 2.0
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert quartiles([7.0]) == (7.0, 7.0)


def test_resident_memory_is_counted_in_kibibytes(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("VmHWM:\t9 kB\nVmRSS:\t   3 kB\n")
    assert resident_bytes(process=tmp_path) == 3 * 1024
    assert resident_bytes(process=tmp_path / "none") is None
