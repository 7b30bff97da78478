"""A peer in a process of its own gives the same outputs, and a run goes on after it has failed."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import pytest
import torch

from benchmarks import Case, Ceilings, Peer, PreparedCall, TimingBudget, measure
from benchmarks.own_process import PeerProcess, prepare_in_own_process
from benchmarks.peers import regard_kernels
from benchmarks.problems import AttentionProblem
from regard.errors import RegardError
from regard.timing.machine import torch_threads
from tests.benchmarks.small import CPU, SMALL

SIZES = SMALL["causal-prefill"]


def of_the_process(problem: AttentionProblem) -> PreparedCall:
    """Return the number of the process and of its threads beside the outputs."""
    call = regard_kernels.attention(problem)
    numbers = {
        "process": torch.tensor(os.getpid()),
        "threads": torch.tensor(torch.get_num_threads()),
    }
    return PreparedCall(call.step, lambda found: {**call.read(found), **numbers}, "a kernel")


def fails(problem: AttentionProblem) -> PreparedCall:
    raise ValueError(f"no such model for {problem.dtype}\nand more")


def crashes(problem: AttentionProblem) -> PreparedCall:
    return PreparedCall(lambda: os._exit(7), dict)


def peer(prepare: object, name: str = "theirs") -> Peer[AttentionProblem]:
    return Peer(name, "For a test.", prepare, own_process=True)  # type: ignore[arg-type]


def test_the_outputs_are_those_of_another_process() -> None:
    with torch_threads(1):
        call = prepare_in_own_process(peer(of_the_process), SIZES, torch.float32, CPU)
        found = dict(call.read(call.step()))
        here = of_the_process(SIZES.problem(torch.float32, CPU))
        expected = here.read(here.step())
    assert int(found.pop("process")) != os.getpid()
    assert int(found.pop("threads")) == 1
    assert torch.equal(found["out"], expected["out"])
    assert call.kernel == "a kernel"
    assert call.settle is not None
    assert call.settle() is None


@pytest.mark.full
def test_the_process_ends_with_the_call() -> None:
    call = prepare_in_own_process(peer(of_the_process), SIZES, torch.float32, CPU)
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
def test_an_error_is_the_peer_s_own() -> None:
    expected = "theirs failed in its process: ValueError: no such model for torch.float32"
    with pytest.raises(RegardError, match=f"^{expected}$"):
        PeerProcess(peer(fails), SIZES, torch.float32, CPU)


@pytest.mark.full
def test_a_crash_leaves_the_others() -> None:
    ours = Peer("regard", "For a test.", regard_kernels.attention)
    others = peer(crashes), peer(regard_kernels.attention, "third")
    case = Case("test", "A test.", {}, (), (ours, *others))
    budget, top = TimingBudget(rounds=2, sample=0.0), Ceilings(1e9, {torch.float32: 1e9})
    found = measure(case, SIZES, torch.float32, CPU, budget=budget, ceilings=top)
    assert [x.status for x in found.rows] == ["timed", "failed", "timed"]
    assert found.rows[1].why == "RegardError: the process of theirs ended with exit code 7"
    assert found.rows[2].rounds == 2
