"""A wrong peer is caught, also in a process of its own; a slow one comes out slower by the right
ratio; and nothing is left out without a reason.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import Ceilings, Peer, PreparedCall
from benchmarks.attention import AttentionProblem
from benchmarks.interfaces import MinimumWork, Outputs
from benchmarks.regard_peers import attention
from benchmarks.render import case_table, header
from benchmarks.result import (
    RELATIVE_TOLERANCE,
    CaseResult,
    OutputCheck,
    PeerResult,
    as_json,
    check_outputs,
    timed_result,
)
from benchmarks.runner import PeerProcess, prepare_in_own_process
from regard.errors import RegardError
from regard.timing import BandwidthProbe, torch_threads
from regard.tolerance import ERROR_FACTOR, GRADIENT_ERROR_FACTOR, two_roundings
from tests.benchmarks.small import CPU, SMALL, run_peers

SIZES = SMALL["causal-prefill"]
REFERENCE = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def peer(name: str, change: Callable[[Outputs], Outputs] = dict, **more: Any) -> Peer[Any]:
    """Ours, with its outputs changed."""

    def prepare(problem: AttentionProblem) -> PreparedCall:
        call = attention(problem)
        return PreparedCall(call.step, lambda x: change(call.read(x)), "some kernel")

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

            return PreparedCall(step, lambda x: x)

        return Peer(name, "Takes its time.", prepare)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_wrong_peer_is_not_timed(dtype: torch.dtype) -> None:
    said: list[str] = []
    late = peer("late", lambda x: {"out": x["out"].roll(1, dims=2)})  # the mask is shifted by one
    result = run_peers(peer("regard"), late, dtype=dtype, say=said.append)
    right, wrong = result.rows
    assert (right.status, wrong.status, wrong.seconds) == ("timed", "wrong", None)
    assert wrong.error is not None
    assert wrong.allowed is not None
    assert wrong.error > wrong.allowed
    assert result.failed
    assert "wrong: out has an error of" in case_table(result)
    assert all(any(name in line for line in said) for name in ("regard", "late"))


def test_a_small_error_is_found_too() -> None:
    scaled = peer("scaled", lambda x: {"out": x["out"] * 1.001})
    assert [row.status for row in run_peers(peer("regard"), scaled).rows] == ["timed", "wrong"]


def test_a_slow_peer_is_slower_by_the_right_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("regard.timing.time", clock)
    peers = clock.peer("ours", 0.25), clock.peer("slow", 1.0)
    result = run_peers(*peers, budget={"rounds": 5})
    first, slow = result.rows
    assert (first.ratio, slow.ratio, slow.seconds) == (1.0, 4.0, 1.0)
    assert (first.rounds, slow.rounds, slow.quartiles) == (5, 5, (1.0, 1.0))
    assert result.work is not None
    assert slow.flops_per_second == result.work.flops
    assert slow.of_read == result.work.bytes / 1e9
    assert slow.of_gemm == result.work.flops / 1e9
    short = run_peers(*peers, budget={"rounds": 99, "seconds": 3.0})
    assert [row.rounds for row in short.rows] == [3, 3]


@pytest.mark.full
def test_everything_that_is_not_timed_says_why() -> None:
    def broken(problem: AttentionProblem) -> PreparedCall:
        raise ZeroDivisionError("first line\nsecond line")

    result = run_peers(
        peer("regard"),
        peer("absent", needs=("no_such_module", "math")),
        peer("unable", why_not=lambda problem: "has no softmax"),
        peer("for a GPU", devices=("cuda",)),
        peer("for fp16", dtypes=(torch.float16,)),
        peer("large", bytes=lambda problem: 1 << 60),
        Peer("broken", "Raises.", broken),
    )
    reasons = {row.peer: (row.status, row.why) for row in result.rows}
    assert reasons.pop("large")[1].startswith("needs 1,024 PiB, ")
    assert reasons == {
        "regard": ("timed", ""),
        "absent": ("missing", "no module no_such_module"),
        "unable": ("unable", "has no softmax"),
        "for a GPU": ("unable", "runs on cuda only"),
        "for fp16": ("unable", "has no float32"),
        "broken": ("failed", "ZeroDivisionError: first line"),
    }
    assert result.failed
    assert not run_peers(peer("regard"), peer("absent", needs=("no_such_module",))).failed
    lines = case_table(result)
    assert all(f"{status}: {why}" in lines for status, why in reasons.values() if why)


def test_a_case_that_does_not_fit_is_refused() -> None:
    result = run_peers(peer("regard"), sizes=SIZES.resized(length=1 << 40))
    assert result.refused.startswith("test needs ")
    assert result.failed
    assert result.rows == ()


def interrupter(after: int) -> Peer[Any]:
    calls = 0

    def prepare(problem: AttentionProblem) -> PreparedCall:
        call = attention(problem)

        def step() -> Any:
            nonlocal calls
            calls += 1
            if calls > after:
                raise KeyboardInterrupt
            return call.step()

        return PreparedCall(step, call.read)

    return Peer("stopped", "Interrupts.", prepare)


def test_an_interrupt_keeps_complete_rounds() -> None:
    # one call to check it, two to warm up, two rounds
    result = run_peers(peer("regard"), interrupter(5), budget={"rounds": 9})
    assert result.interrupted
    assert [row.rounds for row in result.rows] == [2, 2]
    assert "interrupted" in case_table(result)
    none = run_peers(peer("regard"), interrupter(3))
    assert [row.status for row in none.rows] == ["interrupted", "interrupted"]
    with pytest.raises(KeyboardInterrupt):
        run_peers(peer("regard"), interrupter(0))


def test_the_json_of_a_run() -> None:
    nothing = peer("empty", lambda x: {"out": x["out"] * float("nan")})
    result = run_peers(peer("regard"), nothing)
    run = as_json({"torch": "2"}, Ceilings(1e9), [result], interrupted=False)  # type: ignore[typeddict-item]
    (case,) = json.loads(json.dumps(run))["cases"]
    right, wrong = case["rows"]
    assert set(right) == {field.name for field in fields(PeerResult)}
    assert (right["kernel"], right["ratio"]) == ("some kernel", 1.0)
    assert wrong["error"] is None  # NaN is not JSON
    assert result.work is not None
    assert case["flops"] == result.work.flops


def test_memory_is_measured_of_those_that_were_right() -> None:
    asked: list[str] = []
    result = run_peers(
        peer("regard"),
        peer("wrong", lambda x: {}),
        peak=lambda name: asked.append(name) or 5_000_000,  # type: ignore[func-returns-value]
    )
    assert asked == ["regard"]
    assert [row.peak_bytes for row in result.rows] == [5_000_000, None]
    assert "4.77 MiB" in case_table(result)


def test_shares_are_of_reading_in_the_same_rounds() -> None:
    """A machine that reads half as fast in one round, and a kernel that then takes twice as long:
    the share stays.
    """
    about = CaseResult("demo", "", "", torch.float32, "cpu", MinimumWork(flops=8, bytes=300))
    ceilings = Ceilings(1e9, {}, BandwidthProbe(100, lambda: None))
    check = OutputCheck(correct=True, error=0.0, allowed=1.0, why="")
    own, ours, probe = [8.0, 4.0, 8.0], [4.0, 4.0, 2.0], [2.0, 1.0, 2.0]
    row = timed_result("one", "", check, own, ours, probe, about, ceilings)
    assert row.of_read == 300 / 8 / (100 / 2)
    assert (row.seconds, row.ratio, row.bytes_per_second) == (8.0, 2.0, 300 / 8)
    row = timed_result("one", "", check, [8.0], None, None, about, ceilings)
    assert row.of_read == 300 / 8 / 1e9
    assert row.ratio is None


def test_reading_is_timed_in_turns_and_no_peer() -> None:
    calls: list[int] = []
    ceilings = Ceilings(1e9, {}, BandwidthProbe(100, lambda: calls.append(1)))
    result = run_peers(peer("a"), peer("b"), ceilings=ceilings)
    assert len(calls) > 2
    assert [row.peer for row in result.rows] == ["a", "b"]


def test_the_header_has_machine_and_ceilings() -> None:
    facts: Any = {"processor": "CPU", "cores": 2, "threads": 1, "features": [], "gpu": "GPU"}
    facts |= {"torch": "2", "regard": "1"}
    text = header(facts, Ceilings(4e10, {torch.bfloat16: 2e11}))
    assert text.splitlines()[0] == "GPU, CPU, 2 cores, 1 thread, torch 2, regard 1"
    assert "reading 40.0 GB/s, bfloat16 products 200 GFLOP/s" in text


# the rule for outputs


def test_fp32_may_be_off_by_a_share_or_by_twice_the_error_of_a_worse_plain_computation() -> None:
    reference, share = {"out": REFERENCE}, RELATIVE_TOLERANCE * float(REFERENCE.abs().max())
    plains: tuple[tuple[Outputs, float], ...] = (
        ({}, share),
        ({"out": (REFERENCE + 10 * share).float()}, 20 * share),
        ({"out": (REFERENCE + share / 10).float()}, share),
    )
    for plain, allowed in plains:
        for error, right in ((0.9 * allowed, True), (1.1 * allowed, False)):
            x = REFERENCE.clone()
            x[1, 2] += error
            check = check_outputs({"out": x}, reference, plain)
            assert check.correct is right
            assert check.error == pytest.approx(error)
            assert check.allowed == pytest.approx(allowed, rel=1e-2)


@pytest.mark.parametrize(("name", "factor"), [("out", ERROR_FACTOR), ("dk", GRADIENT_ERROR_FACTOR)])
def test_half_types_may_be_off_by_so_many_errors_of_plain(name: str, factor: float) -> None:
    # 1 + 1/4: sums with 0.3 in the rounding term are of a known size
    reference = {name: torch.full((4,), 64.0, dtype=torch.float64)}
    plain = {name: torch.full((4,), 65.0, dtype=torch.bfloat16)}
    bound = factor * 1.0 + two_roundings(reference[name], torch.bfloat16)
    check = check_outputs({name: torch.full((4,), 64.5, dtype=torch.bfloat16)}, reference, plain)
    assert check.correct
    assert check.allowed == pytest.approx(bound)
    far = torch.full((4,), 64.0 + 2 * bound, dtype=torch.bfloat16)
    assert not check_outputs({name: far}, reference, plain).correct


def test_what_is_missing_misshapen_or_no_number_is_wrong_and_the_worst_output_counts() -> None:
    reference = {"out": REFERENCE, "dq": REFERENCE, "dk": REFERENCE}
    nan = REFERENCE.clone()
    nan[0, 0] = float("nan")
    for outputs, why in (
        ({"out": nan}, "out has an error of nan"),
        ({"out": REFERENCE[:2]}, "out has shape (2, 5), not (3, 5)"),
        ({"z": REFERENCE}, "returns none of out, dq, dk"),
        ({"out": REFERENCE, "dq": REFERENCE + 1, "dk": REFERENCE + 1e-7}, "dq has an error of 1"),
    ):
        check = check_outputs(outputs, reference, {})
        assert not check.correct
        assert check.why.startswith(why)
    assert check_outputs({"out": REFERENCE}, reference, {}).correct  # gradients may be left out
    assert check_outputs({"out": REFERENCE[:0]}, {"out": REFERENCE[:0]}, {}).correct


# a process of its own


def of_the_process(problem: AttentionProblem) -> PreparedCall:
    """Return the number of the process and of its threads beside the outputs."""
    call = attention(problem)
    numbers = {
        "process": torch.tensor(os.getpid()),
        "threads": torch.tensor(torch.get_num_threads()),
    }
    return PreparedCall(call.step, lambda x: {**call.read(x), **numbers}, "a kernel")


def fails(problem: AttentionProblem) -> PreparedCall:
    raise ValueError(f"no such model for {problem.dtype}\nand more")


def crashes(problem: AttentionProblem) -> PreparedCall:
    return PreparedCall(lambda: os._exit(7), dict)


def alone(prepare: Any, name: str = "theirs") -> Peer[AttentionProblem]:
    return Peer(name, "For a test.", prepare, own_process=True)


@pytest.mark.full
def test_the_outputs_are_those_of_another_process() -> None:
    with torch_threads(1):
        call = prepare_in_own_process(alone(of_the_process), SIZES, torch.float32, CPU)
        outputs = dict(call.read(call.step()))
        here = of_the_process(SIZES.problem(torch.float32, CPU))  # type: ignore[arg-type]
        expected = here.read(here.step())
    assert int(outputs["process"]) != os.getpid()
    assert int(outputs["threads"]) == 1
    assert torch.equal(outputs["out"], expected["out"])
    assert call.kernel == "a kernel"
    assert call.settle is not None
    assert call.settle() is None


@pytest.mark.full
def test_the_process_ends_with_the_call() -> None:
    call = prepare_in_own_process(alone(of_the_process), SIZES, torch.float32, CPU)
    process = int(call.read(call.step())["process"])
    assert Path(f"/proc/{process}").exists() or not Path("/proc/self").exists()
    del call
    gc.collect()
    for _ in range(100):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("the process runs")


@pytest.mark.full
def test_an_error_is_the_peer_s_own_and_a_crash_leaves_the_others() -> None:
    expected = "theirs failed in its process: ValueError: no such model for torch.float32"
    with pytest.raises(RegardError, match=f"^{expected}$"):
        PeerProcess(alone(fails), SIZES, torch.float32, CPU)
    result = run_peers(peer("regard"), alone(crashes), alone(attention, "third"))
    assert [x.status for x in result.rows] == ["timed", "failed", "timed"]
    assert result.rows[1].why == "RegardError: the process of theirs ended with exit code 7"
    assert result.rows[2].rounds == 3
