"""Parts that checkpoints need, against loops in fp64: gated layers, capped logits, clipped
projections, normed paths.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.nn import FusedQKV, SwiGLU
from regard.nn.blocks.blocks import NormedResidual, PreNorm
from regard.nn.blocks.embedding import CappedLogits
from regard.nn.blocks.feed_forward import ClippedSwiGLU, GatedFeedForward
from regard.nn.projections.fused import ClippedQKV
from regard.nn.projections.steps import Clip, L2Clip
from regard.positions import Rotary
from tests.nn.catalogue import random
from tests.rules import assert_close_rule

M, HIDDEN = 5, 7
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
Rows = list[list[float]]


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def times(weight: Tensor, x: list[float], bias: Tensor | None = None) -> list[float]:
    rows: Rows = weight.double().tolist()
    start = [0.0] * len(rows) if bias is None else bias.double().tolist()
    return [
        b + math.fsum(w * v for w, v in zip(row, x, strict=True))
        for row, b in zip(rows, start, strict=True)
    ]


def gelu_tanh(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu(x: float) -> float:
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


def silu(x: float) -> float:
    return x / (1 + math.exp(-x)) if x > -700 else 0.0


def gated(layer: Any, f: Callable[[float], float], x: Tensor) -> Tensor:
    out = []
    for row in x.double().tolist():
        gate, up = (times(m.weight, row, m.bias) for m in (layer.gate, layer.up))
        out.append(
            times(
                layer.down.weight,
                [f(g) * u for g, u in zip(gate, up, strict=True)],
                layer.down.bias,
            )
        )
    return torch.tensor(out, dtype=torch.float64)


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[float], float]]] = {
    "geglu": (lambda: GatedFeedForward(M, HIDDEN, nn.GELU("tanh")), gelu_tanh),
    "geglu, erf, biases": (lambda: GatedFeedForward(M, HIDDEN, nn.GELU(), bias=True), gelu),
    "swiglu": (lambda: SwiGLU(M, HIDDEN), silu),
    "reglu": (lambda: GatedFeedForward(M, HIDDEN, nn.ReLU()), lambda x: max(x, 0.0)),
}


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_gated(name: str, dtype: torch.dtype) -> None:
    make, f = KINDS[name]
    layer = random(make()).to(dtype)
    for scale in (1e-3, 1.0, 30.0):
        x = randn(9, M, scale=scale).to(dtype)
        gate, up = (F.linear(x, m.weight, m.bias) for m in (layer.gate, layer.up))
        plain = F.linear(layer.activation(gate) * up, layer.down.weight, layer.down.bias)
        turned = [m.weight.mT.contiguous() for m in (layer.gate, layer.up, layer.down)]
        biases = [0 if m.bias is None else m.bias for m in (layer.gate, layer.up, layer.down)]
        other = layer.activation(x @ turned[0] + biases[0]) * (x @ turned[1] + biases[1])
        plains = [plain, other @ turned[2] + biases[2]]
        assert_close_rule(layer(x), plains, gated(layer, f, x), what=f"{scale}")


@torch.no_grad()
def test_the_gate_is_not_the_other_half() -> None:
    make, f = KINDS["geglu"]
    layer, x = random(make()).double(), randn(9, M).double()
    ref = gated(layer, f, x)
    layer.gate, layer.up = layer.up, layer.gate
    assert float((layer(x) - ref).abs().max()) > 0.1
    layer.gate, layer.up = layer.up, layer.gate
    layer.activation = nn.GELU()
    assert 1e-4 < float((layer(x) - ref).abs().max()) < 0.1


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_capped_logits(dtype: torch.dtype) -> None:
    head = random(CappedLogits(M, 4, cap=3.0)).to(dtype)
    for scale in (1e-3, 1.0, 1e4):
        x = randn(9, M, scale=scale).to(dtype)
        rows = [times(head.weight, row) for row in x.double().tolist()]
        ref = torch.tensor(
            [[3.0 * math.tanh(s / 3.0) for s in row] for row in rows], dtype=torch.float64
        )
        plains = [
            3.0 * torch.tanh(logits / 3.0)
            for logits in (F.linear(x, head.weight), x @ head.weight.mT.contiguous())
        ]
        found = head(x)
        assert_close_rule(found, plains, ref)
        assert float(found.abs().max()) <= 3.0
    assert float((ref - torch.tensor(rows)).abs().max()) > 1, "the cap bites"


def test_the_cap_must_be_above_zero() -> None:
    for cap in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ArgumentError, match=r"cap is .*; it must be above 0"):
            CappedLogits(M, 4, cap=cap)
    assert "cap=3" in repr(CappedLogits(M, 4, cap=3.0))


@torch.no_grad()
@pytest.mark.parametrize("order", ["parts", "heads", "groups"])
def test_clipped(order: Any) -> None:
    """Clipped before the steps, in each of the orders of rows; keys and values are remembered
    clipped.
    """
    H, D, limit = 2, 4, 0.8
    rotary = Rotary(D)
    project = random(ClippedQKV(M, H, H, D, limit=limit, order=order, steps=[rotary])).double()
    free = FusedQKV(M, H, H, D, order=order).double()
    free.linear = project.linear
    x, where = randn(1, 6, M).double(), torch.arange(3, 9)[None]
    parts = (free.query(x, where), *free.remember(x, where))
    q, k, v = (
        [
            [[[min(max(n, -limit), limit) for n in row] for row in head] for head in b]
            for b in p.tolist()
        ]
        for p in parts
    )
    q, k, v = (torch.tensor(p, dtype=torch.float64) for p in (q, k, v))
    found = (project.query(x, where), *project.remember(x, where))
    for made, ref in zip(found, (rotary(q, where), rotary(k, where), v), strict=True):
        assert float((made - ref).abs().max()) < 1e-15
    assert float((parts[2] - v).abs().max()) > 0.5, "the limit bites"
    behind = rotary(parts[0], where).clamp(-limit, limit)
    assert float((behind - found[0]).abs().max()) > 0.1, (
        "clipping behind the rotation is another thing"
    )
    assert float(found[0].abs().max()) > limit
    assert "limit=0.8" in repr(project)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_limit_that_the_dtype_cannot_hold_clips_nothing(dtype: torch.dtype) -> None:
    """torch's clamp raises for such a number, as a config.json may have."""
    x = randn(3, M).to(dtype)
    project, gated = (
        random(part).to(dtype)
        for part in (ClippedQKV(M, 2, 2, 4, limit=1e4), ClippedSwiGLU(M, 8, limit=1e4))
    )
    found = project.query(x[None], None), gated(x)
    project.limit = gated.limit = 1e308
    for clipped, free in zip(found, (project.query(x[None], None), gated(x)), strict=True):
        assert torch.equal(clipped, free)
    for part in (Clip(1e308), L2Clip(1e308)):
        assert torch.equal(part(x), x)


def test_a_limit_must_be_above_zero() -> None:
    for limit in (0.0, -1.0):
        with pytest.raises(ArgumentError, match=r"limit is .*; it must be above 0; use FusedQKV"):
            ClippedQKV(M, 2, 2, 4, limit=limit)


@torch.no_grad()
def test_normed_path() -> None:
    norm = random(nn.LayerNorm(M)).double()
    x = randn(2, 3, M).double()
    found = NormedResidual(norm)(x, torch.sin)
    for b in range(2):
        for t in range(3):
            row = x[b, t].tolist()
            mean = math.fsum(row) / M
            root = math.sqrt(math.fsum((v - mean) ** 2 for v in row) / M + norm.eps)
            for i, v in enumerate(row):
                n = (v - mean) / root * float(norm.weight[i]) + float(norm.bias[i])
                assert abs(float(found[b, t, i]) - (n + math.sin(n))) < 1e-13
    assert float((PreNorm(norm)(x, torch.sin) - found).abs().max()) > 0.1
    weighted = NormedResidual(norm, alpha=3.5, beta=0.25)(x, torch.sin)
    assert float((weighted - (3.5 * norm(x) + 0.25 * torch.sin(norm(x)))).abs().max()) < 1e-13
    with pytest.raises(ArgumentError, match="beta is nan; it must be finite"):
        NormedResidual(norm, beta=math.nan)


def test_dropout_is_on_what_is_added_only() -> None:
    path = NormedResidual(nn.Identity(), dropout=0.5)
    x = torch.ones(1, 100, 1)
    assert set(path(x, lambda n: n).flatten().tolist()) == {1.0, 3.0}
    assert set(path.eval()(x, lambda n: n).flatten().tolist()) == {2.0}
