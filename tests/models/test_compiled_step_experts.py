"""The compiled step of decoders with mixtures of experts, against their modules."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from regard.models.decoder import Decoder
from regard.nn import (
    ExpertGroups,
    GatedFeedForward,
    MoE,
    SigmoidRouter,
    SoftmaxRouter,
    SwiGLU,
    stack_experts,
)
from regard.nn.blocks.feed_forward import ClippedSwiGLU, GatedSharedExpert
from regard.nn.blocks.routers import Router
from regard.ops.stored_weights import Int4Weight, Int8Weight
from tests.kernels import require_kernels
from tests.models.step_models import (
    DTYPES,
    F,
    M,
    V,
    assert_changes_are_used,
    assert_equals_modules,
    assert_leaves_step,
    assert_same_bits,
    assert_threads_change_no_bit,
    decode,
    in_few_bits,
    llama,
)

require_kernels()

IDS = torch.randint(V, (3, 14), generator=torch.Generator().manual_seed(1))


def mixture(
    router: Router, shared: nn.Module | None = None, expert: type[nn.Module] = SwiGLU
) -> MoE:
    return MoE(router, [expert(M, F) for _ in range(router.experts)], shared)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "mixtral": lambda: mixture(SoftmaxRouter(M, 5, 2, normalize=True)),
    "qwen2-moe": lambda: mixture(SoftmaxRouter(M, 7, 3), GatedSharedExpert(M, SwiGLU(M, 2 * F))),
    "gpt-oss": lambda: mixture(
        SoftmaxRouter(M, 4, 2, normalize=True, bias=True), expert=ClippedSwiGLU
    ),
    "glm4-moe": lambda: mixture(
        SigmoidRouter(M, 8, 3, normalize=True, scale=2.5, groups=ExpertGroups(4, 2, best=2)),
        SwiGLU(M, 72),
    ),
    "groups": lambda: mixture(
        SoftmaxRouter(M, 6, 2, normalize=True, groups=ExpertGroups(3, 1)), expert=ClippedSwiGLU
    ),
    "scores": lambda: mixture(SigmoidRouter(M, 6, 2, bias=True), SwiGLU(M, F)),
}


@pytest.mark.full(keep=["bfloat16-qwen2-moe", "float32-glm4-moe"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: str(x).removeprefix("torch."))
def test_the_step_equals_the_modules(kind: str, dtype: torch.dtype) -> None:
    """Three rows, of which several may use one expert."""
    decoder = llama(network=KINDS[kind], sink=kind == "gpt-oss").to(dtype)
    assert_equals_modules(decoder, IDS, 9)


def exact_shares(k: int) -> Decoder:
    """Experts whose logits are numbers of the hidden states, so that every sum of them is exact,
    and whose weights are powers of two: k experts have the same logit.
    """

    def network() -> MoE:
        experts = [GatedFeedForward(M, F, nn.ReLU()) for _ in range(4 * k)]
        shared = GatedSharedExpert(M, GatedFeedForward(M, F, nn.ReLU()))
        return MoE(SoftmaxRouter(M, 4 * k, k, normalize=True), experts, shared)

    decoder = llama(H=8, G=4, bias=True, network=network)
    for layer in decoder.layers:
        weight = layer.feed_forward.router.linear.weight
        weight.zero_()
        weight[torch.arange(4 * k), torch.arange(4 * k) // k] = 1
        layer.feed_forward.shared.gate.weight.zero_()
    return decoder


@pytest.mark.full(keep=["bfloat16-3-2", "float32-1-2"])
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=lambda x: str(x).removeprefix("torch."))
def test_where_the_shares_are_exact_all_bits_are(dtype: torch.dtype, rows: int, k: int) -> None:
    assert_same_bits(exact_shares(k).to(dtype), IDS[:rows], 9)


@pytest.mark.full(keep=["bfloat16-Int4Weight"])
@pytest.mark.parametrize("form", [Int8Weight, Int4Weight])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=lambda x: str(x).removeprefix("torch."))
def test_stored_experts(dtype: torch.dtype, form: type[Int8Weight | Int4Weight]) -> None:
    """Some experts, a router and a gate are stored in few bits, and others are not."""
    decoder = llama(network=KINDS["qwen2-moe"]).to(dtype)
    decoder = in_few_bits(decoder, form.quantize, form.quantize, None, form.quantize, None)
    assert_equals_modules(decoder, IDS, 9)


@pytest.mark.full
@pytest.mark.parametrize("threads", [1, 5])
def test_the_number_of_threads_changes_no_bit(threads: int) -> None:
    assert_threads_change_no_bit(llama(network=KINDS["glm4-moe"]), threads)


def test_dense_layers_and_mixtures_in_one_decoder() -> None:
    mixtures = (KINDS[kind]() for kind in ("qwen2-moe", "mixtral", "scores"))
    networks = iter([SwiGLU(M, 3 * F), next(mixtures), next(mixtures), SwiGLU(M, F), *mixtures])
    assert_equals_modules(llama(network=lambda: next(networks), layers=5), IDS, 9)


def test_a_step_follows_experts_into_their_stacks(steps: list[int]) -> None:
    """The addresses that the step knows are those of freed memory afterwards."""
    decoder = llama(network=KINDS["glm4-moe"])
    before, _ = decode(decoder, IDS, 9)
    count = len(steps)
    assert stack_experts(decoder) == 2
    for expert in decoder.layers[1].feed_forward.experts:
        expert.up.weight.mul_(2)
    found, _ = decode(decoder, IDS, 9)
    plain, _ = decode(decoder, IDS, 9, backend="reference")
    assert len(steps) == 2 * count > 0
    assert not torch.equal(found, before)
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)


def test_changes_are_used() -> None:
    decoder = llama(network=KINDS["glm4-moe"])
    layer = decoder.layers[1].feed_forward
    changes: list[Callable[[], object]] = [
        lambda: setattr(layer.router, "scale", 1.0),
        lambda: setattr(layer.router, "groups", None),
        lambda: setattr(layer.router, "normalize", False),
        lambda: setattr(layer.router, "k", 5),
        lambda: layer.router.correction.copy_(torch.arange(8.0)),
        lambda: layer.experts[7].up.weight.mul_(2),
        lambda: layer.experts.__setitem__(7, copy.deepcopy(layer.experts[0])),
        lambda: setattr(layer, "shared", None),
    ]
    assert_changes_are_used(decoder, IDS, 11, changes)


def _method(decoder: Decoder) -> None:
    layer = decoder.layers[1].feed_forward
    layer.weighted_expert = lambda *_: None


REFUSED: dict[str, tuple[Callable[[Decoder], object], str]] = {
    "hook": (
        lambda d: d.layers[1].feed_forward.experts[3].down.register_forward_hook(print),
        "has a hook",
    ),
    "method": (_method, "the weighted_expert of a MoE was replaced"),
    "router": (
        lambda d: setattr(
            d.layers[0].feed_forward, "router", type("Other", (SoftmaxRouter,), {})(M, 8, 3)
        ),
        "layer 0: the router is Other",
    ),
    "number": (lambda d: setattr(d.layers[0].feed_forward.router, "k", 9), "the router chooses 9"),
    "groups": (
        lambda d: setattr(d.layers[0].feed_forward.router, "groups", ExpertGroups(3, 1)),
        "8 experts cannot be in ExpertGroups(count=3",
    ),
    "expert": (
        lambda d: d.layers[1].feed_forward.experts.__setitem__(2, nn.Identity()),
        "an expert is Identity",
    ),
    "units": (
        lambda d: d.layers[1].feed_forward.experts.__setitem__(2, SwiGLU(M, 2 * F)),
        "different numbers of hidden units",
    ),
    "dtype": (lambda d: d.layers[1].feed_forward.router.linear.half(), "torch.float16 on cpu"),
    "correction": (
        lambda d: setattr(
            d.layers[1].feed_forward.router, "correction", nn.Parameter(torch.ones(3))
        ),
        "the correction has another size than the experts",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_leaves_the_step_and_why(case: str) -> None:
    assert_leaves_step(llama(network=KINDS["glm4-moe"]), *REFUSED[case])
