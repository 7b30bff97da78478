"""Linear attention, retention, gated linear attention: every form against the sums over pairs that
define them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.linear import gated_linear, linear_attention, retention
from tests.ops.linear.mechanisms import (
    FORMS,
    MECHANISMS,
    Case,
    assert_same,
    case,
    gammas,
    root,
    states,
)
from tests.oracles.linear import linear, plain_loop, plain_matrix, retained
from tests.rules import GRADIENT, assert_close_rule

NAMES = list(MECHANISMS)


@pytest.mark.full(keep="each")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("G", [1, 2, 4])
def test_every_form_is_the_definition_for_every_chunk_size(name: str, G: int) -> None:
    mechanism, c = MECHANISMS[name], case(B=1 if G == 4 else 2, G=G)
    B = c.q.shape[0]
    start = (torch.randn(B, G, 4, 3).double(), torch.randn(B, G, 4).double().abs() + 1)
    for first in (None, start[: mechanism.parts]):
        given = {} if first is None else dict(zip("Sz", first, strict=False))
        answer = mechanism.exact(c, **given)
        before = [x.clone() for x in start]
        for form in FORMS:
            for size in range(1, 9) if form == "chunk" else [64]:
                out, last = mechanism.run(c, form=form, chunk=size, state=first)
                assert_same(out, answer.out)
                assert len(last) == mechanism.parts
                for x, y in zip(last, states(answer, mechanism.parts), strict=True):
                    assert_same(x, y)
        assert all(map(torch.equal, start, before)), "a state that is given is not changed"


def plain_inputs(name: str, c: Case) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What the plain forms take for a mechanism, H = G."""
    if name in ("retention", "gated", "gated by head"):
        decays = {"retention": gammas(c).to(c.g.dtype), "gated": c.g}
        return c.q * root(c), c.k, c.v, decays.get(name, c.g[..., :1].expand_as(c.g))
    maps = {
        "elu+1": lambda x: F.elu(x) + 1,
        "identity": lambda x: x,
        "relu^2": lambda x: x.relu() ** 2,
    }
    phi = maps[name.split(",")[0]]
    return phi(c.q), phi(c.k), c.v, None


def plains(name: str, c: Case) -> list[Tensor]:
    """The definition as people type it, in three orders of the sum."""
    q, k, v, g = plain_inputs(name, c)
    found = []
    for form in (plain_loop, lambda *x: plain_loop(*x, ahead=True), plain_matrix):
        out = form(q, k, v, g)
        if MECHANISMS[name].parts == 2:
            out = out / form(q, k, torch.ones_like(v[..., :1]), g)
        found.append(out)
    return found


@pytest.mark.full(keep=7)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize(
    "name", ["elu+1", "elu+1, sums", "relu^2", "identity", "retention", "gated", "gated by head"]
)
def test_rounding_is_that_of_plain_math(name: str, scale: float) -> None:
    c = case(B=1, H=2, G=2, T=40, D=8, E=6, scale=scale).to(torch.float32)
    exact = MECHANISMS[name].exact(c.to(torch.float64)).out
    for form in FORMS:
        out, _ = MECHANISMS[name].run(c, form=form, chunk=16)
        assert_close_rule(out, plains(name, c), exact, what=f"{name} {form}")


def gradients(out: Any, leaves: Case, weight: Tensor) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad((out * weight.to(out.dtype)).sum(), leaves, allow_unused=True)


def leaf(c: Case) -> Case:
    return Case(*(x.detach().clone().requires_grad_() for x in c))


def in_two_parts(name: str, c: Case, form: str) -> Tensor:
    """The outputs of two calls, of which the second goes on from the state of the first."""
    run = MECHANISMS[name].run
    first, state = run(c.upto(0, 10), form=form, chunk=9)
    return torch.cat([first, run(c.upto(10, 24), form=form, chunk=9, state=state)[0]], 2)


@pytest.mark.parametrize("name", ["elu+1", "retention", "gated", "gated by head"])
def test_gradients_round_as_those_of_plain_math(name: str) -> None:
    c = case(B=2, H=2, G=2, T=24, D=6, E=5).to(torch.float32)
    weight = torch.randn(2, 2, 24, 5, dtype=torch.float64)
    wide, narrow = leaf(c.to(torch.float64)), leaf(c)
    exact = gradients(plains(name, wide)[0], wide, weight)
    usual = [gradients(plains(name, narrow)[i], narrow, weight) for i in range(3)]
    for form in FORMS:
        mine = leaf(c)
        found = gradients(in_two_parts(name, mine, form), mine, weight)
        for field, x, right, *others in zip(Case._fields, found, exact, *usual, strict=True):
            if right is not None:
                assert_close_rule(x, others, right, GRADIENT, f"{name} {form} {field}")


def test_gradients_reach_the_decay() -> None:
    c = case(B=1, H=2, G=2, T=9)
    gamma = torch.tensor([0.9, 0.5], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x: retention(*c[:3], decay=x, chunk=4, form="chunk")[0], gamma
    )


# Identities.


@pytest.mark.parametrize("form", FORMS)
def test_retention_is_the_paper_s_parallel_form(form: str) -> None:
    c = case(B=1, H=3, G=3, T=12)
    out, _ = retention(*c[:3], form=form, chunk=5)
    assert_same(out, retained(*c[:3], gamma=(0.96875, 0.984375, 0.9921875)))
    given = torch.tensor([0.5, 0.0, 1.0], dtype=torch.float64)
    out, _ = retention(*c[:3], decay=given, form=form, chunk=5)
    assert_same(out, retained(*c[:3], gamma=(0.5, 0.0, 1.0)))


def test_a_scale_cancels_only_where_it_is_normalized() -> None:
    c = case()
    one, other = (linear_attention(*c[:3], scale=s)[0] for s in (1.0, 7.0))
    assert torch.equal(one, other)
    sums = [linear_attention(*c[:3], scale=s, normalize=False)[0] for s in (1.0, 7.0)]
    assert_same(sums[1], 7 * sums[0], 1e-14)


def test_a_feature_map_of_ones_own() -> None:
    """Features may be more than channels: here the outer product, exact for (q . k)^2."""
    c = case(T=9)

    def squares(x: Tensor) -> Tensor:
        return (x[..., :, None] * x[..., None, :]).flatten(-2)

    out, (S, z) = linear_attention(*c[:3], feature_map=squares)
    assert S.shape == (2, 2, 16, 3)
    assert z.shape == (2, 2, 16)
    weights = (c.q @ c.k.repeat_interleave(2, 1).mT).square().tril()
    assert_same(out, weights @ c.v.repeat_interleave(2, 1) / weights.sum(-1, keepdim=True), 1e-11)


# What is known to go wrong.


def test_wrong_variants_are_caught() -> None:
    """Decay behind the writing, heads tiled instead of repeated, another scale or rate, no
    normalizer, a state without z.
    """
    c = case(B=1, H=4, G=2, T=12).to(torch.float32)
    wide = Case(c.q, *(x.repeat_interleave(2, 1) for x in c[1:]))
    tiled = Case(c.q, *(x.repeat(1, 2, 1, 1) for x in c[1:]))
    late = F.pad(c.g, (0, 0, 1, 0))[:, :, :-1]
    half, (S, z) = linear_attention(*c.upto(0, 6)[:3])
    rest = [linear_attention(*c.upto(6, 12)[:3], state=(S, x))[0] for x in (z, torch.zeros_like(z))]
    over_heads = F.elu(wide.k).add(1).cumsum(1)  # a running sum over heads in place of tokens
    total = (F.elu(c.q).add(1) * over_heads).sum(-1, keepdim=True)
    sums = linear_attention(*c[:3], normalize=False)[0]
    cases = {
        "gated": (
            [gated_linear(*c, form=form, chunk=5)[0] for form in FORMS],
            [
                gated_linear(*c._replace(g=late))[0],
                gated_linear(*tiled)[0],
                gated_linear(*c, scale=1.0)[0],
            ],
        ),
        "retention": (
            [retention(*c[:3], form=form, chunk=5)[0] for form in FORMS],
            [
                retention(*c[:3], decay=1 - torch.tensor([2.0**-4, 2.0**-5]))[0],
                retention(*tiled[:3])[0],
            ],
        ),
        "elu+1": (
            [
                torch.cat([half, rest[0]], 2),
                *(linear_attention(*c[:3], form=form, chunk=5)[0] for form in FORMS),
            ],
            [torch.cat([half, rest[1]], 2), sums, sums / total, linear_attention(*tiled[:3])[0]],
        ),
    }
    for name, (right, wrong) in cases.items():
        repeated = wide._replace(g=gammas(c).repeat_interleave(2, 1).float())
        usual = plains(
            "gated" if name == "retention" else name, repeated if name == "retention" else wide
        )
        exact = MECHANISMS[name].exact(c.to(torch.float64)).out
        for out in right:
            assert_close_rule(out, usual, exact, what=name)
        for out in wrong:
            with pytest.raises(AssertionError, match="error"):
                assert_close_rule(out, usual, exact)


@pytest.mark.parametrize("by_head", [False, True])
def test_a_weak_decay_behind_a_strong_one_keeps_its_digits(by_head: bool) -> None:
    c = case(B=1, H=1, G=1, T=64, D=8, E=6)
    g = torch.full_like(c.g, -1e-3)
    g[:, :, :32] = -2000.0
    c = c._replace(g=g).to(torch.float32)
    name = "gated by head" if by_head else "gated"
    exact = linear(*c.to(torch.float64)[:3], log_decay=c.g.double(), scale=root(c)).out
    usual = plains(name, c)
    for form in FORMS:
        assert_close_rule(MECHANISMS[name].run(c, form=form)[0], usual, exact, what=form)
    with pytest.raises(AssertionError, match="error"):
        assert_close_rule(plain_matrix(*plain_inputs(name, c), differences=True), usual, exact)
