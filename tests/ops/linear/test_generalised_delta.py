"""The generalised delta rule: every form against the loops, the mechanisms that it contains on the
fixed example, and the overflows of other code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from regard.linear import delta_product, gated_delta_rule, generalised_delta_rule
from tests.fixture_f import decays, example, strengths, vectors
from tests.oracles.generalised_delta import (
    generalised_delta,
    generalised_delta_plain,
    generalised_delta_plain_system,
)
from tests.rules import GRADIENT, assert_close_rule, in_orders

FORMS = ("recurrent", "chunk", "parallel")


class Case(NamedTuple):
    """The arguments of the rule; `a` may be None."""

    q: Tensor
    k: Tensor
    v: Tensor
    c: Tensor
    g: Tensor
    a: Tensor | None


def case(
    B: int = 2,
    H: int = 4,
    G: int = 2,
    N: int = 2,
    T: int = 7,
    D: int = 4,
    E: int = 3,
    scale: float = 1.0,
    seed: int = 0,
) -> Case:
    """Keys of length 1, reads that shrink the state, decays from none to strong per channel."""
    make = torch.Generator().manual_seed(seed)

    def randn(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=make, dtype=torch.float64)

    k, c, a = randn(B, G, T, D), randn(B, N, T, D), randn(B, N, T, D)
    k, c, a = (x / x.norm(dim=-1, keepdim=True) for x in (k, c, a))
    g = -randn(B, N, T, D).mul(2).exp()
    return Case(scale * randn(B, H, T, D), k, scale * randn(B, N, T, E), 0.7 * c, g, a)


def run(c: Case, **given: Any) -> tuple[Tensor, Tensor]:
    out, (S,) = generalised_delta_rule(c.q, c.k, c.v, c.c, c.g, a=c.a, **given)
    return out, S


def assert_same(x: Tensor, y: Tensor) -> None:
    assert float((x.detach() - y).abs().max()) <= 1e-11 * max(1.0, float(y.abs().max()))


def variants(c: Case) -> list[Case]:
    return [c, c._replace(a=None), c._replace(g=c.g[..., 0]), c._replace(g=c.g[..., 0], a=None)]


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("heads", [(4, 2, 2), (2, 2, 4), (4, 1, 2)])
def test_every_form_is_the_definition_for_every_chunk_size(heads: tuple[int, int, int]) -> None:
    H, G, N = heads
    start = torch.randn(2, N, 4, 3, dtype=torch.float64)
    for c in variants(case(H=H, G=G, N=N)):
        for state, scale in ((None, None), (start, 0.7)):
            exact = generalised_delta(*c, state=state, scale=scale)
            given = {"scale": scale, "state": None if state is None else (state,)}
            for form in FORMS:
                for size in (1, 2, 3, 4, 9) if form == "chunk" else [64]:
                    out, S = run(c, form=form, chunk=size, **given)
                    assert_same(out, exact.out)
                    assert_same(S, exact.state)


FIXED: dict[str, tuple[Callable[..., Tensor], tuple[float, float]]] = {}
"""Each mechanism on the fixed example: its choice of vectors, and the output of the last token."""


def fixed(name: str, *numbers: float) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    def register(build: Callable[..., Tensor]) -> Callable[..., Tensor]:
        FIXED[name] = build, (numbers[0], numbers[1])
        return build

    return register


@fixed("Kimi Delta Attention", 0.0562046062, 0.1299867581)
def kimi(**given: Any) -> Tensor:
    (q, k, v), g, b = example(), decays(channels=True), strengths()[..., None]
    direct = gated_delta_rule(q, k, v, b, g, **given)[0]
    out = generalised_delta_rule(q, k, b * v, g.exp() * b * k, g, **given)[0]
    assert_same(out, direct)
    return out


@fixed("Gated DeltaNet", 0.0791761528, 0.1718237647)
def gated(**given: Any) -> Tensor:
    (q, k, v), g, b = example(), decays(), strengths()[..., None]
    return generalised_delta_rule(q, k, b * v, g.exp()[..., None] * b * k, g, **given)[0]


@fixed("Gated DeltaNet-2", 0.2224551689, 0.3182779724)
def gated_2(**given: Any) -> Tensor:
    (q, k, v), g = example(), decays(channels=True)
    return generalised_delta_rule(q, k, v.sigmoid() * v, g.exp() * k.sigmoid() * k, g, **given)[0]


@fixed("Comba", -0.0160083801, 0.0711135915)
def comba(**given: Any) -> Tensor:
    (q, k, v), g, b = example(), decays(), strengths()[..., None]
    return generalised_delta_rule(q, k, b * v, g.exp()[..., None] * b * vectors(), g, **given)[0]


@fixed("RWKV-7", 0.6355701486, 1.1690745162)
def rwkv7(**given: Any) -> Tensor:
    (q, k, v), g, w = example(), decays(channels=True), vectors()
    r = w / w.norm(dim=-1, keepdim=True)
    return generalised_delta_rule(q, k, v, -r, g, a=r * w.sigmoid(), scale=1.0, **given)[0]


@fixed("DeltaProduct", 0.0397382558, 0.2082752999)
def product(**given: Any) -> Tensor:
    (q, k, v), g, b = example(), decays(), strengths()
    keys, values = torch.stack([k, vectors()], 3), torch.stack([v, v.flip(-1)], 3)
    return delta_product(q, keys, values, torch.stack([b, b / 2], 3), g, scale=1.0, **given)[0]


@pytest.mark.parametrize("name", FIXED)
def test_output_of_the_last_token_of_the_fixed_example(name: str) -> None:
    build, expected = FIXED[name]
    for form in FORMS:
        for size in (1, 2, 4):
            out = build(form=form, chunk=size)
            assert out[0, 0, -1].tolist() == pytest.approx(expected, abs=1e-9), (form, size)


def test_value_heads_are_repeated_queries_and_keys() -> None:
    """Value head h uses query and key head h // (N / H), as in Qwen3-Next; another order, h mod H,
    is another function.
    """
    c = case(H=2, G=2, N=6, T=11)
    right = run(c, form="chunk", chunk=4)[0]
    q, k = (x.repeat_interleave(3, 1) for x in (c.q, c.k))
    assert_same(run(c._replace(q=q, k=k), form="chunk", chunk=4)[0], right)
    q, k = (x.repeat(1, 3, 1, 1) for x in (c.q, c.k))
    assert float((run(c._replace(q=q, k=k))[0] - right).abs().max()) > 1e-2


def test_a_state_splits_a_run_anywhere() -> None:
    for c in variants(case(B=1, T=40)):
        for form in FORMS:
            out, S = run(c, form=form, chunk=16)
            for cut in (0, 1, 17, 39, 40):
                parts = [
                    Case(*(None if x is None else x[:, :, where] for x in c))  # type: ignore[arg-type]
                    for where in (slice(0, cut), slice(cut, 40))
                ]
                first, middle = run(parts[0], form=form, chunk=16)
                second, last = run(parts[1], form=form, chunk=16, state=(middle,))
                assert_same(torch.cat([first, second], 2), out)
                assert_same(last, S)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("form", FORMS)
def test_rounding_is_that_of_the_plain_loop(form: str) -> None:
    for scale in (1e-3, 1.0, 1e3):
        for c in variants(case(B=1, H=2, T=40, D=8, E=6, scale=scale)):
            c = Case(*(None if x is None else x.float() for x in c))  # type: ignore[arg-type]
            exact = generalised_delta(*c)
            plains = [generalised_delta_plain(*c, matrix=m) for m in (False, True)]
            out, S = run(c, form=form, chunk=16)
            assert_close_rule(out, [p[0] for p in plains], exact.out, what=form)
            assert_close_rule(S, [p[1] for p in plains], exact.state, what=form)


def test_gradients_round_as_those_of_plain_math() -> None:
    make = torch.Generator().manual_seed(1)
    weight = torch.randn(2, 2, 20, 5, dtype=torch.float64, generator=make)

    def gradients(rule: Callable[..., Tensor], c: Case) -> list[Tensor]:
        leaves = [None if x is None else x.detach().requires_grad_() for x in c]
        total = (rule(*leaves) * weight.to(c.q.dtype)).sum()
        return list(torch.autograd.grad(total, [x for x in leaves if x is not None]))

    rules = [lambda *x, m=m: generalised_delta_plain(*x, matrix=m)[0] for m in (False, True)]
    for c in variants(case(H=2, T=20, D=6, E=5)):
        narrow = Case(*(None if x is None else x.float() for x in c))  # type: ignore[arg-type]
        wide = Case(*(None if x is None else x.double() for x in narrow))  # type: ignore[arg-type]
        exact = gradients(rules[0], wide)
        plains = [gradients(rule, narrow) for rule in rules]
        for form in FORMS:
            mine = gradients(lambda *x, form=form: run(Case(*x), form=form, chunk=8)[0], narrow)
            for i, (found, right, *usual) in enumerate(zip(mine, exact, *plains, strict=True)):
                assert_close_rule(found, usual, right, GRADIENT, f"{form} {i}")


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS)
def test_gradcheck(form: str) -> None:
    c = case(B=1, H=2, G=1, N=2, T=5, D=3, E=2)
    assert c.a is not None
    leaves = [x.requires_grad_() for x in (*c[:5], c.a, torch.randn(1, 2, 3, 2).double())]

    def call(q: Tensor, k: Tensor, v: Tensor, c: Tensor, g: Tensor, a: Tensor, S: Tensor) -> Tensor:
        out, (last,) = generalised_delta_rule(q, k, v, c, g, a=a, state=(S,), form=form, chunk=2)
        return torch.cat([out.flatten(), last.flatten()])

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)
    assert torch.autograd.gradcheck(
        lambda q, k, v, c, g: generalised_delta_rule(q, k, v, c, g, form=form, chunk=2)[0],
        leaves[:5],
    )


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("floor", [-5.0, -5.914, -40.0])
def test_strong_decays_do_not_overflow_in_chunks_of_64(floor: float, dtype: torch.dtype) -> None:
    """An error of other code: with one anchor for a chunk of 64 tokens, decays of e^-5 a token give
    e^320; with blocks of 16, the limit is e^-5.914. Here every exponent is a sum of decays.
    """
    c = case(B=1, H=2, T=70)
    g = torch.full_like(c.g, floor)
    g[..., 1] = 0.0
    g[..., 2] = -torch.rand(c.g.shape[:-1], dtype=torch.float64) * 1e-3
    c = c._replace(c=0.7 * g.exp() * c.k, g=g, a=None)  # Kimi Delta Attention
    c = Case(*(None if x is None else x.to(dtype) for x in c))  # type: ignore[arg-type]
    anchored = (-g.cumsum(2).float()).exp()  # what one anchor multiplies keys by
    assert not bool(anchored.isfinite().all())
    exact = generalised_delta(*c)
    wide = [x.float() for x in c[:5]]
    forms = (
        *(lambda m=m: generalised_delta_plain(*wide, matrix=m)[0] for m in (False, True)),
        lambda: generalised_delta_plain_system(*wide),
    )
    plains = [x.to(dtype) for form in forms for x in in_orders(form)]
    leaves = Case(*(None if x is None else x.requires_grad_() for x in c))  # type: ignore[arg-type]
    for form in ("chunk", "parallel"):
        out, S = run(leaves, form=form, chunk=64)
        assert_close_rule(out, plains, exact.out, what=form)
        found = torch.autograd.grad(out.float().sum() + S.sum(), list(leaves[:5]))
        assert all(bool(x.isfinite().all()) for x in found)


def test_a_cleared_channel_and_the_past_alone() -> None:
    """g = -inf clears a channel; and no output depends on a later token, as it would with an anchor
    in the middle of a block.
    """
    c = case(B=1, T=20)
    c.g[:, :, 9, 2] = -math.inf
    exact = generalised_delta(*c)
    for form in FORMS:
        out, S = run(c, form=form, chunk=8)
        assert_same(out, exact.out)
        assert_same(S, exact.state)
    later = Case(*(None if x is None else x.clone() for x in c))  # type: ignore[arg-type]
    for x in later:
        if x is not None:
            x[:, :, 13:] = math.nan
    for form in FORMS:
        out, _ = run(later, form=form, chunk=8)
        assert_same(out[:, :, :13], exact.out[:, :, :13])
        assert bool(out[:, :, 13:].isnan().all())


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, 7.0])
def test_padding_changes_nothing_and_gives_0(garbage: float) -> None:
    """The decay of an empty slot is masked too, not only its key and value."""
    T = 21
    positions = torch.stack([torch.arange(T), torch.arange(T)])
    positions[0, :4], positions[0, 4:] = -1, torch.arange(T - 4)
    positions[1, [2, 9, 10, 19, 20]] = -1
    empty = positions < 0
    for c in variants(case(T=T)):
        inputs = [x.clone() for x in c if x is not None]
        for x in inputs:
            x.masked_fill_(empty[:, None, :].reshape(2, 1, T, *[1] * (x.ndim - 3)), garbage)
        leaves = [x.requires_grad_() for x in inputs]
        given = Case(*leaves[:5], leaves[5] if c.a is not None else None)
        clean = Case(*(None if x is None else x.detach().nan_to_num(0, 0, 0) for x in given))  # type: ignore[arg-type]
        exact = generalised_delta(*clean, real=~empty)
        for form in FORMS:
            out, S = run(given, form=form, chunk=8, k_positions=positions)
            assert_same(out, exact.out)
            assert_same(S, exact.state)
            for x in torch.autograd.grad(out.sum() + S.sum(), leaves):
                assert bool(x.isfinite().all())
                assert bool(x.movedim(2, 1)[empty].eq(0).all())


def test_wrong_variants_are_caught() -> None:
    """The read behind the decay, `a` of another sign, decays of the token before."""
    c = case(B=1, H=2, T=12)
    exact = generalised_delta(*c)
    plains = [generalised_delta_plain(*c, matrix=m)[0] for m in (False, True)]
    assert c.a is not None
    for form in FORMS:
        assert_close_rule(run(c, form=form, chunk=5)[0], plains, exact.out)
    late = torch.cat([torch.zeros_like(c.g[:, :, :1]), c.g[:, :, :-1]], 2)
    for wrong in (c._replace(c=c.c * c.g.exp()), c._replace(a=-c.a), c._replace(g=late)):
        with pytest.raises(AssertionError, match="error"):
            assert_close_rule(run(wrong)[0], plains, exact.out)


@pytest.mark.full
def test_it_compiles_without_a_break() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(generalised_delta_rule, fullgraph=True, backend="eager")
    for c in variants(case(B=1, T=12))[:2]:
        for form in ("recurrent", "chunk"):
            usual, S = run(c, form=form, chunk=8)
            out, (last,) = compiled(c.q, c.k, c.v, c.c, c.g, a=c.a, form=form, chunk=8)
            assert_same(out, usual)
            assert_same(last, S)
