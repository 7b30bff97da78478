"""Running a case: what is there and able is made ready, checked, and timed in turns; everything
else says why not.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from regard import units
from regard.bench.interfaces import Case, Peer, Problem, Sizes, Way
from regard.bench.machine import Ceilings, free, synchroniser
from regard.bench.result import Measured, Row, Times, Verdict, compare, timed
from regard.bench.timing import interleaved

Say = Callable[[str], None]

READING = "reading memory"
"""What is timed beside the peers: the ceiling of this very moment."""


@dataclass(frozen=True)
class Budget:
    """How long to measure.

    Attributes:
        rounds: each times every peer once.
        seconds: of rounds for a case; no new round begins behind them. None is no limit.
        sample: seconds of one timing: short calls are repeated.
    """

    rounds: int = 15
    seconds: float | None = 30.0
    sample: float = 0.02


@dataclass(frozen=True)
class Ready:
    """A peer that gave the right answer."""

    way: Way
    verdict: Verdict


def measure(
    case: Case,
    sizes: Sizes,
    dtype: torch.dtype,
    device: torch.device,
    *,
    budget: Budget,
    ceilings: Ceilings,
    say: Say = lambda line: None,
    peak: Callable[[str], int | None] | None = None,
) -> Measured:
    """One case at one size in one dtype: a row for each peer, ours first.

    Args:
        case, sizes, dtype, device: what is measured.
        budget: how long.
        ceilings: what shares are of.
        say: told what is being done.
        peak: a peer's name -> bytes that a call of it takes at most; None measures no memory.

    An interrupt while rounds run ends them: what is complete counts, and `interrupted` says so.
    Before, it is raised.

    >>> from regard.bench.problems import AttentionSizes
    >>> def zeros(problem):
    ...     return Way(lambda: problem.q, lambda q: {"out": 0 * q})
    >>> case = Case("demo", "", {}, (), (Peer("ours", "", zeros), Peer("other", "", zeros)))
    >>> sizes, cpu = AttentionSizes(B=1, H=1, G=1, D=2, S=3), torch.device("cpu")
    >>> how = {"budget": Budget(rounds=1), "ceilings": Ceilings(1.0)}
    >>> found = measure(case, sizes, torch.float32, cpu, **how)
    >>> [row.status for row in found.rows]
    ['wrong', 'wrong']
    """
    needed, there = sizes.bytes(dtype), free(device)
    about = Measured(case.name, case.about, str(sizes), dtype, device.type)
    if there and needed > there:
        return about.refuse(f"{case.name} needs {units.size(needed)}, {units.size(there)} are free")
    say(f"{case.name}, {sizes}, {about.dtype_name}: the right answer")
    problem = sizes.problem(dtype, device)
    about = about.with_work(problem.work)
    reference, plain = problem.reference(), problem.plain()
    rows: dict[str, Row] = {}
    ready: dict[str, Ready] = {}
    for peer in case.peers:
        say(f"{case.name}, {about.dtype_name}: {peer.name}")
        why = _not_run(peer, problem)
        found = Row(peer.name, *why) if why else _prepare(peer, problem, reference, plain)
        if isinstance(found, Row):
            rows[peer.name] = found
        else:
            ready[peer.name] = found
    del reference, plain
    gc.collect()
    say(f"{case.name}, {about.dtype_name}: {len(ready)} in turns")
    times: dict[str, list[float]] = {}
    interrupted = False
    try:
        steps = {name: one.way.step for name, one in ready.items()}
        if ceilings.reading is not None:
            steps[READING] = ceilings.reading.step
        interleaved(
            steps,
            rounds=budget.rounds,
            sample=budget.sample,
            limit=budget.seconds,
            into=times,
            synchronise=synchroniser(device),
        )
    except KeyboardInterrupt:
        interrupted = True
    ours = case.peers[0].name
    for name, one in ready.items():
        rows[name] = timed(
            name,
            one.way.kernel,
            one.verdict,
            Times(times.get(name, []), times.get(ours), times.get(READING)),
            about,
            ceilings,
        )
        if peak is not None and not interrupted:
            say(f"{case.name}, {about.dtype_name}: memory of {name}")
            rows[name] = replace(rows[name], peak_bytes=peak(name))
    return about.with_rows([rows[peer.name] for peer in case.peers], interrupted=interrupted)


def _not_run(peer: Peer[Any], problem: Problem) -> tuple[str, str] | None:
    """The status of a peer that is not tried, and why."""
    if why := peer.missing():
        return "missing", why
    if why := peer.why_not(problem):
        return "unable", why
    needed, there = peer.bytes(problem), free(problem.device)
    if there and needed > there:
        return "memory", f"needs {units.size(needed)}, {units.size(there)} are free"
    return None


def _prepare(peer: Peer[Any], problem: Problem, reference: Any, plain: Any) -> Ready | Row:
    """The peer with its verdict, or the row of one that fails or is wrong."""
    try:
        way = peer.prepare(problem)
        found = problem.checked(way.read(way.step()))
    except (
        Exception
    ) as error:  # other people's code may raise anything; it is told, and the rest goes on
        first = (str(error).strip() or "no message").splitlines()[0]
        return Row(peer.name, "failed", f"{type(error).__name__}: {first}"[:200])
    verdict = compare(found, reference, plain)
    if verdict.right:
        return Ready(way, verdict)
    return Row(
        peer.name, "wrong", verdict.why, way.kernel, error=verdict.error, allowed=verdict.allowed
    )


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """So many threads for torch, and as many as before behind it.

    >>> with threads(1):
    ...     torch.get_num_threads()
    1
    """
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
