"""Running a case: peers are prepared and checked; those that are right are timed in turns.

Threads of another library slow down the others in the same process. CTranslate2 starts its threads
with the OpenMP library that torch has loaded; with more threads than processors, that library lets
all of them sleep between two operations, which costs torch's operations 15 % (LOG.md). A crash in
another process does not end the run, either.
"""

from __future__ import annotations

import gc
import io
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pkgutil import resolve_name
from types import FunctionType
from typing import Any

import torch

from benchmarks.interfaces import Case, Outputs, Peer, PreparedCall, Problem, ProblemSizes
from benchmarks.result import (
    CaseResult,
    OutputCheck,
    PeerResult,
    check_outputs,
    timed_result,
)
from regard import units
from regard.errors import RegardError
from regard.freed_memory import give_back_freed_memory
from regard.timing import Ceilings, free_memory, interleaved, wait_for, wait_until_idle

ReportStatus = Callable[[str], None]
"""A function that shows a line of text while a case runs."""

MEMORY_READ = "reading memory"
"""The name of the memory read that is timed in turns with the peers."""


@dataclass(frozen=True)
class TimingBudget:
    """How long a case is measured.

    Args:
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

    After an interrupt the complete rounds count; before the first round it is raised.
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
            times.get(name, []),
            times.get(ours),
            times.get(MEMORY_READ),
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
    """Return the results of peers that cannot run or are wrong, and the prepared others."""
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
    """Return the seconds by name in each complete round, and whether they were interrupted."""
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
            synchronize=partial(wait_for, device),
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
    if reason := peer.refusal(problem):
        return "unable", reason
    needed, available = peer.extra_bytes(problem), free_memory(problem.device)
    if peer.own_process:  # it creates the problem again
        needed += sizes.bytes(problem.dtype)
    if available and needed > available:
        return "memory", f"needs {units.size(needed)}, {units.size(available)} are free"
    return None


def _prepare(
    peer: Peer[Any], problem: Problem, sizes: ProblemSizes, expected: tuple[Outputs, Outputs]
) -> PreparedPeer | PeerResult:
    """Return a peer with its prepared call, or the result of one that fails or is wrong."""
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


PREPARE, STEP, READ, SETTLE = "prepare", "step", "read", "settle"
"""The requests to the process."""

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""Environment variables with which glibc keeps freed memory, as in a process that has run for a
while. Otherwise a step of CTranslate2, which copies its cache, takes half as long again.
"""

_CODE = "import sys; from benchmarks.runner import serve; serve(int(sys.argv[1]))"


class PeerProcess:
    """A process in which a peer solves a problem. It ends when this object is deleted."""

    def __init__(
        self, peer: Peer[Any], sizes: ProblemSizes, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._name = peer.name
        self._connection, other = Pipe()
        path = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(  # noqa: S603 (our own code, by the path of this Python)
            [sys.executable, "-c", _CODE, str(other.fileno())],
            pass_fds=[other.fileno()],
            stdout=2,  # the figures are on standard output
            start_new_session=True,  # Ctrl-C is for the run, which keeps its complete rounds
            env={**os.environ, **ALLOCATOR, "PYTHONPATH": path},
        )
        other.close()
        weakref.finalize(self, _end, self._connection, self._process)
        self.kernel: str = self.request(
            PREPARE, (peer, sizes, dtype, str(device), torch.get_num_threads())
        )

    def request(self, name: str, value: object = None) -> Any:
        """Send a request to the process, and return its answer."""
        try:
            self._connection.send_bytes(_pickled((name, value)))
            answer, error = pickle.loads(self._connection.recv_bytes())  # noqa: S301 (from our own process)
        except (EOFError, OSError):
            code = self._process.wait()
            raise RegardError(f"the process of {self._name} ended with exit code {code}") from None
        if error:
            raise RegardError(f"{self._name} failed in its process: {error}")
        return answer


def prepare_in_own_process(
    peer: Peer[Any], sizes: ProblemSizes, dtype: torch.dtype, device: torch.device
) -> PreparedCall:
    """Prepare a peer in a process of its own, with as many threads as torch has here."""
    process = PeerProcess(peer, sizes, dtype, device)
    return PreparedCall(
        partial(process.request, STEP),
        lambda _: process.request(READ),
        process.kernel,
        settle=partial(process.request, SETTLE),
    )


def serve(descriptor: int) -> None:
    """Answer the requests of a `PeerProcess`, until it closes its end."""
    with Connection(descriptor) as connection:
        answers: Mapping[str, Callable[[Any], object]] = _Answers().by_name
        while True:
            try:
                name, value = pickle.loads(connection.recv_bytes())  # noqa: S301 (from our own process)
            except EOFError:
                return
            try:
                answer, error = answers[name](value), ""
            except Exception as problem:  # other libraries may raise anything
                first_line = (str(problem).strip() or "no message").splitlines()[0]
                answer, error = None, f"{type(problem).__name__}: {first_line}"
            connection.send_bytes(_pickled((answer, error)))


class _Answers:
    """What the process of a peer does upon each request."""

    def __init__(self) -> None:
        self.by_name = {
            PREPARE: self._prepare,
            STEP: self._step,
            READ: lambda _: self._call.read(self._result),
            SETTLE: lambda _: wait_until_idle(),
        }

    def _prepare(self, value: Any) -> str:
        peer, sizes, dtype, device, threads = value
        torch.set_num_threads(threads)
        call: PreparedCall = peer.prepare(sizes.problem(dtype, torch.device(device)))
        self._call = call
        gc.collect()
        give_back_freed_memory()
        return call.kernel

    def _step(self, _: object) -> None:
        self._result = self._call.step()


class _Pickler(pickle.Pickler):
    """Writes a function of a module as its name, also where it is wrapped."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, FunctionType) and value is not resolve_name:
            return resolve_name, (f"{value.__module__}:{value.__qualname__}",)
        return NotImplemented


def _pickled(value: object) -> bytes:
    with io.BytesIO() as memory:
        _Pickler(memory).dump(value)
        return memory.getvalue()


def _end(connection: Connection, process: subprocess.Popen[bytes]) -> None:
    """Close the connection, upon which the process ends."""
    connection.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
