"""The delta rules and the short convolution as modules, against transformers' classes with the same
weights: a prompt, a cache in several calls, and left padding. Each has a wrong variant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from regard.nn.variants import gated_delta_net, kimi_delta, short_convolution
from tests.nn.catalogue import in_chunks

pytest.importorskip("transformers")

M, D, E = 12, 4, 6


class Pair(NamedTuple):
    """Our module and their class with the same weights, both in float64."""

    ours: Any
    theirs: Any


def random(module: Any) -> Any:
    make = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=make, dtype=torch.float64) * 0.5
    return module.double().eval().requires_grad_(False)


def put(ours: Any, names: dict[str, Tensor]) -> Any:
    ours = ours.double()
    kept = ours.state_dict()
    assert set(names) == set(kept), set(names) ^ set(kept)
    ours.load_state_dict({name: x.reshape(kept[name].shape) for name, x in names.items()})
    return ours.eval().requires_grad_(False)


def qwen3_next() -> Pair:
    """Two query and key heads, four value heads; the fused rows are those of each key head."""
    from transformers.models.qwen3_next import configuration_qwen3_next, modeling_qwen3_next

    G, N = 2, 4
    config = configuration_qwen3_next.Qwen3NextConfig(
        hidden_size=M,
        linear_num_value_heads=N,
        linear_num_key_heads=G,
        linear_key_head_dim=D,
        linear_value_head_dim=E,
        linear_conv_kernel_dim=4,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    theirs = random(modeling_qwen3_next.Qwen3NextGatedDeltaNet(config, 0))
    ours = gated_delta_net(M, G, groups=G, head_dim=D, value_dim=E, value_heads=N, kernel=4)
    P = N // G
    rows = theirs.in_proj_qkvz.weight.view(G, 2 * D + 2 * P * E, M)
    q, k, v, z = rows.split([D, D, P * E, P * E], 1)
    b, a = theirs.in_proj_ba.weight.view(G, 2 * P, M).split(P, 1)
    names = {
        "project.q.linear.weight": q,
        "project.k.linear.weight": k,
        "project.v.linear.weight": v,
        "project.convolution.weight": theirs.conv1d.weight,
        "rule.beta_proj.weight": b,
        "rule.decay.linear.weight": a,
        "rule.decay.A_log": theirs.A_log,
        "rule.decay.dt_bias": theirs.dt_bias,
        "gate.linear.weight": z,
        "norm.weight": theirs.norm.weight,
        "output.weight": theirs.out_proj.weight,
    }
    return Pair(put(ours, names), theirs)


def kimi_names(theirs: Any) -> dict[str, Tensor]:
    return {
        "project.q.linear.weight": theirs.q_proj.weight,
        "project.k.linear.weight": theirs.k_proj.weight,
        "project.v.linear.weight": theirs.v_proj.weight,
        "rule.beta_proj.weight": theirs.b_proj.weight,
        "rule.decay.project.down.weight": theirs.forget_gate.f_a_proj.weight,
        "rule.decay.project.linear.weight": theirs.forget_gate.f_b_proj.weight,
        "rule.decay.A_log": theirs.forget_gate.A_log,
        "rule.decay.dt_bias": theirs.forget_gate.dt_bias,
        "gate.down.weight": theirs.g_a_proj.weight,
        "gate.linear.weight": theirs.g_b_proj.weight,
        "norm.weight": theirs.o_norm.weight,
        "output.weight": theirs.o_proj.weight,
    }


def kimi_linear() -> Pair:
    from transformers.models.kimi_linear import configuration_kimi_linear, modeling_kimi_linear

    config = configuration_kimi_linear.KimiLinearConfig(
        hidden_size=M,
        linear_num_heads=3,
        linear_head_dim=D,
        linear_conv_kernel_dim=4,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    theirs = random(modeling_kimi_linear.KimiLinearDeltaAttention(config, 0))
    names = kimi_names(theirs) | {"project.convolution.weight": theirs.conv1d.weight}
    ours = put(kimi_delta(M, 3, head_dim=D), names)
    ours.norm.eps = config.rms_norm_eps
    return Pair(ours, theirs)


def lfm2() -> Pair:
    from transformers.models.lfm2 import configuration_lfm2, modeling_lfm2

    config = configuration_lfm2.Lfm2Config(
        hidden_size=M,
        conv_L_cache=3,
        conv_bias=False,
        num_hidden_layers=1,
        num_attention_heads=2,
        layer_types=["conv"],
    )
    theirs = random(modeling_lfm2.Lfm2ShortConv(config, 0))
    names = {
        "input.weight": theirs.in_proj.weight,
        "convolution.weight": theirs.conv.weight,
        "output.weight": theirs.out_proj.weight,
    }
    return Pair(put(short_convolution(M, 2), names), theirs)


PAIRS: dict[str, Callable[[], Pair]] = {
    "qwen3_next": qwen3_next,
    "kimi_linear": kimi_linear,
    "lfm2": lfm2,
}
FLOAT32 = 2e-5
"""Their recurrences compute in float32 whatever the inputs are."""


def tokens(T: int, B: int = 2) -> Tensor:
    return torch.randn(B, T, M, generator=torch.Generator().manual_seed(T), dtype=torch.float64)


def error(found: Tensor, right: Tensor) -> float:
    return float((found - right).abs().max() / right.abs().max())


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", PAIRS)
def test_a_prompt_and_a_cache_in_several_calls(name: str) -> None:
    """Calls of several tokens with a cache, too, which released code got wrong."""
    pair, x = PAIRS[name](), tokens(80)
    right = pair.theirs(x)
    assert error(pair.ours(x), right) < FLOAT32
    assert error(in_chunks(pair.ours, x, (2, 1, 70, 1, 5, 1)), right) < FLOAT32


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", PAIRS)
def test_left_padding(name: str) -> None:
    pair, x = PAIRS[name](), tokens(9)
    positions = torch.stack([torch.arange(9), torch.tensor([-1, -1, -1, *range(6)])])
    right = pair.theirs(x, attention_mask=(positions >= 0).long())
    found = pair.ours(x, positions)
    assert error(found[positions >= 0], right[positions >= 0]) < FLOAT32


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", PAIRS)
def test_wrong_variants_are_far(name: str) -> None:
    """Filters in the other direction, heads in another order, no bias of the decay, another
    function of the gate.
    """
    x = tokens(20)
    right = PAIRS[name]().theirs(x)

    def flipped(ours: Any) -> None:
        part = ours if name == "lfm2" else ours.project
        part.convolution.weight.data = part.convolution.weight.flip(1)

    changes: list[Callable[[Any], None]] = [flipped]
    if name != "lfm2":

        def other_heads(ours: Any) -> None:
            weight = ours.project.k.linear.weight
            weight.data = weight.unflatten(0, (-1, D)).flip(0).flatten(0, 1)

        def other_gate(ours: Any) -> None:
            ours.gate_activation = "sigmoid" if name == "qwen3_next" else "silu"

        changes += [other_heads, other_gate, lambda ours: ours.rule.decay.dt_bias.data.zero_()]
    for change in changes:
        ours = PAIRS[name]().ours
        change(ours)
        assert error(ours(x), right) > 1e-3


def test_the_bounded_decay_is_that_of_glm() -> None:
    """g = lower sigmoid(exp(A) (f + b)), where Kimi Linear has -exp(A) softplus(f + b)."""
    modeling = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")
    configuration = pytest.importorskip("transformers.models.glm5_next.configuration_glm5_next")
    x = tokens(7)
    for lower in (-5.0, None):
        config = configuration.Glm5NextTextConfig(
            hidden_size=M, linear_num_heads=3, linear_head_dim=D, linear_lower_bound=lower
        )
        config.linear_lower_bound = lower
        theirs = random(modeling.Glm5NextTextForgetGate(config))
        decay = kimi_delta(M, 3, head_dim=D, lower_bound=lower).rule.decay
        names = {
            "project.down.weight": theirs.f_a_proj.weight,
            "project.linear.weight": theirs.f_b_proj.weight,
            "A_log": theirs.A_log,
            "dt_bias": theirs.dt_bias,
        }
        found = put(decay, names)(x)
        assert error(found, theirs(x).transpose(1, 2)) < FLOAT32
        assert lower is None or bool((found >= lower).all())
        decay.lower_bound = -4.0
        assert error(decay(x), theirs(x).transpose(1, 2)) > 1e-2
