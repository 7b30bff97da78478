"""--device of the commands that measure: a device that cannot be used is refused at once."""

from __future__ import annotations

import json
from typing import Any

import regard
from regard.compare.speed_and_memory import Timing, memory_experiments, timing_experiments
from regard.inspect.explain.layer_stages import run_layers
from regard.masks import Causal
from tests.cli.command import Said
from tests.pretended_device import SelectingKernel, pretended_cuda


def test_a_layer_on_the_cpu_by_name(said: Said) -> None:
    small = ("layer", "gqa", "--dim", "8", "--heads", "4", "--set", "groups=2", "--json")
    plain, named = (json.loads(said(*small, *more)) for more in ((), ("--device", "cpu")))
    assert without_times(named) == without_times(plain)


def test_a_layer_on_a_device() -> None:
    """Weights and tokens are those of the CPU, and what is returned is there."""
    sizes: dict[str, Any] = {"dim": 8, "heads": 2, "mask": Causal(), "seed": 3}
    (expected,) = run_layers(["mha"], **sizes)
    with (
        pretended_cuda() as device,
        regard.register_kernel(SelectingKernel(device)),  # no other kernel looks for a GPU
        device.reads(),
    ):
        (found,) = run_layers(["mha"], **sizes, device="cuda")
    for a, b in zip(found.stages, expected.stages, strict=True):
        assert type(a.values) is type(b.values)
        assert (a.values - b.values).abs().nan_to_num().max() < 1e-5 or a.name == "block"
    assert found.allowed.tolist() == expected.allowed.tolist()


def test_measurements_of_a_device_are_kept_apart() -> None:
    """A saved time of the CPU is never taken for one of a GPU; those of the CPU keep their keys."""
    cpu, gpu = {"device": "cpu", "torch": "2"}, {"device": "cuda", "gpu": "H100", "torch": "2"}
    timing = Timing(contexts=(4,))
    here = timing_experiments({}, timing, cpu)[0].settings["machine"]
    there = timing_experiments({}, timing, gpu)[0].settings["machine"]
    assert "device" not in here
    assert there == {**here, "device": "cuda", "gpu": "H100"}
    assert memory_experiments({}, timing, gpu) == []


def without_times(layers: list[dict[str, Any]]) -> list[object]:
    return [[{**stage, "seconds": 0} for stage in layer["stages"]] for layer in layers]
