"""The most memory that a piece of work takes, measured in a process of its own.

The highest resident memory of the process (VmHWM, set back before the work) less what it held then.
The work has run once before, so that kernels are compiled and libraries are loaded.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from regard.errors import RegardError

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""So that glibc gives freed tensors back to the system at once, and they do not count as held."""

PROCESS = Path("/proc/self")


def resident(field: str = "VmRSS", process: Path = PROCESS) -> int | None:
    """Bytes of this process in memory now, or with "VmHWM" at most so far.

    Returns:
        The bytes, or None where there is no /proc.

    >>> found = resident()
    >>> found is None or found > 0
    True
    """
    status = process / "status"
    if not status.exists():
        return None
    for line in status.read_text("ascii", errors="replace").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None


def peak(work: Callable[[], object], process: Path = PROCESS) -> int | None:
    """Bytes by which resident memory rises at most while `work` runs.

    The highest mark is set back first. What was freed before and not given back to the system would
    hide as much of the rise: see `ALLOCATOR`.

    Returns:
        The bytes, or None where the system does not tell.

    >>> found = peak(lambda: b"x" * (1 << 26))
    >>> found is None or found > 1 << 25
    True
    """
    gc.collect()
    before = resident(process=process)
    try:
        (process / "clear_refs").write_text("5")
    except OSError:
        return None
    work()
    after = resident("VmHWM", process)
    return None if before is None or after is None else max(0, after - before)


def in_child(
    function: str, settings: object, *, advice: str = "", command: Sequence[str] | None = None
) -> Any:
    """Call a function in a new process, whose allocator gives back what is freed.

    Args:
        function: "module:name" of a function from plain values to plain values.
        settings: the plain value that it is called with.
        advice: what to do when it fails, for the message.
        command: another program that reads JSON and writes JSON, for tests.

    Returns:
        What the function returned.

    Raises:
        RegardError: the process fails; says how it ended.

    >>> in_child("regard.bench.peak_memory:resident", "VmHWM") is not None or sys.platform != "linux"
    True
    """
    module, _, name = function.partition(":")
    code = f"import json, sys; from {module} import {name}; "
    code += f"print(json.dumps({name}(json.load(sys.stdin))))"
    ended = subprocess.run(  # noqa: S603 (our own function, by the path of this Python)
        command or [sys.executable, "-c", code],
        input=json.dumps(settings),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **ALLOCATOR, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    if ended.returncode:
        last = (ended.stderr.strip() or "it said nothing").splitlines()[-1]
        raise RegardError(
            f"the process that measures memory ended with {ended.returncode}: {last}"
            f"{advice and '; '}{advice}"
        )
    return json.loads(ended.stdout.splitlines()[-1])


def peer_peak(settings: Mapping[str, Any]) -> int | None:
    """Bytes that one solution of a problem takes at most, its result included.

    Args:
        settings: case, size, length, batch, dtype, threads and peer, as `regard bench` has them.

    Returns:
        The bytes, or None where the system does not tell, or where other processes do the work.
    """
    import torch

    from regard.bench.cases import CASES

    case = CASES[settings["case"]]
    torch.set_num_threads(settings["threads"])
    sizes = case.sizes[settings["size"]]
    sizes = sizes.resized(length=settings["length"], batch=settings["batch"])
    problem = sizes.problem(getattr(torch, settings["dtype"]), torch.device("cpu"))
    if not any(problem.work):
        return None
    (peer,) = (one for one in case.peers if one.name == settings["peer"])
    way = peer.prepare(problem)
    way.step()
    return peak(way.step)
