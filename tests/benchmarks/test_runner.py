"""A wrong peer is caught, a slow one comes out slower by the right ratio, and nothing is left out
without a reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks import Case, Ceilings, Peer, PreparedCall, TimingBudget, measure
from benchmarks.interfaces import MinimumWork, Outputs
from benchmarks.peers import regard_kernels
from benchmarks.problems import AttentionProblem
from benchmarks.render import case_table, header
from benchmarks.result import CaseResult, OutputCheck, RoundTimes, as_json, timed_result
from regard.timing.machine import BandwidthProbe, torch_threads
from tests.benchmarks.small import CPU, SMALL

SIZES = SMALL["causal-prefill"]
TOP = Ceilings(1e9, {torch.float32: 1e9})


def peer(name: str, change: Callable[[Outputs], Outputs] = dict, **more: Any) -> Peer[Any]:
    """Ours, with its outputs changed."""

    def prepare(problem: AttentionProblem) -> PreparedCall:
        way = regard_kernels.attention(problem)
        return PreparedCall(way.step, lambda found: change(way.read(found)), "some kernel")

    return Peer(name, "For a test.", prepare, **more)


class Clock:
    """A clock that goes only while a peer works: what is measured is then exact, whatever else the
    machine does.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def process_time(self) -> float:
        return 0.0  # no thread computes beside a peer

    def sleep(self, _: float) -> None:
        """Wait for other threads, which takes none of this clock's time."""

    def peer(self, name: str, seconds: float) -> Peer[Any]:
        def prepare(problem: AttentionProblem) -> PreparedCall:
            out = problem.reference()

            def step() -> Outputs:
                self.now += seconds
                return out

            return PreparedCall(step, lambda found: found)

        return Peer(name, "Takes its time.", prepare)


def run(
    *peers: Peer[Any], dtype: torch.dtype = torch.float32, top: Ceilings = TOP, **budget: Any
) -> CaseResult:
    case = Case("test", "A test.", {}, (), peers)
    said: list[str] = []
    found = measure(
        case,
        SIZES,
        dtype,
        CPU,
        budget=TimingBudget(**{"rounds": 3, "sample": 0.0, **budget}),
        ceilings=top,
        say=said.append,
    )
    assert all(any(one.name in line for line in said) for one in peers)
    return found


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_wrong_peer_is_not_timed(dtype: torch.dtype) -> None:
    def later(outputs: Outputs) -> Outputs:  # the causal mask is shifted by one
        return {"out": outputs["out"].roll(1, dims=2)}

    found = run(peer("regard"), peer("late", later), dtype=dtype)
    right, wrong = found.rows
    assert (right.status, wrong.status) == ("timed", "wrong")
    assert wrong.seconds is None
    assert wrong.why.startswith("out has an error of")
    assert wrong.error is not None
    assert wrong.allowed is not None
    assert wrong.error > wrong.allowed
    assert found.failed
    assert "wrong: out has an error of" in case_table(found)


def test_a_small_error_is_found_too() -> None:
    scaled = peer("scaled", lambda outputs: {"out": outputs["out"] * 1.001})
    assert [row.status for row in run(peer("regard"), scaled).rows] == ["timed", "wrong"]


def test_a_slow_peer_is_slower_by_the_right_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("regard.timing.measurement.time", clock)
    found = run(clock.peer("ours", 0.25), clock.peer("slow", 1.0), rounds=5)
    first, slow = found.rows
    assert first.ratio == 1.0
    assert slow.ratio == 4.0
    assert slow.seconds == 1.0
    assert (first.rounds, slow.rounds) == (5, 5)
    assert found.work is not None
    assert slow.flops_per_second == found.work.flops / slow.seconds
    assert slow.of_read == found.work.bytes / slow.seconds / 1e9
    assert slow.of_gemm == slow.flops_per_second / 1e9
    low, high = slow.quartiles or (0, 0)
    assert low <= slow.seconds <= high


def test_rounds_end_with_the_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("regard.timing.measurement.time", clock)
    found = run(clock.peer("ours", 0.25), clock.peer("slow", 1.0), rounds=99, seconds=3.0)
    assert [row.rounds for row in found.rows] == [3, 3]


@pytest.mark.full
def test_everything_that_is_not_timed_says_why() -> None:
    def broken(problem: AttentionProblem) -> PreparedCall:
        raise ZeroDivisionError("first line\nsecond line")

    found = run(
        peer("regard"),
        peer("absent", needs=("no_such_module", "math")),
        peer("unable", why_not=lambda problem: "has no softmax"),
        peer("large", bytes=lambda problem: 1 << 60),
        Peer("broken", "Raises.", broken),
    )
    told = {row.peer: (row.status, row.why) for row in found.rows}
    assert told["absent"] == ("missing", "no module no_such_module")
    assert told["unable"] == ("unable", "has no softmax")
    assert told["large"][0] == "memory"
    assert told["large"][1].startswith("needs 1024 PiB, ")
    assert told["broken"] == ("failed", "ZeroDivisionError: first line")
    assert found.failed
    assert not run(peer("regard"), peer("absent", needs=("no_such_module",))).failed
    lines = case_table(found).splitlines()
    assert all(any(f"{s}: {why}" in line for line in lines) for s, why in told.values() if why)


def test_a_case_that_does_not_fit_is_refused_by_name() -> None:
    huge = SIZES.resized(length=1 << 40)
    case = Case("large-case", "A test.", {}, (), (peer("regard"),))
    found = measure(case, huge, torch.float32, CPU, budget=TimingBudget(), ceilings=TOP)
    assert found.refused.startswith("large-case needs ")
    assert found.failed
    assert found.rows == ()


def interrupter(after: int) -> Peer[Any]:
    calls = 0

    def prepare(problem: AttentionProblem) -> PreparedCall:
        way = regard_kernels.attention(problem)

        def step() -> Any:
            nonlocal calls
            calls += 1
            if calls > after:
                raise KeyboardInterrupt
            return way.step()

        return PreparedCall(step, way.read)

    return Peer("stopped", "Interrupts.", prepare)


def test_an_interrupt_keeps_complete_rounds() -> None:
    # one call to check it, two to warm up, two rounds
    found = run(peer("regard"), interrupter(5), rounds=9)
    assert found.interrupted
    assert [row.rounds for row in found.rows] == [2, 2]
    assert "interrupted" in case_table(found)
    none = run(peer("regard"), interrupter(3), rounds=9)
    assert [row.status for row in none.rows] == ["interrupted", "interrupted"]
    with pytest.raises(KeyboardInterrupt):
        run(peer("regard"), interrupter(0))


def test_the_json_of_a_run() -> None:
    nothing = peer("empty", lambda outputs: {"out": outputs["out"] * float("nan")})
    found = run(peer("regard"), nothing)
    told = json.loads(json.dumps(as_json({"torch": "2"}, TOP, [found], interrupted=False)))
    assert set(told) == {"schema", "machine", "rule", "ceilings", "interrupted", "cases"}
    (case,) = told["cases"]
    assert set(case) == {
        "case",
        "about",
        "sizes",
        "dtype",
        "device",
        "flops",
        "bytes",
        "refused",
        "interrupted",
        "rows",
    }
    right, wrong = case["rows"]
    assert set(right) == {
        "peer",
        "status",
        "why",
        "kernel",
        "seconds",
        "quartiles",
        "rounds",
        "ratio",
        "ratio_quartiles",
        "bytes_per_second",
        "flops_per_second",
        "of_read",
        "of_gemm",
        "error",
        "allowed",
        "peak_bytes",
        "figures",
    }
    assert (right["kernel"], right["ratio"]) == ("some kernel", 1.0)
    assert wrong["error"] is None  # NaN is not JSON
    assert case["flops"] == found.work.flops if found.work else False


def test_memory_is_measured_of_those_that_were_right() -> None:
    asked: list[str] = []

    def peak(name: str) -> int:
        asked.append(name)
        return 5_000_000

    case = Case("test", "A test.", {}, (), (peer("regard"), peer("wrong", lambda found: {})))
    found = measure(
        case,
        SIZES,
        torch.float32,
        CPU,
        budget=TimingBudget(rounds=1, sample=0.0),
        ceilings=TOP,
        peak=peak,
    )
    assert asked == ["regard"]
    assert [row.peak_bytes for row in found.rows] == [5_000_000, None]
    line = next(x for x in case_table(found).splitlines() if x.startswith("  regard"))
    assert "4.77 MiB" in line


def test_shares_are_of_reading_in_the_same_rounds() -> None:
    """A machine that reads half as fast in one round, and a kernel that then takes twice as long:
    the share stays.
    """
    about = CaseResult("demo", "", "", torch.float32, "cpu", MinimumWork(flops=8, bytes=300))
    top = Ceilings(1e9, {}, BandwidthProbe(100, lambda: None))
    verdict = OutputCheck(correct=True, error=0.0, allowed=1.0, why="")
    row = timed_result(
        "one",
        "",
        verdict,
        RoundTimes([8.0, 4.0, 8.0], [4.0, 4.0, 2.0], [2.0, 1.0, 2.0]),
        about,
        top,
    )
    assert row.of_read == 300 / 8 / (100 / 2)
    assert (row.seconds, row.ratio, row.bytes_per_second) == (8.0, 2.0, 300 / 8)
    row = timed_result("one", "", verdict, RoundTimes([8.0]), about, top)
    assert row.of_read == 300 / 8 / 1e9
    assert row.ratio is None


def test_reading_is_timed_in_turns_and_no_peer() -> None:
    calls: list[int] = []
    top = Ceilings(1e9, {}, BandwidthProbe(100, lambda: calls.append(1)))
    found = run(peer("a"), peer("b"), top=top)
    assert len(calls) > 2
    assert [row.peer for row in found.rows] == ["a", "b"]


def test_ceilings_are_measured_and_shown() -> None:
    rates = {"rounds": 1, "read_bytes": 1 << 20, "side": 64}
    top = Ceilings.measure([torch.float32, torch.bfloat16], CPU, **rates)
    assert top.read > 1e7
    assert set(top.gemm) == {torch.float32, torch.bfloat16}
    about = {
        "processor": "CPU",
        "cores": 2,
        "threads": 1,
        "features": [],
        "torch": "2",
        "regard": "1",
    }
    text = header({**about, "gpu": "GPU"}, Ceilings(4e10, {torch.bfloat16: 2e11}))
    assert text.splitlines()[0] == "GPU, CPU, 2 cores, 1 thread, torch 2, regard 1"
    assert "reading 40.0 GB/s, bfloat16 products 200 GFLOP/s" in text


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    seen = []

    def fail() -> None:
        with torch_threads(before + 1):
            seen.append(torch.get_num_threads())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert seen == [before + 1]
    assert torch.get_num_threads() == before
