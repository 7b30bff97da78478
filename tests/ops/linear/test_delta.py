"""The delta rule, with and without decay: every form against Python loops, and against what it must
and must not do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.ops.linear.delta_rules import delta_rule, gated_delta_rule
from regard.span import Span
from tests.oracles.delta import delta, delta_plain, delta_plain_matrices
from tests.rules import GRADIENT, assert_close_rule

FORMS = ("recurrent", "chunk", "parallel", "auto")


class Case(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor

    def to(self, dtype: torch.dtype) -> Case:
        return Case(*(x.to(dtype) for x in self))

    def upto(self, first: int, stop: int) -> Case:
        return Case(*(x[:, :, first:stop] for x in self))


def case(
    B: int = 2, H: int = 4, G: int = 2, T: int = 7, D: int = 4, E: int = 3, scale: float = 1.0
) -> Case:
    """Keys of length 1, strengths in (0, 1), decays from none to strong; in float64."""
    draw: Any = {"dtype": torch.float64}
    return Case(
        torch.randn(B, H, T, D, **draw) * scale,
        F.normalize(torch.randn(B, G, T, D, **draw), dim=-1),
        torch.randn(B, G, T, E, **draw) * scale,
        torch.randn(B, G, T, **draw).sigmoid(),
        -torch.randn(B, G, T, **draw).mul(2).exp(),
    )


def run(c: Case, *, gated: bool = True, **options: Any) -> tuple[Tensor, Tensor]:
    if gated:
        out, (S,) = gated_delta_rule(*c, **options)
    else:
        out, (S,) = delta_rule(*c[:4], **options)
    return out, S


def assert_same(x: Tensor, y: Tensor, bound: float = 1e-12) -> None:
    """fp64 against fp64: sums of a few dozen products of order 1, a bound of thousands of
    roundings.
    """
    assert x.shape == y.shape
    assert x.dtype == y.dtype == torch.float64
    assert float((x - y).detach().abs().max()) <= bound * (1 + float(y.detach().abs().max()))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("G", [1, 2, 4])
def test_every_form_is_the_definition_for_every_chunk_size(G: int, gated: bool) -> None:
    c = case(G=G)
    start = torch.randn(2, G, 4, 3, dtype=torch.float64)
    for state, options in ((None, {}), (start, {"scale": 0.7})):
        out, S = delta(*c[:4], c.g if gated else None, state=state, **options)
        given = {**options, "gated": gated, "state": None if state is None else (state,)}
        before = start.clone()
        for form, sizes in (
            ("recurrent", [64]),
            ("parallel", [1]),
            ("auto", [64]),
            ("chunk", range(1, 9)),
        ):
            for size in sizes:
                got, last = run(c, form=form, chunk=size, **given)
                assert_same(got, out)
                assert_same(last, S)
        assert torch.equal(start, before), "a state that is given is not changed"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("T", [0, 1, 9, 70])
def test_a_state_splits_a_run_anywhere(T: int, form: str) -> None:
    c = case(B=1, H=6, T=T)
    out, S = run(c, form=form, chunk=16)
    assert out.shape == (1, 6, T, 3)
    for cut in sorted({0, min(1, T), T // 2, max(0, T - 1), T}):
        first, middle = run(c.upto(0, cut), form=form, chunk=16)
        second, last = run(c.upto(cut, T), form=form, chunk=16, state=(middle,))
        together = torch.cat([first, second], 2)
        assert T == 0 or float((together - out).abs().max()) < 1e-12
        assert_same(last, S)
        assert last.data_ptr() != middle.data_ptr()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("gated", [False, True])
def test_rounding_is_that_of_the_plain_loop(gated: bool, scale: float, form: str) -> None:
    c = case(B=1, H=2, G=2, T=40, D=8, E=6, scale=scale).to(torch.float32)
    g = c.g if gated else None
    exact = delta(*c[:4], g)
    plains = [delta_plain(*c[:4], g, erase_first=erase) for erase in (False, True)]
    out, S = run(c, gated=gated, form=form, chunk=16)
    assert_close_rule(out, [p[0] for p in plains], exact.out, what=form)
    assert_close_rule(S, [p[1] for p in plains], exact.state, what=form)


def gradients(rule: Callable[..., Tensor], c: Case, weight: Tensor) -> tuple[Tensor, ...]:
    leaves = Case(*(x.detach().clone().requires_grad_() for x in c))
    return torch.autograd.grad((rule(*leaves) * weight.to(c.q.dtype)).sum(), leaves)


def test_gradients_round_as_those_of_plain_math() -> None:
    c = case(B=2, H=2, G=2, T=24, D=6, E=5).to(torch.float32)
    weight = torch.randn(2, 2, 24, 5, dtype=torch.float64)
    loop, erasing = (lambda *x, e=e: delta_plain(*x, erase_first=e)[0] for e in (False, True))
    exact = gradients(loop, c.to(torch.float64), weight)
    plains = [gradients(rule, c, weight) for rule in (loop, erasing, delta_plain_matrices)]
    for form in FORMS:
        mine = gradients(lambda *x, form=form: run(Case(*x), form=form, chunk=9)[0], c, weight)
        for name, x, right, *usual in zip(Case._fields, mine, exact, *plains, strict=True):
            assert_close_rule(x, usual, right, GRADIENT, f"{form} {name}")


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("form, chunk", [("recurrent", 1), ("chunk", 2), ("parallel", 1)])
@pytest.mark.parametrize("gated", [False, True])
def test_gradcheck(gated: bool, form: str, chunk: int) -> None:
    c = case(B=1, H=2, G=1, T=5, D=3, E=2)
    state = torch.randn(1, 1, 3, 2, dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in (*c[: 5 if gated else 4], state)]

    def call(*x: Tensor) -> tuple[Tensor, Tensor]:
        rule = gated_delta_rule if gated else delta_rule
        out, (S,) = rule(*x[:-1], state=(x[-1],), form=form, chunk=chunk)
        return out, S

    assert torch.autograd.gradcheck(call, leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_low_precision_is_summed_in_fp32(dtype: torch.dtype, form: str) -> None:
    c = case(T=20).to(dtype)
    out, S = run(c, form=form, chunk=8)
    wide, last = run(c.to(torch.float32), form=form, chunk=8)
    assert out.dtype == dtype
    assert torch.equal(out, wide.to(dtype))
    assert S.dtype == torch.float32
    assert torch.equal(S, last)
    apart = c._replace(beta=c.beta.float(), g=c.g.float())  # gates may be wider than q, k, v
    assert torch.equal(run(apart, form=form, chunk=8)[0], out)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(run(c.to(torch.float32), form=form, chunk=8)[0], wide)


# What the rule promises.


@pytest.mark.parametrize("form", FORMS)
def test_strength_0_writes_nothing_and_gates_0_are_the_delta_rule(form: str) -> None:
    c = case(T=20)
    start = torch.randn(2, 2, 4, 3, dtype=torch.float64)
    _, S = run(c._replace(beta=torch.zeros_like(c.beta)), gated=False, form=form, state=(start,))
    assert torch.equal(S, start)
    for x, y in zip(
        run(c._replace(g=torch.zeros_like(c.g)), form=form),
        run(c, gated=False, form=form),
        strict=True,
    ):
        assert_same(x, y, 1e-15)


@pytest.mark.parametrize("form", FORMS)
def test_orthogonal_keys_hold_their_values_and_a_second_writing_replaces(form: str) -> None:
    D, E = 6, 5
    k = torch.linalg.qr(torch.randn(D, D, dtype=torch.float64))[0][None, None]
    v = torch.randn(1, 1, D, E, dtype=torch.float64)
    one = torch.ones(1, 1, D, dtype=torch.float64)
    _, (S,) = delta_rule(k, k, v, one, form=form, chunk=4)
    assert_same(S[0, 0].T @ k[0, 0].T, v[0, 0].T, 1e-14)
    again = v.clone()
    again[:, :, 2] = torch.randn(E, dtype=torch.float64)
    _, (S,) = delta_rule(
        k[:, :, 2:3], k[:, :, 2:3], again[:, :, 2:3], one[:, :, :1], state=(S,), form=form
    )
    assert_same(S[0, 0].T @ k[0, 0].T, again[0, 0].T, 1e-14)
    added = S + k[:, :, 2, :, None] * again[:, :, 2, None]  # what linear attention would do
    assert float((added[0, 0].T @ k[0, 0, 2] - again[0, 0, 2]).abs().max()) > 0.1


def test_the_bound_on_the_length_of_keys_is_where_the_state_grows() -> None:
    """The docstring's claim: |1 - beta k^2| <= 1 keeps the state, a little more does not."""
    k = torch.ones(1, 1, 200, 1, dtype=torch.float64)
    v, start = torch.zeros_like(k), torch.ones(1, 1, 1, 1, dtype=torch.float64)
    for beta, kept in ((1.9, True), (2.0, True), (2.1, False)):
        _, (S,) = delta_rule(k, k, v, torch.full((1, 1, 200), beta, dtype=k.dtype), state=(start,))
        assert (float(S.abs().max()) <= 1) is kept
        assert_same(S, start * (1 - beta) ** 200, 1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_strong_decay_and_full_reset(form: str) -> None:
    c = case(B=1, T=256)
    strong = c._replace(g=torch.full_like(c.g, -20.0))
    out, S = delta(*strong)
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        leaves = Case(*(x.to(dtype).requires_grad_() for x in strong))
        got, last = run(leaves, form=form)
        assert float((got.double() - out).detach().abs().max()) < bound
        assert float((last.double() - S).detach().abs().max()) < bound
        assert all(x.isfinite().all() for x in torch.autograd.grad(got.sum() + last.sum(), leaves))
    reset = c.g.clone()
    reset[:, :, [100, 101]] = -math.inf
    leaves = Case(*(x.clone().requires_grad_() for x in c._replace(g=reset)))
    got, last = run(leaves, form=form)
    fresh, S = run(c.upto(101, 256), form=form)
    assert_same(got[:, :, 101:], fresh)
    assert_same(last, S)
    assert_same(got[:, :, :100], run(c.upto(0, 100), form=form)[0])
    grads = torch.autograd.grad(got[:, :, 101:].sum() + last.sum(), leaves)
    assert all(x.isfinite().all() for x in grads)
    assert all(x[:, :, :101].eq(0).all() for x in grads[1:4]), "nothing in front of a reset counts"


def test_a_weak_decay_behind_a_strong_one_keeps_its_digits() -> None:
    c = case(B=1, H=1, G=1, T=64, D=8, E=6)
    g = torch.full_like(c.g, -1e-3)
    g[:, :, :32] = -2000.0
    c = c._replace(g=g).to(torch.float32)
    exact = delta(*c).out
    plains = [delta_plain(*c, erase_first=erase)[0] for erase in (False, True)]
    for form in FORMS:
        assert_close_rule(run(c, form=form)[0], plains, exact, what=form)
    with pytest.raises(AssertionError, match="error"):
        assert_close_rule(delta_plain_matrices(*c, differences=True), plains, exact)


# Padding, and what is not finite.


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, 7.0])
def test_padding_changes_nothing_and_gives_0(garbage: float, form: str) -> None:
    T = 21
    positions = torch.stack([torch.arange(T), torch.arange(T)])
    positions[0, :4], positions[0, 4:] = -1, torch.arange(T - 4)  # left
    positions[1, [2, 9, 10, 19, 20]] = -1  # inside and right
    c = case(T=T)
    empty = positions < 0
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
    for row in range(2):
        alone = Case(*(x[row : row + 1, :, ~empty[row]].detach() for x in c))
        got, last = run(alone, form=form, chunk=8)
        assert_same(out[row : row + 1, :, ~empty[row]].detach(), got)
        assert_same(S[row : row + 1].detach(), last)


def test_positions_of_a_span_and_of_one_row_for_all() -> None:
    c = case(T=5)
    whole = run(c)[0]
    assert torch.equal(run(c, k_positions=Span(3, 5))[0], whole)
    assert torch.equal(run(c.upto(0, 0), k_positions=Span(-1, 0))[0], whole[:, :, :0])
    got, S = run(c, k_positions=Span(-2, 5))  # -2 and -1 are no positions of tokens
    rest, last = run(c.upto(2, 5))
    assert got[:, :, :2].eq(0).all()
    assert_same(got[:, :, 2:], rest)
    assert_same(S, last)
    one = run(c, k_positions=torch.tensor([[-1, -1, 0, 1, 2]]))
    assert torch.equal(one[0], got)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", Case._fields)
def test_a_nan_reaches_what_it_must_and_nothing_in_front_of_it(name: str, form: str) -> None:
    c = case(B=1, H=2, T=20)
    clean, _ = run(c, form=form, chunk=8)
    getattr(c, name)[0, 1, 10].view(-1)[:1] = math.nan
    exact = delta(*c)
    got, S = run(c, form=form, chunk=8)
    assert torch.equal(got.isnan(), exact.out.isnan())
    assert torch.equal(S.isnan(), exact.state.isnan())
    assert got.isnan().any()
    assert_same(got[:, :, :10], clean[:, :, :10])
    assert_same(got[:, 0], clean[:, 0])
    leaves = Case(*(x.detach().requires_grad_() for x in c))
    if form in ("chunk", "parallel"):  # the loop's own autograd multiplies 0 by NaN
        first = run(leaves, form=form, chunk=8)[0][:, :, :10].sum()
        assert all(x.isfinite().all() for x in torch.autograd.grad(first, leaves))


# Others, wrong ones too.


def test_wrong_variants_are_caught() -> None:
    """Decay behind the writing, strength on the value alone, heads tiled instead of repeated,
    another scale.
    """
    c = case(B=1, H=4, G=2, T=12).to(torch.float32)
    exact = delta(*c)
    wide = c._replace(
        k=c.k.repeat_interleave(2, 1),
        v=c.v.repeat_interleave(2, 1),
        beta=c.beta.repeat_interleave(2, 1),
        g=c.g.repeat_interleave(2, 1),
    )
    plains = [delta_plain(*wide, erase_first=erase)[0] for erase in (False, True)]
    right = [run(c, form=form, chunk=5)[0] for form in FORMS]
    late = F.pad(c.g, (1, 0))[..., :-1]
    swapped = [x.repeat(1, 2, *[1] * (x.ndim - 2)) for x in c[1:]]
    wrong = [
        run(c._replace(g=late))[0],
        run(c._replace(v=c.v * c.beta[..., None], beta=torch.ones_like(c.beta)))[0],
        run(Case(c.q, *swapped))[0],
        run(c, scale=1.0)[0],
    ]
    for out in right:
        assert_close_rule(out, plains, exact.out)
    for out in wrong:
        with pytest.raises(AssertionError, match="error"):
            assert_close_rule(out, plains, exact.out)


def test_it_is_the_rule_of_qwen3_next_in_transformers() -> None:
    """Theirs has [B, T, heads, dim], scales by 1/sqrt(D), and shares a query among value heads: so
    H = G here.
    """
    theirs = pytest.importorskip(
        "transformers.models.qwen3_next.modeling_qwen3_next", reason="transformers is not installed"
    )
    c = case(H=3, G=3, T=70, D=8, E=6).to(torch.float32)
    exact = delta(*c)
    start = torch.randn(2, 3, 8, 6)
    resumed = delta(*c, state=start)
    q, k, v, beta, g = (x.transpose(1, 2) for x in c)
    for function in (theirs.torch_recurrent_gated_delta_rule, theirs.torch_chunk_gated_delta_rule):
        for first, known in ((None, exact), (start, resumed)):
            out, S = function(q, k, v, g=g, beta=beta, initial_state=first, output_final_state=True)
            for form in FORMS:
                mine, last = run(c, form=form, state=None if first is None else (first,))
                assert_close_rule(mine, out.transpose(1, 2), known.out, what=form)
                assert_close_rule(last, S, known.state, what=form)
                ungated = run(c, gated=False, form=form)[0]
                with pytest.raises(AssertionError, match="error"):
                    assert_close_rule(ungated, out.transpose(1, 2), known.out)
