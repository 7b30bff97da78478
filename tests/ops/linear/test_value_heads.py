"""The gated delta rule with more value heads than key heads: its rounding, and the same of
transformers' Qwen3-Next. `tests/laws/test_recurrences` has all recurrences on repeated heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.linear import gated_delta_rule
from regard.ops.linear.call import shared_matmul
from tests.oracles.delta import delta, delta_plain
from tests.rules import GRADIENT, assert_close_rule

FORMS = ("recurrent", "chunk", "parallel", "auto")


class Inputs(NamedTuple):
    """Float64 tensors of one call; g holds a log decay for each channel of a key."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor


def inputs(heads: tuple[int, int, int], T: int = 11, D: int = 4, E: int = 3) -> Inputs:
    H, G, N = heads
    draw: Any = {
        "dtype": torch.float64,
        "generator": torch.Generator().manual_seed(H + 10 * G + 100 * N),
    }
    return Inputs(
        torch.randn(2, H, T, D, **draw),
        F.normalize(torch.randn(2, G, T, D, **draw), dim=-1),
        torch.randn(2, N, T, E, **draw),
        torch.randn(2, N, T, **draw).sigmoid(),
        -torch.randn(2, N, T, D, **draw).exp(),
    )


def repeated(x: Inputs) -> Inputs:
    """The same call with a key of its own for each state: output o reads state o // (O/N) with
    query o // (O/H), and state n has key n // (N/G).
    """
    H, G, N = (y.shape[1] for y in x[:3])
    O = max(H, N)
    q = torch.stack([x.q[:, o // (O // H)] for o in range(O)], 1)
    k = torch.stack([x.k[:, n // (N // G)] for n in range(N)], 1)
    return x._replace(q=q, k=k)


def assert_same(x: Tensor, y: Tensor) -> None:
    """fp64 against fp64: sums of a few dozen products of order 1."""
    assert x.shape == y.shape
    assert float((x - y).detach().abs().max()) <= 1e-12 * (1 + float(y.detach().abs().max()))


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_rule(form: str, dtype: torch.dtype) -> None:
    x = inputs((2, 2, 6), T=70, D=16, E=8)
    x = Inputs(*(y.to(dtype).double() for y in x))
    whole = repeated(x)._replace(g=x.g[..., 0])
    exact, state = delta(*whole)[:2]
    low = Inputs(*(y.to(dtype) for y in x))
    out, (S,) = gated_delta_rule(*low[:4], low.g[..., 0], form=form)
    typed = [y.to(dtype) for y in whole]
    plain, plain_state = zip(
        *(delta_plain(*typed, erase_first=first) for first in (False, True)), strict=True
    )
    assert_close_rule(out, list(plain), exact, factor=2.0)
    single = [y.float() for y in whole]
    plain_state = [delta_plain(*single, erase_first=first)[1] for first in (False, True)]
    assert_close_rule(S, plain_state, state, factor=GRADIENT)


def test_other_heads_are_far() -> None:
    """A negative control: keys in turn, 0 1 0 1, where they are shared by neighbours, 0 0 1 1."""
    x = inputs((2, 2, 4))
    want, _ = gated_delta_rule(*x)
    wrong = x._replace(q=x.q.repeat(1, 2, 1, 1), k=x.k.repeat(1, 2, 1, 1))
    assert float((gated_delta_rule(*wrong)[0] - want).abs().max()) > 0.1
    right, _ = gated_delta_rule(*repeated(x))
    assert_same(right, want)


@pytest.mark.parametrize("T", [1, 70])
def test_transformers_qwen3_next(T: int) -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    x = Inputs(*(y.float() for y in inputs((4, 4, 8), T=T, D=16, E=8)))
    turned = [y.transpose(1, 2) for y in (*x[:3], x.g[..., 0], x.beta)]
    exact, exact_state = delta(
        *repeated(Inputs(*(y.double() for y in x)))[:4], x.g[..., 0].double()
    )[:2]
    plain, plain_state = [], []
    for function in (
        modeling.torch_recurrent_gated_delta_rule,
        modeling.torch_chunk_gated_delta_rule,
    ):
        out, state = function(*turned, output_final_state=True)
        plain.append(out.transpose(1, 2))
        plain_state.append(state)
    for form in FORMS:
        out, (S,) = gated_delta_rule(*x[:4], x.g[..., 0], form=form)
        assert_close_rule(out, plain, exact)
        assert_close_rule(S, plain_state, exact_state)


def test_a_shared_matrix_is_not_copied() -> None:
    a, b = torch.randn(2, 3, 1, 5, 4), torch.randn(2, 3, 6, 4, 7)
    torch.testing.assert_close(shared_matmul(a, b), a @ b)
    own = torch.randn(2, 3, 6, 5, 4)
    assert shared_matmul(own, b).equal(own @ b)
