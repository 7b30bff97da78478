"""Lightning attention, Mamba-2, RWKV-4 and mLSTM against transformers' layers: one pass, padded
batches, steps with a cache; with a wrong part each is far.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.nn import variants
from regard.nn.recurrence.decays import RetentionRule
from regard.nn.variants.decayed import lightning_rates

transformers = pytest.importorskip("transformers")

DIM, HEADS, T = 32, 4, 23


def random(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module.double().eval()


def load(pairs: dict[Tensor, Tensor]) -> None:
    with torch.no_grad():
        for ours, theirs in pairs.items():
            ours.copy_(theirs.reshape(ours.shape))


def close(x: Tensor, y: Tensor, bound: float) -> bool:
    return float((x - y).detach().abs().max()) <= bound * float(y.detach().abs().max())


def assert_far_when(module: nn.Module, x: Tensor, right: Tensor, change: Callable[[], Any]) -> None:
    """Negative control: after a change of one part the result is another."""
    change()
    assert not close(module(x), right, 1e-3)


def lightning(layer: int, layers: int) -> tuple[Any, Any]:
    from transformers.models.minimax.configuration_minimax import MiniMaxConfig
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

    config = MiniMaxConfig(
        hidden_size=DIM,
        num_attention_heads=HEADS,
        num_hidden_layers=layers,
        head_dim=8,
        block_size=5,
        layer_types=["linear_attention"] * layers,
    )
    theirs = random(MiniMaxLightningAttention(config, layer))
    ours = variants.lightning(DIM, HEADS, layer=layer, layers=layers).double().eval()
    stacked = theirs.qkv_proj.weight.unflatten(0, (HEADS, 3, 8))
    load(
        {
            ours.project.q.linear.weight: stacked[:, 0],
            ours.project.k.linear.weight: stacked[:, 1],
            ours.project.v.linear.weight: stacked[:, 2],
            ours.norm.weight: theirs.norm.weight,
            ours.gate.linear.weight: theirs.output_gate.weight,
            ours.output.weight: theirs.out_proj.weight,
        }
    )
    ours.norm.eps = theirs.norm.variance_epsilon
    return ours, theirs


@pytest.mark.parametrize("layer", [0, 3])
def test_lightning_attention_of_minimax(layer: int) -> None:
    ours, theirs = lightning(layer, 5)
    x = torch.randn(2, T, DIM, dtype=torch.float64)
    no_positions = (x, x)
    right = theirs(x, no_positions, None)[0]
    # their rates are buffers in float32
    assert close(ours(x), right, 1e-6)
    cache = ours.new_cache()
    steps = [ours(part, None, cache) for part in x.split([4, 1, 17, 1], 1)]
    assert close(torch.cat(steps, 1), right, 1e-6)
    mask = torch.ones(2, T, dtype=torch.bool)
    mask[1, :6] = False
    positions = (mask.cumsum(1) - 1).masked_fill(~mask, -1)
    padded = ours(x, positions)
    assert close(padded[1, 6:], ours(x[1:, 6:])[0], 1e-12)
    # Theirs clears the values of the padding, and a state of zeros decays to zeros.
    assert close(padded[mask], theirs(x, no_positions, mask)[0][mask], 1e-6)
    # A wrong scale alone would not show: the norm over all heads divides it out.
    usual = RetentionRule(HEADS, scale=1.0)
    assert_far_when(ours, x, right, lambda: setattr(ours, "rule", usual))
    ours, _ = lightning(layer, 5)
    assert_far_when(ours, x, right, lambda: setattr(ours, "gate_activation", "silu"))


def test_the_rates_of_lightning_attention() -> None:
    rates = lightning_rates(8, 0, 80)
    assert rates[0] == pytest.approx(0.5000050000, abs=1e-10)
    assert rates[7] == pytest.approx(0.003906289063, abs=1e-12)
    assert lightning_rates(8, 79, 80)[0] < 1e-5


def mamba2(groups: int) -> tuple[Any, Any]:
    from transformers.models.mamba2.configuration_mamba2 import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config = Mamba2Config(
        hidden_size=DIM,
        num_heads=HEADS,
        head_dim=16,
        state_size=8,
        n_groups=groups,
        conv_kernel=4,
        chunk_size=5,
        expand=2,
        num_hidden_layers=1,
        use_bias=False,
        use_conv_bias=True,
    )
    theirs = random(Mamba2Mixer(config, 0))
    ours = variants.mamba2(DIM, HEADS, groups=groups, head_dim=8, value_dim=16).double().eval()
    inner, state = HEADS * 16, groups * 8
    gate, x, B, C, dt = theirs.in_proj.weight.split([inner, inner, state, state, HEADS])
    # their convolution has the channels x, B, C; ours q = C, k = B, v = x
    taps, bias = (
        torch.cat(part.split([inner, state, state])[::-1])
        for part in (theirs.conv1d.weight[:, 0], theirs.conv1d.bias)
    )
    load(
        {
            ours.project.q.linear.weight: C,
            ours.project.k.linear.weight: B,
            ours.project.v.linear.weight: x,
            ours.project.convolution.weight: taps,
            ours.project.convolution.bias: bias,
            ours.rule.linear.weight: dt,
            ours.rule.dt_bias: theirs.dt_bias,
            ours.rule.A_log: theirs.A_log,
            ours.rule.skip: theirs.D,
            ours.gate.linear.weight: gate,
            ours.norm.weight: theirs.norm.weight,
            ours.output.weight: theirs.out_proj.weight,
        }
    )
    ours.norm.eps = theirs.norm.variance_epsilon
    return ours, theirs


@pytest.mark.parametrize("groups", [1, 2])
def test_mamba2(groups: int) -> None:
    ours, theirs = mamba2(groups)
    x = torch.randn(2, T, DIM, dtype=torch.float64)
    right = theirs(x)  # sums in float32
    assert close(ours(x), right, 1e-5)
    # a cache and several tokens at once, of which a public implementation dropped all but the first
    for sizes in ([4, 1, 17, 1], [1] * T, [20, 3], [2, 2, 19]):
        cache = ours.new_cache()
        steps = [ours(part, None, cache) for part in x.split(sizes, 1)]
        assert close(torch.cat(steps, 1), ours(x), 1e-12)
    mask = torch.ones(2, T, dtype=torch.bool)
    mask[1, :6] = False
    positions = (mask.cumsum(1) - 1).masked_fill(~mask, -1)
    garbage = x.masked_fill(~mask[..., None], torch.nan)
    padded = ours(garbage, positions)
    assert close(padded[1, 6:], ours(x[1:, 6:])[0], 1e-12), "padding enters neither of the states"
    assert close(padded[mask], theirs(x, attention_mask=mask.double())[mask], 1e-5)
    changes: list[Callable[[Any], Any]] = [
        lambda m: setattr(m, "gate_before_norm", False),
        lambda m: m.rule.skip.data.zero_(),
        lambda m: m.rule.A_log.data.add_(1),
        lambda m: m.project.convolution.weight.data.copy_(m.project.convolution.weight.flip(1)),
        lambda m: setattr(m.norm, "groups", 3 - m.norm.groups),
    ]
    for change in changes:
        wrong, _ = mamba2(groups)
        wrong.load_state_dict(ours.state_dict())
        assert_far_when(wrong, x, right, lambda change=change, wrong=wrong: change(wrong))


def rwkv() -> tuple[Any, Any]:
    from transformers.models.rwkv.configuration_rwkv import RwkvConfig
    from transformers.models.rwkv.modeling_rwkv import RwkvSelfAttention

    config = RwkvConfig(hidden_size=DIM, num_hidden_layers=1, context_length=64)
    theirs = RwkvSelfAttention(config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5 * 2)
    theirs.double()
    ours = variants.rwkv4(DIM, HEADS).double().eval()
    load(
        {
            ours.project.q.linear.weight: theirs.receptance.weight,
            ours.project.k.linear.weight: theirs.key.weight,
            ours.project.v.linear.weight: theirs.value.weight,
            ours.rule.decay: theirs.time_decay,
            ours.rule.bonus: theirs.time_first,
            ours.output.weight: theirs.output.weight,
        }
    )
    mixes = (theirs.time_mix_receptance, theirs.time_mix_key, theirs.time_mix_value)
    load(dict(zip((getattr(ours.project, f"mix_{i}") for i in "qkv"), mixes, strict=True)))
    return ours, theirs


def test_rwkv4() -> None:
    ours, theirs = rwkv()
    x = torch.randn(2, T, DIM, dtype=torch.float64)
    right, _ = theirs(x)
    assert close(ours(x), right, 1e-5)  # theirs in float32
    for sizes in ([4, 1, 17, 1], [1] * T):
        cache = ours.new_cache()
        steps = [ours(part, None, cache) for part in x.split(sizes, 1)]
        assert close(torch.cat(steps, 1), ours(x), 1e-12)
    changes: list[Callable[[Any], Any]] = [
        lambda m: m.rule.bonus.data.add_(1),
        lambda m: m.rule.decay.data.add_(1),
        lambda m: m.project.mix_k.data.copy_(1 - m.project.mix_k),
    ]
    for change in changes:
        wrong, _ = rwkv()
        wrong.load_state_dict(ours.state_dict())
        assert_far_when(wrong, x, right, lambda change=change, wrong=wrong: change(wrong))


def xlstm() -> tuple[Any, Any]:
    from transformers.models.xlstm import modeling_xlstm
    from transformers.models.xlstm.configuration_xlstm import xLSTMConfig

    if not hasattr(modeling_xlstm, "xLSTMLayer"):
        pytest.skip("the package xlstm is installed, and transformers has no layer of its own then")
    config = xLSTMConfig(
        hidden_size=DIM,
        embedding_dim=DIM,
        num_heads=HEADS,
        num_blocks=1,
        chunkwise_kernel="chunkwise--native_autograd",
        sequence_kernel="native_sequence__native",
        step_kernel="native",
        chunk_size=8,
    )
    theirs = random(modeling_xlstm.xLSTMLayer(config))
    ours = variants.mlstm(DIM, HEADS, gate_cap=config.gate_soft_cap).double().eval()
    load(
        {
            ours.project.q.linear.weight: theirs.q.weight,
            ours.project.k.linear.weight: theirs.k.weight,
            ours.project.v.linear.weight: theirs.v.weight,
            ours.rule.input_gate.weight: theirs.igate_preact.weight,
            ours.rule.input_gate.bias: theirs.igate_preact.bias,
            ours.rule.forget_gate.weight: theirs.fgate_preact.weight,
            ours.rule.forget_gate.bias: theirs.fgate_preact.bias,
            ours.gate.linear.weight: theirs.ogate_preact.weight,
            ours.norm.weight: theirs.multihead_norm.weight,
            ours.output.weight: theirs.out_proj.weight,
        }
    )
    ours.norm.eps = config.norm_eps
    return ours, theirs


def test_mlstm_of_xlstm() -> None:
    ours, theirs = xlstm()
    x = torch.randn(2, 24, DIM, dtype=torch.float64)
    with torch.no_grad():
        right, _ = theirs(x)
    # theirs adds 1e-6 to the bound, and sums in float32
    assert close(ours(x), right, 1e-4)
    cache = ours.new_cache()
    steps = [ours(part, None, cache) for part in x.split([4, 1, 18, 1], 1)]
    assert close(torch.cat(steps, 1), ours(x), 1e-11)
    for change in (
        lambda m: m.rule.input_gate.bias.data.add_(1),
        lambda m: m.rule.forget_gate.bias.data.sub_(2),
        lambda m: setattr(m, "gate_activation", "silu"),
    ):
        wrong, _ = xlstm()
        wrong.load_state_dict(ours.state_dict())
        assert_far_when(wrong, x, right, lambda change=change, wrong=wrong: change(wrong))
