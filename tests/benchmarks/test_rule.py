"""The rule that outputs are held to: what passes, what does not, and that it is not generous."""

from __future__ import annotations

import pytest
import torch

from benchmarks.result import RELATIVE_TOLERANCE, check_outputs
from regard.tolerance import ERROR_FACTOR, GRADIENT_ERROR_FACTOR, two_roundings

REFERENCE = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_fp32_may_be_off_by_a_share_of_the_largest_number() -> None:
    reference, top = {"out": REFERENCE}, float(REFERENCE.abs().max())
    for share, right in ((0.9, True), (1.1, False)):
        x = REFERENCE.clone()
        x[1, 2] += share * RELATIVE_TOLERANCE * top
        verdict = check_outputs({"out": x}, reference, {})
        assert verdict.correct is right
        assert verdict.error == pytest.approx(share * RELATIVE_TOLERANCE * top)
        assert verdict.allowed == pytest.approx(RELATIVE_TOLERANCE * top)


def test_fp32_may_be_off_by_twice_the_error_of_a_plain_computation_that_is_worse() -> None:
    reference, share = {"out": REFERENCE}, RELATIVE_TOLERANCE * float(REFERENCE.abs().max())
    for error, allowed in ((10 * share, 20 * share), (share / 10, share)):
        plain = {"out": (REFERENCE + error).float()}
        verdict = check_outputs({"out": REFERENCE.float()}, reference, plain)
        assert verdict.allowed == pytest.approx(allowed, rel=1e-2)
        far = (REFERENCE + 1.05 * allowed).float()
        assert not check_outputs({"out": far}, reference, plain).correct


@pytest.mark.parametrize(("name", "factor"), [("out", ERROR_FACTOR), ("dk", GRADIENT_ERROR_FACTOR)])
def test_half_types_may_be_off_by_so_many_errors_of_plain(name: str, factor: float) -> None:
    # 1 + 1/4: sums with 0.3 in the rounding term are of a known size
    reference = {name: torch.full((4,), 64.0, dtype=torch.float64)}
    plain = {name: torch.full((4,), 65.0, dtype=torch.bfloat16)}
    bound = factor * 1.0 + two_roundings(reference[name], torch.bfloat16)
    verdict = check_outputs({name: torch.full((4,), 64.5, dtype=torch.bfloat16)}, reference, plain)
    assert verdict.correct
    assert verdict.allowed == pytest.approx(bound)
    far = torch.full((4,), 64.0 + 2 * bound, dtype=torch.bfloat16)
    assert not check_outputs({name: far}, reference, plain).correct


def test_what_is_missing_misshapen_or_no_number_is_wrong() -> None:
    reference = {"out": REFERENCE, "dq": REFERENCE}
    nan = REFERENCE.clone()
    nan[0, 0] = float("nan")
    assert not check_outputs({"out": nan}, reference, {}).correct
    assert (
        check_outputs({"out": REFERENCE[:2]}, reference, {}).why
        == "out has shape (2, 5), not (3, 5)"
    )
    assert check_outputs({"z": REFERENCE}, reference, {}).why == "returns none of out, dq"


def test_the_verdict_is_of_the_worst_output() -> None:
    reference = {"out": REFERENCE, "dq": REFERENCE, "dk": REFERENCE}
    found = {"out": REFERENCE, "dq": REFERENCE + 1, "dk": REFERENCE + 1e-7}
    verdict = check_outputs(found, reference, {})
    assert not verdict.correct
    assert verdict.why.startswith("dq has an error of 1")
    assert check_outputs({"out": REFERENCE}, reference, {}).correct  # gradients may be left out
    assert check_outputs({"out": REFERENCE[:0]}, {"out": REFERENCE[:0]}, {}).correct
