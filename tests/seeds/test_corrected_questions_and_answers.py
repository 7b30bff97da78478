"""What AttnJourney (the second note) gets wrong, done right. docs/seeds.md lists each error."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import regard
from regard.masks import Causal, Window
from regard.nn.variants import gpt, mha, mla
from regard.positions import Rotary
from regard.span import Positions, Span


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, dtype=torch.float64)


def apart(x: Tensor, y: Tensor) -> float:
    return float((x - y).detach().abs().max())


# --- why scale


@pytest.mark.parametrize(("D", "measured"), [(64, 7.94), (128, 11.4), (4096, 64.3)])
def test_the_spread_of_scores_is_the_root_of_d(D: int, measured: float) -> None:
    n = 120
    q, k = draw(1, 1, n, D), draw(1, 1, n, D)
    with regard.Trace("scores") as trace:
        regard.attend(q, k, k, scale=1.0)
    spread = float(trace["scores"].std())
    # of the mean of n^2 squares: 2 / n^2 from the products, 2 / n D from the length of each query
    # and of each key
    allowed = 5 * math.sqrt(D) * math.sqrt(2 / n**2 + 4 / (n * D)) / 2
    assert abs(spread - math.sqrt(D)) < allowed
    assert abs(measured - math.sqrt(D)) < allowed
    with regard.Trace("scores") as trace:
        regard.attend(q, k, k)
    assert float(trace["scores"].std()) == pytest.approx(spread / math.sqrt(D), rel=1e-12)


def jacobian(scores: Tensor) -> Tensor:
    """d weights / d scores of one row, through the package."""
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    keys = torch.zeros(1, 1, len(scores), 1, dtype=torch.float64)
    return torch.autograd.functional.jacobian(
        lambda s: regard.attention_weights(zero, keys, bias=s[None])[0, 0, 0], scores
    )


def test_the_gradient_of_the_scores_vanishes_and_never_explodes() -> None:
    norms = []
    for D in (1, 16, 256, 4096):
        row = draw(32, scale=math.sqrt(D))
        J = jacobian(row)
        p = torch.softmax(row, -1)
        assert apart(J, torch.diag(p) - torch.outer(p, p)) < 1e-15
        norms.append(float(torch.linalg.matrix_norm(J, ord=2)))
    assert max(norms) <= 0.5
    assert norms[-1] < 1e-6, "at a spread of 64 the largest key has everything"
    # the bound is reached by two equal keys, and by no larger scores
    half = jacobian(torch.zeros(2, dtype=torch.float64))
    assert float(torch.linalg.matrix_norm(half, ord=2)) == pytest.approx(0.5, rel=1e-15)


def gradient_of_queries(D: int, scale: float) -> tuple[float, Tensor]:
    """Norms of dL/dW_q and of dL/dq of each of 64 tokens, in a fresh layer, under a random gradient
    of its output.
    """
    make = torch.Generator().manual_seed(0)
    x, target = torch.randn(2, 64, D, generator=make, dtype=torch.float64)
    maps = torch.randn(3, D, D, generator=make, dtype=torch.float64) * D**-0.5
    W_q = maps[0].clone().requires_grad_()
    q = x @ W_q
    q.retain_grad()
    rows = [t[None, None] for t in (q, x @ maps[1], x @ maps[2])]
    (regard.attend(*rows, scale=scale)[0, 0] * target).sum().backward()
    assert q.grad is not None
    assert W_q.grad is not None
    return float(W_q.grad.norm()), q.grad.norm(dim=-1)


def test_the_gradient_of_the_weights_is_larger_without_the_scale_and_most_queries_get_none() -> (
    None
):
    """d score / d q = scale k: without the scale it is sqrt(d) times larger, behind a softmax that
    lets little through.
    """
    factors = []
    for D in (64, 1024):
        unscaled, each_unscaled = gradient_of_queries(D, 1.0)
        scaled, each_scaled = gradient_of_queries(D, D**-0.5)
        factors.append(unscaled / scaled)
    assert factors[0] > 5
    assert factors[1] > 1.5 * factors[0], "the factor grows with d"
    assert each_unscaled.median() < 0.2 * each_scaled.median(), "most queries get almost nothing"
    assert each_unscaled.max() > 20 * each_scaled.max(), "and a few far too much"


# --- dropout and what is shown


def test_with_dropout_rows_no_longer_sum_to_1_and_evaluation_has_none() -> None:
    zero, eye = torch.zeros(3, 4, 12, 1), torch.eye(12).expand(3, 4, 12, 12)
    mixed = regard.attend(zero, zero, eye, dropout=0.5, backend="reference")
    assert apart(mixed.sum(-1), torch.ones(3, 4, 12)) > 0.3
    module, x = mha(16, 4, dropout=0.5).double(), draw(3, 12, 16)
    with regard.Trace("pattern", "z") as trace:
        module.eval()(x)
    assert apart(trace["pattern"].sum(-1), torch.ones(3, 4, 12)) < 1e-14
    v = module.project.v(x, None)
    assert apart(trace["z"], trace["pattern"] @ v) < 1e-14, "what is shown is what was mixed"
    assert torch.equal(module(x), module(x))
    assert apart(module.train()(x), module.eval()(x)) > 0.05
    assert not regard.load("tiny").decoder.training


# --- one input, three projections


def test_one_input_gives_three_different_projections() -> None:
    module, x = gpt(16, 2).double(), draw(1, 6, 16)
    with regard.Trace("q", "k", "v") as trace:
        module(x)
    parts = [trace[name] for name in ("q", "k", "v")]
    assert {tuple(part.shape) for part in parts} == {(1, 2, 6, 8)}
    for i, one in enumerate(parts):
        assert all(apart(one, other) > 0.1 for other in parts[i + 1 :])
    # what is equal is the input: the rows of one matrix [q; k; v] applied to the same x
    rows = (x @ module.project.linear.weight.T + module.project.linear.bias)[0]
    joined = torch.cat([part[0].transpose(0, 1).flatten(1) for part in parts], -1)
    assert apart(joined, rows) < 1e-14


# --- no arithmetic is behind "GPT attention is faster"


def test_one_fused_matrix_computes_as_much_as_three() -> None:
    fused, apart_ = gpt(512, 8, bias=False), mha(512, 8, is_causal=True)
    for context in (1, 128, 4096):
        a, b = fused.describe(context), apart_.describe(context)
        assert a.flops_per_token.value == b.flops_per_token.value
        assert a.parameters.value == b.parameters.value == 4 * 512 * 512
        assert a.kv_per_token.value == b.kv_per_token.value == 2 * 512
    with torch.no_grad():
        parts = (apart_.project.q, apart_.project.k, apart_.project.v)
        fused.project.linear.weight.copy_(torch.cat([part.linear.weight for part in parts]))
        fused.output.weight.copy_(apart_.output.weight)
    x = torch.randn(2, 7, 512)
    assert apart(fused.double()(x.double()), apart_.double()(x.double())) < 1e-12


# --- masked tiles are not computed


def test_masked_tiles_are_skipped() -> None:
    T, H, D = 4096, 2, 8
    q = torch.zeros(1, H, T, D)
    every = 2 * H * T * T * (D + D)

    def done(mask: Causal | Window | None) -> float:
        plan = regard.plan(q, q, q, mask=mask)
        assert plan.flops == every
        assert plan.kernel != "reference"
        return plan[plan.kernel].flops / every

    assert done(None) == 1
    assert done(Causal()) == pytest.approx((T + 1) / (2 * T))
    assert done(Causal() & Window(128)) < 1 / 8  # 3 % is visible; tiles are larger
    assert regard.plan(q, q, q, mask=Causal())["reference"].flops == every, (
        "the plain form skips none"
    )


# --- rotating values


def rotated_values(x: Tensor, positions: Positions, *, undo: bool) -> Tensor:
    """out_i = R_{-i} sum_j p_ij R_j v_j, or without R_{-i}; q, k and v are x itself."""
    rotary = Rotary(x.shape[-1])
    turned = rotary(x, positions)
    out = regard.attend(
        turned, turned, turned, mask=Causal(), q_positions=positions, k_positions=positions
    )
    if not undo:
        return out
    where = (
        positions
        if isinstance(positions, Tensor)
        else torch.arange(x.shape[2])[None] + positions.start
    )
    frequencies = [10000.0 ** (-2 * i / x.shape[-1]) for i in range(x.shape[-1] // 2)]
    angle = -where.double()[:, None, :, None] * torch.tensor(frequencies, dtype=torch.float64)
    a, b = out.chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def test_rotated_values_depend_on_the_distance_once_they_are_turned_back() -> None:
    x = draw(2, 3, 9, 8)
    here, there = Span(0, 9), Span(5000, 9)
    assert apart(rotated_values(x, here, undo=True), rotated_values(x, there, undo=True)) < 1e-10
    assert apart(rotated_values(x, here, undo=False), rotated_values(x, there, undo=False)) > 0.5
    # it is another function than values that are not turned, and as well defined
    rotary = Rotary(8)
    turned = rotary(x, here)
    plain = regard.attend(turned, turned, x, mask=Causal())
    assert apart(rotated_values(x, here, undo=True), plain) > 0.1
    # by hand for two tokens: p_11 v_1 + p_10 R_{-1} v_0
    p = regard.attention_weights(turned, turned, mask=Causal())[0, 0, 1]
    t = [-(10000.0 ** (-2 * i / 8)) for i in range(4)]
    v0, v1 = x[0, 0, 0].tolist(), x[0, 0, 1].tolist()
    back = [v0[i] * math.cos(t[i]) - v0[i + 4] * math.sin(t[i]) for i in range(4)]
    back += [v0[i + 4] * math.cos(t[i]) + v0[i] * math.sin(t[i]) for i in range(4)]
    by_hand = [
        float(p[1]) * own + float(p[0]) * turned_back
        for own, turned_back in zip(v1, back, strict=True)
    ]
    made = rotated_values(x, here, undo=True)[0, 0, 1]
    assert apart(made, torch.tensor(by_hand, dtype=torch.float64)) < 1e-12


# --- permute gives a view


def test_permute_gives_a_view_that_view_refuses() -> None:
    x = draw(2, 5, 3, 4)  # [batch, tokens, heads, dim]
    heads = x.permute(0, 2, 1, 3)
    assert heads.shape == (2, 3, 5, 4)
    assert heads.data_ptr() == x.data_ptr()
    assert not heads.is_contiguous()
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        heads.view(2, 15, 4)
    assert torch.equal(heads.reshape(2, 15, 4), heads.contiguous().view(2, 15, 4))
    assert all(torch.equal(heads[:, h, t], x[:, t, h]) for h in range(3) for t in range(5))
    # such views are what attention is given, and it may give them back
    out = regard.attend(heads, heads, heads)
    assert torch.equal(out, regard.attend(*[heads.contiguous()] * 3))


# --- what an MLA needs before it can be compared


class Unturned(Rotary):
    """Wrong, as in the note's repository: it gives back what it is given."""

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        return x


def test_a_rotary_that_turns_nothing_and_a_missing_mask_are_seen() -> None:
    layer = mla(16, 2, kv_rank=8, nope_dim=4, rope_dim=4, value_dim=6).double()
    x = draw(1, 6, 16)
    near, far = torch.arange(6)[None], torch.arange(6)[None] * 7
    right = layer(x, near)
    assert apart(layer(x, far), right) > 1e-3, "other distances, another result"
    turned = layer.project.rotary
    layer.project.rotary = Unturned(4, layout="interleaved")
    assert apart(layer(x, far), layer(x, near)) < 1e-14
    assert apart(layer(x, near), right) > 1e-3
    layer.project.rotary, layer.mask = turned, None
    assert apart(layer(x, near)[:, :-1], right[:, :-1]) > 0.01
    assert apart(layer(x, near)[:, -1], right[:, -1]) < 1e-14
