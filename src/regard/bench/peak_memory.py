"""The peak memory of a function, measured in a process of its own.

The result is the peak resident memory of the process (VmHWM, reset before the function runs) minus
its resident memory before the function runs. The function is called once before the measurement, so
that kernels are compiled and libraries are loaded.
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
"""Environment variables with which glibc returns freed tensors to the system at once."""

PROCESS = Path("/proc/self")


def resident_bytes(field: str = "VmRSS", process: Path = PROCESS) -> int | None:
    """Return the resident memory of this process.

    Args:
        field: "VmRSS" for the memory now, "VmHWM" for the peak so far.
        process: the folder of the process under /proc.

    Returns:
        The bytes, or None if there is no /proc.

    >>> resident = resident_bytes()
    >>> resident is None or resident > 0
    True
    """
    status = process / "status"
    if not status.exists():
        return None
    for line in status.read_text("ascii", errors="replace").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None


def peak_bytes(work: Callable[[], object], process: Path = PROCESS) -> int | None:
    """Return how far the resident memory of this process rises while a function runs.

    The peak is reset first. Memory that was freed before without being returned to the system would
    hide a part of the rise; `ALLOCATOR` prevents this.

    Args:
        work: the function.
        process: the folder of the process under /proc.

    Returns:
        The bytes, or None if the system does not report them.

    >>> peak = peak_bytes(lambda: b"x" * (1 << 26))
    >>> peak is None or peak > 1 << 25
    True
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
    """Call a function in a new process, whose allocator returns freed memory to the system.

    Args:
        function: "module:name" of a function from plain values to plain values.
        settings: its argument, a plain value.
        advice: the next step if it fails, for the error message.
        command: another program that reads JSON and writes JSON, for tests.

    Returns:
        The result of the function.

    Raises:
        RegardError: the process fails; the message has its exit code and its last line.

    >>> bytes_ = call_in_subprocess("regard.bench.peak_memory:resident_bytes", "VmHWM")
    >>> bytes_ is not None or sys.platform != "linux"
    True
    """
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


def peer_peak_bytes(settings: Mapping[str, Any]) -> int | None:
    """Return the peak memory of one solution of a problem, with its result.

    Args:
        settings: case, size, length, batch, dtype, threads and peer, as in `regard bench`.

    Returns:
        The bytes, or None if the system does not report them, or if other processes do the work.
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
    (peer,) = (candidate for candidate in case.peers if candidate.name == settings["peer"])
    call = peer.prepare(problem)
    call.step()
    return peak_bytes(call.step)
