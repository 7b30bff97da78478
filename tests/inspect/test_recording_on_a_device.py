"""A recording that is made on a device: it lies in host memory, its rows are checked against the
definition as on a CPU, and no tensor of queries by keys is copied. The device is the pretended one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, masks
from regard.caches import Cache, Float8, Growing, Quantized, Ring
from regard.inspect import Recorder, Recording
from regard.models.generation.cache_config import CacheConfig
from regard.ops.softmax.call import Call
from regard.ops.softmax.kernel import KernelResult
from tests.models import small
from tests.pretended_device import PretendedDevice, PretendedTensor, SelectingKernel, pretended_cuda

T, S = 12, 19
WINDOW = masks.Causal() & masks.Window(6)


class DeviceKernel(SelectingKernel):
    """A kernel of the device that computes what a fault makes of a call."""

    def __init__(
        self,
        device: PretendedDevice,
        fault: Callable[[Call], Call] = lambda call: call,
    ) -> None:
        super().__init__(device)
        self._fault = fault

    def run(self, call: Call) -> KernelResult:
        return super().run(self._fault(call))


def calls() -> dict[str, tuple[tuple[Tensor, ...], dict[str, Any]]]:
    """Name -> q, k, v, and the options of a call, whose tensors go to the device with them."""
    draw = torch.Generator().manual_seed(0)

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    qkv = made(2, 4, T, 8), made(2, 2, S, 8), made(2, 2, S, 6)
    positions = torch.arange(S).expand(2, -1) - torch.tensor([[0], [5]])
    positions = positions.clamp(min=-1)
    padded = {"q_positions": positions[:, -T:].contiguous(), "k_positions": positions}
    dense = torch.rand(2, 1, T, S, generator=draw) > 0.4
    return {
        "window": (qkv, {"mask": WINDOW}),
        "padded": (qkv, {"mask": WINDOW | masks.Sinks(2), **padded}),
        "alibi": (qkv, {"mask": masks.Causal(), "slopes": made(4).abs()}),
        "dense": (qkv, {"dense": dense, "table": made(1, 4, T, S), "softcap": 3.0}),
        "sink": (qkv, {"mask": masks.Causal(), "sink": made(4), "scale": 0.7}),
    }


def attended(qkv: tuple[Tensor, ...], options: dict[str, Any]) -> Tensor:
    options = dict(options)
    if (slopes := options.pop("slopes", None)) is not None:
        options["bias"] = biases.ALiBi(slopes=slopes)
    if (dense := options.pop("dense", None)) is not None:
        options["mask"] = masks.Dense(dense)
    if (table := options.pop("table", None)) is not None:
        options["bias"] = biases.DenseBias(table)
    result: Tensor = regard.attend(*qkv, **options)
    return result


def tensors_of(recording: Recording) -> list[Tensor]:
    """Every tensor of a recording, those of its masks and biases included."""
    found: list[Tensor] = []
    for place in recording.places.values():
        for pool in place.pools:
            found += [x for x in vars(pool).values() if isinstance(x, Tensor)]
        for step in place.steps:
            found += [x for x in vars(step).values() if isinstance(x, Tensor)]
            found += [] if step.bias is None else step.bias.tensors()
            found += tensors_of_mask(step.mask)
    return found


def tensors_of_mask(mask: masks.Mask) -> list[Tensor]:
    found: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        found.append(x)
        return x

    mask.with_tensors(keep)
    return found


def assert_audited(recording: Recording, right: Recording) -> None:
    """The recording lies in host memory, is that of the CPU, and its rows are right."""
    assert {type(x) for x in tensors_of(recording)} == {Tensor}
    sums = recording.row_sums
    assert set(sums) == set(right.row_sums) != set()
    for name, found in sums.items():
        assert found.findings == ()
        assert found.rows == found.of == right.row_sums[name].of > 0
        place = recording[name]
        for head in place.heads:
            for batch in range(place.B):
                a, b = (x.weights(name, head, batch=batch) for x in (recording, right))
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", calls())
@pytest.mark.full(keep=["padded"])
def test_a_call_on_a_device_is_recorded_and_checked(name: str) -> None:
    qkv, options = calls()[name]
    with torch.no_grad(), Recorder() as on_cpu:
        attended(qkv, options)
    with pretended_cuda() as device, regard.register_kernel(DeviceKernel(device)):
        with torch.no_grad(), device.reads(), Recorder() as recorder:
            out = attended(device.put(qkv), device.put(options))
        with device.reads():
            recording = recorder.recording()
        assert type(out) is PretendedTensor
        assert_audited(recording, on_cpu.recording())
    assert_audited(recording, on_cpu.recording())


FAULTS: dict[str, tuple[Callable[[Call], Call], str]] = {
    "window": (lambda call: replace(call, mask=masks.Causal() & masks.Window(7)), "window"),
    "scale": (lambda call: replace(call, scale=0.5), "scale"),
    "values": (lambda call: replace(call, v=call.v.flip(2)), "values"),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.full(keep=["scale"])
def test_a_faulty_kernel_of_a_device_is_found(name: str) -> None:
    """The negative control."""
    fault, word = FAULTS[name]
    qkv, options = calls()["window"]
    with pretended_cuda() as device, regard.register_kernel(DeviceKernel(device, fault)):
        with torch.no_grad(), device.reads(), Recorder() as recorder:
            attended(device.put(qkv), options)
        with device.reads():
            recording = recorder.recording()
        (found,) = recording.row_sums.values()
    assert any(word in x for x in found.findings), found.findings


CACHES: dict[str, Callable[[], Cache]] = {
    "growing": Growing,
    "ring": lambda: Ring(6),
    "quantized": lambda: Quantized(8, group=4, residual=3),
    "fp8": Float8,
}


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.full(keep=["growing"])
def test_every_key_of_a_cache_is_copied_once(kind: str) -> None:
    """A text of many tokens, in chunks and single tokens: the copies to the host are q, k, v, out
    and lse, and none is as large as the queries by keys.
    """
    draw = torch.Generator().manual_seed(1)
    total = 96
    x = torch.randn(1, 2, total, 8, generator=draw)
    chunks = (64, 16, *[1] * 16)

    def run(put: Callable[[Any], Any]) -> None:
        cache, start = CACHES[kind](), 0
        for n in chunks:
            new = put(x[:, :, start : start + n])
            memory, positions = cache.update((new, new), regard.Span(start, n))
            where = regard.Span(start, n)
            regard.attend(new, *memory, mask=WINDOW, q_positions=where, k_positions=positions)
            start += n

    with torch.no_grad(), Recorder() as on_cpu:
        run(lambda y: y)
    with pretended_cuda() as device, regard.register_kernel(DeviceKernel(device)):
        with torch.no_grad(), device.reads(), Recorder() as recorder:
            device.copies = []
            run(device.put)
            copies, device.copies = device.copies, None
        with device.reads():
            recording = recorder.recording()
    assert_audited(recording, on_cpu.recording())
    assert copies
    assert max(copies) <= 64 * 16, "no more than the keys of a chunk"


@pytest.mark.parametrize("cache", ["growing", "fp8"])
@pytest.mark.full
def test_a_model_on_a_device_is_recorded_and_checked(cache: str) -> None:
    """A prompt with padded rows and six tokens behind it."""
    ids = torch.randint(3, 90, (2, 13), generator=torch.Generator().manual_seed(2))
    positions = (torch.arange(7).expand(2, -1) - torch.tensor([[0], [2]])).clamp(min=-1)
    config = CacheConfig(cache).with_capacity(7, 6)

    def run(network: Any, put: Callable[[Any], Any]) -> None:
        caches = config.new_caches(network, 2)
        network(put(ids[:, :7]), put(positions), caches, last=1)
        for step in ids[:, 7:].split(1, 1):
            network(put(step), None, caches)

    with torch.inference_mode(), Recorder() as on_cpu:
        run(small.model().decoder, lambda y: y)
    with pretended_cuda() as device, regard.register_kernel(DeviceKernel(device)):
        network = small.model().decoder
        device.put_module(network)
        with torch.inference_mode(), device.reads(), Recorder() as recorder:
            run(network, device.put)
        with device.reads():
            recording = recorder.recording()
    assert_audited(recording, on_cpu.recording())
