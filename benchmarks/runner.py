"""Running a case: peers are prepared and checked; those with right outputs are timed in turns."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.interfaces import Case, Outputs, Peer, PreparedCall, Problem, ProblemSizes
from benchmarks.own_process import prepare_in_own_process
from benchmarks.result import (
    CaseResult,
    OutputCheck,
    PeerResult,
    RoundTimes,
    check_outputs,
    timed_result,
)
from regard import units
from regard.timing.machine import Ceilings, free_memory, make_synchronize
from regard.timing.measurement import interleaved, wait_until_idle

ReportStatus = Callable[[str], None]
"""A function that shows a line of text while a case runs."""

MEMORY_READ = "reading memory"
"""The name of the memory read that is timed in turns with the peers."""


@dataclass(frozen=True)
class TimingBudget:
    """How long a case is measured.

    Args:
        rounds: how many rounds; each round times every peer once.
        seconds: no new round begins after this many seconds of rounds; None is no limit.
        sample: seconds of one timing; short calls are repeated.
    """

    rounds: int = 15
    seconds: float | None = 30.0
    sample: float = 0.02


@dataclass(frozen=True)
class PreparedPeer:
    """A peer whose outputs are right, with its prepared call."""

    call: PreparedCall
    check: OutputCheck


def measure(
    case: Case,
    sizes: ProblemSizes,
    dtype: torch.dtype,
    device: torch.device,
    *,
    budget: TimingBudget,
    ceilings: Ceilings,
    say: ReportStatus = lambda line: None,
    peak: Callable[[str], int | None] | None = None,
) -> CaseResult:
    """Measure a case at one size in one dtype.

    After an interrupt during the rounds, the complete rounds count and the result is marked as
    interrupted. An interrupt before the first round is raised.

    Args:
        case: the case.
        sizes, dtype, device: the sizes, the dtype and the device of the problem.
        budget: how long to measure.
        ceilings: the largest rates of the machine.
        say: called with a line of text before each part of the work.
        peak: returns the peak memory in bytes of a peer's call by the peer's name; None measures no
            memory.

    Returns:
        The result, with one row per peer, regard first.

    >>> from benchmarks.problems import AttentionSizes
    >>> def zeros(problem):
    ...     return PreparedCall(lambda: problem.q, lambda q: {"out": 0 * q})
    >>> case = Case("demo", "", {}, (), (Peer("ours", "", zeros), Peer("other", "", zeros)))
    >>> sizes, cpu = AttentionSizes(B=1, H=1, G=1, D=2, S=3), torch.device("cpu")
    >>> options = {"budget": TimingBudget(rounds=1), "ceilings": Ceilings(1.0)}
    >>> result = measure(case, sizes, torch.float32, cpu, **options)
    >>> [row.status for row in result.rows]
    ['wrong', 'wrong']
    """
    needed, available = sizes.bytes(dtype), free_memory(device)
    result = CaseResult(case.name, case.description, str(sizes), dtype, device.type)
    if why := case.why_not(device):
        return result.refuse(why)
    if available and needed > available:
        return result.refuse(
            f"{case.name} needs {units.size(needed)}, {units.size(available)} are free"
        )
    absent = [PeerResult(peer.name, "missing", peer.missing() or "") for peer in case.peers]
    if all(row.why for row in absent):  # a problem may be built by the same module
        return result.with_rows(absent)
    say(f"{case.name}, {sizes}, {result.dtype_name}: computing the reference")
    problem = sizes.problem(dtype, device)
    result = result.with_work(problem.work)
    rows, ready = _prepare_peers(case, problem, sizes, result, say)
    say(f"{case.name}, {result.dtype_name}: timing {units.plural(len(ready), 'peer')} in turns")
    times, interrupted = _time_in_turns(ready, budget, ceilings, device)
    ours = case.peers[0].name
    for name, candidate in ready.items():
        rows[name] = timed_result(
            name,
            candidate.call.kernel,
            candidate.check,
            RoundTimes(times.get(name, []), times.get(ours), times.get(MEMORY_READ)),
            result,
            ceilings,
        )
        if candidate.call.figures is not None and not interrupted:
            rows[name] = replace(rows[name], figures=dict(candidate.call.figures()))
        if peak is not None and not interrupted:
            say(f"{case.name}, {result.dtype_name}: measuring the memory of {name}")
            rows[name] = replace(rows[name], peak_bytes=peak(name))
    return result.with_rows([rows[peer.name] for peer in case.peers], interrupted=interrupted)


def _prepare_peers(
    case: Case, problem: Problem, sizes: ProblemSizes, result: CaseResult, say: ReportStatus
) -> tuple[dict[str, PeerResult], dict[str, PreparedPeer]]:
    """Return the results of peers that cannot run or are wrong, and the other peers with their
    prepared calls.
    """
    reference, plain = problem.reference(), problem.plain()
    rows: dict[str, PeerResult] = {}
    ready: dict[str, PreparedPeer] = {}
    for peer in case.peers:
        say(f"{case.name}, {result.dtype_name}: {peer.name}")
        skipped = _reason_to_skip(peer, problem, sizes)
        prepared = (
            PeerResult(peer.name, *skipped)
            if skipped
            else _prepare(peer, problem, sizes, (reference, plain))
        )
        if isinstance(prepared, PeerResult):
            rows[peer.name] = prepared
        else:
            ready[peer.name] = prepared
    return rows, ready


def _time_in_turns(
    ready: Mapping[str, PreparedPeer],
    budget: TimingBudget,
    ceilings: Ceilings,
    device: torch.device,
) -> tuple[dict[str, list[float]], bool]:
    """Return the seconds of each peer and of the memory read in each complete round, and whether
    the rounds were interrupted.
    """
    gc.collect()
    times: dict[str, list[float]] = {}
    steps = {name: candidate.call.step for name, candidate in ready.items()}
    waits = [x.call.settle for x in ready.values() if x.call.settle is not None]

    def settle() -> None:
        for wait in (wait_until_idle, *waits):
            wait()

    if ceilings.probe is not None:
        steps[MEMORY_READ] = ceilings.probe.step
    try:
        interleaved(
            steps,
            rounds=budget.rounds,
            sample=budget.sample,
            limit=budget.seconds,
            into=times,
            synchronise=make_synchronize(device),
            settle=settle,
        )
    except KeyboardInterrupt:
        return times, True
    return times, False


def _reason_to_skip(
    peer: Peer[Any], problem: Problem, sizes: ProblemSizes
) -> tuple[str, str] | None:
    """Return the status and the reason for a peer that cannot run; None if it can."""
    if reason := peer.missing():
        return "missing", reason
    if reason := peer.why_not(problem):
        return "unable", reason
    needed, available = peer.bytes(problem), free_memory(problem.device)
    if peer.own_process:  # it creates the problem again
        needed += sizes.bytes(problem.dtype)
    if available and needed > available:
        return "memory", f"needs {units.size(needed)}, {units.size(available)} are free"
    return None


def _prepare(
    peer: Peer[Any], problem: Problem, sizes: ProblemSizes, expected: tuple[Outputs, Outputs]
) -> PreparedPeer | PeerResult:
    """Return a peer with its prepared call, or the result of one that fails or is wrong; expected:
    the outputs of the reference and of the plain computation.
    """
    try:
        if peer.own_process:
            call = prepare_in_own_process(peer, sizes, problem.dtype, problem.device)
        else:
            call = peer.prepare(problem)
        outputs = problem.checked(call.read(call.step()))
    except Exception as error:  # other libraries may raise anything; the error becomes the result
        first_line = (str(error).strip() or "no message").splitlines()[0]
        return PeerResult(peer.name, "failed", f"{type(error).__name__}: {first_line}"[:200])
    check = check_outputs(outputs, *expected)
    if check.correct:
        return PreparedPeer(call, check)
    return PeerResult(
        peer.name, "wrong", check.why, call.kernel, error=check.error, allowed=check.allowed
    )
