"""A captured decoding step gives the tokens of the ordinary path: recorded once on the pretended
device, and run again without Python in the same memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import regard
from regard.caches import Cache, Fixed
from regard.caches.base import StaticSize
from regard.configs.reader import parse
from regard.errors import ArgumentError, ArgumentTypeError
from regard.models.decoder import Decoder
from regard.models.families import family
from regard.models.generation import GenerationOptions, beam_search_text
from regard.models.generation.cache_config import CacheConfig
from regard.models.generation.captured_step import (
    WARM_UP_STEPS,
    CapturedSession,
    Step,
    why_not_captured,
)
from regard.models.generation.decode_session import DecodeSession
from regard.nn import stack_experts
from tests.cost.tiny import TINY
from tests.models import small
from tests.pretended_device import (
    HiddenRead,
    PretendedDevice,
    PretendedTensor,
    SelectingKernel,
    pretended_cuda,
)
from tests.rules import assert_close_rule, in_orders

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


def text(*, padded: bool, seed: int = 0, prompt: int = PROMPT, steps: int = STEPS) -> Text:
    make = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 90, (2, prompt + steps), generator=make)
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
    decoder: Decoder = found.build(parse(found.config, TINY[name]))
    small.randomize(decoder)
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
        stack_experts(decoder)
        recorder = PretendedRecorder(device)
        session: CapturedSession | None = None
        for given in texts:
            read = prefilled(device, decoder, config, given)
            with device.reads():
                if session is None:
                    session = CapturedSession(read, len(given.more[0]), recorder)
                else:
                    session.refill(read)
            more = given.more if not found else given.more[:, :REPLAYED]
            found.append(steps(device, session, more))
    assert recorder.replays == (len(texts[0].more[0]) - WARM_UP_STEPS) * len(texts)
    return found


def assert_captured_is_ordinary(
    make: Callable[[], Decoder], config: CacheConfig, *, padded: bool, steps: int = STEPS
) -> None:
    given = text(padded=padded, steps=steps)
    config = config.with_capacity(PROMPT, steps)
    plain = in_orders(partial(ordinary, make(), config, given))
    (found,) = captured(make(), config, given)
    assert_close_rule(found, plain, ordinary(make().double(), config, given))
    assert torch.equal(found.argmax(-1), plain[0].argmax(-1))


CACHES = {"growing": None, "fixed": None, "ring": 8, "streaming": 9}
"""The kinds that have a static form, and the largest context of those that forget."""


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.full
def test_a_captured_step_of_a_cache(cache: str, *, padded: bool) -> None:
    assert_captured_is_ordinary(llama, CacheConfig(cache, CACHES[cache]), padded=padded)


FAMILIES = (
    *("bloom", "falcon", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "mamba2", "mpt", "opt"),
    *("qwen3", "qwen3_5_text", "olmo_hybrid", "rwkv", "falcon_h1", "gemma3n_text"),
)
"""Families of different positions, windows, projections and states."""


@pytest.mark.parametrize("name", ["gpt_oss", "mixtral", "qwen2_moe"])
@pytest.mark.full
def test_a_captured_step_of_stacked_experts(name: str) -> None:
    assert_captured_is_ordinary(lambda: of_family(name), CacheConfig(), padded=True, steps=12)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.full
def test_a_captured_step_of_a_family(name: str) -> None:
    assert_captured_is_ordinary(lambda: of_family(name), CacheConfig(), padded=True, steps=12)


@pytest.mark.full
def test_a_captured_step_with_sinks() -> None:
    assert_captured_is_ordinary(sinks, CacheConfig("ring", 8), padded=True)


@pytest.mark.parametrize("cache", ["growing", "ring"])
@pytest.mark.full
def test_one_captured_step_serves_another_prompt(cache: str) -> None:
    """The second prompt is shorter, and lies in the memory of the first."""
    config = CacheConfig(cache, CACHES[cache]).with_capacity(PROMPT, STEPS)
    first, second = text(padded=True), text(padded=True, seed=1, prompt=PROMPT - 2)
    found = captured(llama(), config, first, second)
    shorter = second._replace(more=second.more[:, :REPLAYED])
    plain = partial(ordinary, llama(), config, shorter)
    assert_close_rule(found[1], plain, ordinary(llama().double(), config, shorter))
    assert not torch.equal(found[0][:, :REPLAYED].argmax(-1), found[1].argmax(-1))


def replay_with(caches: list[Cache], given: Text) -> Tensor:
    """Logits of steps with any caches, of which the first is captured: no check is made."""
    decoder = llama()
    with pretended_cuda() as device, regard.register_kernel(SelectingKernel(device)):
        device.put_module(decoder)
        with device.reads():
            decoder(device.put(given.ids), device.put(given.positions), caches, last=1)
        ids = device.put(given.more[:, :1].clone())
        replay, logits = device.capture(lambda: decoder(ids, None, caches, last=1)[:, -1])
        found = []
        for x in given.more.split(1, 1):
            ids.copy_(device.put(x))
            replay()
            found.append(device.get(logits).clone())
    return torch.stack(found, 1)


@pytest.mark.full
@torch.inference_mode()
def test_a_cache_that_counts_in_python_replays_wrong_tokens() -> None:
    """Negative control: `Fixed` slices its buffers by a number that Python holds, so that a
    captured step writes into the same slot again and again, and sees no token behind it.
    """
    given = text(padded=False)
    plain = in_orders(partial(ordinary, llama(), CacheConfig(), given))
    found = replay_with([Fixed(PROMPT + STEPS) for _ in llama().layers], given)
    exact = ordinary(llama().double(), CacheConfig(), given)
    assert_close_rule(found[:, :1], plain.each(lambda x: x[:, :1]), exact[:, :1])
    far = (found - exact).abs().amax((0, 2))
    assert bool((far[2:] > 0.01 * exact.abs().max()).all())


@pytest.mark.full
def test_rows_that_are_finished_stay_in_the_captured_step() -> None:
    given = text(padded=True)
    plain = in_orders(partial(ordinary, llama(), CacheConfig(), given))
    exact = ordinary(llama().double(), CacheConfig(), given)
    last = WARM_UP_STEPS + 2
    inference = torch.inference_mode()
    with inference, pretended_cuda() as device, regard.register_kernel(SelectingKernel(device)):
        decoder = llama()
        device.put_module(decoder)
        read = prefilled(device, decoder, CacheConfig(), given)
        with device.reads():
            session = CapturedSession(read, STEPS, PretendedRecorder(device))
        steps(device, session, given.more[:, :last])
        with device.reads():
            session.select(torch.tensor([1]))
        found = steps(device, session, given.more[1:, last:])
        assert session.is_captured
        with pytest.raises(ArgumentError, match=f"has run {STEPS} steps"):
            session.append(device.put(given.more[1:, :1]))
    assert_close_rule(found, plain.each(lambda x: x[1:, last:]), exact[1:, last:])


def test_a_copy_from_the_host_cannot_be_captured() -> None:
    """Negative control: what a real capture refuses raises on the pretended device."""
    with pretended_cuda() as device:
        x = device.put(torch.zeros(2))
        with pytest.raises(HiddenRead, match="a copy between host and device"):
            device.capture(lambda: x + torch.ones(2).to(x.device, non_blocking=True))


@pytest.mark.parametrize("kind", ["paged", "quantized", "h2o", "quest"])
def test_a_cache_without_a_static_form_is_refused(kind: str) -> None:
    config = CacheConfig(kind, 64)
    session = DecodeSession(llama(), config)
    reasons = why_not_captured(session.decoder, session.caches)
    assert any(f"a {type(session.caches[0]).__name__}, cannot: " in reason for reason in reasons)
    session.append(text(padded=False).ids[:1])
    with pytest.raises(ArgumentError, match="has no static form: "):
        session.caches[0].to_static(StaticSize(9, 1, session.device))


@pytest.mark.parametrize(
    ("name", "words"), [("mixtral", "is MoE, which reads which experts"), ("minimax", "is MoE")]
)
@pytest.mark.full(keep=["mixtral"])
def test_a_mixture_of_experts_is_refused_until_they_are_stacked(name: str, words: str) -> None:
    decoder = of_family(name)
    assert words in why_not_captured(decoder, decoder.new_caches())[0]
    assert stack_experts(decoder) > 0
    assert why_not_captured(decoder, decoder.new_caches()) == []


def test_frequencies_that_depend_on_the_length_are_refused() -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    decoder = llama(rope_scaling=scaling)
    (reason,) = why_not_captured(decoder, decoder.new_caches())
    assert "PerRowRotary, which reads the length of each row" in reason


def test_generation_on_another_device_is_refused() -> None:
    model = regard.load("tiny")
    with pytest.raises(ArgumentError, match=r"this model is on cpu; move it with model.to\("):
        model.generate("If", cuda_graph=True)
    prefix = model.cache_prefix("If")
    with pytest.raises(ArgumentError, match="this model is on cpu"):
        model.generate(" a", prefix=prefix, cuda_graph=True)
    with pytest.raises(ArgumentTypeError, match="cuda_graph is str; it must be True or False"):
        model.generate("If", cuda_graph="yes")  # type: ignore[call-overload]
    options = GenerationOptions(cuda_graph=True)
    with pytest.raises(ArgumentError, match="beam search moves them"):
        beam_search_text(model, "If", options)


class NoCapture:
    """Runs every step as it is."""

    def warm_up(self, step: Step) -> Tensor:
        return step()

    def record(self, step: Step) -> tuple[Callable[[], None], Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing")


def test_another_session_must_fit() -> None:
    session = DecodeSession(llama())
    session.append(text(padded=False).ids)
    captured_session = CapturedSession(session, 4, NoCapture())
    longer = DecodeSession(llama())
    longer.append(text(padded=False, prompt=PROMPT + 1).ids)
    with pytest.raises(ArgumentError, match="has read 8 tokens, and this captured step has room"):
        captured_session.refill(longer)


def test_who_listens_is_not_left_out_in_silence() -> None:
    """A captured step runs no hook and reports to no trace."""
    decoder = llama()
    session = DecodeSession(decoder)
    session.append(text(padded=False).ids)
    step = CapturedSession(session, 4, NoCapture())
    token = torch.tensor([[3], [4]])
    with (
        regard.Trace("embed", missing="ignore"),
        pytest.raises(ArgumentError, match="a trace is open, and a captured step"),
    ):
        step.append(token)
    handle = decoder.norm.register_forward_hook(lambda module, args, out: None)
    (reason,) = why_not_captured(decoder, session.caches)
    assert reason == "norm is RMSNorm with a hook, which would be called once"
    handle.remove()
    step.append(token)
    with pytest.raises(ArgumentError, match=r"ids are \(1, 1\); they must be \(2, 1\)"):
        step.append(token[:1])
