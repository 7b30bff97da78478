"""A decode step on a device waits for it once, when the drawn tokens are read: found without a GPU
on a pretended device, whose numbers are those of the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.caches import Paged
from regard.errors import ArgumentError
from regard.models.decoder import Decoder
from regard.models.generation.cache_config import CacheConfig
from regard.models.generation.sampling import Sampler, SamplingParams
from regard.positions import LearnedPositions
from regard.process_state import ConstantTensor
from tests.models.generation.test_captured_step import PROMPT, Text, llama, of_family, text
from tests.pretended_device import HiddenRead, PretendedTensor, SelectingKernel, pretended_cuda
from tests.rules import assert_close_rule

STEPS = 6
CACHES = {
    "growing": None,
    "fixed": None,
    "paged": None,
    "quantized": None,
    "fp8": None,
    "ring": 8,
    "streaming": 9,
    "h2o": 9,
    "tova": 9,
    "snapkv": 9,
    "key_norm": 9,
    "keydiff": 9,
}
"""The kinds of caches, and the largest context of those that forget."""

FAMILIES = (
    *("bloom", "falcon", "gemma3_text", "gpt2", "gpt_neox", "mamba2"),
    *("mpt", "opt", "qwen3_5_text", "rwkv"),
)
"""Families of different positions, projections and states."""


def _texts(padded: bool) -> Text:
    return text(padded=padded, steps=STEPS)


def _on_cpu(decoder: Decoder, config: CacheConfig, *, padded: bool) -> Tensor:
    ids, positions, more = _texts(padded)
    network = config.restrict(decoder)
    caches = config.new_caches(network, len(ids))
    logits = [network(ids, positions, caches, last=1)]
    logits += [network(x, None, caches) for x in more.split(1, 1)]
    return torch.cat(logits, 1)


def _on_device(
    decoder: Decoder, config: CacheConfig, *, padded: bool, found: list[str] | None = None
) -> Tensor:
    """The same on the pretended device, where only the pass over the prompt may read; `found` takes
    the other reads.
    """
    ids, positions, more = _texts(padded)
    with pretended_cuda() as device, regard.register_kernel(SelectingKernel(device)):
        network = config.restrict(decoder)
        device.put_module(network)
        caches = config.new_caches(network, len(ids))
        with device.reads():
            logits = [network(device.put(ids), device.put(positions), caches, last=1)]
        device.found = found
        for x in more.split(1, 1):
            step = network(device.put(x), None, caches)
            assert type(step) is PretendedTensor
            logits.append(step)
    return torch.cat(device.get(logits), 1)


def assert_steps_read_nothing(
    make: Callable[[], Decoder], config: CacheConfig, *, padded: bool
) -> None:
    config = config.with_capacity(PROMPT, STEPS)
    with torch.inference_mode():
        plain = partial(_on_cpu, make(), config, padded=padded)
        exact = _on_cpu(make().double(), config, padded=padded)
        found = _on_device(make(), config, padded=padded)
        assert_close_rule(found, plain, exact)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.full(keep=1)
def test_a_step_reads_nothing(cache: str, *, padded: bool) -> None:
    assert_steps_read_nothing(llama, CacheConfig(cache, CACHES[cache]), padded=padded)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.full(keep=["gpt2"])
def test_a_step_of_a_family_reads_nothing(name: str) -> None:
    assert_steps_read_nothing(lambda: of_family(name), CacheConfig(), padded=True)


@pytest.mark.parametrize(("name", "mixtures"), [("mixtral", 3), ("deepseek_v2", 2), ("minimax", 3)])
@pytest.mark.full
def test_a_mixture_of_experts_reads_once(name: str, mixtures: int) -> None:
    """Python runs the networks of the chosen experts one after another, so it has to know them;
    nothing else of such a model reads.
    """
    config = CacheConfig()
    with torch.inference_mode():
        plain = partial(_on_cpu, of_family(name), config, padded=True)
        exact = _on_cpu(of_family(name).double(), config, padded=True)
        found: list[str] = []
        logits = _on_device(of_family(name), config, padded=True, found=found)
        assert_close_rule(logits, plain, exact)
    assert len(found) == mixtures * STEPS
    assert all("experts.py" in where for where in found)


SAMPLING = (
    SamplingParams(),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.2),
    SamplingParams(temperature=1.0, top_p=0.5, seed=7),
)


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
def test_a_draw_reads_once_and_a_seed_draws_the_same_everywhere(sampling: SamplingParams) -> None:
    logits = 3 * torch.randn(3, 2000, generator=torch.Generator().manual_seed(1))
    on_cpu, on_device = (Sampler(sampling, [[1], [2], [3]], 2000) for _ in range(2))
    with pretended_cuda() as device:
        there = device.put(logits)
        with device.reads():  # what was seen in the prompts goes to the device once
            drawn = [on_device(there)]
        device.found = []
        drawn += [on_device(there) for _ in range(4)]
        on_device.select([2, 0])
        drawn.append(on_device(device.put(logits[:2])))
    expected = [on_cpu(logits) for _ in range(5)]
    on_cpu.select([2, 0])
    expected.append(on_cpu(logits[:2]))
    assert drawn == expected
    assert len(device.found) == 5
    assert all("_draw_on_device" in where for where in device.found)


def test_a_logit_that_is_not_finite_is_refused_on_the_device() -> None:
    logits = torch.tensor([[0.0, 1.0], [torch.nan, 0.0]])
    with pretended_cuda() as device, device.reads():
        sampler = Sampler(SamplingParams(temperature=1.0), [[0], [0]], 2)
        with pytest.raises(ArgumentError, match="the largest logit of row 1 is nan"):
            sampler(device.put(logits))


def test_a_position_without_a_vector_is_nan_on_the_device() -> None:
    table = LearnedPositions(4, 2)
    with pretended_cuda() as device, torch.no_grad():
        device.put_module(table)
        cache = Paged(2, 8)
        with device.reads():
            cache.update(device.put((torch.zeros(2, 1, 3, 2),)), device.put(_POSITIONS))
        following = cache.next(2)
        vectors = device.get(table(following))
        assert device.get(following).tolist() == [[2, 3], [3, 4]]
        with device.reads(), pytest.raises(ArgumentError, match="position 4 has no vector"):
            table(device.put(torch.tensor([[3, 4]])))
    assert vectors.isnan().tolist() == [[[False] * 2] * 2, [[False] * 2, [True] * 2]]


_POSITIONS = torch.tensor([[-1, 0, 1], [0, 1, 2]])


def test_positions_of_a_user_are_read() -> None:
    """Only positions that a cache computed itself are known; wrong ones of a user are refused."""
    memory = (torch.zeros(2, 1, 3, 2),)
    with pretended_cuda() as device:
        cache = regard.caches.Ring(4)
        with device.reads():
            cache.update(device.put(memory), device.put(_POSITIONS))
        one = device.put((torch.zeros(2, 1, 1, 2),))
        with pytest.raises(HiddenRead):
            cache.update(one, device.put(torch.tensor([[2], [3]])))
        with device.reads(), pytest.raises(ArgumentError, match="a ring is filled in the order"):
            cache.update(one, device.put(torch.tensor([[2], [2]])))
        cache.update(one, cache.next(1))


def test_a_constant_travels_to_a_device_once() -> None:
    constant = ConstantTensor(torch.tensor([1.0, 2.0]))
    with pretended_cuda() as device:
        where = device.put(torch.ones(1)).device
        with device.reads():
            copy = constant.on(where)
        assert constant.on(where) is copy
        assert device.get(copy + 1).tolist() == [2.0, 3.0]
    assert constant.on(torch.device("cpu")) is constant.tensor


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x[0] > 0),
        lambda x: x.tolist(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x[[0, 1]],
        lambda x: x.cpu(),
        lambda x: x + torch.ones(3),
        lambda x: torch.tensor([1, 2], device=x.device),
        lambda x: torch.equal(x, x),
        lambda x: nn.functional.one_hot(x.long()),
    ],
)
def test_the_pretended_device_finds_reads(read: Callable[[Tensor], object]) -> None:
    """Negative control: what waits for a device is refused."""
    with pretended_cuda() as device, torch.no_grad():
        x = device.put(torch.tensor([1.0, 0.0, 2.0]))
        with pytest.raises(HiddenRead):
            read(x)
        assert device.get(x + 1).tolist() == [2.0, 1.0, 3.0]
