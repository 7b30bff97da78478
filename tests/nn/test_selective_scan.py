"""The layer of Mamba against loops over tokens, channels and values of the state, in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.nn import CausalConvolution, HeadProjection, Recurrent, RMSNorm
from regard.nn.recurrence import decays
from regard.nn.recurrence.decays import SelectiveQKV, SelectiveScanRule
from regard.nn.variants import VARIANTS
from regard.nn.weights import Linear
from tests.nn import catalogue

M, N, D, RANK, KERNEL, T = 6, 5, 3, 2, 4, 11


def layer(*, normed: bool = True) -> Recurrent:
    torch.manual_seed(0)
    q, k = (HeadProjection(N, 1, D, *([RMSNorm(D)] if normed else [])) for _ in "qk")
    v, gate = (HeadProjection(M, N, 1) for _ in "vg")
    convolution = CausalConvolution(N, KERNEL, bias=True)
    rule = SelectiveScanRule(N, D, RANK, norm=RMSNorm(RANK) if normed else None)
    made = Recurrent(SelectiveQKV(q, k, v, convolution), rule, Linear(N, M), gate=gate)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made.double().eval().requires_grad_(False)


def tokens(batch: int = 2, length: int = T) -> Tensor:
    make = torch.Generator().manual_seed(1)
    return torch.randn(batch, length, M, generator=make, dtype=torch.float64)


def normalized(x: Tensor, norm: nn.Module | None) -> Tensor:
    return x if norm is None else x / (x.square().mean() + norm.eps).sqrt() * norm.weight


def by_loops(mixer: Recurrent, x: Tensor) -> Tensor:
    """The definition for one text [T,M]: Gu and Dao 2023, algorithm 2."""
    project, rule = mixer.project, mixer.rule
    values, gates = x @ project.v.linear.weight.T, x @ mixer.gate.linear.weight.T
    taps, bias = project.convolution.weight, project.convolution.bias
    state = [[0.0] * D for _ in range(N)]
    rows = []
    for t in range(len(x)):
        u = []
        for c in range(N):
            total = float(bias[c])
            for i in range(KERNEL):
                if t - i >= 0:
                    total += float(taps[c, KERNEL - 1 - i] * values[t - i, c])
            u.append(total / (1 + math.exp(-total)))
        y = torch.tensor(u, dtype=torch.float64)
        B, C = (
            normalized(heads.linear.weight @ y, heads.steps[0] if len(heads.steps) else None)
            for heads in (project.k, project.q)
        )
        low = normalized(rule.down.weight @ y, rule.norm)
        row = []
        for c in range(N):
            step = math.log1p(math.exp(float(rule.up.weight[c] @ low + rule.dt_bias[c])))
            z = float(rule.skip[c]) * u[c]
            for n in range(D):
                decay = math.exp(-step * math.exp(float(rule.A_log[c, n])))
                state[c][n] = decay * state[c][n] + step * float(B[n]) * u[c]
                z += float(C[n]) * state[c][n]
            g = float(gates[t, c])
            row.append(z * g / (1 + math.exp(-g)))
        rows.append(torch.tensor(row, dtype=torch.float64))
    return torch.stack(rows) @ mixer.output.weight.T + mixer.output.bias


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("form", ["auto", "reference", "chunk"])
def test_it_is_the_definition(normed: bool, form: str) -> None:
    mixer, x = layer(normed=normed), tokens()
    expected = torch.stack([by_loops(mixer, row) for row in x])
    assert float((mixer(x, backend=form) - expected).abs().max()) < 1e-12
    mixer.rule.A_log.add_(0.1)
    assert float((mixer(x, backend=form) - expected).abs().max()) > 1e-4, "the negative control"


def test_long_texts_are_computed_in_pieces() -> None:
    """As many tokens as one piece more than twice; a step alone is never cut."""
    mixer, x = layer(), tokens(1, 150)
    rule, sizes = mixer.rule, []
    inner = rule._scan

    def scan(q: Tensor, *rest: object) -> object:
        sizes.append(q.shape[2])
        return inner(q, *rest)

    rule._scan = scan
    rule.piece = 64
    pieces = mixer(x)
    assert sizes == [64, 64, 22]
    rule.piece = None
    assert float((pieces - mixer(x)).abs().max()) < 1e-12
    assert sizes[3:] == [150]


def test_what_is_refused() -> None:
    with pytest.raises(regard.ArgumentError, match="each must be at least 1"):
        SelectiveScanRule(3, 0, 1)
    q, v = HeadProjection(N, 1, D), HeadProjection(M, N, 1)
    with pytest.raises(regard.ArgumentError, match="the convolution has 4"):
        SelectiveQKV(q, q, v, CausalConvolution(4, 2))
    with pytest.raises(regard.ArgumentError, match=r"q and k read \[6\] channels"):
        SelectiveQKV(HeadProjection(6, 1, D), HeadProjection(6, 1, D), v, CausalConvolution(N, 2))
    assert "no row of weights" in layer().explain_refusal
    assert decays.MAX_DECAYS == 1 << 24


def test_without_gradients_the_tokens_are_computed_one_by_one() -> None:
    """On a CPU, where that is faster; the results are those of chunks up to rounding."""
    module, x = catalogue.example(VARIANTS["mamba"]), catalogue.tokens(17)
    with_gradients = module(x).detach()
    with torch.no_grad():
        found, chunks = module(x), module(x, backend="chunk")
        assert torch.equal(found, module(x, backend="recurrent"))
    assert torch.equal(with_gradients, chunks)
    assert float((found - chunks).abs().max()) < 1e-12
    assert not torch.equal(found, chunks), "negative control: the forms round differently"
