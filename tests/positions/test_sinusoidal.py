"""Absolute positions. Numbers: computed in float64 from the formulas."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import ArgumentError, ArgumentTypeError
from regard.positions import LearnedPositions, sinusoidal
from regard.span import Span

F64 = torch.float64
LAYOUTS = ("interleaved", "halves", "tensor2tensor")


def test_products_of_rows():
    for layout in ("interleaved", "halves"):
        table = sinusoidal(11, 512, layout=layout, dtype=F64)
        for k, product in ((0, 256), (1, 249.10209783), (10, 173.78972492)):
            assert float(table[0] @ table[k]) == pytest.approx(product, abs=1e-8)


@given(dim=st.integers(1, 40), p=st.integers(-5, 10**5), base=st.floats(2.0, 1e6))
def test_each_number_by_its_formula(dim, p, base):
    inter, halves, other = (
        sinusoidal(Span(p, 1), dim, base=base, layout=layout, dtype=F64)[0, 0].tolist()
        for layout in LAYOUTS
    )
    formula = [
        (math.cos if j % 2 else math.sin)(p * base ** (-(j - j % 2) / dim)) for j in range(dim)
    ]
    assert inter == pytest.approx(formula, abs=1e-9)
    assert halves == inter[0::2] + inter[1::2]
    half = dim // 2
    angles = [p * base ** (-i / max(half - 1, 1)) for i in range(half)]
    formula = [*map(math.sin, angles), *map(math.cos, angles), *[0.0] * (dim % 2)]
    assert other == pytest.approx(formula, abs=1e-9)


def test_tensor2tensor_is_another_table():
    ours, theirs = (
        sinusoidal(2, 512, layout=layout, dtype=F64)[1].asin()
        for layout in ("halves", "tensor2tensor")
    )
    assert float(ours[1]) == pytest.approx(0.96466162, abs=1e-8)
    assert float(theirs[1]) == pytest.approx(0.96452553, abs=1e-8)


def test_shapes_and_dtypes():
    assert sinusoidal(3, 5).shape == (3, 5)
    assert sinusoidal(0, 4).shape == (0, 4)
    positions = torch.tensor([[0, 1, 2], [-1, 0, 1]])
    table = sinusoidal(positions, 6)
    assert table.shape == (2, 3, 6)
    assert table.dtype == torch.float32
    assert table.isfinite().all()
    assert torch.equal(table[0], sinusoidal(3, 6))
    assert torch.equal(table[1, 1:], sinusoidal(2, 6))
    far = sinusoidal(Span(131071, 1), 2, dtype=torch.bfloat16)  # computed before it is rounded
    assert far.flatten().tolist() == torch.tensor(
        [131071.0], dtype=F64
    ).sin().bfloat16().tolist() + (torch.tensor([131071.0], dtype=F64).cos().bfloat16().tolist())


def test_learned():
    learned = LearnedPositions(4, 3)
    found = learned(torch.tensor([[3, -1, 0], [-1, -1, 2]]))
    assert torch.equal(
        found[0], torch.stack((learned.weight[3], torch.zeros(3), learned.weight[0]))
    )
    assert torch.equal(found[1, 2], learned.weight[2])
    assert not found[1, :2].any()
    assert torch.equal(learned(Span(1, 3))[0], learned.weight[1:])
    assert learned(Span(9, 0)).shape == (1, 0, 3)
    assert learned(torch.zeros(1, 0, dtype=torch.int64)).shape == (1, 0, 3)
    found.sum().backward()
    assert learned.weight.grad[:, 0].tolist() == [1, 0, 1, 1]
    offset = LearnedPositions(4, 3, offset=2)
    assert offset.weight.shape == (6, 3)
    assert torch.equal(offset(Span(3, 1))[0, 0], offset.weight[5])
    assert str(offset) == "LearnedPositions(4, 3, offset=2)"
    compiled = torch.compile(learned, fullgraph=True, backend="aot_eager")
    positions = torch.tensor([[3, -1]])
    assert torch.equal(compiled(positions), learned(positions))


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: LearnedPositions(4, 3)(Span(2, 3)), ArgumentError, "position 4 has no vector"),
        (lambda: LearnedPositions(4, 3, offset=2)(Span(4, 1)), ArgumentError, r"position 4 has no"),
        (
            lambda: LearnedPositions(4, 3)(torch.tensor([[0, 7]])),
            ArgumentError,
            "position 7 has no vector",
        ),
        (
            lambda: LearnedPositions(4, 3)(torch.tensor([0.0])[None]),
            ArgumentTypeError,
            "positions is float32",
        ),
        (
            lambda: LearnedPositions(4, 3)(torch.tensor([0, 1])),
            ArgumentError,
            r"positions is \(2,\)",
        ),
        (lambda: LearnedPositions(4, 3)(torch.tensor(1)), ArgumentError, r"positions is \(\)"),
        (lambda: LearnedPositions(4, 3)(3), ArgumentTypeError, "positions is int"),
        (lambda: LearnedPositions(0, 3), ArgumentError, r"LearnedPositions\(0, 3, offset=0\)"),
        (lambda: sinusoidal(-1, 4), ArgumentError, "Span length is -1"),
        (lambda: sinusoidal(3, 0), ArgumentError, "dim is 0; it must be at least 1"),
        (lambda: sinusoidal(3, 4, base=0.0), ArgumentError, "base is 0.0; it must be above 0"),
        (lambda: sinusoidal(3, 4, layout="half"), ArgumentError, "layout is 'half'; it must be"),
        (lambda: sinusoidal("3", 4), ArgumentTypeError, "positions is str"),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()
