"""Generation on a GPU: `pytest -m gpu tests/models/generation`, in a minute."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import regard
from regard.models.generation.cache_config import CacheConfig
from regard.models.generation.sampling import Sampler, SamplingParams
from regard.nn import MoE, SoftmaxRouter, SwiGLU, stack_experts
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
