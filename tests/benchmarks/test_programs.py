"""Cases of whole programs: what counts as done, and that a program that fails is wrong; and the
peak memory of one peer.
"""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch

from benchmarks import Peer
from benchmarks.cases import peer_peak_bytes
from benchmarks.programs import (
    READ_CHECKPOINT,
    READY_MARK,
    STARTUP,
    CheckpointProblem,
    CheckpointSizes,
    PageProblem,
    StartSizes,
    _open,
    _run,
    _start,
    find_browser,
)
from benchmarks.result import check_outputs
from regard.timing import PROCESS, call_in_subprocess
from tests.benchmarks.small import CPU, SMALL, run_peers


def test_a_command_that_fails_is_wrong_and_nothing_is_counted() -> None:
    good = Peer("good", "Ends with 0.", partial(_start, ("-c", "pass")))
    bad = Peer("bad", "Ends with 3.", partial(_start, ("-c", "raise SystemExit(3)")))
    result = run_peers(good, bad, sizes=StartSizes(), budget={"rounds": 1})
    assert [row.status for row in result.rows] == ["timed", "wrong"]
    assert result.rows[0].bytes_per_second is None
    assert result.rows[0].of_read is None
    assert result.failed


def test_programs_have_no_length() -> None:
    for case in (STARTUP, READ_CHECKPOINT):
        for sizes in case.sizes.values():
            assert sizes.resized(length=7, batch=3) == sizes


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
    call = peer.prepare(problem)
    assert check_outputs(call.read(call.step()), problem.reference(), {}).correct
    content = bytearray(problem.file.read_bytes())
    content[-1] ^= 1  # the last number of the last tensor
    problem.file.write_bytes(content)
    assert not check_outputs(call.read(call.step()), problem.reference(), {}).correct


@pytest.mark.full
@pytest.mark.skipif(find_browser() is None, reason="no browser is on the PATH")
def test_a_page_that_never_draws_is_wrong() -> None:
    problem = SMALL["draw-page"].problem(torch.float32, CPU)
    assert isinstance(problem, PageProblem)
    for name, right in (("page.html", True), ("empty.html", False)):
        call = _open(name, READY_MARK, problem)
        assert check_outputs(call.read(call.step()), problem.reference(), {}).correct is right


def settings(case: str, peer: str, length: int | None) -> dict[str, object]:
    chosen = {"case": case, "peer": peer, "length": length, "batch": None, "size": "small"}
    return {**chosen, "dtype": "float32", "threads": 1}


@pytest.mark.full
@pytest.mark.skipif(not (PROCESS / "clear_refs").exists(), reason="this system reports no memory")
def test_the_kernel_that_keeps_every_score_takes_more_than_the_tiled_one() -> None:
    whole, tiled = (
        call_in_subprocess(
            "benchmarks.cases:peer_peak_bytes", settings("kernels", f"regard {name}", 2048)
        )
        for name in ("reference", "tiled")
    )
    assert whole > 4 * 2048**2 > tiled > 0


def test_work_of_other_processes_is_not_counted() -> None:
    peak = peer_peak_bytes(settings("kernels", "regard reference", 16))
    assert peak is None or peak >= 0
    assert peer_peak_bytes(settings("startup", "python", None)) is None
