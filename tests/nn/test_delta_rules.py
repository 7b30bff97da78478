"""The rules of Gated DeltaNet-2, Comba, preconditioned Kimi Delta Attention, DeltaProduct, the Mesa
layer and Titans as modules, against their formulas written out from the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.caches import Growing
from regard.nn.recurrence.delta import (
    BottleneckProjection,
    ChannelLogDecay,
    CombaRule,
    DeltaProductRule,
    DeltaRule,
    EraseRule,
    MesaRule,
    PreconditionedDeltaRule,
    SeveralKeysQKV,
    TitansRule,
)
from regard.nn.recurrence.recurrent import GatedConvolution
from regard.nn.variants import comba, gated_delta_2, mesa
from regard.nn.variants.projections import ValueHeadStart
from tests.nn.catalogue import randomize
from tests.oracles.generalized_delta import generalized_delta, mesa_loop, titans_loop
from tests.rules import assert_refused

M, H, D, E, T = 8, 2, 4, 3, 12


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def gates(part: Any, x: Tensor) -> Tensor:
    """[B,T,n] of a linear map, heads first: [B,n,T]."""
    y = x @ part.weight.T
    return (y if part.bias is None else y + part.bias).transpose(1, 2)


def scalar_decay(part: Any, x: Tensor) -> Tensor:
    step = torch.log1p(torch.exp(gates(part.linear, x) + part.dt_bias[:, None]))
    return -part.A_log.exp()[:, None] * step


def channel_decay(part: Any, x: Tensor) -> Tensor:
    y = x @ part.project.down.weight.T @ part.project.linear.weight.T
    y = y.unflatten(-1, (H, D)).transpose(1, 2) + part.dt_bias[:, None]
    return -part.A_log.exp()[:, None, None] * torch.log1p(torch.exp(y))


def erase(rule: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    g = channel_decay(rule.decay, x)
    b = sigmoid((x @ rule.erase.linear.weight.T).unflatten(-1, (H, D)).transpose(1, 2))
    return generalized_delta(q, k, v, g.exp() * b * k, g).out


def comba_formula(rule: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    g, beta = scalar_decay(rule.decay, x), sigmoid(gates(rule.beta_proj, x))[..., None]
    p = sigmoid(rule.erase_share)[:, None, None] * k
    q = q - rule.correction[:, None, None] * p
    return generalized_delta(q, k, beta * v, g.exp()[..., None] * beta * p, g).out


def preconditioned(rule: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    h, a = scalar_decay(rule.square_decay, x), sigmoid(gates(rule.square_proj, x))
    g, beta = channel_decay(rule.decay, x), sigmoid(gates(rule.beta_proj, x))[..., None]
    A, factors = torch.zeros(2, H, D, dtype=x.dtype), []
    for t in range(x.shape[1]):
        A = h[:, :, t, None].exp() * A + a[:, :, t, None] * k[:, :, t] ** 2
        r = torch.log(A + 1e-6) - rule.center[:, None]
        factors.append(rule.bound ** (-r / (1 + r.abs())))
    written = torch.stack(factors, 2) * k
    return generalized_delta(q, written, beta * v, g.exp() * beta * k, g).out


def mesa_formula(rule: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    g = -torch.log1p(torch.exp(-gates(rule.decay_proj, x)))
    ridge = torch.log1p(torch.exp(rule.ridge)) + rule.least_ridge
    return mesa_loop(q, k, v, sigmoid(gates(rule.beta_proj, x)), g, ridge).out


def titans_formula(rule: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    g, e = (-torch.log1p(torch.exp(-gates(p, x))) for p in (rule.keep_proj, rule.momentum_proj))
    step = rule.max_step * sigmoid(gates(rule.step_proj, x))
    return titans_loop(q, k, v, step, g, e, by_gradient=False).out


def product(rule: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The reflections of each token as one matrix, in loops."""
    n, out = rule.writes, torch.zeros(2, H, T, E, dtype=torch.float64)
    g = scalar_decay(rule.decay, x).exp()
    beta = rule.max_beta * sigmoid(x @ rule.beta_proj.weight.T).unflatten(-1, (H, n))
    keys, values = k.unflatten(-1, (n, D)), v.unflatten(-1, (n, E))
    keys = keys / (keys.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    for b in range(2):
        for h in range(H):
            S = torch.zeros(D, E, dtype=torch.float64)
            for t in range(T):
                S = g[b, h, t] * S
                for i in range(n):
                    key, strength = keys[b, h, t, i], beta[b, t, h, i]
                    S = S - strength * torch.outer(key, key @ S - values[b, h, t, i])
                out[b, h, t] = S.T @ q[b, h, t] / D**0.5
    return out


def decay() -> ChannelLogDecay:
    return ChannelLogDecay(M, H, D, 3)


RULES: dict[str, tuple[Callable[[], Any], Callable[..., Tensor]]] = {
    "erase": (lambda: EraseRule(M, H, D, decay=decay()), erase),
    "comba": (lambda: CombaRule(M, H, H), comba_formula),
    "preconditioned": (lambda: PreconditionedDeltaRule(M, H, decay=decay()), preconditioned),
    "product": (lambda: DeltaProductRule(M, H, writes=2), product),
    "mesa": (lambda: MesaRule(M, H, D), mesa_formula),
    "titans": (lambda: TitansRule(M, H), titans_formula),
}


def rule_of(name: str) -> Any:
    return randomize(RULES[name][0]().double(), 2).requires_grad_(False)


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(5)

    def randn(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=make, dtype=torch.float64)

    k = randn(2, H, T, D)
    k = k / k.norm(dim=-1, keepdim=True)
    return randn(2, T, M), randn(2, H, T, D), k, randn(2, H, T, E)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_its_formula_and_every_parameter_matters(name: str) -> None:
    rule, (x, q, k, v) = rule_of(name), inputs()
    if name == "product":
        k, v = torch.cat([k, k.flip(2)], -1), torch.cat([v, v.flip(2)], -1)
    right = RULES[name][1](rule, x, q, k, v)
    for form in ("recurrent", "chunk", "parallel"):
        found, _ = rule(x, q, k, v, None, None, form)
        assert float((found - right).abs().max()) < 1e-10
    for which, parameter in rule.named_parameters():
        kept = parameter.clone()
        parameter.mul_(0.5).add_(0.3)
        changed, _ = rule(x, q, k, v, None, None, "auto")
        assert float((changed - right).abs().max()) > 1e-4, which
        parameter.copy_(kept)


def test_a_preconditioner_of_1_is_kimi_delta_attention() -> None:
    rule, (x, q, k, v) = rule_of("preconditioned"), inputs()
    plain = DeltaRule(M, H, decay=rule.decay)
    plain.beta_proj = rule.beta_proj
    right, (S,) = plain(x, q, k, v, None, None, "auto")
    assert float((rule(x, q, k, v, None, None, "auto")[0] - right).abs().max()) > 1e-3
    rule.bound = 1.0
    found, (last, _) = rule(x, q, k, v, None, None, "auto")
    assert float((found - right).abs().max()) < 1e-12
    assert float((last - S).abs().max()) < 1e-12
    factors = rule.preconditioner(x, k, None, None, "auto")[0]
    assert bool(factors.eq(1).all())


def test_the_written_value_of_gated_delta_net_2_is_gated() -> None:
    mixer = randomize(gated_delta_2(M, H).double(), 1).requires_grad_(False)
    x = torch.randn(2, T, M, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gate, project = mixer.project.value_gate, mixer.project
    with regard.Trace("v") as seen:
        mixer(x)
    project.value_gate = None
    plain = project.project(x, None, None).v
    write = sigmoid((x @ gate.linear.weight.T).unflatten(-1, (H, -1)).transpose(1, 2))
    assert float((seen["v"] - write * plain).abs().max()) < 1e-12


def test_decays_are_strong_within_their_bound() -> None:
    x = 100 * torch.randn(1, 50, M, generator=torch.Generator().manual_seed(0))
    bounded = ChannelLogDecay(M, H, D, 3, lower_bound=-5.0)(x).detach()
    assert bool((bounded >= -5).all())
    assert float(bounded.min()) < -4.9
    free = ChannelLogDecay(M, H, D, 3)(x).detach()
    assert float(free.min()) < -50
    assert ChannelLogDecay(M, H, D, 3).extra_repr() == "lower_bound=None"


def test_refusals() -> None:
    assert_refused(
        [
            (lambda: ChannelLogDecay(M, H, D, 3, lower_bound=1.0), "lower_bound is 1.0; it must"),
            (lambda: BottleneckProjection(0, 1, 1, 1), "BottleneckProjection(dim=0): it must be"),
            (lambda: CombaRule(8, 0, 1), "CombaRule(dim=8, heads=0, groups=1): each"),
            (lambda: PreconditionedDeltaRule(M, H, decay=decay(), bound=3.0), "bound is 3.0; it"),
            (lambda: MesaRule(8, 2, 0), "MesaRule(dim=8, heads=2, head_dim=0): each"),
            (lambda: MesaRule(8, 2, 4, least_ridge=0), "least_ridge is 0; it must be above 0"),
            (lambda: TitansRule(8, 0), "TitansRule(dim=8, heads=0): each must be"),
            (lambda: TitansRule(8, 1, max_step=0), "max_step is 0; it must be above 0"),
            (lambda: GatedConvolution(0), "GatedConvolution(dim=0): each must be at"),
        ]
    )
    layer, x = GatedConvolution(M), torch.zeros(1, 3, M)
    with pytest.raises(regard.ArgumentError, match="backend is 'sdpa'; a convolution has one form"):
        layer(x, backend="sdpa")
    with pytest.raises(regard.ArgumentTypeError, match="the cache is Growing; a recurrence needs"):
        layer(x, cache=Growing())
    with pytest.raises(regard.ArgumentError, match=r"groups=2, writes=0\): each must be at least"):
        DeltaProductRule(M, H, writes=0)
    heads = ValueHeadStart(M, H, head_dim=D, value_dim=E).convolved(4)
    with pytest.raises(regard.ArgumentError, match="with 2 writes per token, keys and values must"):
        SeveralKeysQKV(heads.q, heads.k, heads.v, heads.convolution, writes=2)
    with pytest.raises(regard.ArgumentError, match="value heads"):
        comba(M, H, value_heads=3)
    part = ValueHeadStart(M, H, head_dim=D, value_dim=E).convolved(4)
    with pytest.raises(regard.ArgumentError, match="value_gate is 2 heads of 4; it must be 2"):
        type(part)(part.q, part.k, part.v, part.convolution, value_gate=part.q)
    with pytest.raises(regard.ArgumentError, match="gate_activation is 'tanh'; it must be one of"):
        regard.nn.Recurrent(part, MesaRule(M, H, D), layer.output, gate_activation="tanh")  # type: ignore[arg-type]
    first = torch.nn.functional.softplus(mesa(M, H).rule.ridge.detach()) + 0.25
    assert float((first - 1).abs().max()) < 1e-6, "the ridge at the start"
