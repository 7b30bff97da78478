"""What a call of linear attention, retention and gated linear attention refuses, with the message;
and that it compiles.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import regard
from regard.linear import gated_linear, linear_attention, retention
from tests.ops.linear.mechanisms import MECHANISMS, case

Q, K, V = torch.zeros(2, 4, 5, 3), torch.zeros(2, 2, 5, 3), torch.zeros(2, 2, 5, 6)
G = torch.zeros(2, 2, 5, 3)
PASS_ON = "pass the state that a call with the same sizes returned"


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (
            {"q": Q[:, :3]},
            regard.ArgumentError,
            "3 query heads are not divisible by 2 key/value heads; allowed key/value heads: 1, 3",
        ),
        (
            {"q": Q[0]},
            regard.ArgumentError,
            (
                "query has 3 dimensions, (4, 5, 3); it must be [batch, heads, length, dim]: add a "
                "batch dimension with [None]"
            ),
        ),
        (
            {"q": Q[:, :, :4]},
            regard.ArgumentError,
            (
                "query length 4 != key length 5: a recurrence needs a query for each key; "
                "pass the result of earlier tokens as state"
            ),
        ),
        (
            {"v": V[:, :, :4]},
            regard.ArgumentError,
            "key length 5 != value length 4 (key (2, 2, 5, 3), value (2, 2, 4, 6))",
        ),
        (
            {"k": K.double()},
            regard.ArgumentTypeError,
            "query is float32 and key is float64; all must have one dtype: convert one with .to()",
        ),
        (
            {"k": K[:1]},
            regard.ArgumentError,
            (
                "key batch 1 != query batch 2; batches do not broadcast: if one key serves all "
                "rows, pass key.expand(2, -1, -1, -1)"
            ),
        ),
        ({"scale": float("inf")}, regard.ArgumentError, "scale is inf; it must be finite"),
        ({"scale": "1"}, regard.ArgumentTypeError, "scale is str; it must be a number, finite"),
        (
            {"k_positions": torch.zeros(2, 4, dtype=torch.long)},
            regard.ArgumentError,
            "k_positions is (2, 4); it must be (2, 5) or (1, 5)",
        ),
        (
            {"form": "chunked"},
            regard.ArgumentError,
            "form is 'chunked'; it must be one of auto, recurrent, chunk, parallel, triton",
        ),
        ({"chunk": 0}, regard.ArgumentError, "chunk is 0; it must be at least 1"),
        ({"chunk": True}, regard.ArgumentTypeError, "chunk is bool; it must be an int, at least 1"),
    ],
)
def test_errors_of_all(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"q": Q, "k": K, "v": V, **changes}
    for call in (linear_attention, retention, lambda **x: gated_linear(log_decay=G, **x)):
        with pytest.raises(error) as raised:
            call(**given)
        assert str(raised.value) == message


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda: linear_attention(Q, K, V, feature_map="elu"),
            regard.ArgumentError,
            (
                "feature_map is 'elu'; it must be one of elu+1, exp, identity, relu, relu^2, "
                "softmax, or a function of a tensor"
            ),
        ),
        (
            lambda: linear_attention(Q, K, V, feature_map=3),
            regard.ArgumentTypeError,
            (
                "feature_map is int; it must be a name (elu+1, exp, identity, relu, relu^2, "
                "softmax) or a function"
            ),
        ),
        (
            lambda: linear_attention(Q, K, V, feature_map=lambda x: x.sum(2)),
            regard.ArgumentError,
            (
                "feature_map returned (2, 2, 3) for keys (2, 2, 5, 3); it may change the last "
                "dimension only"
            ),
        ),
        (
            lambda: linear_attention(Q, K, V, state=(torch.zeros(2, 2, 3, 6),)),
            regard.ArgumentError,
            (
                "state has 1 tensor; it must be (S, z), as a call with the same options returned "
                "it, or None"
            ),
        ),
        (
            lambda: linear_attention(Q, K, V, normalise=False, state=torch.zeros(2, 2, 3, 6)),
            regard.ArgumentTypeError,
            "state is Tensor; it must be (S,), as an earlier call returned it, or None",
        ),
        (
            lambda: linear_attention(Q, K, V, state=(torch.zeros(2, 2, 3, 6), torch.zeros(2, 3))),
            regard.ArgumentError,
            f"state is torch.float32 (2, 3); it must be torch.float32 (2, 2, 3): {PASS_ON}",
        ),
        (
            lambda: retention(Q, K, V, state=()),
            regard.ArgumentError,
            (
                "state has 0 tensors; it must be (S,), as a call with the same options returned "
                "it, "
                "or None"
            ),
        ),
        (
            lambda: retention(Q, K, V, state=(torch.zeros(2, 2, 6, 3),)),
            regard.ArgumentError,
            (
                "state is torch.float32 (2, 2, 6, 3); it must be torch.float32 (2, 2, 3, 6): "
                f"{PASS_ON}"
            ),
        ),
        (
            lambda: gated_linear(Q, K, V, G, state=(torch.zeros(2, 2, 3, 6).half(),)),
            regard.ArgumentError,
            (
                "state is torch.float16 (2, 2, 3, 6); it must be torch.float32 (2, 2, 3, 6): "
                f"{PASS_ON}"
            ),
        ),
        (
            lambda: retention(Q, K, V, decay=torch.ones(4)),
            regard.ArgumentError,
            (
                "decay is (4,); it must be (2,), one factor per key/value head, each of which has "
                "one state"
            ),
        ),
        (
            lambda: retention(Q, K, V, decay=[0.5, 0.5]),
            regard.ArgumentTypeError,
            "decay is list; it must be a torch tensor",
        ),
        (
            lambda: gated_linear(Q, K, V, G[..., 0]),
            regard.ArgumentError,
            (
                "log_decay is (2, 2, 5); it must be (2, 2, 5, 3) or (2, 2, 5, 1), one number per "
                "key channel and token, or one for all channels"
            ),
        ),
        (
            lambda: gated_linear(Q, K, V, G.long()),
            regard.ArgumentTypeError,
            (
                "log_decay is int64; it must be float64, float32, bfloat16 or float16: use "
                "log_decay.float()"
            ),
        ),
        (
            lambda: gated_linear(Q, K, V, None),
            regard.ArgumentTypeError,
            "log_decay is NoneType; it must be a torch tensor",
        ),
    ],
)
def test_errors_of_each(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == message


def test_the_finite_check_names_the_tensor() -> None:
    bad = V.clone()
    bad[1, 1, 4, 5] = float("nan")
    named = r"value has 1 non-finite value, first at \[1, 1, 4, 5\]"
    positions = torch.tensor([[0, 1, 2, 3, -1]])
    with regard.checks(finite=True):
        for call in (linear_attention, retention, lambda *x, **o: gated_linear(*x, G, **o)):
            with pytest.raises(regard.ArgumentError, match=named):
                call(Q, K, bad)
            call(Q, K, bad, k_positions=positions)


@pytest.mark.full
@pytest.mark.parametrize("name", ["elu+1", "retention", "gated", "gated by head"])
def test_it_compiles_without_a_break(name: str) -> None:
    torch._dynamo.reset()
    c, run = case(B=1, H=2, G=1, T=12).to(torch.float32), MECHANISMS[name].run
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    for form in ("recurrent", "chunk"):
        for extra in ({}, {"k_positions": torch.arange(12)[None] - 3}):
            for x, y in zip(
                compiled(c, form=form, chunk=8, **extra)[:1],
                run(c, form=form, chunk=8, **extra)[:1],
                strict=True,
            ):
                assert float((x - y).abs().max()) < 1e-5
