"""Steps on heads and on their results beside the classes of transformers that have them, with the
same weights, in fp64, though norms, gates and softmax run in fp32 on their side; each with a wrong
variant that must be far.
"""

from __future__ import annotations

import importlib
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from regard.nn import RMSNorm
from regard.nn.projections.steps import (
    L2Clip,
    OwnValueRemoval,
    QueryTemperature,
    QueryTokens,
    WeightlessRMSNorm,
)
from regard.nn.variants import VARIANTS, gqa, keys_as_values, value_norm
from regard.span import Span
from tests.parity.layers import assert_far, assert_near

M, H, G, D, T = 32, 4, 2, 8, 11


def theirs(name: str) -> Any:
    """The module of a model's code; skips if the installed transformers does not have it."""
    return pytest.importorskip(f"transformers.models.{name}.modeling_{name}")


def config_of(name: str, class_name: str, **values: Any) -> Any:
    found = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
    config = getattr(found, class_name)(
        hidden_size=M,
        num_attention_heads=H,
        num_key_value_heads=G,
        head_dim=D,
        num_hidden_layers=2,
        vocab_size=11,
        **values,
    )
    config._attn_implementation = "eager"
    return config


def randomized(module: nn.Module) -> nn.Module:
    make = torch.Generator().manual_seed(0)
    module = module.double().eval()
    with torch.no_grad():
        for p in module.parameters():
            noise = torch.randn(p.shape, generator=make, dtype=torch.float64)
            p.copy_(noise * p.shape[-1] ** -0.5 * 1.5 if p.ndim > 1 else p + 0.3 * noise)
    return module


def inputs() -> Tensor:
    make = torch.Generator().manual_seed(1)
    return torch.randn(2, T, M, generator=make, dtype=torch.float64)


def tables(base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """cos and sin [1,T,D] in the layout of transformers."""
    frequencies = base ** (-torch.arange(0, D, 2).double() / D)
    angles = (torch.arange(T).double()[:, None] * frequencies).repeat(1, 2)[None]
    return angles.cos(), angles.sin()


def causal_bias() -> Tensor:
    hidden = torch.full((T, T), float("-inf"), dtype=torch.float64)
    return hidden.triu(1)[None, None]


def copy_maps(mine: nn.Module, other: Any, *, norms: bool = False) -> Any:
    """Our layer with their weights."""
    project = cast("Any", mine).project
    inner = getattr(project, "project", project)
    pairs = [(inner.q, other.q_proj), (inner.k, other.k_proj)]
    if getattr(inner, "v", None) is not None:
        pairs.append((inner.v, other.v_proj))
    with torch.no_grad():
        for part, linear in pairs:
            part.linear.weight.copy_(linear.weight)
        cast("Any", mine).output.weight.copy_(other.o_proj.weight)
        if norms:
            inner.q.steps[0].weight.copy_(other.q_norm.weight)
            inner.k.steps[0].weight.copy_(other.k_norm.weight)
    return mine


def with_norms(mine: Any) -> Any:
    """Our layer with QK-norm before its rotary positions, as these models have it."""
    inner = getattr(mine.project, "project", mine.project)
    for part in (inner.q, inner.k):
        part.steps = nn.ModuleList([RMSNorm(D), *part.steps])
    return mine.double().eval()


def assert_same_and_far(mine: Tensor, wrong: Tensor, other: Tensor) -> None:
    assert_near(mine, other)
    assert_far(wrong, other)


GATED = {
    "lfm3": ("Lfm3Config", "Lfm3Attention", "head_gate", {"use_attention_gate": True}),
    "laguna": ("LagunaConfig", "LagunaAttention", "softplus_gate", {"gating": "per-head"}),
    "beam": ("BeamConfig", "BeamAttention", "biased_gate", {}),
}


@pytest.mark.parametrize("name", GATED)
def test_gates(name: str) -> None:
    config_name, class_name, mechanism, options = GATED[name]
    code = theirs(name)
    config = config_of(name, config_name, **options)
    config.layer_types, config.rms_norm_eps = ["full_attention"] * 2, 1e-6
    extra = (H,) if name == "laguna" else ()
    other = randomized(getattr(code, class_name)(config, 0, *extra))
    assert getattr(other, "sliding_window", None) is None
    mine = with_norms(VARIANTS[mechanism].build(M, H, groups=G))
    copy_maps(mine, other, norms=True)
    gate = mine.project.finishes[0]
    with torch.no_grad():
        gate.linear.weight.copy_(
            cast("Any", other.gate_proj if name == "beam" else other.g_proj).weight
        )
        if name == "beam":
            gate.bias.copy_(cast("Tensor", other.gate_bias))
    x = inputs()
    with torch.no_grad():
        given = {"attention_mask": causal_bias(), "position_embeddings": tables()}
        expected = other(x, **given)[0]
        found = mine(x)
        gate.linear.weight.neg_()
        assert_same_and_far(found, mine(x), expected)


@pytest.mark.parametrize("tied", [False, True])
def test_gemma_4(tied: bool) -> None:
    code = theirs("gemma4")
    config = config_of(
        "gemma4",
        "Gemma4TextConfig",
        layer_types=["full_attention"] * 2,
        attention_k_eq_v=tied,
        global_head_dim=D,
        num_global_key_value_heads=G,
        num_kv_shared_layers=0,
    )
    other = randomized(code.Gemma4TextAttention(config, 0))
    assert (other.v_proj is None) is tied
    mine = (keys_as_values if tied else value_norm)(M, H, groups=G).double().eval()
    copy_maps(mine, other, norms=True)
    x = inputs()
    with torch.no_grad():
        expected = other(
            x,
            position_embeddings=tables(),
            attention_mask=causal_bias(),
            shared_kv_states={},
        )[0]
        found = mine(x)
        mine.scale = None
        assert_same_and_far(found, mine(x), expected)


def test_exclusive_attention() -> None:
    code = theirs("neomme")

    class Sizes:
        num_attention_heads, num_key_value_heads = H, G

    other = randomized(code.NeoMMEExclusiveSelfAttention(Sizes()))
    make = torch.Generator().manual_seed(2)
    z = torch.randn(2, H, T, D, generator=make, dtype=torch.float64)
    project = gqa(M, H, groups=G).double().project
    mine = OwnValueRemoval(H, learned=True).double()
    tokens = QueryTokens(inputs(), Span(0, T), project)
    with torch.no_grad():
        cast("Tensor", mine.alpha).copy_(cast("Tensor", other.alpha))
        expected = other(z.transpose(1, 2), tokens.values()).transpose(1, 2)
        found = mine(z, tokens)
        assert_same_and_far(found, OwnValueRemoval(H)(z, tokens), expected)


def test_limits_and_norms_of_inkling_2() -> None:
    code = theirs("inkling2")
    other = randomized(code.Inkling2ScaledL2Clip(H, D, 1.5))
    mine = L2Clip(1.5, factors=(H, D)).double()
    make = torch.Generator().manual_seed(3)
    x = torch.randn(2, H, T, D, generator=make, dtype=torch.float64)
    with torch.no_grad():
        cast("Tensor", mine.weight).copy_(cast("Tensor", other.scale))
        expected = other(x.transpose(1, 2)).transpose(1, 2)
        assert_same_and_far(mine(x), L2Clip(1.5)(x), expected)
    norm = code.Inkling2UnweightedRMSNorm(eps=1e-6)
    assert_same_and_far(WeightlessRMSNorm()(x), WeightlessRMSNorm(eps=0.1)(x), norm(x))


def test_temperatures() -> None:
    positions = torch.arange(0, 30000, 7)[None]
    q = torch.ones(1, H, positions.shape[1], D).double()
    ministral = theirs("ministral3").get_llama_4_attn_scale(positions, 0.1, 8192)
    mine = QueryTemperature("ministral3", scale=0.1, length=8192)
    wrong = QueryTemperature("llama4", scale=0.1, length=8192)
    found = mine(q, positions)
    assert float((found - q * ministral).abs().max()) < 1e-6
    # the two forms differ where (i + 1) / n becomes whole: at i = 8197 - 6 = 8191 they do
    edge = torch.tensor([[8191]])
    assert float((mine.factors(edge) - wrong.factors(edge)).abs()) > 0.05
    beam = theirs("beam").compute_attention_scaling(positions)
    found = QueryTemperature("beam", scale=0.1, length=2048)(q, positions)
    assert float((found - q * beam).abs().max()) < 1e-6
    other = theirs("mistral_large4").MistralLarge4TextSoftmaxScaling(H)
    nn.init.normal_(other.scale, generator=torch.Generator().manual_seed(0))
    nn.init.normal_(other.bias, generator=torch.Generator().manual_seed(1))
    learned = QueryTemperature("mistral_large4", heads=H)
    with torch.no_grad():
        cast("Tensor", learned.slope).copy_(other.scale)
        cast("Tensor", learned.offset).copy_(other.bias)
        expected = other(q, positions, True)
        assert float((learned(q, positions) - expected).abs().max()) < 1e-5
        assert float((q - expected).abs().max()) > 1
