"""Recurrences with two states, the Mesa layer and the linear memory of Titans: every form against
the loops.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.linear import delta_rule, mesa, titans_memory
from tests.oracles.generalized_delta import mesa_loop, titans_loop
from tests.rules import GRADIENT, assert_close_rule

FORMS = ("recurrent", "chunk", "parallel")
Inputs = tuple[Tensor, ...]
OPS: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "mesa": (mesa, mesa_loop, {"solve": True}, {"solve": False}),
    "titans": (titans_memory, titans_loop, {"by_gradient": True}, {"by_gradient": False}),
}
"""Each op, its loops, and two orders of their sums."""
FIRST, REST = slice(0, 10), slice(10, None)


def case(name: str, T: int = 11, D: int = 4, E: int = 3, dtype: Any = torch.float64) -> Inputs:
    make = torch.Generator().manual_seed(T)

    def randn(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=make, dtype=torch.float64)

    q, k, v = randn(2, 2, T, D), randn(2, 2, T, D), randn(2, 2, T, E)
    k = k / k.norm(dim=-1, keepdim=True)
    step, g, e = randn(2, 2, T).sigmoid(), -randn(2, 2, T).exp() / 4, -randn(2, 2, T).exp()
    last = randn(2, D).exp() + 0.25 if name == "mesa" else e
    return tuple(x.to(dtype) for x in (q, k, v, step, g, last))


@pytest.mark.parametrize("name", OPS)
def test_every_form_is_the_definition(name: str) -> None:
    run, loop, one, _ = OPS[name]
    for T in (0, 1, 11):
        inputs = case(name, T)
        exact = loop(*inputs, **one)
        for form in FORMS:
            for chunk in (1, 2, 4, 9, 16) if form == "chunk" else (16,):
                out, states = run(*inputs, form=form, chunk=chunk)
                for found, right in zip((out, *states), exact, strict=True):
                    assert float((found - right).abs().sum()) < 1e-10


def test_titans_without_momentum_and_forgetting_is_the_delta_rule() -> None:
    q, k, v, step, g, _ = case("titans", 40)
    none = torch.full_like(g, -math.inf)
    for form in FORMS:
        out, (M, N) = titans_memory(q, k, v, step, 0 * g, none, form=form, chunk=16)
        right, (S,) = delta_rule(q, k, v, step)
        assert float((out - right).abs().max()) < 1e-12
        assert float((M - S).abs().max()) < 1e-12
        assert bool(N.ne(0).any())


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OPS)
def test_rounding_and_gradients_are_those_of_plain_math(name: str, form: str) -> None:
    run, loop, one, other = OPS[name]
    inputs = case(name, 24, dtype=torch.float32)
    wide = [x.double() for x in inputs]
    exact = loop(*wide, **one)
    out, states = run(*inputs, form=form, chunk=8)
    plains = [loop(*inputs, **order) for order in (one, other)]
    for i, found in enumerate((out, *states)):
        assert_close_rule(found, [plain[i] for plain in plains], exact[i], what=f"{name} {i}")
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).double()

    def gradients(rule: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in given]
        return list(torch.autograd.grad((rule(*leaves) * weight.to(leaves[0])).sum(), leaves))

    rules = [{"by_gradient": False}] if name == "titans" else [one, other]
    right = gradients(lambda *x: loop(*x, **rules[0]).out, wide)
    usual = [gradients(lambda *x, o=o: loop(*x, **o).out, list(inputs)) for o in rules]

    def in_two_parts(*given: Tensor) -> Tensor:
        early, late = ([x if x.ndim == 2 else x[:, :, t] for x in given] for t in (FIRST, REST))
        first, state = run(*early, form=form, chunk=8)
        return torch.cat([first, run(*late, form=form, chunk=8, state=state)[0]], 2)

    mine = gradients(in_two_parts, list(inputs))
    for i, (found, exactly, *plain) in enumerate(zip(mine, right, *usual, strict=True)):
        assert_close_rule(found, plain, exactly, GRADIENT, f"{name} {form} {i}")


@pytest.mark.full
def test_strong_decays_and_wrong_variants() -> None:
    for name, (run, loop, one, other) in OPS.items():
        inputs = list(case(name, 70))
        inputs[4] = inputs[4] - 1000 * (torch.arange(70) % 3 == 0)
        exact = loop(*inputs, **one).out
        for form in FORMS:
            assert float((run(*inputs, form=form, chunk=64)[0] - exact).abs().max()) < 1e-9
        plain = [loop(*inputs, **order).out for order in (one, other)]
        for i, change in ((3, 1.1), (4, 0.5), (5, 1.5)):
            wrong = [x * change if j == i else x for j, x in enumerate(inputs)]
            with pytest.raises(AssertionError, match="error"):
                assert_close_rule(run(*wrong)[0], plain, exact)


def test_a_matrix_that_is_not_positive_definite_gives_nan() -> None:
    q, k, v, beta, g, ridge = case("mesa")
    assert bool(mesa(q, k, v, beta, g, -100 * ridge)[0].isnan().any())
