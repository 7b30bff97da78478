"""What is not finite, strong decays, and features at their limits."""

from __future__ import annotations

import math

import pytest
import torch

from regard.linear import FEATURE_MAPS, gated_linear, linear_attention, retention
from regard.ops.linear.linear_attention import default_log_decays, normalized_query_features
from tests.ops.linear.mechanisms import FORMS, MECHANISMS, Case, assert_same, case, gammas
from tests.oracles.linear import MAPS, linear, retained


def test_counting_the_padding_is_caught() -> None:
    """A negative control: the right tokens, and a wrong denominator."""
    c = case(T=9)
    real = torch.ones(2, 9, dtype=torch.bool)
    real[:, :3] = False
    zeros = Case(*(x.masked_fill(~real[:, None, :, None], 0) for x in c))
    right = linear(*zeros[:3], feature_map="elu+1", normalize=True, real=real).out
    wrong = linear(*zeros[:3], feature_map="elu+1", normalize=True).out
    assert float((right - wrong)[:, :, 3:].abs().max()) > 0.1
    out, _ = linear_attention(*c[:3], k_positions=torch.arange(9)[None] - 3)
    assert_same(out, right)


@pytest.mark.parametrize("form", FORMS)
def test_an_infinity_is_not_lost(form: str) -> None:
    for field in ("q", "k", "v"):
        c = case(B=1, H=2, T=20)
        getattr(c, field)[0, 1, 10, 0] = math.inf
        out, (S,) = retention(*c[:3], form=form, chunk=8)
        assert bool((~out[0, 1, 10].isfinite()).any())
        assert bool(S.isfinite().all()) is (field == "q")
        assert out[0, 0].isfinite().all()
        assert out[:, :, :10].isfinite().all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("by_head", [False, True])
def test_strong_decay_and_full_reset(form: str, by_head: bool) -> None:
    """-20 in each of 256 steps: e^-5120 in all, where a quotient of running products would be 0 /
    0.
    """
    c = case(B=1, T=256)
    width = 1 if by_head else 4
    strong = c._replace(g=torch.full_like(c.g[..., :width], -20.0))
    own = (c.q * c.k.repeat_interleave(2, 1)).sum(-1, keepdim=True) * c.v.repeat_interleave(2, 1)
    for dtype, bound in ((torch.float64, 1e-15), (torch.float32, 1e-6)):
        leaves = Case(*(x.to(dtype).requires_grad_() for x in strong))
        out, (S,) = gated_linear(*leaves, form=form)
        # what is left of all other tokens is below e^-20 = 2e-9 of them
        limit = (bound + 4 * math.exp(-20)) * float(own.abs().max()) * 4
        assert float((2 * out.double() - own).detach().abs().max()) < limit
        grads = torch.autograd.grad(out.sum() + S.sum(), leaves)
        assert all(x.isfinite().all() for x in grads)
    reset = c.g[..., :width].clone()
    reset[:, :, [100, 101]] = -math.inf
    leaves = Case(*(x.clone().requires_grad_() for x in c._replace(g=reset)))
    out, (S,) = gated_linear(*leaves, form=form)
    after, before = (
        Case(*(x[:, :, part].detach() for x in leaves)) for part in (slice(101, None), slice(100))
    )
    fresh, (end,) = gated_linear(*after, form=form)
    assert_same(out[:, :, 101:], fresh)
    assert_same(S, end)
    assert_same(out[:, :, :100], gated_linear(*before, form=form)[0])
    grads = torch.autograd.grad(out[:, :, 101:].sum() + S.sum(), leaves)
    assert all(x.isfinite().all() for x in grads)
    assert all(x[:, :, :101].eq(0).all() for x in grads[1:3]), "nothing in front of a reset counts"


@pytest.mark.parametrize("form", FORMS)
def test_one_channel_may_be_reset_alone(form: str) -> None:
    c = case(T=20)
    c.g[:, :, 9, 2] = -math.inf
    exact = MECHANISMS["gated"].exact(c)
    out, (S,) = gated_linear(*c, form=form, chunk=8)
    assert_same(out, exact.out)
    assert_same(S, exact.S)


def test_decays_near_1_are_not_rounded_to_1() -> None:
    """Head 23 of fp32: 1 - 2^-28 is 1 in fp32, yet what it keeps of a token after 4096 steps is
    below 1.
    """
    logs = default_log_decays(24, dtype=torch.float32)
    assert bool((logs < 0).all())
    right = torch.tensor([math.log1p(-(2.0 ** (-5 - g))) for g in range(24)], dtype=torch.float64)
    assert float((logs.double() / right - 1).abs().max()) < 1e-6
    gamma = default_log_decays(4, dtype=torch.float64).exp()
    assert gamma.tolist() == pytest.approx([0.96875, 0.984375, 0.9921875, 0.99609375], abs=1e-16)
    c = case(B=1, H=1, G=1, T=6)
    given, default = (retention(*c[:3], decay=d)[0] for d in (gamma[:1], None))
    assert_same(given, default)
    assert_same(default, retained(*c[:3], gamma=[0.96875]))
    assert gammas(c).exp().unique().tolist() == pytest.approx([0.96875], abs=1e-16)


# Features.


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_feature_maps_are_their_formulas(name: str) -> None:
    x = torch.cat([torch.randn(5, 4).double() * s for s in (1e-3, 1, 20)])
    exact = torch.tensor([MAPS[name](row) for row in x.tolist()], dtype=torch.float64)
    assert torch.allclose(FEATURE_MAPS[name](x), exact, rtol=1e-14, atol=0)
    ours, rows = normalized_query_features(name, x), exact.abs().amax(-1, keepdim=True)
    seen = rows[:, 0] > 0
    shares = (ours / ours.abs().amax(-1, keepdim=True))[seen]
    assert torch.allclose(shares, (exact / rows)[seen], rtol=1e-13, atol=0), (
        "one factor for each row"
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("feature_map", ["elu+1", "exp"])
def test_a_query_far_below_0_still_reads_its_mean(feature_map: str, form: str) -> None:
    """Its features are all 0 in fp32: the quotient would be 0 / 0."""
    c = case(T=9).to(torch.float32)
    q = c.q - 1000
    assert FEATURE_MAPS[feature_map](q).eq(0).all()
    out, _ = linear_attention(q, c.k, c.v, feature_map=feature_map, form=form, chunk=4)
    exact = linear(q.double() + 990, c.k.double(), c.v.double(), feature_map="exp", normalize=True)
    if feature_map == "exp":
        assert float((out - exact.out).abs().max()) < 1e-4
    low, high = c.v.amin(2), c.v.amax(2)
    assert bool((out[:, :, -1] >= low.repeat_interleave(2, 1) - 1e-6).all())
    assert bool((out[:, :, -1] <= high.repeat_interleave(2, 1) + 1e-6).all())
    assert out[:, :, 0].ne(0).all()


@pytest.mark.parametrize("form", FORMS)
def test_nothing_seen_is_0_and_has_no_gradient(form: str) -> None:
    """0 / 0: every channel of the first three keys is shut."""
    c = case(B=1, H=1, G=1, T=9)
    k = c.k.clone()
    k[:, :, :3] = -k[:, :, :3].abs()
    leaves = [x.requires_grad_() for x in (c.q.abs(), k, c.v)]
    out, _ = linear_attention(*leaves, feature_map="relu", form=form, chunk=4)
    assert out[:, :, :3].eq(0).all()
    assert out[:, :, 3:].ne(0).any()
    for x in torch.autograd.grad(out[:, :, :3].sum(), leaves):
        assert x.eq(0).all()


# How little a positive feature map tells keys apart.
