"""A `score_mod` of FlexAttention as a rule, and rules as one: loops over single numbers call the
same function once for each score, as its definition says.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import regard
from regard import scores
from regard.errors import ArgumentError, ArgumentTypeError
from regard.span import Span
from tests.ops.softmax.plain import assert_near
from tests.oracles.scores import Steps, attention
from tests.scores import rules

H, T, S, D = 4, 5, 6, 4
Made = tuple[Callable[..., Tensor], tuple[Tensor, ...]]
"""A function, and the tensors in its closure that get gradients."""


def drawn(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    made = torch.randn(*shape, generator=draw).to(dtype)
    return made.requires_grad_()


def table(dtype: torch.dtype) -> Made:
    bias = drawn(dtype, H, T, S)
    return lambda s, b, h, i, j: s + bias[h, i, j], (bias,)


def by_row(dtype: torch.dtype) -> Made:
    # a product of whole rows, which no broadcasting over scores would give
    w = drawn(dtype, H, D)
    return lambda s, b, h, i, j: s + w[h] @ w[h] * (i - j), (w,)


def stacked(dtype: torch.dtype) -> Made:
    return lambda s, b, h, i, j: torch.stack([s, s * 0.5, s - s * j]).logsumexp(0), ()


def twice(dtype: torch.dtype) -> Made:
    w, u = drawn(dtype, H), drawn(dtype, 2, seed=1)

    def mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s * w[h] + u[b] * w[h] * w[0]

    return mod, (w, u)


class Layer(nn.Module):
    """A layer whose score_mod is a method that reads a parameter."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.cap = nn.Parameter(drawn(dtype, H).detach().abs() + 1)

    def forward(self, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return self.cap[h] * torch.tanh(s / self.cap[h])


def layer(dtype: torch.dtype) -> Made:
    made = Layer(dtype)
    return made.forward, (made.cap,)


def hides(dtype: torch.dtype) -> Made:
    lengths = torch.tensor([4, 6])  # and the first query sees nothing
    return (lambda s, b, h, i, j: torch.where((j < lengths[b]) & (i > 0), s, -float("inf")), ())


def in_place(dtype: torch.dtype) -> Made:
    w = drawn(dtype, H)

    def mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        s += w[h]
        s *= 2
        return s

    return mod, (w,)


MODS = {x.__name__: x for x in (table, by_row, stacked, twice, layer, hides, in_place)}


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (drawn(dtype, 2, n, t, D, seed=3) for n, t in ((H, T), (2, S), (2, S)))
    return q, k, v


@cache
def loops(name: str, dtype: torch.dtype, order: int = 0) -> list[Tensor]:
    """out and the gradients of q, k, v and of the tensors of the function."""
    (mod, learned), (q, k, v) = MODS[name](dtype), inputs(dtype)

    def pair(s: Tensor, *at: int) -> Tensor:
        return mod(s.clone(), *(torch.tensor(x) for x in at))

    at = [list(range(S - T, S))] * 2, [list(range(S))] * 2
    seen = torch.ones(1, 1, T, S, dtype=torch.bool)
    if name == "hides":  # softmax of a row that sees nothing is not for loops
        seen[:, :, 0] = False
    steps = Steps((lambda s, b, h, i, j: pair(s, b, h, i - (S - T), j),))
    out, _ = attention(q, k, v, steps, visible=seen, q_at=at[0], k_at=at[1], order=order)
    return results(out, (q, k, v, *learned))


def results(out: Tensor, leaves: tuple[Tensor, ...]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(9)
    found = [out.detach()]
    gradients = []
    for _ in range(3):
        d_out = torch.randn(out.shape, generator=draw).to(out.dtype)
        gradients.append(torch.autograd.grad(out, leaves, d_out, retain_graph=True))
    return found + [torch.stack(x) for x in zip(*gradients, strict=True)]


def run(name: str, dtype: torch.dtype, backend: str) -> list[Tensor]:
    (mod, learned), (q, k, v) = MODS[name](dtype), inputs(dtype)
    out = regard.attend(q, k, v, score=scores.from_score_mod(mod), backend=backend)
    return results(out, (q, k, v, *learned))


@pytest.mark.full(keep=["twice"])
@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_a_score_mod_is_what_it_computes_for_one_score(name: str, backend: str) -> None:
    exact = loops(name, torch.float64)
    plain = [loops(name, torch.float32, order) for order in (0, 1, 2)]
    found = run(name, torch.float32, backend)
    assert len(found) == len(exact)
    for i, (x, y) in enumerate(zip(found, exact, strict=True)):
        assert_near(x, y, [p[i] for p in plain], factor=3 if i else 2)
    assert_near(run(name, torch.float64, backend)[0], exact[0], [p[0] for p in plain])


@pytest.mark.parametrize("wrong", ["the other head", "no gradient"])
def test_a_wrong_function_is_found(wrong: str) -> None:
    bias = drawn(torch.float64, H)
    exact, detached = (
        lambda s, b, h, i, j: s * bias[h],
        lambda s, b, h, i, j: s * (bias.detach()[h] if wrong == "no gradient" else bias[H - 1 - h]),
    )
    q, k, v = inputs(torch.float64)
    found = []
    for mod in (exact, detached):
        out = regard.attend(q, k, v, score=scores.from_score_mod(mod))
        found.append(torch.autograd.grad(out.square().sum(), (q, bias), allow_unused=True))
    assert (found[1][1] is None) == (wrong == "no gradient")
    assert torch.equal(found[0][0], found[1][0]) == (wrong == "no gradient")


def test_captured_tensors_are_the_tensors_of_the_rule() -> None:
    mod, (w, u) = twice(torch.float32)
    rule = scores.from_score_mod(mod)
    assert [id(x) for x in rule.tensors()] == [id(w), id(u)]
    assert str(rule) == "fn(mod)"
    assert rule == scores.from_score_mod(mod)
    assert rule != scores.from_score_mod(lambda s, b, h, i, j: s)
    q, k, v = inputs(torch.float32)

    def result(rule: scores.ScoreRule) -> Tensor:
        with torch.no_grad():
            return regard.attend(q, k, v, score=rule)

    other, copied = rule.with_tensors([2 * w.detach(), u.detach()]), copy.deepcopy(rule)
    assert not torch.equal(result(other), result(rule))
    assert torch.equal(result(copied), result(rule))
    with torch.no_grad():
        w *= 2
    assert torch.equal(result(other), result(rule))
    assert not torch.equal(result(copied), result(rule))
    with pytest.raises(ArgumentError, match="reads tensors from its closure"):
        pickle.dumps(rule)
    plain = pickle.loads(pickle.dumps(scores.from_score_mod(rules.wave)))
    assert plain == scores.from_score_mod(rules.wave)


def test_parameters_and_captured_tensors_together() -> None:
    captured, given = drawn(torch.float64, H), drawn(torch.float64, H, seed=1)

    def mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, w: Tensor) -> Tensor:
        return s * captured[h] + w[h] * j

    rule = scores.from_score_mod(mod, (given,))
    assert [id(x) for x in rule.tensors()] == [id(given), id(captured)]
    q, k, v = inputs(torch.float64)
    out = regard.attend(q, k, v, score=rule)
    by_fn = scores.FnScore(
        lambda s, b, h, i, j, w, c: s * c[h] + w[h] * j, (given, captured), slots=True
    )
    same = regard.attend(q, k, v, score=by_fn)
    for x, y in zip(
        torch.autograd.grad(out.sum(), rule.tensors()),
        torch.autograd.grad(same.sum(), by_fn.tensors()),
        strict=True,
    ):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-13)


def test_what_is_no_score_mod_is_refused() -> None:
    q, k, v = inputs(torch.float32)
    with pytest.raises(ArgumentTypeError, match="score_mod is int; it must be a function"):
        scores.from_score_mod(3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match=r"parameters\[0\] is float"):
        scores.from_score_mod(rules.wave, (1.0,))  # type: ignore[arg-type]
    branch = scores.from_score_mod(lambda s, b, h, i, j: s if i > j else 2 * s)
    with pytest.raises(RuntimeError, match="data-dependent control flow"):
        regard.attend(q, k, v, score=branch)
    pair = scores.from_score_mod(lambda s, b, h, i, j: torch.stack([s, s]))
    with pytest.raises(ArgumentError, match="it must return one number per score"):
        regard.attend(q, k, v, score=pair)


NAMED: dict[str, Any] = {
    name: rule for name in rules.MADE if (rule := rules.make(name, rules.tensors_for(name, 7)).rule)
}


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.full(keep=["clamp-then-head", "long"])
@pytest.mark.parametrize("name", NAMED)
def test_every_named_rule_both_ways(name: str) -> None:
    rule = NAMED[name]
    q, k, v = (x.detach() for x in inputs(torch.float64))
    at = Span(S - T, T), Span(0, S)
    whole = [
        x for x in rule.steps() if x.scope != "pair" or x.stages != ("scores",) or x.needs_count
    ]
    if whole:
        with pytest.raises(ArgumentError, match="cannot be a score_mod, which is given one score"):
            scores.to_score_mod(rule, *at)
        return
    mod = scores.to_score_mod(rule, *at)
    ours = regard.attend(q, k, v, score=rule)
    theirs = flex_attention(q, k, v, score_mod=mod, enable_gqa=True)
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-13)
    back = regard.attend(q, k, v, score=scores.from_score_mod(mod))
    torch.testing.assert_close(back, ours, rtol=0, atol=1e-13)
