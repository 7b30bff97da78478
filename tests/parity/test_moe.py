"""The mixtures of experts of transformers' models, with random weights, against regard's parts;
wrong ones must fail.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.nn.blocks.experts import MoE
from regard.nn.blocks.feed_forward import ClippedSwiGLU, SwiGLU
from regard.nn.blocks.routers import ExpertGroups, Router, SigmoidRouter, SoftmaxRouter

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="parity needs the transformers extra")

M, HIDDEN, N = 12, 10, 8


def random(theirs: Any, seed: int = 0) -> Any:
    """Weights of about 1/sqrt(M), biases and corrections among them."""
    make = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*theirs.parameters(), *theirs.buffers()):
            tensor.copy_(0.5 * torch.randn(tensor.shape, generator=make))
    return theirs.eval()


def halves(theirs: Any) -> list[SwiGLU]:
    """Gate and up are stored one above the other."""
    experts = []
    for fused, down in zip(theirs.gate_up_proj, theirs.down_proj, strict=True):
        expert = SwiGLU(M, HIDDEN)
        gate, up = fused.chunk(2)
        for module, weight in ((expert.gate, gate), (expert.up, up), (expert.down, down)):
            module.weight.data.copy_(weight)
        experts.append(expert)
    return experts


def mlp(theirs: Any) -> SwiGLU:
    ours = SwiGLU(M, theirs.gate_proj.weight.shape[0])
    for name in ("gate", "up", "down"):
        getattr(ours, name).weight.data.copy_(getattr(theirs, f"{name}_proj").weight)
    return ours


def every_second(theirs: Any, limit: float) -> list[ClippedSwiGLU]:
    """gpt-oss: gate and up take turns in the columns, and matrices are [in, out]."""
    experts = []
    for e in range(N):
        expert = ClippedSwiGLU(M, HIDDEN, limit=limit)
        fused, bias = theirs.gate_up_proj[e].T, theirs.gate_up_proj_bias[e]
        for i, module in enumerate((expert.gate, expert.up)):
            module.weight.data.copy_(fused[i::2])
            module.bias.data.copy_(bias[i::2])
        expert.down.weight.data.copy_(theirs.down_proj[e].T)
        expert.down.bias.data.copy_(theirs.down_proj_bias[e])
        experts.append(expert)
    return experts


def gpt_oss() -> tuple[MoE, Callable[[Tensor], Tensor]]:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    config = transformers.GptOssConfig(
        hidden_size=M,
        intermediate_size=HIDDEN,
        num_local_experts=N,
        num_experts_per_tok=3,
        swiglu_limit=1.0,
    )
    theirs = random(GptOssMLP(config))
    router = SoftmaxRouter(M, N, 3, normalize=True, bias=True)
    router.linear.weight.data.copy_(theirs.router.weight)
    router.linear.bias.data.copy_(theirs.router.bias)
    return MoE(router, every_second(theirs.experts, 1.0)), lambda x: theirs(x)[0]


def mixtral() -> tuple[MoE, Callable[[Tensor], Tensor]]:
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = transformers.MixtralConfig(
        hidden_size=M, intermediate_size=HIDDEN, num_local_experts=N, num_experts_per_tok=2
    )
    theirs = random(MixtralSparseMoeBlock(config))
    router = SoftmaxRouter(M, N, 2, normalize=True)
    router.linear.weight.data.copy_(theirs.gate.weight)
    return MoE(router, halves(theirs.experts)), theirs


def deepseek(router: Router, theirs: Any) -> tuple[MoE, Callable[[Tensor], Tensor]]:
    router.linear.weight.data.copy_(theirs.gate.weight)
    if isinstance(router, SigmoidRouter):
        router.correction.data.copy_(theirs.gate.e_score_correction_bias)
    return MoE(router, halves(theirs.experts), mlp(theirs.shared_experts)), theirs


def v2(**change: Any) -> Any:
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe

    config = transformers.DeepseekV2Config(
        hidden_size=M,
        num_attention_heads=2,
        moe_intermediate_size=HIDDEN,
        n_routed_experts=N,
        num_experts_per_tok=3,
        n_shared_experts=2,
        **change,
    )
    return random(DeepseekV2Moe(config))


def deepseek_v2_greedy() -> tuple[MoE, Callable[[Tensor], Tensor]]:
    return deepseek(SoftmaxRouter(M, N, 3), v2(topk_method="greedy"))


def deepseek_v2_groups() -> tuple[MoE, Callable[[Tensor], Tensor]]:
    theirs = v2(
        topk_method="group_limited_greedy", n_group=4, topk_group=2, routed_scaling_factor=16.0
    )
    return deepseek(SoftmaxRouter(M, N, 3, groups=ExpertGroups(4, 2), scale=16.0), theirs)


def deepseek_v3() -> tuple[MoE, Callable[[Tensor], Tensor]]:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    config = transformers.DeepseekV3Config(
        hidden_size=M,
        num_attention_heads=2,
        moe_intermediate_size=HIDDEN,
        n_routed_experts=N,
        num_experts_per_tok=3,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
    )
    router = SigmoidRouter(M, N, 3, groups=ExpertGroups(4, 2, best=2), normalize=True, scale=2.5)
    return deepseek(router, random(DeepseekV3MoE(config)))


PAIRS = {
    f.__name__: f for f in (gpt_oss, mixtral, deepseek_v2_greedy, deepseek_v2_groups, deepseek_v3)
}


def tokens(*shape: int) -> Tensor:
    return 2 * torch.randn(*shape, M, generator=torch.Generator().manual_seed(5))


def differ(ours: MoE, theirs: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """By more than 1e-5 of the largest output, in fp32."""
    with torch.no_grad():
        mine, want = ours(x), theirs(x)
    assert mine.shape == want.shape
    return bool((mine - want).abs().max() > 1e-5 * want.abs().max())


@pytest.mark.parametrize("name", PAIRS)
def test_it_computes_what_transformers_does(name: str) -> None:
    ours, theirs = PAIRS[name]()
    assert not differ(ours, theirs, tokens(2, 50))
    assert not differ(ours, theirs, tokens(1, 1))


def corrected_weights(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    scores = self.logits(x).sigmoid() + self.correction
    chosen = self.choose(scores, scores)
    weights = scores.gather(-1, chosen)
    return weights / weights.sum(-1, keepdim=True) * self.scale, chosen


def swap(moe: Any) -> None:
    for expert in moe.experts:
        expert.gate, expert.up = expert.up, expert.gate


def unclipped(moe: Any) -> None:
    for expert in moe.experts:
        expert.limit = 1e9


def no_correction(moe: Any) -> None:
    moe.router.correction.data.zero_()


MISTAKES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "softmax over all": ("gpt_oss", lambda m: setattr(m.router, "normalize", False)),
    "not clipped": ("gpt_oss", unclipped),
    "gate and up swapped": ("gpt_oss", swap),
    "halves swapped": ("mixtral", swap),
    "not renormalized": ("mixtral", lambda m: setattr(m.router, "normalize", False)),
    "no shared expert": ("deepseek_v2_greedy", lambda m: setattr(m, "shared", None)),
    "renormalized": ("deepseek_v2_greedy", lambda m: setattr(m.router, "normalize", True)),
    "no groups": ("deepseek_v2_groups", lambda m: setattr(m.router, "groups", None)),
    "groups by two": (
        "deepseek_v2_groups",
        lambda m: setattr(m.router, "groups", ExpertGroups(4, 2, best=2)),
    ),
    "not scaled": ("deepseek_v2_groups", lambda m: setattr(m.router, "scale", 1.0)),
    "groups by one": ("deepseek_v3", lambda m: setattr(m.router, "groups", ExpertGroups(4, 2))),
    "weights of corrected scores": (
        "deepseek_v3",
        lambda m: setattr(m.router, "forward", corrected_weights.__get__(m.router)),
    ),
    "no correction": ("deepseek_v3", no_correction),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake: str) -> None:
    name, spoil = MISTAKES[mistake]
    ours, theirs = PAIRS[name]()
    spoil(ours)
    assert differ(ours, theirs, tokens(2, 50))
