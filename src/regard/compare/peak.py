"""The program that measures peak memory: settings as JSON on stdin, bytes as JSON on stdout.
`regard.compare.memory` runs it.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path

from regard.compare.experiment import Numbers

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident(field: str = "VmRSS", status: Path = STATUS) -> int | None:
    """Bytes of this process in memory now, or with "VmHWM" at most so far; None where the system
    has no such file.

    >>> found = resident()
    >>> found is None or found > 0
    True
    """
    if not status.exists():
        return None
    for line in status.read_text("ascii", errors="replace").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None


def peak(work: Callable[[], object], status: Path = STATUS, clear: Path = CLEAR) -> int | None:
    """Bytes by which resident memory rises at most while `work` runs; None where the system does
    not tell.

    Set the highest mark back, look, work, look again. What was freed before and not given back to
    the system would hide as much of the rise: see `regard.compare.memory.ALLOCATOR`.

    >>> found = peak(lambda: b"x" * (1 << 26))
    >>> found is None or found > 1 << 25
    True
    """
    gc.collect()
    before = resident(status=status)
    try:
        clear.write_text("5")
    except OSError:
        return None
    work()
    after = resident("VmHWM", status)
    return None if before is None or after is None else max(0, after - before)


def run(settings: Numbers) -> Numbers:
    """Peak bytes of a prompt and of a training step; each has run once before on a smaller text and
    once on this one.
    """
    import torch

    from regard.compare.mechanisms import decoder
    from regard.compare.speed import prefill, training
    from regard.models.families.regard import Config

    torch.set_num_threads(settings["threads"])
    config = Config(**settings["model"])
    model = decoder(config)
    training(model, config, settings["length"], settings["batch"])()
    model.zero_grad(set_to_none=True)
    steps = peak(lambda: training(model, config, settings["length"], settings["batch"])())
    model.zero_grad(set_to_none=True)
    model.eval().requires_grad_(False)
    step = prefill(model, config, settings["context"])
    step()
    return {"prefill": peak(step), "training": steps}


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.stdin.read()))))
