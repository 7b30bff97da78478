"""Products of fp16 matrices by tiles of bfloat16 numbers, against fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import ArgumentError
from regard.nn.weights import linear as module
from regard.nn.weights.linear import linear
from regard.ops.fp16_linear import MIN_ROWS, fp16_linear, why_not_fp16_linear
from regard.ops.jit.amx import has_amx
from tests.rules import assert_close_rule

needs_tiles = pytest.mark.skipif(not has_amx(), reason="the processor has no AMX")


def draw(R: int, M: int, N: int, size: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(R + M + N)
    x, w, b = (torch.randn(shape, generator=make) for shape in ((R, M), (N, M), (N,)))
    return (size * x).half(), (size * w).half(), b.half()


def exact(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return F.linear(x.double(), w.double(), None if b is None else b.double())


@needs_tiles
@pytest.mark.full(keep=3)
@pytest.mark.parametrize(
    "R, M, N", [(16, 512, 32), (33, 96, 200), (1030, 64, 321), (40, 1120, 70), (17, 32, 1100)]
)
@pytest.mark.parametrize("size", [1e-4, 0.03, 1.0])
@pytest.mark.parametrize("threads", [1, 2])
def test_against_fp64(R: int, M: int, N: int, size: float, threads: int) -> None:
    """Ragged rows and outputs, several blocks of each and of the depth, and subnormal numbers."""
    x, w, b = draw(R, M, N, size)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for weight in (w, w.bfloat16().half()):  # the rests of the second are 0
            for bias in (None, b):
                found = fp16_linear(x[None], weight, bias)
                assert found is not None
                assert found.shape == (1, R, N)
                plain = F.linear(x, weight, bias)
                assert_close_rule(found[0], plain, exact(x, weight, bias))
    finally:
        torch.set_num_threads(before)


@needs_tiles
def test_every_number_is_the_sum_of_its_parts() -> None:
    """Times 1, in either factor, every finite fp16 number is itself."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.half)
    numbers = numbers[numbers.isfinite()].view(-1, 128)
    for found in (
        fp16_linear(numbers, torch.eye(128).half(), None),
        fp16_linear(torch.eye(128).half(), numbers, None),
    ):
        assert found is not None
        rows = found if found.shape == numbers.shape else found.T
        assert torch.equal(rows, numbers)


@needs_tiles
def test_the_product_of_the_rests_counts() -> None:
    """Where the leading products cancel, the sum without the product of both rests is wrong."""
    sign = torch.where(torch.arange(512) % 2 == 0, 1.0, -1.0)
    w = (sign + 7 * 2.0**-10).repeat(32, 1).half()
    x = torch.full((16, 512), 1 + 7 * 2.0**-10).half()
    right, plain = exact(x, w), F.linear(x, w)
    found = fp16_linear(x, w, None)
    assert found is not None
    assert_close_rule(found, plain, right)
    x_rest, w_rest = (
        y.double() - (y.float().view(torch.int32) & -(1 << 16)).view(torch.float32).double()
        for y in (x, w)
    )
    with pytest.raises(AssertionError, match="error"):
        assert_close_rule((right - exact(x_rest, w_rest)).half(), plain, right)


@needs_tiles
@pytest.mark.parametrize("wrong", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("place", ["x", "w", "b"])
def test_what_is_not_finite_is_computed_in_another_way(wrong: float, place: str) -> None:
    x, w, b = draw(20, 128, 128)
    {"x": x, "w": w, "b": b}[place].view(-1)[5] = wrong
    assert fp16_linear(x, w, b) is None
    found, plain = linear(x, w, b), F.linear(x, w, b)
    assert torch.equal(found.isnan(), plain.isnan())
    assert torch.equal(found.isinf(), plain.isinf())
    assert torch.equal(found.sign().nan_to_num(), plain.sign().nan_to_num())


@needs_tiles
def test_a_result_beyond_fp16_is_infinite() -> None:
    x, w = torch.full((16, 128), 200.0).half(), torch.full((128, 128), 3.0).half()
    assert fp16_linear(x, w, None) is None
    assert bool(linear(x, w).isinf().all())


@needs_tiles
def test_linear_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def spy(x: Tensor, *more: Tensor) -> Tensor | None:
        calls.append(len(x))
        return fp16_linear(x, *more)

    monkeypatch.setattr(module, "fp16_linear", spy)
    x, w, _ = draw(20, 128, 128)
    assert_close_rule(linear(x, w), F.linear(x, w), exact(x, w))
    assert calls == [20]
    linear(x[:3], w)  # a few vectors are computed by gemv
    linear(x.float(), w.float())
    assert calls == [20]


def test_when_it_does_not_run() -> None:
    x, w, b = draw(20, 128, 128)
    assert why_not_fp16_linear(x, w, b) == ([] if has_amx() else ["the processor has no AMX"])
    for other, weight, words in (
        (x.float(), w.float(), "not float16"),
        (x[: MIN_ROWS - 1], w, "x has 15 rows"),
        (x[:, :96], w[:, :96].contiguous(), "W has 12,288 weights"),
        (x[:, :100], w.repeat(2, 1)[:, :100].contiguous(), "100 numbers"),
        (x, w.T, "not contiguous"),
        (x.clone().requires_grad_(), w, "cannot read"),
        (x.to("meta"), w.to("meta"), "cannot read"),
    ):
        assert words in why_not_fp16_linear(other, weight, None)[0]
        assert fp16_linear(other, weight, None) is None
    with pytest.raises(ArgumentError, match="its last dimension must be 128"):
        fp16_linear(x[:, :96], w, None)
    strided = draw(20, 128, 256)[2][::2]
    assert "not contiguous" in why_not_fp16_linear(x, w, strided)[0]
