"""The error rule of the package agrees with that of the tests, which shares no code with it."""

from __future__ import annotations

import pytest
import torch

from regard.tolerance import ERROR_FACTOR, GRADIENT_ERROR_FACTOR, allowed_error, two_roundings
from tests.rules import assert_close_rule

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
