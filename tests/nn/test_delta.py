"""DeltaNet and Gated DeltaNet against their formulas written out from the weights, and what their
state owes.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard.nn import HeadProjection, SeparateQKV
from regard.nn.blocks.norms import L2Norm
from regard.nn.projections.steps import Swish
from regard.nn.recurrence.delta import DeltaRule, LogDecay
from regard.nn.recurrence.recurrent import Recurrent
from regard.nn.variants import delta_net, gated_delta_net
from tests.nn.catalogue import random
from tests.oracles.delta import delta
from tests.rules import assert_close_rule, assert_refused

SIZES = {"groups": 2, "head_dim": 4, "value_dim": 6}
BOTH = [delta_net, gated_delta_net]


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def written_out(module: Any, x: Tensor, *, unit: bool = True, most: float = 1.0) -> Tensor:
    """From the weights alone: the recurrence by the oracle's loops, all else by the papers'
    formulas.
    """
    B, T, _ = x.shape

    def heads(part: Any) -> Tensor:
        n, d = part.heads, part.head_dim
        return torch.stack([x @ part.linear.weight[i * d : (i + 1) * d].T for i in range(n)], 1)

    q, k, v = (silu(heads(part)) for part in (module.project.q, module.project.k, module.project.v))
    if unit:
        q, k = (y / torch.sqrt((y * y).sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    rule = module.rule
    beta = most / (1 + torch.exp(-(x @ rule.beta_proj.weight.T)))
    g = None
    if rule.decay is not None:
        step = torch.log(1 + torch.exp(x @ rule.decay.linear.weight.T + rule.decay.dt_bias))
        g = (-torch.exp(rule.decay.A_log) * step).transpose(1, 2)
    z = delta(q, k, v, beta.transpose(1, 2), g).out.to(x.dtype)
    z = z / torch.sqrt((z * z).mean(-1, keepdim=True) + 1e-6) * module.norm.weight
    if module.gate is not None:
        z = z * silu(heads(module.gate))
    joined = torch.stack([z[:, h] for h in range(z.shape[1])], 2).reshape(B, T, -1)
    return joined @ module.output.weight.T


def test_the_modules_are_their_formulas() -> None:
    x = torch.randn(2, 9, 12)
    for make in BOTH:
        for options in ({}, {"normalize_keys": False, "max_beta": 2.0}):
            module = random(make(12, 4, **SIZES, **options)).requires_grad_(False)
            module.project.k.linear.weight.data /= 8  # without a norm, keys must be short
            given = {"unit": "max_beta" not in options, "most": options.get("max_beta", 1.0)}
            usual = written_out(module, x, **given)
            exact = written_out(copy.deepcopy(module).double(), x.double(), **given)
            for backend in ("auto", "reference", "recurrent", "chunk", "parallel"):
                assert_close_rule(module(x, backend=backend), usual, exact, what=backend)
            wrong = written_out(module, x, unit=not given["unit"], most=given["most"])
            with pytest.raises(AssertionError, match="error"):
                assert_close_rule(module(x), wrong, exact, factor=0)


def test_a_missing_gate_or_decay_is_caught() -> None:
    """Negative controls: the same weights without the one or the other."""
    x = torch.randn(1, 9, 12)
    module = random(gated_delta_net(12, 4, **SIZES)).requires_grad_(False)
    usual, exact = written_out(module, x), written_out(copy.deepcopy(module).double(), x.double())
    assert_close_rule(module(x), usual, exact)
    for owner, name in ((module, "gate"), (module.rule, "decay"), (module.project.q, "steps")):
        part = getattr(owner, name)
        setattr(owner, name, nn.ModuleList() if name == "steps" else None)
        with pytest.raises(AssertionError, match="error"):
            assert_close_rule(module(x), usual, exact)
        setattr(owner, name, part)


def test_describe() -> None:
    """At the sizes of a Qwen3-Next layer with equal heads: H = G = 16, D = E = 128."""
    layer = gated_delta_net(2048, 16).describe(context=100_000)
    assert layer.state.value == 262_144 == 16 * 128 * 128
    assert str(layer.state) == "262,144 = G D E = 16 x 128 x 128"
    assert layer.cached_values == layer.state.value
    maps = 5 * 2048 * 2048 + 2 * 2048 * 16  # q k v gate out; strength and decay
    assert layer.flops_per_token.value == 2 * maps + 16 * (7 * 128 * 128 + 2 * 128)
    assert layer.flops_per_token.formula == (
        f"2 x {maps} (matrices) + 16 x 2 D E + 16 x (4 D E + 2 E + D E), D = 128, E = 128"
    )
    assert layer.parameters.value == maps + 2 * 16 + 128  # rate and shift, and the norm
    plain = delta_net(64, 4, groups=2, head_dim=8, value_dim=12).describe()
    assert plain.flops_per_token.formula.endswith("4 x 2 D E + 2 x (4 D E + 2 E), D = 8, E = 12")
    with pytest.raises(regard.ArgumentError, match="context is 0; it must be at least 1"):
        delta_net(8, 2).describe(0)


def test_decays_start_as_in_mamba_2_and_stay_below_0() -> None:
    decay = LogDecay(8, 1000).requires_grad_(False)
    rate, step = decay.A_log.exp(), F.softplus(decay.dt_bias)
    for x, low, high in ((rate, 1, 16), (step, 0.001, 0.1)):
        assert low * 0.999 <= float(x.min()) < low * 1.2
        assert high * 0.9 < float(x.max()) <= high * 1.001
    x = torch.randn(2, 5, 8, dtype=torch.bfloat16) * 100
    g = decay.bfloat16()(x)
    assert g.dtype == torch.float32
    assert g.shape == (2, 1000, 5)
    assert bool((g <= 0).all())
    assert bool(g.isfinite().all())


def test_steps() -> None:
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    assert float((Swish()(x, None) - silu(x)).abs().max()) < 1e-15
    unit = L2Norm(eps=1e-2)
    assert (
        float((unit(x) - x / (x.square().sum(-1, keepdim=True) + 1e-2).sqrt()).abs().max()) < 1e-15
    )
    assert unit(torch.zeros(1, 4)).eq(0).all()
    half = torch.full((1, 4), 300.0, dtype=torch.float16)  # its squares overflow in fp16
    assert torch.equal(L2Norm()(half), torch.full((1, 4), 0.5, dtype=torch.float16))
    assert repr(unit) == "L2Norm(eps=0.01)"


def test_errors() -> None:
    project = SeparateQKV(HeadProjection(8, 4, 2), HeadProjection(8, 2, 2), HeadProjection(8, 2, 3))
    output = nn.Linear(12, 8)
    cases = [
        (lambda: LogDecay(8, 0), "LogDecay(dim=8, groups=0): each must be at least 1"),
        (lambda: DeltaRule(0, 1), "DeltaRule(dim=0, groups=1): each must be at least 1"),
        (lambda: DeltaRule(8, 2, max_beta=2.5), "max_beta is 2.5; it must be greater than 0 and"),
        (lambda: DeltaRule(8, 2, max_beta=0.0), "max_beta is 0.0; it must be greater than 0 and"),
        (lambda: L2Norm(eps=-1.0), "L2Norm(eps=-1.0): eps must be at least 0"),
        (lambda: L2Norm(eps=math.nan), "L2Norm(eps=nan): eps must be at least 0"),
        (
            lambda: Recurrent(project, DeltaRule(8, 2), output, gate=HeadProjection(8, 4, 2)),
            "gate is 4 heads of 2; it must be 4 heads of 3, as the rule returns",
        ),
        (lambda: delta_net(12, 4, groups=3), "4 query heads are not divisible by 3 key/value"),
        (lambda: gated_delta_net(10, 4), "dim 10 is not divisible by 4 heads; give head_dim, or"),
    ]
    assert_refused(cases)
