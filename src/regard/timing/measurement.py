"""Measuring functions: times of several in turns, and the peak memory of a process."""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from regard.errors import RegardError


def interleaved(
    cases: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 25,
    sample: float = 0.02,
    limit: float | None = None,
    into: dict[str, list[float]] | None = None,
    synchronize: Callable[[], object] = lambda: None,
    clock: Callable[[], float] | None = None,
    settle: Callable[[], object] | None = None,
) -> dict[str, list[float]]:
    """Time functions in turns, so that the machine's speed changes for all of them.

    Each is called twice before the first round, and timed when the threads of the one before sleep;
    each round begins with another one.
    """
    clock = time.perf_counter if clock is None else clock
    settle = wait_until_idle if settle is None else settle
    times = {} if into is None else into
    times.update({name: [] for name in cases})
    repeats = {
        name: _calibrate_repeats(case, sample, synchronize, clock) for name, case in cases.items()
    }
    names, start = list(cases), time.perf_counter()
    try:
        for index in range(rounds):
            if index and limit is not None and time.perf_counter() - start > limit:
                break
            for name in rotated_order(names, index):
                settle()
                times[name].append(_time_calls(cases[name], repeats[name], synchronize, clock))
    finally:
        complete = min(map(len, times.values()), default=0)
        for seconds in times.values():
            del seconds[complete:]
    return times


def wait_until_idle(pause: float = 0.002, limit: float = 1.0) -> None:
    """Wait until no thread of this process computes.

    Those of OpenMP, ONNX Runtime and others look for work for up to 0.2 seconds after a call.
    """
    start = time.perf_counter()
    while True:
        before = time.process_time()
        time.sleep(pause)
        if time.process_time() - before < pause / 4 or time.perf_counter() - start >= limit:
            return


def rotated_order(names: Sequence[str], by: int) -> list[str]:
    """Return the names in round `by`: from the next one, and reversed after each turn."""
    if not names:
        return []
    turn, first = divmod(by, len(names))
    step = -1 if turn % 2 else 1
    return [names[(first + step * i) % len(names)] for i in range(len(names))]


def median_ratio(times: Mapping[str, Sequence[float]], of: str, to: str) -> float:
    """Return the median over rounds of the ratio of two functions' times."""
    return median(round_ratios(times[of], times[to]))


def round_ratios(own: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the ratio of two functions' times in each round."""
    return [a / b for a, b in zip(own, others, strict=True)]


def median(times: Sequence[float]) -> float:
    """Return the median of times in seconds."""
    return statistics.median(times)


def quartiles(times: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile; a single number is both."""
    if len(times) < 2:
        return times[0], times[0]
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, high


def _calibrate_repeats(
    case: Callable[[], object],
    sample: float,
    synchronize: Callable[[], object],
    clock: Callable[[], float],
) -> int:
    """Return how many calls take about `sample` seconds."""
    case()
    return max(1, int(sample / max(_time_calls(case, 1, synchronize, clock), 1e-9)))


def _time_calls(
    case: Callable[[], object],
    repeats: int,
    synchronize: Callable[[], object],
    clock: Callable[[], float],
) -> float:
    """Return the seconds of one call, averaged over `repeats` calls."""
    synchronize()
    start = clock()
    for _ in range(repeats):
        case()
    synchronize()
    return (clock() - start) / repeats


ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Environment variables with which glibc returns freed tensors to the system at once."""

PROCESS = Path("/proc/self")


def resident_bytes(field: str = "VmRSS", process: Path = PROCESS) -> int | None:
    """Return the resident memory of this process."""
    status = process / "status"
    if not status.exists():
        return None
    for line in status.read_text("ascii", errors="replace").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None


def peak_bytes(work: Callable[[], object], process: Path = PROCESS) -> int | None:
    """Return how far the resident memory rises above a reset peak while a function runs.

    Freed memory that the process kept would hide a part of it; `ALLOCATOR` prevents this.
    """
    gc.collect()
    before = resident_bytes(process=process)
    try:
        (process / "clear_refs").write_text("5")
    except OSError:
        return None
    work()
    after = resident_bytes("VmHWM", process)
    return None if before is None or after is None else max(0, after - before)


def call_in_subprocess(
    function: str, settings: object, *, advice: str = "", command: Sequence[str] | None = None
) -> Any:
    """Call a function in a new process, whose allocator returns freed memory to the system."""
    module, _, name = function.partition(":")
    code = f"import json, sys; from {module} import {name}; "
    code += f"print(json.dumps({name}(json.load(sys.stdin))))"
    process = subprocess.run(  # noqa: S603 (our own function, by the path of this Python)
        command or [sys.executable, "-c", code],
        input=json.dumps(settings),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **ALLOCATOR, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    if process.returncode:
        last_line = (process.stderr.strip() or "no output").splitlines()[-1]
        raise RegardError(
            f"the process that measures memory ended with exit code {process.returncode}: "
            f"{last_line}"
            f"{advice and '; '}{advice}"
        )
    return json.loads(process.stdout.splitlines()[-1])
