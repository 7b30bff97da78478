"""The error rule of the package agrees with that of the tests, which shares no code with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.tolerance import ERROR_FACTOR, GRADIENT_ERROR_FACTOR, allowed_error, two_roundings
from tests.rules import ORDERS, assert_close_rule, in_orders

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def test_two_roundings_are_the_sum_rounded_in_the_dtype() -> None:
    # 1 + 0.3 in bfloat16 (8 bits: steps of 1/128 behind 1) is 1.296875, which less 0.3 is
    # 0.99609375
    assert two_roundings(torch.tensor([1.0]), torch.bfloat16) == 2 * (1 - 0.99609375)


@pytest.mark.parametrize("dtype", DTYPES)
def test_they_are_never_0_by_luck(dtype: torch.dtype) -> None:
    lucky = torch.tensor([0.0], dtype=dtype)  # 0 + 0.3 - 0.3 is 0 exactly
    assert float(lucky + 0.3 - 0.3) == 0.0
    assert two_roundings(lucky.double(), dtype) > 0.0
    large = torch.tensor([2.0**12], dtype=dtype)
    if float(large + 0.3 - 0.3 - large) == 0.0:
        assert two_roundings(large.double(), dtype) == 2.0**12 * torch.finfo(dtype).eps


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_plain_math_is_run_in_several_orders_in_every_mode(mode: Callable[[], Any]) -> None:
    """In inference mode a dispatch mode sees `linear` and `matmul`, and no product inside them."""
    generator = torch.Generator().manual_seed(5)
    x, w = (torch.randn(n, 301, generator=generator) for n in (40, 50))
    sums = (
        lambda: F.linear(x, w),
        lambda: x @ w.T,
        lambda: torch.einsum("im,om->io", x, w),
        lambda: (x * w[:1]).sum(-1),
        lambda: (x * w[:1]).mean(-1),
    )
    for compute in sums:
        with mode():
            found = list(in_orders(compute))
        assert len(found) == len(ORDERS)
        for i, one in enumerate(found):
            for other in found[:i]:
                assert not torch.equal(one, other)
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_one_lucky_order_is_not_the_measure() -> None:
    """The rule computes other orders where one allows too little, and no more than it needs."""
    exact, asked = torch.ones(3, dtype=torch.float64), []

    def plain() -> Tensor:
        asked.append(1)
        return torch.ones(3) + 1e-3 * (len(asked) - 1)

    assert_close_rule(torch.ones(3), plain, exact)
    assert len(asked) == 1
    asked.clear()
    assert_close_rule(torch.ones(3) + 3e-3, plain, exact)
    assert len(asked) == 3
    with pytest.raises(AssertionError, match=r"error 0\.005 above"):
        assert_close_rule(torch.ones(3) + 5e-3, lambda: torch.ones(3) + 1e-3, exact)


@pytest.mark.parametrize("factor", [ERROR_FACTOR, GRADIENT_ERROR_FACTOR])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_it_allows_the_rule_of_the_tests_accepts_and_nothing_more(
    dtype: torch.dtype, factor: float
) -> None:
    reference = torch.randn(64, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    reference[7] = 0.0  # so that an error there is not rounded away
    plain = reference.to(dtype) * (1 + 4 * torch.finfo(dtype).eps)
    allowed = allowed_error([plain], reference, factor)
    x = reference.to(dtype, copy=True)
    x[7] = 0.9 * allowed
    assert_close_rule(x, plain, reference, factor)
    x[7] = 1.1 * allowed
    with pytest.raises(AssertionError, match="above"):
        assert_close_rule(x, plain, reference, factor)


def test_the_largest_error_of_several_plain_results_counts_and_what_is_not_finite_does_not() -> (
    None
):
    reference = torch.tensor([1.0, 2.0, torch.inf, torch.nan], dtype=torch.float64)
    near, far, broken = (
        torch.tensor([1.0, x, torch.inf, torch.nan]) for x in (2.25, 2.5, torch.nan)
    )
    floor = two_roundings(reference, torch.float32)
    assert allowed_error([near], reference) == 0.5 + floor
    assert allowed_error([near, far], reference) == 1.0 + floor
    assert allowed_error([broken], reference) == floor
    assert two_roundings(reference[2:], torch.float32) == 0.0
