"""Lightning attention and mLSTM against transformers' layers: one pass, padded batches, steps with
a cache; with a wrong part each is far.
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
