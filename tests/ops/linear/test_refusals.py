"""What the recurrences refuse, and that they compile."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import regard
from regard.errors import ArgumentError, ArgumentTypeError
from regard.linear import (
    PowerFeatures,
    RandomFeatures,
    cosine_features,
    delta_rule,
    gated_delta_rule,
    gated_linear,
    linear_attention,
    mesa,
    retention,
    rwkv6,
    titans_memory,
)
from regard.span import Span
from tests.ops.linear.mechanisms import MECHANISMS, case

Q, K, V = torch.zeros(2, 4, 5, 3), torch.zeros(2, 2, 5, 3), torch.zeros(2, 2, 5, 6)
BETA, G, S = torch.zeros(2, 2, 5), torch.zeros(2, 2, 5, 3), torch.zeros(2, 2, 3, 6)

CALLS: dict[str, Callable[..., Any]] = {
    "linear attention": linear_attention,
    "retention": retention,
    "gated linear": lambda **x: gated_linear(log_decay=G, **x),
    "delta": lambda **x: delta_rule(beta=BETA, **x),
    "gated delta": lambda **x: gated_delta_rule(beta=BETA, log_decay=BETA, **x),
}


@pytest.mark.parametrize(
    "changes, error, words",
    [
        ({"q": Q[:, :3]}, ArgumentError, "3 query heads are not divisible by 2 key/value heads"),
        ({"q": Q[0]}, ArgumentError, "query has 3 dimensions"),
        ({"q": Q[:, :, :4]}, ArgumentError, "query length 4 != key length 5"),
        ({"v": V[:, :, :4]}, ArgumentError, "key length 5 != value length 4"),
        ({"k": K.double()}, ArgumentTypeError, "query is float32 and key is float64"),
        ({"k": K[:1]}, ArgumentError, "key batch 1 != query batch 2"),
        ({"scale": float("nan")}, ArgumentError, "scale is nan; it must be finite"),
        ({"scale": "1"}, ArgumentTypeError, "scale is str"),
        ({"k_positions": torch.zeros(2, 4, dtype=torch.long)}, ArgumentError, "(2, 5) or (1, 5)"),
        ({"form": "chunked"}, ArgumentError, "one of auto, recurrent, chunk, parallel, triton"),
        ({"chunk": 0}, ArgumentError, "chunk is 0; it must be at least 1"),
        ({"chunk": True}, ArgumentTypeError, "chunk is bool"),
    ],
)
def test_what_all_refuse(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    for call in CALLS.values():
        with pytest.raises(error, match=re.escape(words)):
            call(**{"q": Q, "k": K, "v": V, **changes})


def delta(**changes: Any) -> Any:
    return gated_delta_rule(**{"q": Q, "k": K, "v": V, "beta": BETA, "log_decay": BETA, **changes})


def linear(*x: Any, **options: Any) -> Any:
    return linear_attention(Q, K, V, *x, **options)


RWKV6 = {"q": K, "k": K, "v": K, "log_decay": G, "bonus": torch.zeros(2, 3)}
FOUR = torch.zeros(1, 4, 2, 3)  # four heads, where the keys have two
TWO = (torch.zeros(1, 2, 2, 3),) * 2
GATES = (torch.zeros(1, 2, 2),) * 3


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: linear(feature_map="elu"), ArgumentError, "one of elu+1, exp, identity, relu"),
        (lambda: linear(feature_map=3), ArgumentTypeError, "feature_map is int"),
        (lambda: linear(feature_map=lambda x: x.sum(2)), ArgumentError, "the last dimension only"),
        (lambda: linear(state=(S,)), ArgumentError, "state has 1 tensor; it must be (S, z)"),
        (lambda: linear(state=(S, S[0])), ArgumentError, "it must be torch.float32 (2, 2, 3)"),
        (lambda: linear(normalize=False, state=S), ArgumentTypeError, "state is Tensor; it must"),
        (lambda: retention(Q, K, V, state=()), ArgumentError, "state has 0 tensors"),
        (lambda: retention(Q, K, V, state=(S.mT,)), ArgumentError, "state is torch.float32"),
        (lambda: retention(Q, K, V, state=(S.half(),)), ArgumentError, "state is torch.float16"),
        (lambda: retention(Q, K, V, decay=torch.ones(4)), ArgumentError, "per key/value head"),
        (lambda: retention(Q, K, V, decay=[0.5, 0.5]), ArgumentTypeError, "decay is list"),
        (lambda: retention(Q, K, FOUR[:, :3]), ArgumentError, "value"),
        (lambda: retention(K, K, V[:, :1]), ArgumentError, "value heads 1 must be a multiple"),
        (lambda: retention(K, K, torch.zeros(2, 3, 5, 6)), ArgumentError, "value heads 3 must be"),
        (lambda: retention(Q[:, :3], K[:, :1], V), ArgumentError, "query heads 3 and value"),
        (
            lambda: retention(K, K, torch.zeros(2, 4, 5, 6), decay=torch.ones(2)),
            ArgumentError,
            "one factor per value head",
        ),
        (
            lambda: retention(K, K, torch.zeros(2, 4, 5, 6), state=(S,)),
            ArgumentError,
            "(2, 4, 3, 6)",
        ),
        (lambda: delta_rule(K, K, torch.zeros(2, 4, 5, 6), BETA), ArgumentError, "one number"),
        (lambda: gated_linear(Q, K, V, G[..., 0]), ArgumentError, "(2, 2, 5, 3) or (2, 2, 5, 1)"),
        (lambda: gated_linear(Q, K, V, G.long()), ArgumentTypeError, "log_decay is int64"),
        (lambda: gated_linear(Q, K, V, None), ArgumentTypeError, "log_decay is NoneType"),
        (lambda: delta(beta=BETA[:, :1]), ArgumentError, "beta is (2, 1, 5)"),
        (lambda: delta(beta=BETA.long()), ArgumentTypeError, "beta is int64"),
        (lambda: delta(beta=0.5), ArgumentTypeError, "beta is float; it must be a torch tensor"),
        (lambda: delta(beta=G), ArgumentError, "beta is (2, 2, 5, 3)"),
        (lambda: delta(log_decay=BETA[..., None]), ArgumentError, "or one per key channel as well"),
        (lambda: delta(log_decay=None), ArgumentTypeError, "log_decay is NoneType"),
        (lambda: rwkv6(**{**RWKV6, "bonus": torch.zeros(1, 3)}), ArgumentError, "bonus is (1, 3)"),
        (lambda: rwkv6(**{**RWKV6, "log_decay": G[:, :1]}), ArgumentError, "log_decay is (2, 1"),
        (lambda: mesa(FOUR, *TWO, *GATES[:2], torch.ones(2, 3)), ArgumentError, "q has 4 heads"),
        (lambda: titans_memory(FOUR, *TWO, *GATES), ArgumentError, "a memory of Titans"),
        (lambda: PowerFeatures(3), ArgumentError, "an even number of at least 2"),
        (lambda: PowerFeatures(2.0), ArgumentTypeError, "power is float; it must be an int"),
        (lambda: RandomFeatures(0, 3), ArgumentError, "each must be at least 1"),
        (lambda: RandomFeatures(8, 12)(torch.zeros(1, 5)), ArgumentError, "x has 5 channels"),
        (lambda: cosine_features(K, Span(0, 5), 0), ArgumentError, "period is 0"),
    ],
)
def test_what_each_refuses(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        call()


def test_the_finite_check_names_the_tensor() -> None:
    bad = V.clone()
    bad[1, 1, 4, 5] = float("nan")
    with regard.checks(finite=True):
        for call in CALLS.values():
            with pytest.raises(
                ArgumentError, match=r"value has 1 non-finite value, first at \[1, 1, 4, 5\]"
            ):
                call(q=Q, k=K, v=bad)
            call(q=Q, k=K, v=bad, k_positions=torch.tensor([[0, 1, 2, 3, -1]]))


@pytest.mark.full
@pytest.mark.parametrize("name", ["elu+1", "retention", "gated", "gated by head"])
def test_it_compiles_without_a_break(name: str) -> None:
    torch._dynamo.reset()
    c, run = case(B=1, H=2, G=1, T=12).to(torch.float32), MECHANISMS[name].run
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    for form in ("recurrent", "chunk"):
        for extra in ({}, {"k_positions": torch.arange(12)[None] - 3}):
            found = compiled(c, form=form, chunk=8, **extra)[0]
            assert float((found - run(c, form=form, chunk=8, **extra)[0]).abs().max()) < 1e-5
