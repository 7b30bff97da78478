"""The most memory that a mechanism takes while it works, measured in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from regard.compare.experiment import Experiment, Numbers
from regard.compare.speed import MACHINE, Timing
from regard.errors import RegardError
from regard.models.families.regard import Config

HOW = (
    "the highest resident memory of a process of its own (VmHWM, set back before the work) less "
    "what it held then: "
    "weights are not counted; the work has run once before, so that kernels are compiled"
)
"""What is measured."""

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""So that glibc gives freed tensors back to the system at once, and they do not count as held."""


def experiments(
    configs: Mapping[str, Config], timing: Timing, machine: Mapping[str, Any]
) -> list[Experiment]:
    """Peak memory of a prompt of the longest context, and of a training step, for each mechanism.

    >>> from regard.compare.mechanisms import Contestant, Shape
    >>> made = {"mqa": Contestant("mqa", "mqa").config(Shape(dim=32, layers=1))}
    >>> [one.name for one in experiments(made, Timing(contexts=(4, 8)), {})]
    ['memory/mqa']
    """
    sizes = {"context": max(timing.contexts), "length": timing.length, "batch": timing.batch}
    on = {name: machine.get(name) for name in MACHINE}
    found = []
    for name, config in configs.items():
        settings = {"model": asdict(config), "machine": on, **sizes}
        settings["threads"] = torch.get_num_threads()
        found.append(
            Experiment(f"memory/{name}", settings, lambda given=settings: measure(given), 10.0)  # type: ignore[misc]
        )
    return found


def measure(settings: Mapping[str, Any], command: Sequence[str] | None = None) -> Numbers:
    """Run `regard.compare.peak` in a new process.

    Args:
        settings: model (a config's fields), threads, context, length and batch.
        command: another program with the same manners, for tests.

    Returns:
        `prefill` and `training`: bytes; None where the system does not tell.

    Raises:
        RegardError: the process fails; says how it ended.
    """
    done = subprocess.run(  # noqa: S603 (our own module, by the path of this Python)
        command or [sys.executable, "-m", "regard.compare.peak"],
        input=json.dumps(settings),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **ALLOCATOR, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    if done.returncode:
        last = (done.stderr.strip() or "it said nothing").splitlines()[-1]
        raise RegardError(
            f"the process that measures memory ended with {done.returncode}: {last}; --no-memory "
            "goes without it"
        )
    found: Numbers = json.loads(done.stdout.splitlines()[-1])
    return found
