"""Every score rule on every kernel against loops over single numbers, with its gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

import regard
from regard import scores
from regard.errors import KernelRefusal
from regard.ops.softmax.dispatch import KERNELS
from regard.scores import SCORES, ScoreRule
from regard.span import Positions, Span
from tests.ops.softmax.cases import Case, Made
from tests.ops.softmax.cases import make as make_case
from tests.ops.softmax.plain import assert_near
from tests.oracles.scores import Steps, attention
from tests.scores import rules

SHAPE = (2, 4, 2, 2, 5, 4, 3)
CALLS = [
    (Case("none", (1, 4, 2, 2, 17, 4, 4), seed=1), torch.float32),
    (Case("causal", SHAPE, bias="dense", softcap=2.0, sink=True, seed=2), torch.float32),
    (Case("window", SHAPE, positions="rows", seed=3), torch.float32),
    (Case("causal", SHAPE, scale=-0.7, size=3.0, seed=4), torch.bfloat16),
    (Case("heads", (1, 4, 4, 4, 4, 4, 6), bias="alibi", seed=5), torch.float64),
]
ORDERS = {torch.float64: (0,), torch.float32: (0, 1), torch.bfloat16: (0,)}
"""The orders of summation of plain math: in float32 one alone may be right by chance."""
IDS = [f"{case}-{dtype}" for case, dtype in CALLS]


def positions_of(case: Case, made: Made) -> tuple[list[list[int]], list[list[int]]]:
    B, _, _, T, S, _, _ = case.shape
    given = made.options["q_positions"], made.options["k_positions"]
    usual = Span(S - T, T), Span(0, S)

    def listed(x: Positions) -> list[list[int]]:
        return [[*range(x.start, x.stop)]] * B if isinstance(x, Span) else x.tolist()

    q, k = (listed(u if x is None else x) for x, u in zip(given, usual, strict=True))
    return q, k


@cache
def loops(
    case: Case, name: str, dtype: torch.dtype, like: torch.dtype, order: int = 0
) -> list[Tensor]:
    """out and the gradients of all leaves by the loops, in a dtype, of numbers of `like`."""
    made, tensors = leaves(case, name, dtype, like)
    out, _ = by_loops(case, made, rules.make(name, tensors).steps, order)
    return [out.detach(), *gradients(out, made, tensors)]


def leaves(
    case: Case, name: str, dtype: torch.dtype, like: torch.dtype
) -> tuple[Made, list[Tensor]]:
    if rules.make(name, rules.tensors_for(name, 0)).rule.normalizer is not None:
        # it has no denominator for a sink
        case = Case(**{**case.__dict__, "sink": False})
    made = make_case(case, dtype, like=like, gradient=True)
    tensors = [x.to(like).to(dtype).requires_grad_() for x in rules.tensors_for(name, case.seed)]
    return made, tensors


def by_loops(case: Case, made: Made, steps: Steps, order: int = 0) -> tuple[Tensor, Tensor]:
    q_at, k_at = positions_of(case, made)
    options = {x: made.options[x] for x in ("scale", "softcap", "sink")}
    return attention(
        made.q,
        made.k,
        made.v,
        steps,
        visible=made.visible,
        q_at=q_at,
        k_at=k_at,
        bias=made.bias,
        order=order,
        **options,
    )


def gradients(out: Tensor, made: Made, tensors: list[Tensor]) -> list[Tensor]:
    """The gradients of all leaves for several gradients of the output: of few numbers, plain math
    may be right by chance.
    """
    draw = torch.Generator().manual_seed(9)
    learned, found = [*made.leaves, *tensors], []
    for _ in range(4):
        d_out = torch.randn(out.shape, generator=draw).to(out.dtype)
        found.append(
            torch.autograd.grad(
                out, learned, d_out, retain_graph=True, allow_unused=True, materialize_grads=True
            )
        )
    return [torch.stack(x) for x in zip(*found, strict=True)]


def assert_rule(
    name: str,
    case: Case,
    dtype: torch.dtype,
    backend: str,
    *,
    backward: bool = True,
    wrong: Callable[[ScoreRule], ScoreRule] | None = None,
) -> None:
    """The results of a kernel against the loops; with `wrong`, of another rule."""
    exact = loops(case, name, torch.float64, dtype)
    half = dtype if dtype != torch.float64 else torch.float32
    plain = [loops(case, name, half, dtype, order) for order in ORDERS[dtype]]
    made, tensors = leaves(case, name, dtype, dtype)
    right = rules.make(name, tensors).rule
    if wrong is not None:
        right = wrong(right)
    with torch.set_grad_enabled(backward):
        out = regard.attend(made.q, made.k, made.v, score=right, backend=backend, **made.options)
    assert_near(out.detach(), exact[0], [x[0] for x in plain])
    if backward:
        found = gradients(out, made, tensors)
        for i, x in enumerate(found, 1):
            assert_near(x, exact[i], [y[i] for y in plain], factor=3)


def test_every_rule_has_a_case() -> None:
    kinds = {
        step.kind
        for name in rules.MADE
        for step in rules.make(name, rules.tensors_for(name, 0)).rule.steps()
    }
    ours = {name for name, kind in SCORES if kind.__module__.startswith("regard.scores.")}
    assert ours - kinds == {"chain", "pairrule"}


@pytest.mark.full(keep="each")
@pytest.mark.parametrize(("case", "dtype"), CALLS, ids=IDS)
@pytest.mark.parametrize("name", rules.MADE)
def test_the_reference_gives_what_the_loops_give(name: str, case: Case, dtype: torch.dtype) -> None:
    assert_rule(name, case, dtype, "reference")


LEAST = {"tiled": (9, 9), "flex": (7, 0), "cpu": (3, 0), "gemm": (3, 2), "sdpa": (2, 0)}
"""How many rules each kernel serves at least, in one of the calls, without and with gradients."""


@pytest.mark.nightly(keep=3)
@pytest.mark.full
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("kernel", LEAST)
def test_every_kernel_gives_what_the_loops_give(kernel: str, backward: bool) -> None:
    served: set[str] = set()
    refused: set[str] = set()
    calls = CALLS[:1] if kernel == "flex" else CALLS  # which torch traces for each rule anew
    for name, (case, dtype) in product(rules.MADE, calls):
        try:
            assert_rule(name, case, dtype, kernel, backward=backward)
        except KernelRefusal as error:
            refused.add(str(error))
        else:
            served.add(name)
    if len(served) < LEAST[kernel][backward]:
        raise AssertionError(f"{kernel} served {sorted(served)} and refused {sorted(refused)}")
    if not served:
        pytest.skip(f"no gradient of a rule on {kernel}: {min(refused)}")


def test_every_kernel_is_tested() -> None:
    assert {*LEAST, "reference", "triton"} == {x.name for x in KERNELS}


def no_derivative(rule: ScoreRule) -> ScoreRule:
    return scores.FnScore(lambda s, b, h, q, k: s.detach() + 0 * s) >> rule


def transposed(rule: ScoreRule) -> ScoreRule:
    return rule.with_tensors([x.T for x in rule.tensors()])


def turned(rule: ScoreRule) -> ScoreRule:
    return rule.with_tensors([x.flip(0) for x in rule.tensors()])


WRONG: dict[str, tuple[str, Callable[[ScoreRule], ScoreRule]]] = {
    "a derivative that is left out": ("clamp", no_derivative),
    "scores mixed instead of weights": (
        "after",
        lambda rule: scores.TalkingHeads(before=rule.tensors()[0]),
    ),
    "weights mixed instead of scores": (
        "before",
        lambda rule: scores.TalkingHeads(after=rule.tensors()[0]),
    ),
    "rows and columns of the matrix exchanged": ("before", transposed),
    "the temperatures of other heads": ("by-head", turned),
    "the vectors of other numbers": ("cope", turned),
    "a rule before the one that comes first": (
        "clamp-then-head",
        lambda rule: rule.steps()[1] >> rule.steps()[0],
    ),
    "one key more": ("top", lambda rule: scores.TopK(3)),
    "the bias of another number of keys": ("sigmoid", lambda rule: scores.Sigmoid(-math.log(4))),
}


@pytest.mark.full(keep=3)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_found(name: str) -> None:
    right, wrong = WRONG[name]
    case, dtype = CALLS[1]
    assert_rule(right, case, dtype, "reference", wrong=lambda rule: rule)
    with pytest.raises(AssertionError, match=r"off by|Tensor-likes"):
        assert_rule(right, case, dtype, "reference", wrong=wrong)
