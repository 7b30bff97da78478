"""A captured decoding step gives the tokens of the ordinary path: recorded once on the pretended
device, and run again without Python in the same memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import regard
from regard.configs.reader import parse
from regard.models.decoder import Decoder
from regard.models.families import family
from regard.models.generation.cache_config import CacheConfig
from regard.models.generation.captured_step import (
    WARM_UP_STEPS,
    CapturedSession,
    Step,
)
from regard.models.generation.decode_session import DecodeSession
from tests.cost.tiny import TINY
from tests.models import small
from tests.pretended_device import (
    PretendedDevice,
    PretendedTensor,
    SelectingKernel,
    pretended_cuda,
)
from tests.rules import assert_close_rule

PROMPT, STEPS = 7, 23
REPLAYED = STEPS - WARM_UP_STEPS


class PretendedRecorder:
    """Captures a step on the pretended device."""

    def __init__(self, device: PretendedDevice) -> None:
        self._device = device
        self.replays = 0

    def warm_up(self, step: Step) -> Tensor:
        return step()

    def record(self, step: Step) -> tuple[Callable[[], None], Tensor]:
        replay, logits = self._device.capture(step)

        def count_and_replay() -> None:
            self.replays += 1
            replay()

        return count_and_replay, logits


class Text(NamedTuple):
    """Prompts, their positions, and the tokens that follow one after another."""

    ids: Tensor
    positions: Tensor | None
    more: Tensor


def text(*, padded: bool, seed: int = 0, prompt: int = PROMPT) -> Text:
    make = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 90, (2, prompt + STEPS), generator=make)
    positions = torch.arange(prompt).expand(2, -1).clone()
    positions[1] = (positions[1] - 2).clamp(min=-1)
    return Text(ids[:, :prompt], positions if padded else None, ids[:, prompt:])


def llama(**change: object) -> Decoder:
    return small.model(**change).decoder


def sinks() -> Decoder:
    """A Llama with a learned sink in every head, as gpt-oss has it."""
    decoder = llama()
    make = torch.Generator().manual_seed(5)
    for layer in decoder.layers:
        heads = layer.attention.project.shape.heads.heads  # type: ignore[union-attr]
        sink = torch.randn(heads, generator=make)
        layer.attention.sink = torch.nn.Parameter(sink, requires_grad=False)  # type: ignore[union-attr]
    return decoder


def of_family(name: str) -> Decoder:
    found = family(name)
    assert found is not None
    decoder: Decoder = found.build(parse(found.config, TINY[name]))
    small.randomise(decoder)
    return decoder.eval().requires_grad_(False)


@torch.inference_mode()
def ordinary(decoder: Decoder, config: CacheConfig, given: Text) -> Tensor:
    """Logits [B, STEPS, V] of the ordinary path, on the CPU."""
    session = DecodeSession(decoder, config, len(given.ids))
    session.append(given.ids, given.positions)
    return torch.stack([session.append(x) for x in given.more.split(1, 1)], 1)


def prefilled(
    device: PretendedDevice, decoder: Decoder, config: CacheConfig, given: Text
) -> DecodeSession:
    session = DecodeSession(decoder, config, len(given.ids))
    with device.reads():
        session.append(device.put(given.ids), device.put(given.positions))
    return session


def steps(device: PretendedDevice, session: CapturedSession, more: Tensor) -> Tensor:
    """Logits [B, STEPS, V]; no step may read anything."""
    found = []
    for x in more.split(1, 1):
        logits = session.append(device.put(x))
        assert type(logits) is PretendedTensor
        found.append(device.get(logits).clone())
    return torch.stack(found, 1)


@torch.inference_mode()
def captured(decoder: Decoder, config: CacheConfig, *texts: Text) -> list[Tensor]:
    """Logits of each text, all of them from one captured step."""
    found = []
    with pretended_cuda() as device, regard.register_kernel(SelectingKernel(device)):
        device.put_module(decoder)
        recorder = PretendedRecorder(device)
        session: CapturedSession | None = None
        for given in texts:
            read = prefilled(device, decoder, config, given)
            with device.reads():
                if session is None:
                    session = CapturedSession(read, STEPS, recorder)
                else:
                    session.refill(read)
            more = given.more if not found else given.more[:, :REPLAYED]
            found.append(steps(device, session, more))
    assert recorder.replays == REPLAYED * len(texts)
    return found


def assert_captured_is_ordinary(
    make: Callable[[], Decoder], config: CacheConfig, *, padded: bool
) -> None:
    given = text(padded=padded)
    config = config.with_capacity(PROMPT, STEPS)
    plain, exact = ordinary(make(), config, given), ordinary(make().double(), config, given)
    (found,) = captured(make(), config, given)
    assert_close_rule(found, plain, exact)
    assert torch.equal(found.argmax(-1), plain.argmax(-1))


CACHES = {"growing": None, "fixed": None, "ring": 8, "streaming": 9}
"""The kinds that have a static form, and the largest context of those that forget."""


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.full(keep=["growing-True", "True-growing"])
def test_a_captured_step_of_a_cache(cache: str, *, padded: bool) -> None:
    assert_captured_is_ordinary(llama, CacheConfig(cache, CACHES[cache]), padded=padded)


FAMILIES = (
    *("bloom", "falcon", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "mamba2", "mpt", "opt"),
    *("qwen3", "qwen3_5_text", "olmo_hybrid", "rwkv", "falcon_h1", "gemma3n_text"),
)
"""Families of different positions, windows, projections and states."""


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.full(keep=["qwen3_5_text"])
def test_a_captured_step_of_a_family(name: str) -> None:
    assert_captured_is_ordinary(lambda: of_family(name), CacheConfig(), padded=True)


@pytest.mark.full
def test_a_captured_step_with_sinks() -> None:
    assert_captured_is_ordinary(sinks, CacheConfig("ring", 8), padded=True)
