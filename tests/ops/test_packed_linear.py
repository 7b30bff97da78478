"""Linear maps with reordered weights, against fp64, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.ops.onednn import pack_linear, why_not_packed
from tests.rules import assert_close_rule, assert_refused

REASON = why_not_packed(torch.eye(2))
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"nothing can be packed: {REASON}")

ACTIVATIONS: dict[str | None, Any] = {
    None: lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def values(rows: int, M: int, N: int, scale: float, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(rows + M)
    x, w = torch.randn(rows, M, generator=generator), torch.randn(N, M, generator=generator)
    b, z = torch.randn(N, generator=generator), torch.randn(rows, N, generator=generator)
    return tuple(y.to(dtype) for y in (x * scale, w / M**0.5, b, z))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "M", "N"), [(1, 3, 5), (7, 33, 17), (130, 64, 96), (0, 4, 4)])
@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
@torch.no_grad()
def test_equals_the_definition(dtype: torch.dtype, rows: int, M: int, N: int, scale: float) -> None:
    x, w, b, z = values(rows, M, N, scale, dtype)
    if (reason := why_not_packed(w)) is not None:
        pytest.skip(reason)
    x64, w64, b64, z64 = (y.double() for y in (x, w, b, z))
    for bias, bias64 in ((b, b64), (None, torch.zeros(N, dtype=torch.float64))):
        packed = pack_linear(w, bias)
        exact, plain = x64 @ w64.T + bias64, F.linear(x, w, bias)
        for name, f in ACTIVATIONS.items():
            got = packed(x, activation=name)  # type: ignore[arg-type]
            assert got.shape == (rows, N)
            assert_close_rule(
                got, [f(plain), f((x @ w.T).add(b) if bias is b else plain)], f(exact)
            )
        assert_close_rule(packed(x, add=z), plain + z, exact + z64)
    shaped = pack_linear(w, b)(x.view(1, rows, M))
    assert shaped.shape == (1, rows, N)


@torch.no_grad()
def test_a_wrong_activation_is_seen() -> None:
    """Negative control: the other form of GELU, and a bias left out."""
    x, w, b, _ = values(130, 64, 96, 1.0, torch.float32)
    exact = F.gelu(x.double() @ w.double().T + b.double())
    plain = F.gelu(F.linear(x, w, b))
    for wrong in (
        pack_linear(w, b)(x, activation="gelu_tanh"),
        pack_linear(w)(x, activation="gelu"),
    ):
        with pytest.raises(AssertionError, match="error"):
            assert_close_rule(wrong, plain, exact)


def test_the_copy_stays_as_it_was() -> None:
    weight, bias = torch.eye(3), torch.ones(3)
    packed = pack_linear(weight, bias)
    weight.zero_(), bias.zero_()
    assert packed(torch.eye(3)).tolist() == (torch.eye(3) + 1).tolist()
    x = torch.tensor([[float("nan"), 0, 0]])
    assert packed(x).isnan().all(), "a NaN propagates"


def test_refusals() -> None:
    packed, x = pack_linear(torch.eye(3)), torch.ones(2, 3)
    wrong: Any = "swish"
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: packed(x, activation=wrong), ArgumentError, "activation is 'swish'; it is one of"),
        (lambda: packed(x, activation="relu", add=x), ArgumentError, "both activation 'relu' and"),
        (lambda: packed(x[:, :2]), ArgumentError, "x is (2, 2); with a packed weight (3, 3)"),
        (lambda: packed(x, add=x[:1]), ArgumentError, "add is (1, 3)"),
        (lambda: packed(x.double()), ArgumentTypeError, "x is torch.float64 and the packed weight"),
        (lambda: packed(x.requires_grad_()), ArgumentError, "x requires a gradient"),
        (lambda: pack_linear(torch.eye(3).double()), ArgumentError, "the weight is torch.float64"),
        (lambda: pack_linear(torch.eye(3), x[0, :2]), ArgumentError, "bias is (2,)"),
    ]
    assert_refused(cases)
    assert "empty" in str(why_not_packed(torch.empty(0, 3)))
    assert "on meta" in str(why_not_packed(torch.empty(2, 3, device="meta")))
    torch._C._set_mkldnn_enabled(False)  # torch's context manager for it warns of its other flags
    try:
        assert "turned off" in str(why_not_packed(torch.eye(3)))
    finally:
        torch._C._set_mkldnn_enabled(True)
