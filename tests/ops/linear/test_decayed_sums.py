"""RWKV-4, RWKV-6, mLSTM, gated slots, log-linear attention, and linear attention with kernels of
the score: every form against sums over pairs, and the numbers of the fixed example.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.linear import (
    PowerFeatures,
    RandomFeatures,
    TaylorFeatures,
    gated_linear,
    gated_slots,
    linear_attention,
    log_sum_exp_gates,
    mlstm,
    rwkv4,
    rwkv6,
)
from tests.ops.linear.decayed_cases import RECURRENCES, Inputs, definition, to, upto
from tests.ops.linear.mechanisms import FORMS, assert_same
from tests.oracles import decayed
from tests.rules import GRADIENT, assert_close_rule

NAMES = list(RECURRENCES)
LOOSE = 1e-9
"""For powers of the score, whose features cancel where a score is small: with D = 4 and p = 4 terms
up to |q|^4 |k|^4 are summed, some thousand times the smallest weight of these inputs.
"""


def bound(name: str) -> float:
    return LOOSE if name.startswith("power") else 1e-12


@pytest.mark.full(keep=4)
@pytest.mark.parametrize("G", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_every_form_is_the_definition_for_every_chunk_size(name: str, G: int) -> None:
    recurrence = RECURRENCES[name]
    c = recurrence.draw(2, 2, G, 7, 1.0)
    exact = definition(name, c)
    for form in FORMS:
        for size in range(1, 9) if form == "chunk" else [64]:
            out, _ = recurrence.run(c, form=form, chunk=size)
            assert_same(out, exact, bound(name))


@pytest.mark.full(keep=6)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("name", NAMES)
def test_rounding_is_that_of_plain_math(name: str, scale: float) -> None:
    c = to(RECURRENCES[name].draw(1, 2, 2, 40, scale), torch.float32)
    exact = definition(name, to(c, torch.float64))
    plain = RECURRENCES[name].plain(c)
    for form in FORMS:
        out, _ = RECURRENCES[name].run(c, form=form, chunk=16)
        assert_close_rule(out, plain, exact, what=f"{name} {form}")


def in_two_parts(name: str, c: Inputs, form: str) -> Tensor:
    """The outputs of two calls, of which the second goes on from the state of the first."""
    run = RECURRENCES[name].run
    if name == "cosine":
        c = c | {"start": torch.tensor(0)}
    first, state = run(upto(c, 0, 10), form=form, chunk=9)
    return torch.cat([first, run(upto(c, 10, 24), form=form, chunk=9, state=state)[0]], 2)


@pytest.mark.full(keep=4)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_round_as_those_of_plain_math(name: str) -> None:
    c = RECURRENCES[name].draw(1, 2, 2, 24, 1.0)
    weight = torch.randn_like(RECURRENCES[name].plain(c)[0])

    def gradients(run: Any, dtype: torch.dtype) -> list[Tensor]:
        leaves = {key: x.to(dtype).requires_grad_() for key, x in c.items()}
        total = (run(leaves) * weight.to(dtype)).sum()
        return list(torch.autograd.grad(total, list(leaves.values())))

    c = {key: x.float().double() for key, x in c.items()}
    plains = range(len(RECURRENCES[name].plain(c)))
    exact = gradients(lambda x: RECURRENCES[name].plain(x)[0], torch.float64)
    usual = [gradients(lambda x, i=i: RECURRENCES[name].plain(x)[i], torch.float32) for i in plains]
    for form in FORMS:
        found = gradients(lambda x, form=form: in_two_parts(name, x, form), torch.float32)
        for key, x, right, *others in zip(c, found, exact, *usual, strict=True):
            assert_close_rule(x, others, right, GRADIENT, f"{name} {form} {key}")


@pytest.mark.parametrize("name", ["rwkv6", "slots"])
def test_strong_decays_in_a_chunk_keep_their_digits(name: str) -> None:
    """Of -2000, then of -0.001, and -inf: no exponent overflows, and no difference cancels."""
    c = to(RECURRENCES[name].draw(1, 1, 1, 64, 1.0), torch.float32)
    g = torch.full_like(c["log_decay"], -1e-3)
    g[:, :, :32] = -2000.0
    g[:, :, 40] = -torch.inf
    c["log_decay"] = g
    exact = definition(name, to(c, torch.float64))
    for form in FORMS:
        out, _ = RECURRENCES[name].run(c, form=form)
        assert bool(out.isfinite().all())
        assert_close_rule(out, RECURRENCES[name].plain(c), exact, what=form)


def test_large_gates_and_keys_do_not_overflow() -> None:
    """exp(400) and exp(-400) are no numbers of fp32."""
    c = to(RECURRENCES["mlstm"].draw(1, 1, 1, 30, 1.0), torch.float32)
    c["log_input"] = 400 * torch.randn(1, 1, 30)
    c["log_forget"] = -100 * torch.rand(1, 1, 30)
    k = to(RECURRENCES["rwkv4"].draw(1, 1, 1, 30, 1.0), torch.float32)
    k["k"] = 400 * torch.randn(1, 1, 30, 3)
    for name, case in (("mlstm", c), ("rwkv4", k)):
        exact = definition(name, to(case, torch.float64))
        plain = RECURRENCES[name].plain(case)
        for form in FORMS:
            out, state = RECURRENCES[name].run(case, form=form, chunk=8)
            assert all(bool(x.isfinite().all()) for x in (out, *state))
            assert_close_rule(out, plain, exact, what=f"{name} {form}")


# Identities.


def test_gates_from_a_running_log_sum_exp_make_means() -> None:
    z = 5 * torch.randn(2, 1, 20, 3, dtype=torch.float64)
    g, (total,) = log_sum_exp_gates(z)
    assert_same(total, z.logsumexp(2))
    shares = torch.stack([decayed.shares_of_softmax(row[0], range(20)) for row in z])[:, None]
    assert_same(-torch.expm1(g), shares)
    first, state = log_sum_exp_gates(z[:, :, :7])
    second, (end,) = log_sum_exp_gates(z[:, :, 7:], state=state)
    assert_same(torch.cat([first, second], 2), g)
    assert_same(end, total)
    slots = [-1, *range(20), -1]
    wide = torch.full((2, 1, 22, 3), torch.nan, dtype=torch.float64)
    wide[:, :, 1:-1] = z
    padded, (last,) = log_sum_exp_gates(wide, k_positions=torch.tensor([slots]))
    assert_same(padded[:, :, 1:-1], g)
    assert_same(last, total)
    assert not bool(padded[:, :, [0, -1]].any())


@pytest.mark.full
def test_random_features_are_softmax_on_average() -> None:
    """Over 200 seeds of 64 features: within four standard errors, and the spread falls with R."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 8, dtype=torch.float64)
    exact = float((q @ k / math.sqrt(8)).exp())

    def draws(count: int) -> Tensor:
        maps = (RandomFeatures(8, count, seed) for seed in range(200))
        return torch.stack([phi(q) @ phi(k) for phi in maps])

    found = draws(64)
    assert abs(float(found.mean()) - exact) < 4 * float(found.std()) / math.sqrt(200)
    assert float(draws(512).std()) < 0.6 * float(found.std())
    assert float(found.min()) > 0
    phi = RandomFeatures(8, 12)
    square = phi.directions[:8] @ phi.directions[:8].mT
    assert float((square - square.diagonal().diag()).abs().max()) < 1e-12, "orthogonal directions"


def test_the_number_of_features_is_what_a_map_says() -> None:
    for phi in (TaylorFeatures(), PowerFeatures(2), PowerFeatures(4), RandomFeatures(5, 7)):
        assert phi(torch.randn(3, 5)).shape == (3, phi.feature_count(5))


# Negative controls.


def test_wrong_variants_are_caught() -> None:
    """A bonus on a state that has decayed, a decay behind the token, no bound, another bound, a
    slot that takes all, an odd kernel.
    """
    made = {name: to(r.draw(1, 1, 1, 12, 1.0), torch.float32) for name, r in RECURRENCES.items()}
    c, m, s = made["rwkv6"], made["mlstm"], made["slots"]
    qkv = [made["taylor"][name] for name in "qkv"]
    usual_gla = gated_linear(c["q"], c["k"], c["v"], c["log_decay"], scale=1.0)[0]
    wrong = {
        "rwkv6": [usual_gla, rwkv6(**{**c, "bonus": 2 * c["bonus"]})[0]],
        "rwkv4": [rwkv4(**{**made["rwkv4"], "bonus": made["rwkv4"]["bonus"] + 1})[0]],
        "mlstm": [mlstm(**m, scale=1.0)[0], mlstm(**{**m, "log_input": m["log_input"] - 2})[0]],
        "slots": [
            gated_slots(**s, scale=1.0)[0],
            gated_slots(**{**s, "log_decay": 2 * s["log_decay"]})[0],
        ],
        "taylor": [linear_attention(*qkv, feature_map=PowerFeatures(2))[0]],
        "cosine": [linear_attention(*(made["cosine"][n] for n in "qkv"), feature_map="relu")[0]],
    }
    for name, outputs in wrong.items():
        exact = definition(name, to(made[name], torch.float64))
        plain = RECURRENCES[name].plain(made[name])
        assert_close_rule(RECURRENCES[name].run(made[name])[0], plain, exact)
        for out in outputs:
            with pytest.raises(AssertionError, match="error"):
                assert_close_rule(out, plain, exact)
