"""Measure the peak memory of each mechanism in a separate process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from regard.bench.peak_memory import call_in_subprocess, peak_bytes
from regard.compare.experiment import Experiment, Numbers
from regard.compare.mechanisms import build_decoder
from regard.compare.speed import MACHINE_KEYS, Timing, prefill_step, training_step
from regard.models.families.regard import Config

METHOD = (
    "the peak resident memory (VmHWM) of a separate process during the work, minus its resident "
    "memory before the work, so that weights are not counted; the work runs once before it is "
    "measured, so that kernels are already compiled"
)
"""How peak memory is measured, as reports print it."""


def memory_experiments(
    configs: Mapping[str, Config], timing: Timing, machine: Mapping[str, Any]
) -> list[Experiment]:
    """Return an experiment for each mechanism: the peak memory of a prompt of the longest context,
    and of a training step.

    >>> from regard.compare.mechanisms import Candidate, Shape
    >>> made = {"mqa": Candidate("mqa", "mqa").config(Shape(dim=32, layers=1))}
    >>> [one.name for one in memory_experiments(made, Timing(contexts=(4, 8)), {})]
    ['memory/mqa']
    """
    sizes = {"context": max(timing.contexts), "length": timing.length, "batch": timing.batch}
    machine_facts = {name: machine.get(name) for name in MACHINE_KEYS}
    experiments = []
    for name, config in configs.items():
        settings = {"model": asdict(config), "machine": machine_facts, **sizes}
        settings["threads"] = torch.get_num_threads()
        experiments.append(
            Experiment(
                f"memory/{name}",
                settings,
                partial(measure_peaks, settings),
                10.0,
            )
        )
    return experiments


def measure_peaks(settings: Mapping[str, Any], command: Sequence[str] | None = None) -> Numbers:
    """Return the peak memory of a prompt and of a training step, measured in a new process.

    Args:
        settings: model (the fields of a config), threads, context, length and batch.
        command: another program that reads and writes the same JSON, for tests.

    Returns:
        `prefill` and `training`: bytes, or None if the system does not report them.

    Raises:
        RegardError: the process fails; the message says how it ended.
    """
    numbers: Numbers = call_in_subprocess(
        "regard.compare.memory:peaks",
        settings,
        advice="--no-memory skips this measurement",
        command=command,
    )
    return numbers


def peaks(settings: Numbers) -> Numbers:
    """Return the peak bytes of a prompt and of a training step; each runs once before it is
    measured.
    """
    torch.set_num_threads(settings["threads"])
    config = Config(**settings["model"])
    model = build_decoder(config)

    def step() -> None:
        training_step(model, config, settings["length"], settings["batch"])()

    step()
    model.zero_grad(set_to_none=True)
    step_peak = peak_bytes(step)
    model.zero_grad(set_to_none=True)
    model.eval().requires_grad_(False)
    prompt = prefill_step(model, config, settings["context"])
    prompt()
    return {"prefill": peak_bytes(prompt), "training": step_peak}
