"""The delta rules: every form of each against Python loops, the mechanisms that they contain on the
fixed example, and what each must and must not do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.linear import delta_rule, gated_delta_rule, generalized_delta_rule
from regard.ops.linear.linear_recurrence import decayed_products, split_into_chunks
from tests.ops.linear import mechanisms
from tests.oracles.delta import delta, delta_plain, delta_plain_matrices, onnx_gated_delta
from tests.oracles.generalized_delta import (
    generalized_delta,
    generalized_delta_plain,
    generalized_delta_plain_system,
)
from tests.rules import GRADIENT, assert_close_rule, in_orders

FORMS = ("recurrent", "chunk", "parallel", "auto")
Inputs = dict[str, Tensor]


class Rule(NamedTuple):
    """One delta rule: the names of its inputs, whether each channel has a decay, how to run it, its
    definition, and the same as somebody would type it, in several orders.
    """

    names: str
    by_channel: bool
    function: Callable[..., Any]
    definition: Callable[..., Any]
    typed: tuple[Callable[..., tuple[Tensor, Tensor]], ...]

    def run(self, x: Inputs, **options: Any) -> tuple[Tensor, Tensor]:
        named = {"a": x["a"]} if "a" in x else {}
        plain = [x[name] for name in self.names.split() if name != "a"]
        out, (S,) = self.function(*plain, **named, **options)
        return out, S

    def exact(self, x: Inputs, **options: Any) -> Any:
        return self.definition(*x.values(), **options)

    def plains(self, x: Inputs) -> list[tuple[Tensor, Tensor]]:
        return [form(*x.values()) for form in self.typed]

    def draw(
        self, B: int = 2, H: int = 4, G: int = 2, T: int = 7, D: int = 4, E: int = 3,
        scale: float = 1.0,
    ) -> Inputs:  # fmt: skip
        """Keys of length 1, strengths in (0, 1), reads that shrink the state, decays from none to
        strong; in float64.
        """
        make: Any = {"dtype": torch.float64}
        k, c, a = (F.normalize(torch.randn(B, G, T, D, **make), dim=-1) for _ in "kca")
        g = -torch.randn(B, G, T, D, **make).mul(2).exp()
        every = {
            "q": torch.randn(B, H, T, D, **make) * scale,
            "k": k,
            "v": torch.randn(B, G, T, E, **make) * scale,
            "beta": torch.randn(B, G, T, **make).sigmoid(),
            "c": 0.7 * c,
            "g": g if self.by_channel else g[..., 0],
            "a": a,
        }
        return {name: every[name] for name in self.names.split()}


DELTA = tuple(lambda *x, e=e: delta_plain(*x, erase_first=e) for e in (False, True))
GENERAL = tuple(lambda *x, m=m: generalized_delta_plain(*x, matrix=m) for m in (False, True))
RULES = {
    "delta": Rule("q k v beta", False, delta_rule, delta, DELTA),
    "gated": Rule("q k v beta g", False, gated_delta_rule, delta, DELTA),
    "channels": Rule("q k v beta g", True, gated_delta_rule, delta, DELTA),
    "general": Rule("q k v c g a", True, generalized_delta_rule, generalized_delta, GENERAL),
    "general by head": Rule(
        "q k v c g a", False, generalized_delta_rule, generalized_delta, GENERAL
    ),
    "general, a = -k": Rule("q k v c g", True, generalized_delta_rule, generalized_delta, GENERAL),
    "general by head, a = -k": Rule(
        "q k v c g", False, generalized_delta_rule, generalized_delta, GENERAL
    ),
}
each_rule = pytest.mark.parametrize("name", RULES)
each_form = pytest.mark.parametrize("form", FORMS)


def to(x: Inputs, dtype: torch.dtype) -> Inputs:
    return {name: y.to(dtype) for name, y in x.items()}


def upto(x: Inputs, first: int, stop: int) -> Inputs:
    return {name: y[:, :, first:stop] for name, y in x.items()}


def leaves_of(x: Inputs) -> Inputs:
    return {name: y.detach().clone().requires_grad_() for name, y in x.items()}


def assert_same(x: Tensor, y: Tensor, bound: float = 1e-11) -> None:
    mechanisms.assert_same(x, y, bound)


@pytest.mark.full(keep="each")
@each_rule
@pytest.mark.parametrize("G", [1, 2, 4])
def test_every_form_is_the_definition_for_every_chunk_size(G: int, name: str) -> None:
    rule = RULES[name]
    x, start = rule.draw(G=G), torch.randn(2, G, 4, 3, dtype=torch.float64)
    for state, scale in ((None, None), (start, 0.7)):
        exact, before = rule.exact(x, state=state, scale=scale), start.clone()
        given = {"scale": scale, "state": None if state is None else (state,)}
        for form in FORMS:
            for size in (1, 2, 3, 4, 8) if form == "chunk" else (64,):
                out, S = rule.run(x, form=form, chunk=size, **given)
                assert_same(out, exact.out)
                assert_same(S, exact.state)
        assert torch.equal(start, before), "a state that is given is not changed"


@pytest.mark.full(keep=7)
@each_rule
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_rounding_is_that_of_the_plain_loop(scale: float, name: str) -> None:
    rule = RULES[name]
    x = to(rule.draw(B=1, H=2, T=40, D=8, E=6, scale=scale), torch.float32)
    exact, plains = rule.exact(x), rule.plains(x)
    for form in FORMS:
        out, S = rule.run(x, form=form, chunk=16)
        assert_close_rule(out, [p[0] for p in plains], exact.out, what=form)
        assert_close_rule(S, [p[1] for p in plains], exact.state, what=form)


def in_two_parts(rule: Rule, x: Inputs, form: str) -> Tensor:
    """The outputs of two calls, of which the second goes on from the state of the first."""
    first, S = rule.run(upto(x, 0, 10), form=form, chunk=9)
    return torch.cat([first, rule.run(upto(x, 10, 24), form=form, chunk=9, state=(S,))[0]], 2)


@each_rule
def test_gradients_round_as_those_of_plain_math(name: str) -> None:
    rule = RULES[name]
    x = to(rule.draw(H=2, T=24, D=6, E=5), torch.float32)
    weight = torch.randn(2, 2, 24, 5, dtype=torch.float64)

    def gradients(out: Callable[..., Tensor], x: Inputs) -> list[Tensor]:
        leaves = leaves_of(x)
        loss = (out(leaves) * weight.to(x["q"].dtype)).sum()
        return list(torch.autograd.grad(loss, list(leaves.values())))

    typed = [lambda y, form=form: form(*y.values())[0] for form in rule.typed]
    exact = gradients(typed[0], to(x, torch.float64))
    if name == "gated":
        typed.append(lambda y: delta_plain_matrices(*y.values()))
    plains = [gradients(form, x) for form in typed]
    for form in FORMS:
        mine = gradients(lambda y, form=form: in_two_parts(rule, y, form), x)
        for key, found, right, *usual in zip(x, mine, exact, *plains, strict=True):
            assert_close_rule(found, usual, right, GRADIENT, f"{form} {key}")


# What a rule promises.


@each_form
def test_the_square_of_a_first_key_may_overflow(form: str) -> None:
    """Only products of a key with later keys enter, and 1e20 squared is no fp32 number."""
    q, k, v, beta = torch.ones(4, 1, 1, 3, 2).unbind()
    k = torch.cat([torch.full_like(k[:, :, :1], 1e20), k[:, :, 1:] / 2], -2)
    out, _ = delta_rule(q, k, v, beta[..., 0] / 2, scale=1.0, form=form)
    # S = k v / 2; then S <- S - k (S k - v) / 2 with k k = 1/2, twice
    right = torch.tensor([1.0, 0.75, 0.5625], dtype=torch.float64)
    assert_same((out[0, 0, :, 0] / 1e20).double(), right, 1e-6)


@pytest.mark.full(keep="each")
@each_form
@pytest.mark.parametrize("name", [x for x in RULES if x != "delta"])
def test_strong_decays_and_a_reset(name: str, form: str) -> None:
    """Decays of e^-2000 a token beside none: e^(c_i - c_j) does not split into two factors. And g =
    -inf clears the state, or a channel of it.
    """
    rule = RULES[name]
    x = rule.draw(B=1, T=130)
    if rule.by_channel:
        x["g"][..., 0], x["g"][..., 1] = -2000.0, 0.0
        x["g"][:, :, 60, 2] = -math.inf
    else:
        x["g"][:, :, ::3] = -2000.0
        x["g"][:, :, [60, 61]] = -math.inf
    exact, leaves = rule.exact(x), leaves_of(x)
    out, S = rule.run(leaves, form=form, chunk=64)
    assert_same(out, exact.out)
    assert_same(S, exact.state)
    grads = torch.autograd.grad(out[:, :, 61:].sum() + S.sum(), list(leaves.values()))
    assert all(bool(y.isfinite().all()) for y in grads)
    if name == "gated":  # the others read the state in front of the reset
        early = dict(zip(leaves, grads, strict=True))
        assert all(bool(early[n][:, :, :60].eq(0).all()) for n in ("k", "v")), "before a reset"


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("floor", [-5.0, -5.914, -40.0])
def test_strong_decays_do_not_overflow_in_chunks_of_64(floor: float, dtype: torch.dtype) -> None:
    """An error of other code: with one anchor for a chunk of 64 tokens, decays of e^-5 a token give
    e^320; with blocks of 16, the limit is e^-5.914. Here every exponent is a sum of decays.
    """
    rule = RULES["general, a = -k"]
    x = rule.draw(B=1, H=2, T=70)
    g = torch.full_like(x["g"], floor)
    g[..., 1] = 0.0
    g[..., 2] = -torch.rand(g.shape[:-1], dtype=torch.float64) * 1e-3
    x = to({**x, "c": 0.7 * g.exp() * x["k"], "g": g}, dtype)  # Kimi Delta Attention
    anchored = (-g.cumsum(2).float()).exp()  # what one anchor multiplies keys by
    assert not bool(anchored.isfinite().all())
    exact, wide = rule.exact(x), list(to(x, torch.float32).values())
    forms = (
        *(lambda form=form: form(*wide)[0] for form in rule.typed),
        lambda: generalized_delta_plain_system(*wide),
    )
    plains = [y.to(dtype) for form in forms for y in in_orders(form)]
    leaves = leaves_of(x)
    for form in ("chunk", "parallel"):
        out, S = rule.run(leaves, form=form, chunk=64)
        assert_close_rule(out, plains, exact.out, what=form)
        found = torch.autograd.grad(out.float().sum() + S.sum(), list(leaves.values()))
        assert all(bool(y.isfinite().all()) for y in found)


def test_a_weak_decay_behind_a_strong_one_keeps_its_digits() -> None:
    rule = RULES["gated"]
    x = rule.draw(B=1, H=1, G=1, T=64, D=8, E=6)
    x["g"][:, :, :32], x["g"][:, :, 32:] = -2000.0, -1e-3
    x = to(x, torch.float32)
    exact, plains = rule.exact(x).out, [p[0] for p in rule.plains(x)]
    for form in FORMS:
        assert_close_rule(rule.run(x, form=form)[0], plains, exact, what=form)
    with pytest.raises(AssertionError, match="error"):
        assert_close_rule(delta_plain_matrices(*x.values(), differences=True), plains, exact)


def test_splitting_the_decay_into_two_factors_fails() -> None:
    """Negative control: (x e^c) (k e^-c)^T, as it is often typed, overflows and loses digits."""
    drawn = to(RULES["channels"].draw(B=1, T=64), torch.float32)
    x, k, g = drawn["k"], drawn["k"], drawn["g"]
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


# The mechanisms that the rules contain, and others, wrong ones too.


@each_form
@pytest.mark.parametrize("name", ["gated", "channels"])
def test_it_is_the_operator_of_onnx(name: str, form: str) -> None:
    """LinearAttention, update rule gated_delta: packed [B,T,H*d], both shapes of its decay and of
    its beta.
    """
    rule = RULES[name]
    x, start = rule.draw(T=11), torch.randn(2, 2, 4, 3, dtype=torch.float64)

    def packed(y: Tensor) -> Tensor:
        return y.transpose(1, 2).flatten(2)

    for shared in (False, True):  # one strength for each head, or one for all
        beta = x["beta"][:, :1].expand_as(x["beta"]) if shared else x["beta"]
        given = packed(beta)[..., :1] if shared else packed(beta)
        out, present = onnx_gated_delta(
            *(packed(x[n]) for n in "qkvg"), given, start, q_num_heads=4, kv_num_heads=2
        )
        got, S = rule.run({**x, "beta": beta[..., None]}, form=form, chunk=4, state=(start,))
        assert_same(packed(got), out)
        assert_same(S, present)


def test_wrong_variants_are_caught() -> None:
    """Decay behind the writing, strength on the value alone, heads tiled instead of repeated,
    another scale; the mean of the channels, and channels in another order; the read behind the
    decay, and `a` of another sign.
    """
    for name, rule in RULES.items():
        H = 4 if name == "gated" else 2
        x = to(rule.draw(B=1, H=H, G=2, T=12), torch.float32)
        own = {n: y if n == "q" else y.repeat_interleave(H // 2, 1) for n, y in x.items()}
        exact, plains = rule.exact(x).out, [p[0] for p in rule.plains(own)]
        for form in FORMS:
            assert_close_rule(rule.run(x, form=form, chunk=5)[0], plains, exact)
        wrong: list[Inputs] = []
        if "g" in x:
            late = torch.cat([torch.zeros_like(x["g"][:, :, :1]), x["g"][:, :, :-1]], 2)
            wrong.append({**x, "g": late})
        if name == "gated":
            tiled = {n: y.repeat(1, 2, *[1] * (y.ndim - 2)) for n, y in x.items() if n != "q"}
            strong = torch.ones_like(x["beta"])
            wrong += [{**x, **tiled}, {**x, "v": x["v"] * x["beta"][..., None], "beta": strong}]
        if name == "channels":
            wrong += [{**x, "g": x["g"].mean(-1)}, {**x, "g": x["g"].flip(-1)}]
        if name == "general":
            wrong += [{**x, "c": x["c"] * x["g"].exp()}, {**x, "a": -x["a"]}]
        outputs = [rule.run(y)[0] for y in wrong] + [rule.run(x, scale=1.0)[0]]
        for out in outputs:
            with pytest.raises(AssertionError, match="error"):
                assert_close_rule(out, plains, exact)
