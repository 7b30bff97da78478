"""The short causal convolution: against its loops and torch's own, and its gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard.linear import short_convolution
from regard.span import Span
from tests.oracles.convolution import convolution, convolution_plain
from tests.rules import GRADIENT, assert_close_rule


def case(
    B: int = 2, T: int = 11, c: int = 5, n: int = 4, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(n)
    sizes = ((B, T, c), (c, n), (c,))
    x, w, b = (torch.randn(s, generator=make, dtype=torch.float64).to(dtype) for s in sizes)
    return x, w, b


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("silu", [False, True])
def test_it_is_the_definition_and_torchs_own(n: int, silu: bool) -> None:
    for T in (0, 1, 2, 11):
        x, w, b = case(T=T, n=n)
        for bias in (None, b):
            y, (past,) = short_convolution(x, w, bias, activation="silu" if silu else None)
            exact = convolution(x, w, bias, silu=silu)
            assert float((y - exact).abs().sum()) < 1e-11
            if T:
                padded = F.pad(x.mT, (n - 1, 0))
                own = F.conv1d(padded, w[:, None], bias, groups=5).mT
                assert float((y - (F.silu(own) if silu else own)).abs().max()) < 1e-12
            zeros = torch.zeros(2, n, 5, dtype=x.dtype)
            assert torch.equal(past, torch.cat([zeros, x], 1)[:, n + T - (n - 1) :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_that_of_plain_math(dtype: torch.dtype) -> None:
    x, w, b = case(T=40, dtype=dtype)
    for silu in (False, True):
        plains = [convolution_plain(x, w, b, silu=silu, reverse=r) for r in (False, True)]
        exact = convolution(x, w, b, silu=silu)
        y, _ = short_convolution(x, w, b, activation="silu" if silu else None)
        assert_close_rule(y, plains, exact)
    with pytest.raises(AssertionError, match="error"):  # filters in the other direction
        assert_close_rule(short_convolution(x, w.flip(1), b, activation="silu")[0], plains, exact)


def joined(result: tuple[Tensor, tuple[Tensor]]) -> tuple[Tensor, Tensor]:
    y, (past,) = result
    return y, past


def test_gradients() -> None:
    x, w, b = case(T=6)
    past = torch.randn(2, 3, 5, dtype=torch.float64)
    positions = torch.tensor([[-1, 0, 1, -1, 2, 3], [0, 1, 2, 3, 4, 5]])
    leaves = [t.clone().requires_grad_() for t in (x, w, b, past)]
    for where in (None, positions):
        assert torch.autograd.gradcheck(
            lambda x, w, b, past, where=where: joined(
                short_convolution(x, w, b, activation="silu", state=(past,), positions=where)
            ),
            leaves,
        )
    narrow, weight = [t.float() for t in (x, w, b)], torch.randn(2, 6, 5).double()

    def gradients(run: object, given: list[Tensor]) -> list[Tensor]:
        given = [t.detach().requires_grad_() for t in given]
        total = (run(*given) * weight.to(given[0].dtype)).sum()  # type: ignore[operator]
        return list(torch.autograd.grad(total, given))

    rules = [lambda *t, r=r: convolution_plain(*t, reverse=r) for r in (False, True)]
    exact = gradients(rules[0], [t.double() for t in narrow])
    plains = [gradients(rule, narrow) for rule in rules]
    mine = gradients(lambda *t: short_convolution(*t)[0], narrow)
    for name, found, right, *usual in zip("xwb", mine, exact, *plains, strict=True):
        assert_close_rule(found, usual, right, GRADIENT, name)


def test_masking_the_output_only_leaks_padding() -> None:
    """Negative control, an error seen in other code: zeros of a padded slot enter the filters, but
    its bias, or what another layer wrote there, does too; and tokens behind a gap lose their past.
    """
    x, w, b = case(B=1, T=6)
    positions = torch.tensor([[0, 1, -1, -1, 2, 3]])
    right, _ = short_convolution(x[:, positions[0] >= 0], w, b)
    for wrong in (x, x.masked_fill(positions[..., None] < 0, 0)):
        y, _ = short_convolution(wrong, w, b)
        assert float((y[:, positions[0] >= 0] - right).abs().max()) > 1e-2
    y, _ = short_convolution(x, w, b, positions=positions)
    assert float((y[:, positions[0] >= 0] - right).abs().max()) < 1e-13


def test_refusals() -> None:
    x, w, b = case()
    with pytest.raises(regard.ArgumentError, match="activation is 'relu'; it must be 'silu' or No"):
        short_convolution(x, w, activation="relu")  # type: ignore[arg-type]
    with pytest.raises(regard.ArgumentError, match="weight has no column; a filter has at least"):
        short_convolution(x, w[:, :0])
    with pytest.raises(
        regard.ArgumentTypeError, match=r"state is Tensor; it must be \(past,\), as"
    ):
        short_convolution(x, w, state=x[:, :3])  # type: ignore[arg-type]
    with pytest.raises(
        regard.ArgumentError, match=r"past is \(2, 2, 5\) on cpu; it must be \(2, 3,"
    ):
        short_convolution(x, w, state=(x[:, :2],))
    with pytest.raises(regard.ArgumentTypeError, match=r"bias is torch.float32 and x is"):
        short_convolution(x, w, b.float())
    with pytest.raises(regard.ArgumentError, match=r"positions is Span\(start=0, length=4\) but"):
        short_convolution(x, w, positions=Span(0, 4))
