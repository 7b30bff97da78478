"""Linear attention, retention and gated linear attention as modules, against their formulas written
out from the weights.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.nn import HeadProjection, SeparateQKV
from regard.nn.blocks.norms import HeadNorm
from regard.nn.recurrence.decays import GatedLinearRule, LinearAttentionRule, RetentionRule
from regard.nn.recurrence.recurrent import Recurrent
from regard.nn.variants import gated_linear, linear_attention, retention
from regard.span import Span
from tests.nn import catalogue
from tests.oracles.linear import linear
from tests.rules import assert_close_rule, assert_refused

SIZES: dict[str, Any] = {"groups": 2, "head_dim": 4, "value_dim": 6}
ALL = [linear_attention, retention, gated_linear]
BACKENDS = ("auto", "reference", "recurrent", "chunk", "parallel")


def random(module: nn.Module) -> Any:
    return catalogue.random(module).requires_grad_(False)


def heads(part: Any, x: Tensor) -> Tensor:
    n, d, bias = part.heads, part.head_dim, part.linear.bias
    made = [x @ part.linear.weight[i * d : (i + 1) * d].T for i in range(n)]
    if bias is not None:
        made = [y + bias[i * d : (i + 1) * d] for i, y in enumerate(made)]
    return torch.stack(made, 1)


def turned(x: Tensor, base: float = 10000.0) -> Tensor:
    """Rotary in halves by complex numbers: pair i at position p turns by p base^(-2i/D)."""
    D = x.shape[-1]
    rate = torch.tensor([base ** (-2 * i / D) for i in range(D // 2)], dtype=torch.float64)
    angle = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * rate
    pairs = torch.complex(x[..., : D // 2].double(), x[..., D // 2 :].double())
    moved = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([moved.real, moved.imag], -1).to(x.dtype)


def normed(z: Tensor, eps: float = 1e-5) -> Tensor:
    away = z - z.mean(-1, keepdim=True)
    return away / torch.sqrt((away * away).mean(-1, keepdim=True) + eps)


def written_out(module: Any, x: Tensor, *, normalize: bool = True) -> Tensor:
    """The sums over pairs by the oracle's loops, all else by the papers' formulas."""
    q, k, v = (heads(part, x) for part in (module.project.q, module.project.k, module.project.v))
    rule, root = module.rule, 1 / math.sqrt(q.shape[-1])
    if isinstance(rule, LinearAttentionRule):
        z = linear(q, k, v, feature_map="elu+1", normalize=normalize).out.to(x.dtype)
    elif isinstance(rule, RetentionRule):
        g = torch.tensor([math.log(1 - 2.0 ** (-5 - h)) for h in range(k.shape[1])])
        g = g.double()[None, :, None, None].expand(k.shape)
        z = linear(turned(q), turned(k), v, log_decay=g, scale=root).out.to(x.dtype)
        z = normed(z) * module.norm.weight[:, None] + module.norm.bias[:, None]
    else:
        gates = x @ rule.down.weight.T @ rule.up.weight.T + rule.up.bias
        g = -torch.log(1 + torch.exp(-gates)) / rule.temperature
        g = torch.stack(g.split(k.shape[-1], -1), 1)
        z = linear(q, k, v, log_decay=g, scale=root).out.to(x.dtype)
        z = normed(z) * module.norm.weight + module.norm.bias
    if module.gate is not None:
        r = heads(module.gate, x)
        z = z * r / (1 + torch.exp(-r))
    joined = torch.cat([z[:, h] for h in range(z.shape[1])], -1)
    return joined @ module.output.weight.T


@pytest.mark.parametrize("make", ALL)
def test_the_modules_are_their_formulas(make: Any) -> None:
    x, module = torch.randn(2, 9, 12), random(make(12, 4, **SIZES))
    usual, exact = written_out(module, x), written_out(copy.deepcopy(module).double(), x.double())
    # the same with the weights of sums in another order: the rows of M, and those of the batch
    order = torch.randperm(12)
    other = copy.deepcopy(module)
    for linear_map in (m for m in other.modules() if isinstance(m, nn.Linear)):
        if linear_map is not other.output and linear_map.in_features == 12:
            linear_map.weight.data = linear_map.weight[:, order]
    again = written_out(other, x[..., order])
    for backend in BACKENDS:
        assert_close_rule(module(x, backend=backend), [usual, again], exact, what=backend)


def test_a_missing_part_is_caught() -> None:
    """Negative controls: without the gate, the norm, the rotary, the normalizer, the decay, or with
    another temperature.
    """
    x = torch.randn(1, 9, 12)

    def assert_caught(module: Any, change: Any, **given: Any) -> None:
        usual = written_out(module, x, **given)
        exact = written_out(copy.deepcopy(module).double(), x.double(), **given)
        assert_close_rule(module(x), usual, exact)
        change(module)
        with pytest.raises(AssertionError, match="error"):
            assert_close_rule(module(x), usual, exact)

    def build(make: Any) -> Any:
        return random(make(12, 4, **SIZES))

    assert_caught(build(linear_attention), lambda m: setattr(m.rule, "normalize", False))
    assert_caught(build(linear_attention), lambda m: setattr(m.rule, "feature_map", "softmax"))
    assert_caught(build(retention), lambda m: setattr(m, "gate", None))
    assert_caught(build(retention), lambda m: setattr(m, "norm", None))
    assert_caught(build(retention), lambda m: setattr(m.project.q, "steps", nn.ModuleList()))
    assert_caught(build(retention), lambda m: setattr(m.rule, "decay", (1.0, 1.0)))
    assert_caught(build(gated_linear), lambda m: setattr(m.rule, "temperature", 8.0))
    assert_caught(build(gated_linear), lambda m: m.rule.up.bias.data.add_(1))


def test_options_change_what_they_say() -> None:
    x = torch.randn(1, 9, 12).double()
    sums = random(linear_attention(12, 4, normalize=False)).double()
    assert torch.allclose(sums(x), written_out(sums, x, normalize=False), rtol=1e-12, atol=1e-10)
    plain = random(retention(12, 4, base=None, head_dim=3)).double()
    assert torch.equal(plain(x), plain(x, Span(100, 9))), "no rotary, no positions"
    rotary = random(retention(12, 4, head_dim=4)).double()
    shifted = rotary(x, Span(100, 9))
    assert float((rotary(x) - shifted).abs().max()) < 1e-10, "only differences of positions count"
    assert float((rotary(x) - rotary(x, Span(0, 18).tensor()[:, ::2])).abs().max()) > 1e-3
    one = random(retention(12, 4, base=None, head_dim=4, decay=[1.0] * 4)).double()
    q, k, v = (heads(part, x) for part in (one.project.q, one.project.k, one.project.v))
    z, _ = regard.linear.linear_attention(q, k, v, feature_map="identity", normalize=False)
    assert float((one.rule(x, q, k, v, None, None, "auto")[0] - z / 2).abs().max()) < 1e-12
    own = LinearAttentionRule(nn.Sequential(nn.Linear(4, 4), nn.Softplus()))
    assert len(list(own.parameters())) == 2, "a learned feature map is part of the module"
    assert own.extra_repr() == "a function, normalize=True"


def test_describe() -> None:
    """At sizes of the papers: RetNet-1.3B's 2048 wide, 8 heads, values twice as wide; GLA with 4
    heads.
    """
    layer = retention(2048, 8).describe(context=100_000)
    assert str(layer.state) == "1,048,576 = G D E = 8 x 256 x 512"
    assert (layer.kv_per_token.value, layer.kv_tokens.value) == (0, 0)
    assert layer.cached_values == layer.state.value
    maps = 2 * 2048 * 2048 + 3 * 2048 * 4096
    assert layer.flops_per_token.value == 2 * maps + 8 * (5 * 256 * 512)
    assert (
        layer.flops_per_token.formula
        == f"2 x {maps} (matrices) + 8 x (2 D E) + 8 x (3 D E), D = 256, E = 512"
    )
    assert layer.parameters.value == maps + 2 * 4096
    gla = gated_linear(2048, 4).describe()
    assert str(gla.state) == "524,288 = G D E = 4 x 256 x 512"
    maps = 2 * 2048 * 1024 + 3 * 2048 * 2048 + 16 * (2048 + 1024)
    assert gla.flops_per_token.value == 2 * maps + 4 * (5 * 256 * 512)
    plain = linear_attention(64, 4, groups=2, head_dim=8, value_dim=12)
    told = plain.describe()
    assert str(told.state) == "208 = G D (E + 1) = 2 x 8 x (12 + 1)"
    assert told.flops_per_token.formula.endswith(
        " + 4 x (2 D E + 2 D + E) + 2 x (2 D E + D), D = 8, E = 12"
    )
    tail = 4 * (2 * 96 + 16 + 12) + 2 * (2 * 96 + 8)
    assert told.flops_per_token.value == 2 * 64 * (32 + 16 + 24 + 48) + tail
    sums = linear_attention(64, 4, normalize=False).describe()
    assert sums.state.formula == "G D E = 4 x 16 x 16"
    with pytest.raises(regard.ArgumentError, match="context is 0; it must be at least 1"):
        plain.describe(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_norm(dtype: torch.dtype) -> None:
    """That of torch's group norm over the heads joined, token by token."""
    norm = random(HeadNorm(3, 5, eps=1e-3)).to(dtype)
    for scale in (1e-3, 1.0, 1e3):
        x = (torch.randn(2, 3, 7, 5) * scale).to(dtype)

        def torchs(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            flat = x.transpose(1, 2).reshape(14, 15)
            y = nn.functional.group_norm(flat, 3, weight.flatten(), bias.flatten(), 1e-3)
            return y.reshape(2, 7, 3, 5).transpose(1, 2)

        exact = torchs(x.double(), norm.weight.double(), norm.bias.double())
        usual = [
            torchs(x, norm.weight, norm.bias),
            normed(x, 1e-3) * norm.weight[:, None] + norm.bias[:, None],
        ]
        assert_close_rule(norm(x), usual, exact)
        assert norm(x).dtype == dtype
    assert repr(norm) == "HeadNorm(3 heads of 5, eps=0.001)"


def test_errors() -> None:
    project = SeparateQKV(HeadProjection(8, 4, 2), HeadProjection(8, 2, 2), HeadProjection(8, 2, 3))
    cases = [
        (lambda: HeadNorm(0, 4), "HeadNorm(0, 4, eps=1e-05): heads and dim must be at least 1 and"),
        (lambda: HeadNorm(1, 4, eps=math.nan), "HeadNorm(1, 4, eps=nan): heads and dim must be at"),
        (lambda: LinearAttentionRule("elu"), r"feature_map is 'elu'; it must be one of elu+1, exp"),
        (lambda: LinearAttentionRule(scale=math.nan), "scale is nan; it must be finite"),
        (lambda: RetentionRule(0), "RetentionRule(groups=0): groups must be at least 1"),
        (lambda: RetentionRule(2, [0.5]), "decay has length 1; it must have one number for each"),
        (lambda: RetentionRule(2, [0.5, 1.5]), "decay of head 1 is 1.5; it must be from 0"),
        (lambda: RetentionRule(1, [math.nan]), "decay of head 0 is nan; it must be from 0"),
        (lambda: GatedLinearRule(8, 2, 0), "GatedLinearRule(dim=8, groups=2, head_dim=0, rank=16)"),
        (lambda: GatedLinearRule(8, 2, 2, temperature=0.0), "temperature is 0.0; it must be"),
        (
            lambda: Recurrent(
                project, RetentionRule(2), nn.Linear(12, 8), gate=HeadProjection(8, 4, 2)
            ),
            "gate is 4 heads of 2; it must be 4 heads of 3, as the rule returns",
        ),
        (lambda: linear_attention(12, 4, groups=3), "4 query heads are not divisible by 3"),
        (lambda: retention(10, 4), "dim 10 is not divisible by 4 heads; give head_dim, or heads"),
        (lambda: gated_linear(12, 4), r"dim is 12; it must be divisible by 2 * heads = 8, or give"),
    ]
    assert_refused(cases)
    with pytest.raises(regard.ArgumentTypeError, match="feature_map is int; it must be a name"):
        LinearAttentionRule(3)
    assert repr(RetentionRule(2, [0.5, 1])) == "RetentionRule(decay=[0.5, 1.0])"
