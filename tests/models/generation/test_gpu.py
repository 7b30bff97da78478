"""Generation on a GPU: `pytest -m gpu tests/models/generation`, in a minute."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import regard
from regard.errors import ArgumentError
from regard.models.decoder import Decoder
from regard.models.generation.cache_config import CacheConfig
from regard.models.generation.captured_step import WARM_UP_STEPS, CapturedSession
from regard.models.generation.decode_session import DecodeSession
from regard.models.generation.sampling import Sampler, SamplingParams
from regard.nn import MoE, SoftmaxRouter, SwiGLU, stack_experts
from tests.models.generation.test_captured_step import STEPS, Text, of_family, ordinary, text
from tests.rules import assert_close_rule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.full,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPTS = ["def read(path):", "import"]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise where the program waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("cache", ["growing", "fixed", "paged", "fp8", "ring", "streaming", "h2o"])
@torch.inference_mode()
def test_a_step_does_not_wait(cache: str) -> None:
    decoder = regard.load("tiny").to("cuda").decoder
    forgets = cache in ("ring", "streaming", "h2o")
    config = CacheConfig(cache, 12 if forgets else 64)
    network = config.restrict(decoder)
    caches = config.new_caches(network, 2)
    ids = torch.randint(3, 90, (2, 8), device="cuda")
    positions = (torch.arange(8) - torch.tensor([[0], [2]])).clamp(min=-1).to("cuda")
    network(ids, positions, caches)
    network(ids[:, :1], None, caches)  # kernels are compiled
    with no_waiting():
        for i in range(6):
            logits = network(ids[:, i : i + 1], None, caches)
    assert logits.isfinite().all()


@torch.inference_mode()
def test_stacked_experts_do_not_wait_and_are_the_experts() -> None:
    torch.manual_seed(0)
    experts = [SwiGLU(256, 512) for _ in range(8)]
    moe = MoE(SoftmaxRouter(256, 8, 2), experts).to("cuda", torch.bfloat16)
    x = torch.randn(3, 1, 256, device="cuda", dtype=torch.bfloat16)
    plain = moe(x)
    exact = copy.deepcopy(moe).double()(x.double())
    assert stack_experts(moe) == 1
    moe(x)
    with no_waiting():
        found = moe(x)
    assert_close_rule(found.cpu(), plain.cpu(), exact.cpu())


@torch.inference_mode()
def test_a_draw_waits_once_and_draws_the_tokens_of_the_cpu() -> None:
    logits = 3 * torch.randn(2, 5000, dtype=torch.float64)
    sampling = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2, seed=4)
    here, there = (Sampler(sampling, [[1], [2]], 5000) for _ in range(2))
    assert [there(logits.to("cuda")) for _ in range(5)] == [here(logits) for _ in range(5)]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}], ids=str)
def test_a_text_is_that_of_the_cpu(sampling: dict[str, float]) -> None:
    texts = []
    for device in ("cpu", "cuda"):
        model = regard.load("tiny", dtype=torch.float64).to(device)
        batch = model.generate(PROMPTS, max_tokens=20, **sampling)  # type: ignore[arg-type]
        list(batch)
        texts.append([row.ids for row in batch.rows])
    assert texts[0] == texts[1]


def captured_on_gpu(decoder: Decoder, config: CacheConfig, given: Text) -> Tensor:
    """Logits [B, STEPS, V] of a captured step, on a GPU."""
    decoder = decoder.to("cuda")
    session = DecodeSession(decoder, config, len(given.ids))
    positions = given.positions
    session.append(given.ids.to("cuda"), None if positions is None else positions.to("cuda"))
    step = CapturedSession(session, STEPS)
    logits = [step.append(x.to("cuda")).clone() for x in given.more.split(1, 1)]
    assert step.is_captured
    return torch.stack(logits, 1).cpu()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("cache", "context"), [("growing", None), ("ring", 8), ("streaming", 9)])
@torch.inference_mode()
def test_a_captured_step_is_the_ordinary_one(
    cache: str, context: int | None, *, padded: bool
) -> None:
    given, config = text(padded=padded), CacheConfig(cache, context)
    plain, exact = (
        ordinary(regard.load("tiny", dtype=dtype).decoder, config, given)
        for dtype in (torch.float32, torch.float64)
    )
    assert_close_rule(captured_on_gpu(regard.load("tiny").decoder, config, given), plain, exact)


@pytest.mark.parametrize("name", ["gemma3_text", "gpt2", "qwen3", "qwen3_5_text", "rwkv"])
@torch.inference_mode()
def test_a_captured_step_of_a_family(name: str) -> None:
    given, config = text(padded=True), CacheConfig()
    plain = ordinary(of_family(name), config, given)
    exact = ordinary(of_family(name).double(), config, given)
    assert_close_rule(captured_on_gpu(of_family(name), config, given), plain, exact)


def test_a_text_of_a_captured_step_is_the_ordinary_one() -> None:
    model = regard.load("tiny").to("cuda")
    texts = []
    for cuda_graph in (False, True):
        batch = model.generate(PROMPTS, max_tokens=30, cuda_graph=cuda_graph)
        list(batch)
        texts.append([row.ids for row in batch.rows])
    assert texts[0] == texts[1]


@torch.inference_mode()
def test_a_step_that_reads_cannot_be_captured() -> None:
    decoder = regard.load("tiny").to("cuda").decoder
    session = DecodeSession(decoder)
    session.append(torch.tensor([[1, 2, 3]], device="cuda"))
    step = CapturedSession(session, STEPS)
    handle = decoder.register_forward_hook(lambda module, args, out: out * out.abs().max().item())
    token = torch.tensor([[5]], device="cuda")
    for _ in range(WARM_UP_STEPS):
        step.append(token)
    with pytest.raises(ArgumentError, match="cannot capture the step of this model"):
        step.append(token)
    handle.remove()
