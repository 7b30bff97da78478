"""The gated delta rule with a decay per key channel: every form against the loops, and against
ONNX's own equation.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from regard.ops.linear.chunks import decayed_products, split_into_chunks
from regard.ops.linear.delta_rules import gated_delta_rule
from tests.ops.linear.test_delta import FORMS, Case, assert_same, case, gradients, run
from tests.oracles.delta import delta, delta_plain, onnx_gated_delta
from tests.rules import GRADIENT, assert_close_rule


def channels(
    B: int = 2, H: int = 4, G: int = 2, T: int = 7, D: int = 4, E: int = 3, scale: float = 1.0
) -> Case:
    """As `case`, with decays from none to strong, another one for each channel."""
    c = case(B, H, G, T, D, E, scale)
    return c._replace(g=-torch.randn(B, G, T, D, dtype=torch.float64).mul(2).exp())


@pytest.mark.parametrize("G", [1, 2, 4])
def test_every_form_is_the_definition_for_every_chunk_size(G: int) -> None:
    c = channels(G=G)
    start = torch.randn(2, G, 4, 3, dtype=torch.float64)
    for state, scale in ((None, None), (start, 0.7)):
        exact = delta(*c, state=state, scale=scale)
        given = {"scale": scale, "state": None if state is None else (state,)}
        for form in FORMS:
            for size in range(1, 10) if form == "chunk" else [64]:
                out, S = run(c, form=form, chunk=size, **given)
                assert_same(out, exact.out)
                assert_same(S, exact.state)


@pytest.mark.parametrize("form", FORMS)
def test_a_state_splits_a_run_anywhere(form: str) -> None:
    c = channels(B=1, T=70)
    out, S = run(c, form=form, chunk=16)
    for cut in (0, 1, 33, 69, 70):
        first, middle = run(c.upto(0, cut), form=form, chunk=16)
        second, last = run(c.upto(cut, 70), form=form, chunk=16, state=(middle,))
        assert_same(torch.cat([first, second], 2), out)
        assert_same(last, S)


@pytest.mark.parametrize("form", FORMS)
def test_equal_channels_are_one_decay_and_strengths_may_have_a_last_dimension(form: str) -> None:
    c = case(T=20)
    out, S = run(c, form=form, chunk=8)
    wide = c._replace(g=c.g[..., None].expand(*c.g.shape, 4), beta=c.beta[..., None])
    got, last = run(wide, form=form, chunk=8)
    assert_same(got, out)
    assert_same(last, S)


@pytest.mark.parametrize("form", FORMS)
def test_rounding_is_that_of_the_plain_loop(form: str) -> None:
    for scale in (1e-3, 1.0, 1e3):
        c = channels(B=1, H=2, G=2, T=40, D=8, E=6, scale=scale).to(torch.float32)
        exact = delta(*c)
        plains = [delta_plain(*c, erase_first=erase) for erase in (False, True)]
        out, S = run(c, form=form, chunk=16)
        assert_close_rule(out, [p[0] for p in plains], exact.out, what=form)
        assert_close_rule(S, [p[1] for p in plains], exact.state, what=form)


def test_gradients_round_as_those_of_plain_math() -> None:
    c = channels(H=2, T=24, D=6, E=5).to(torch.float32)
    weight = torch.randn(2, 2, 24, 5, dtype=torch.float64)
    rules = [lambda *x, e=e: delta_plain(*x, erase_first=e)[0] for e in (False, True)]
    exact = gradients(rules[0], c.to(torch.float64), weight)
    plains = [gradients(rule, c, weight) for rule in rules]
    for form in FORMS:
        mine = gradients(lambda *x, form=form: run(Case(*x), form=form, chunk=8)[0], c, weight)
        for name, x, right, *usual in zip(Case._fields, mine, exact, *plains, strict=True):
            assert_close_rule(x, usual, right, GRADIENT, f"{form} {name}")


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("form, chunk", [("recurrent", 1), ("chunk", 2), ("parallel", 1)])
def test_gradcheck(form: str, chunk: int) -> None:
    c = channels(B=1, H=2, G=1, T=5, D=3, E=2)
    state = torch.randn(1, 1, 3, 2, dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in (*c, state)]

    def call(*x: Tensor) -> tuple[Tensor, Tensor]:
        out, (S,) = gated_delta_rule(*x[:-1], state=(x[-1],), form=form, chunk=chunk)
        return out, S

    assert torch.autograd.gradcheck(call, leaves)


@pytest.mark.parametrize("form", FORMS)
def test_strong_decays_and_a_channel_that_is_emptied(form: str) -> None:
    """Some channels lose e^-2000 a token beside others that lose nothing: e^(c_i - c_j) does not
    split into two factors.
    """
    c = channels(B=1, T=130)
    c.g[..., 0], c.g[..., 1] = -2000.0, 0.0
    c.g[:, :, 60, 2] = -math.inf
    exact = delta(*c)
    leaves = Case(*(x.requires_grad_() for x in c))
    out, S = run(leaves, form=form, chunk=64)
    assert_same(out, exact.out)
    assert_same(S, exact.state)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum() + S.sum(), leaves))


def test_splitting_the_decay_into_two_factors_fails() -> None:
    """Negative control: (x e^c) (k e^-c)^T, as it is often typed, overflows and loses digits where
    `reads` does not.
    """
    c = channels(B=1, T=64).to(torch.float32)
    x, k, g = c.k, c.k, c.g
    exact = torch.zeros(1, 2, 64, 64, dtype=torch.float64)
    for i in range(64):
        for j in range(i + 1):
            left = g[:, :, j + 1 : i + 1].double().sum(2).exp()
            exact[:, :, i, j] = (x[:, :, i].double() * k[:, :, j].double() * left).sum(-1)
    assert float((decayed_products(x, k, g) - exact).abs().max()) < 1e-6
    total = g.cumsum(-2)
    split = ((x * total.exp()) @ (k * (-total).exp()).mT).tril()
    assert not float((split - exact).abs().max()) < 1e-3
    assert torch.equal(
        decayed_products(*(split_into_chunks(y, 4) for y in (x, k, g)))[0, 0, 3],
        decayed_products(*(y[0, 0, 12:16] for y in (x, k, g))),
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, 7.0])
def test_padding_changes_nothing_and_gives_0(garbage: float, form: str) -> None:
    T = 21
    positions = torch.stack([torch.arange(T), torch.arange(T)])
    positions[0, :4], positions[0, 4:] = -1, torch.arange(T - 4)
    positions[1, [2, 9, 10, 19, 20]] = -1
    c, empty = channels(T=T), positions < 0
    for x in c:
        x.masked_fill_(empty[:, None, :].reshape(2, 1, T, *[1] * (x.ndim - 3)), garbage)
    leaves = Case(*(x.requires_grad_() for x in c))
    out, S = run(leaves, form=form, chunk=8, k_positions=positions)
    exact = delta(*(x.detach().nan_to_num(0, 0, 0) for x in c), real=~empty)
    assert_same(out, exact.out)
    assert_same(S, exact.state)
    for x in torch.autograd.grad(out.sum() + S.sum(), leaves):
        assert x.isfinite().all()
        assert x.movedim(2, 1)[empty].eq(0).all()


@pytest.mark.parametrize("form", FORMS)
def test_a_nan_in_one_channel_reaches_nothing_in_front_of_it(form: str) -> None:
    c = channels(B=1, H=2, T=20)
    clean, _ = run(c, form=form, chunk=8)
    c.g[0, 1, 10, 2] = math.nan
    exact = delta(*c)
    out, S = run(c, form=form, chunk=8)
    assert torch.equal(out.isnan(), exact.out.isnan())
    assert torch.equal(S.isnan(), exact.state.isnan())
    assert out.isnan().any()
    assert_same(out[:, :, :10], clean[:, :, :10])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("per_channel", [False, True])
def test_it_is_the_operator_of_onnx(per_channel: bool, form: str) -> None:
    """LinearAttention, update rule gated_delta: packed [B,T,H*d], both shapes of its decay and of
    its beta.
    """
    c = (channels if per_channel else case)(T=11)
    start = torch.randn(2, 2, 4, 3, dtype=torch.float64)

    def packed(x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2)

    heads = {"q_num_heads": 4, "kv_num_heads": 2}
    for beta in (c.beta, c.beta[:, :1].expand_as(c.beta)):  # one for each head, or one for all
        given = packed(beta) if beta is c.beta else packed(beta)[..., :1]
        out, present = onnx_gated_delta(
            *(packed(x) for x in c[:3]), packed(c.g), given, start, **heads
        )
        got, S = run(c._replace(beta=beta[..., None]), form=form, chunk=4, state=(start,))
        assert_same(packed(got), out)
        assert_same(S, present)


def test_wrong_variants_are_caught() -> None:
    """Decay behind the writing, the mean of the channels, channels in another order."""
    c = channels(B=1, H=2, G=2, T=12).to(torch.float32)
    exact = delta(*c)
    plains = [delta_plain(*c, erase_first=erase)[0] for erase in (False, True)]
    for form in FORMS:
        assert_close_rule(run(c, form=form, chunk=5)[0], plains, exact.out)
    late = torch.cat([torch.zeros_like(c.g[:, :, :1]), c.g[:, :, :-1]], 2)
    for g in (late, c.g.mean(-1), c.g.flip(-1)):
        with pytest.raises(AssertionError, match="error"):
            assert_close_rule(run(c._replace(g=g))[0], plains, exact.out)


@pytest.mark.full
def test_it_compiles_without_a_break() -> None:
    torch._dynamo.reset()
    c = channels(B=1, T=12).to(torch.float32)
    compiled = torch.compile(gated_delta_rule, fullgraph=True, backend="eager")
    for form in ("recurrent", "chunk"):
        usual, S = run(c, form=form, chunk=8)
        out, (last,) = compiled(*c, form=form, chunk=8)
        assert float((out - usual).abs().max()) < 1e-5
        assert float((last - S).abs().max()) < 1e-5
