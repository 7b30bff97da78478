"""Cases of whole programs: what counts as done, and that a program that fails is wrong."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch

from benchmarks import Case, Ceilings, Peer, PreparedCall, TimingBudget, measure
from benchmarks.program_cases import (
    READ_CHECKPOINT,
    STARTUP,
    CheckpointProblem,
    CheckpointSizes,
    ProgramProblem,
    StartSizes,
    _open,
    _run,
    _start,
    find_browser,
)
from benchmarks.result import check_outputs
from tests.benchmarks.small import CPU, SMALL


def test_a_command_that_fails_is_wrong_and_nothing_is_counted() -> None:
    good = Peer("good", "Ends with 0.", partial(_start, ("-c", "pass")))
    bad = Peer("bad", "Ends with 3.", partial(_start, ("-c", "raise SystemExit(3)")))
    case = Case("demo", "A demo.", {}, (), (good, bad))
    found = measure(
        case,
        StartSizes(),
        torch.float32,
        CPU,
        budget=TimingBudget(rounds=1, sample=0.0),
        ceilings=Ceilings(1e9),
    )
    assert [row.status for row in found.rows] == ["timed", "wrong"]
    assert found.rows[0].bytes_per_second is None
    assert found.rows[0].of_read is None
    assert found.failed


def test_programs_have_no_length() -> None:
    for case in (STARTUP, READ_CHECKPOINT):
        for sizes in case.sizes.values():
            assert sizes.resized(length=7, batch=3) is sizes


def test_each_start_is_a_process_of_this_python() -> None:
    for peer in STARTUP.peers:
        step = peer.prepare(SMALL["startup"].problem(torch.float32, CPU)).step
        assert isinstance(step, partial)
        assert step.func is _run
        assert step.args[0][0] == sys.executable


def small_checkpoint() -> CheckpointProblem:
    sizes = SMALL["read-checkpoint"]
    assert isinstance(sizes, CheckpointSizes)
    return sizes.problem(torch.float16, CPU)


def test_a_checkpoint_has_the_bytes_that_are_counted_and_goes_with_its_problem() -> None:
    problem = small_checkpoint()
    file = problem.file
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert file.stat().st_size == header + problem.work.bytes
    del problem
    assert not file.exists()


@pytest.mark.parametrize("peer", READ_CHECKPOINT.peers, ids=lambda peer: peer.name)
def test_a_reader_that_reads_other_numbers_is_wrong(peer: Peer[CheckpointProblem]) -> None:
    problem = small_checkpoint()
    way = peer.prepare(problem)
    assert check_outputs(way.read(way.step()), problem.reference(), {}).correct
    content = bytearray(problem.file.read_bytes())
    content[-1] ^= 1  # the last number of the last tensor
    problem.file.write_bytes(content)
    assert not check_outputs(way.read(way.step()), problem.reference(), {}).correct


@pytest.mark.full
@pytest.mark.skipif(find_browser() is None, reason="no browser is on the PATH")
def test_a_page_that_never_draws_is_wrong() -> None:
    problem = SMALL["draw-page"].problem(torch.float32, CPU)
    for name, mark, right in (
        ("page.html", b'data-ready="yes"', True),
        ("empty.html", b'data-ready="yes"', False),
    ):
        way: PreparedCall = _open(name, mark, problem)  # type: ignore[arg-type]
        assert check_outputs(way.read(way.step()), problem.reference(), {}).correct is right


def test_work_that_is_not_done_is_wrong() -> None:
    reference = ProgramProblem(torch.float32, CPU).reference()
    assert check_outputs({"done": torch.ones(1)}, reference, {}).correct
    assert not check_outputs({"done": torch.zeros(1)}, reference, {}).correct
