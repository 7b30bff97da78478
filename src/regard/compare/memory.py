"""The most memory that a mechanism takes while it works, measured in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from regard.bench.peak_memory import call_in_subprocess, peak_bytes
from regard.compare.experiment import Experiment, Numbers
from regard.compare.mechanisms import decoder
from regard.compare.speed import MACHINE, Timing, prefill, training
from regard.models.families.regard import Config

HOW = (
    "the highest resident memory of a process of its own (VmHWM, set back before the work) less "
    "what it held then: "
    "weights are not counted; the work has run once before, so that kernels are compiled"
)
"""What is measured."""


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
    """Run `peaks` in a new process.

    Args:
        settings: model (a config's fields), threads, context, length and batch.
        command: another program that reads and writes the same JSON, for tests.

    Returns:
        `prefill` and `training`: bytes; None where the system does not tell.

    Raises:
        RegardError: the process fails; says how it ended.
    """
    found: Numbers = call_in_subprocess(
        "regard.compare.memory:peaks",
        settings,
        advice="--no-memory goes without it",
        command=command,
    )
    return found


def peaks(settings: Numbers) -> Numbers:
    """Peak bytes of a prompt and of a training step; each has run once before."""
    torch.set_num_threads(settings["threads"])
    config = Config(**settings["model"])
    model = decoder(config)

    def step() -> None:
        training(model, config, settings["length"], settings["batch"])()

    step()
    model.zero_grad(set_to_none=True)
    steps = peak_bytes(step)
    model.zero_grad(set_to_none=True)
    model.eval().requires_grad_(False)
    prompt = prefill(model, config, settings["context"])
    prompt()
    return {"prefill": peak_bytes(prompt), "training": steps}
