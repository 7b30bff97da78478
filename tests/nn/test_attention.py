"""The attention module against its formula written out, and what a module owes: state, copies, eval
mode.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import biases, masks
from regard.caches import Growing
from regard.nn import Attention, Block, HeadProjection, PreNorm, RMSNorm, SeparateQKV, SwiGLU
from regard.positions import Rotary
from regard.span import Span
from tests.nn.catalogue import in_chunks, random
from tests.ops.softmax.plain import assert_near
from tests.rules import assert_close_rule, assert_refused

pytestmark = pytest.mark.usefixtures("no_gradients")

CAUSAL = masks.Causal()


def build(M: int = 12, H: int = 4, G: int = 2, D: int = 6, E: int = 4, **options: Any) -> Attention:
    project = SeparateQKV(
        HeadProjection(M, H, D), HeadProjection(M, G, D), HeadProjection(M, G, E, bias=True)
    )
    return random(Attention(project, nn.Linear(H * E, M), **options))


def written_out(module: Attention, x: Tensor, scale: float, cap: float | None = None) -> Tensor:
    """Head by head, query by query, from the weights alone; causal; key/value head h // (H/G)."""
    q, k, v = (
        x @ part.linear.weight.T for part in (module.project.q, module.project.k, module.project.v)
    )  # type: ignore[union-attr]
    v = v + module.project.v.linear.bias  # type: ignore[union-attr]
    H, D = module.project.q.heads, module.project.q.head_dim  # type: ignore[union-attr]
    G, E = module.project.v.heads, module.project.v.head_dim  # type: ignore[union-attr]
    rows = []
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            joined = []
            for h in range(H):
                g = h // (H // G)
                query = q[b, t, h * D : (h + 1) * D]
                s = torch.stack(
                    [query @ k[b, j, g * D : (g + 1) * D] * scale for j in range(t + 1)]
                )
                s = s if cap is None else cap * torch.tanh(s / cap)
                p = torch.exp(s - s.max()) / torch.exp(s - s.max()).sum()
                joined.append(sum(p[j] * v[b, j, g * E : (g + 1) * E] for j in range(t + 1)))
            rows.append(torch.cat(joined))  # type: ignore[arg-type]
    z = torch.stack(rows).unflatten(0, x.shape[:2])
    return z @ module.output.weight.T + module.output.bias  # type: ignore[operator]


@pytest.mark.parametrize("G", [1, 2, 4])
@pytest.mark.parametrize("scale, cap", [(None, None), (0.3, None), (None, 1.5)])
def test_is_the_formula(G: int, scale: float | None, cap: float | None) -> None:
    x = torch.randn(2, 5, 12)
    module = build(G=G, mask=CAUSAL, scale=scale, softcap=cap)
    c = scale or 1 / math.sqrt(6)
    with torch.no_grad():
        usual = written_out(module, x, c, cap)
        module, x = module.double(), x.double()
        assert_near(module(x), written_out(module, x, c, cap), [usual])


def test_wrong_groups_and_wrong_scale_are_caught() -> None:
    """Negative controls: key/value heads tiled instead of repeated, and another scale."""
    x = torch.randn(1, 5, 12)
    module = build(mask=CAUSAL)
    with torch.no_grad():
        right, usual = module(x), written_out(module, x, 6**-0.5)
        exact = written_out(copy.deepcopy(module).double(), x.double(), 6**-0.5)
        other = written_out(module, x, 4**-0.5)
        for part in (module.project.q,):  # heads 0 1 2 3 -> 0 2 1 3: what tiling would pair
            weight = part.linear.weight.data.unflatten(0, (4, 6))
            part.linear.weight.data = weight[[0, 2, 1, 3]].flatten(0, 1)
        tiled = module(x)
    assert_close_rule(right, usual, exact)
    for wrong in (other, tiled):
        with pytest.raises(AssertionError, match="error"):
            assert_close_rule(wrong, usual, exact)


def test_steps_run_in_the_order_given() -> None:
    """Norm then rotary, rotary then norm: with a weight that differs between dims, they are two
    modules.
    """
    rotary, norm = Rotary(6), random(RMSNorm(6))
    first, second = HeadProjection(12, 4, 6, norm, rotary), HeadProjection(12, 4, 6, rotary, norm)
    second.load_state_dict(
        {k.replace("steps.0", "steps.1"): v for k, v in first.state_dict().items()}
    )
    x, positions = torch.randn(2, 5, 12), Span(3, 5)
    split = (x @ first.linear.weight.T).unflatten(-1, (4, 6)).transpose(1, 2)
    assert torch.equal(first(x, positions), rotary(norm(split), positions))
    assert torch.equal(second(x, positions), norm(rotary(split, positions)))
    assert float((first(x, positions) - second(x, positions)).detach().abs().max()) > 0.1
    flat = random(RMSNorm(24), seed=1)
    whole = HeadProjection(12, 4, 6, flat=flat)
    whole.linear.load_state_dict(first.linear.state_dict())
    assert torch.equal(
        whole(x, positions), flat(x @ first.linear.weight.T).unflatten(-1, (4, 6)).transpose(1, 2)
    )


def test_positions_reach_rotary_and_mask() -> None:
    rotary = Rotary(6)
    project = SeparateQKV(
        HeadProjection(12, 4, 6, rotary), HeadProjection(12, 2, 6, rotary), HeadProjection(12, 2, 6)
    )
    module = random(Attention(project, nn.Linear(24, 12), mask=CAUSAL & masks.Window(3))).double()
    x = torch.randn(1, 6, 12, dtype=torch.float64)
    here, there = module(x), module(x, Span(1000, 6))
    assert float((here - there).abs().max()) < 1e-9, "only differences of positions count"
    spread = module(x, torch.tensor([[0, 2, 4, 6, 8, 10]]))
    assert float((here - spread).abs().max()) > 1e-3
    padded = module(
        torch.cat([torch.full((1, 2, 12), float("nan")).double(), x], 1),
        torch.tensor([[-1, -1, *range(6)]]),
    )
    assert float((padded[:, 2:] - here).abs().max()) < 1e-12


def test_sink_bias_and_dropout_are_passed_on() -> None:
    x = torch.randn(1, 5, 12)
    module = build(sink=nn.Parameter(torch.zeros(4)))
    module.sink.data.fill_(1e4)
    assert torch.equal(module(x), module.output.bias.expand(1, 5, 12)), "such a sink takes all"
    table = torch.zeros(1, 1, 5, 5)
    table[..., 1:] = -1e9
    module = build(bias=biases.DenseBias(table))
    first = build(mask=masks.Dense(table == 0))
    assert float((module(x) - first(x)).abs().max()) < 1e-6


def test_dropout_is_off_in_eval_and_repeats_in_training() -> None:
    x = torch.randn(1, 20, 12)
    module, plain = build(dropout=0.5, mask=CAUSAL), build(mask=CAUSAL)
    assert torch.equal(module.eval()(x), plain(x))
    assert torch.equal(module(x), module(x))
    module.train()
    torch.manual_seed(3)
    a = module(x)
    b = module(x)
    torch.manual_seed(3)
    assert torch.equal(module(x), a)
    assert not torch.equal(a, b)


# The other parts.


def test_rms_norm() -> None:
    norm = random(RMSNorm(6, eps=1e-3))
    for scale in (1e-3, 1.0, 1e3):
        x = torch.randn(2, 3, 6) * scale

        def formula(x: Tensor, w: Tensor) -> Tensor:
            return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * w

        assert_close_rule(
            norm(x), formula(x, norm.weight), formula(x.double(), norm.weight.double())
        )
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.randn(2, 3, 6).to(dtype) * 200  # its squares overflow in fp16
        low = copy.deepcopy(norm).to(dtype)
        exact = formula(x.double(), low.weight.double())
        assert low(x).dtype == dtype
        assert_close_rule(low(x), exact.to(dtype), exact)
    assert norm(torch.zeros(1, 6)).eq(0).all()


def test_swiglu_and_block() -> None:
    x = torch.randn(2, 5, 12)
    feed = random(SwiGLU(12, 20, bias=True))
    gate, up, down = (
        lambda x, f=f: x @ f.weight.T + f.bias for f in (feed.gate, feed.up, feed.down)
    )
    assert float((feed(x) - down(gate(x) * torch.sigmoid(gate(x)) * up(x))).abs().max()) < 1e-4
    norms = [random(RMSNorm(12), seed) for seed in (1, 2)]
    block = Block(build(mask=CAUSAL), feed, *(PreNorm(norm) for norm in norms))
    half = x + block.attention(norms[0](x))
    assert torch.equal(block(x), half + feed(norms[1](half)))
    parts = in_chunks(block, x, (2, 3), Growing(), Span(0, 5))
    assert float((parts - block(x)).detach().abs().max()) < 1e-4


def test_a_learned_bias_is_a_parameter_of_the_module() -> None:
    table = nn.Parameter(torch.randn(8, 4))
    module = build(bias=biases.T5Relative(table), mask=CAUSAL)
    assert any(p.shape == (8, 4) for p in module.parameters())
    x = torch.randn(1, 5, 12)
    with torch.enable_grad():
        module(x).sum().backward()
    (held,) = (p for p in module.parameters() if p.shape == (8, 4))
    assert held.grad is not None
    assert held.grad.ne(0).any()
    before, other = module(x), copy.deepcopy(module)
    held.data.add_(torch.randn(8, 4))
    assert not torch.equal(module(x), before)
    assert torch.equal(other(x), before)
    module.load_state_dict(other.state_dict())
    assert torch.equal(module(x), before)
    assert module.double()(x.double()).dtype == torch.float64
    frozen = biases.DenseBias(torch.zeros(5, 5)) + biases.DenseBias(nn.Parameter(torch.zeros(5, 5)))
    with pytest.raises(regard.ArgumentError, match=r"mixes parameters with plain tensors \(1 of 2"):
        build(bias=frozen)


def test_errors() -> None:
    need = "k and v must have the same number of heads, and q and k the same head dim"
    cases = [
        (lambda: HeadProjection(0, 1, 1), "HeadProjection(dim=0, heads=1, head_dim=1): each must"),
        (lambda: HeadProjection(1, 1, -1), "HeadProjection(dim=1, heads=1, head_dim=-1): each"),
        (lambda: RMSNorm(0), "RMSNorm(0, eps=1e-06): dim must be at least 1 and eps at least 0"),
        (lambda: RMSNorm(4, eps=-1.0), "RMSNorm(4, eps=-1.0): dim must be at least 1 and eps at"),
        (lambda: RMSNorm(4, eps=float("nan")), "RMSNorm(4, eps=nan): dim must be at least 1 and"),
        (
            lambda: SeparateQKV(
                HeadProjection(8, 4, 2), HeadProjection(8, 2, 2), HeadProjection(8, 4, 2)
            ),
            f"q is 4 heads of 2, k is 2 heads of 2, v is 4 heads of 2; {need}",
        ),
        (
            lambda: SeparateQKV(
                HeadProjection(8, 4, 2), HeadProjection(8, 2, 3), HeadProjection(8, 2, 2)
            ),
            f"q is 4 heads of 2, k is 2 heads of 3, v is 2 heads of 2; {need}",
        ),
        (lambda: build(softcap=0.0), "softcap is 0.0; it must be greater than 0: None turns it"),
        (lambda: build(dropout=1.0), "dropout is 1.0; it must be at least 0 and less than 1"),
        (lambda: build(scale=math.nan), "scale is nan; it must be finite"),
    ]
    assert_refused(cases)
