"""What a call of the delta rule refuses, with the message; and that it compiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import regard
from regard.ops.linear.delta_rules import delta_rule, gated_delta_rule

Q, K, V = torch.zeros(2, 4, 5, 3), torch.zeros(2, 2, 5, 3), torch.zeros(2, 2, 5, 6)
BETA = torch.zeros(2, 2, 5)
ONE = "one number per key/value head and token"


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (
            {"q": Q[:, :3]},
            regard.ArgumentError,
            "3 query heads are not divisible by 2 key/value heads; allowed key/value heads: 1, 3",
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
            {"beta": BETA[:, :1]},
            regard.ArgumentError,
            f"beta is (2, 1, 5); it must be (2, 2, 5) or (2, 2, 5, 1), {ONE}",
        ),
        (
            {"beta": BETA.long()},
            regard.ArgumentTypeError,
            "beta is int64; it must be float64, float32, bfloat16 or float16: use beta.float()",
        ),
        ({"beta": 0.5}, regard.ArgumentTypeError, "beta is float; it must be a torch tensor"),
        (
            {"beta": torch.zeros(2, 2, 5, 3)},
            regard.ArgumentError,
            f"beta is (2, 2, 5, 3); it must be (2, 2, 5) or (2, 2, 5, 1), {ONE}",
        ),
        (
            {"log_decay": BETA[..., None]},
            regard.ArgumentError,
            (
                f"log_decay is (2, 2, 5, 1); it must be (2, 2, 5) or (2, 2, 5, 3), {ONE}, or one "
                "per key channel as well"
            ),
        ),
        (
            {"log_decay": None},
            regard.ArgumentTypeError,
            "log_decay is NoneType; it must be a torch tensor",
        ),
        ({"scale": float("nan")}, regard.ArgumentError, "scale is nan; it must be finite"),
        (
            {"state": torch.zeros(2, 2, 3, 6)},
            regard.ArgumentTypeError,
            "state is Tensor; it must be (S,), as an earlier call returned it, or None",
        ),
        (
            {"state": (torch.zeros(2, 2, 6, 3),)},
            regard.ArgumentError,
            (
                "state is torch.float32 (2, 2, 6, 3); it must be torch.float32 (2, 2, 3, 6): pass "
                "the state that a call with the same sizes returned"
            ),
        ),
        (
            {"state": (torch.zeros(2, 2, 3, 6).half(),)},
            regard.ArgumentError,
            (
                "state is torch.float16 (2, 2, 3, 6); it must be torch.float32 (2, 2, 3, 6): pass "
                "the state that a call with the same sizes returned"
            ),
        ),
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
        ({"chunk": 2.0}, regard.ArgumentTypeError, "chunk is float; it must be an int, at least 1"),
    ],
)
def test_errors(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"q": Q, "k": K, "v": V, "beta": BETA, "log_decay": BETA, **changes}
    with pytest.raises(error) as raised:
        gated_delta_rule(**given)
    assert str(raised.value) == message
    if "log_decay" not in changes:
        given.pop("log_decay")
        with pytest.raises(error) as raised:
            delta_rule(**given)
        assert str(raised.value) == message


def test_the_finite_check_names_the_tensor() -> None:
    bad = V.clone()
    bad[1, 1, 4, 5] = float("nan")
    with regard.checks(finite=True):
        with pytest.raises(
            regard.ArgumentError, match=r"value has 1 non-finite value, first at \[1, 1, 4, 5\]"
        ):
            delta_rule(Q, K, bad, BETA)
        delta_rule(Q, K, bad, BETA, k_positions=torch.tensor([[0, 1, 2, 3, -1]]))


@pytest.mark.full
def test_it_compiles_without_a_break() -> None:
    torch._dynamo.reset()
    q, k, v = torch.randn(1, 2, 12, 4), torch.randn(1, 1, 12, 4) / 4, torch.randn(1, 1, 12, 3)
    beta, g = torch.randn(1, 1, 12).sigmoid(), -torch.randn(1, 1, 12).exp()
    positions = torch.arange(12)[None] - 3
    compiled = torch.compile(gated_delta_rule, fullgraph=True, backend="eager")
    for form in ("recurrent", "chunk"):
        for extra in ({}, {"k_positions": positions}):
            usual, (S,) = gated_delta_rule(q, k, v, beta, g, form=form, chunk=8, **extra)
            out, (last,) = compiled(q, k, v, beta, g, form=form, chunk=8, **extra)
            assert float((out - usual).abs().max()) < 1e-5
            assert float((last - S).abs().max()) < 1e-5
