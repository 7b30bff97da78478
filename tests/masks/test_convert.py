"""Masks of other libraries, in and out."""

from __future__ import annotations

import math
import re

import pytest
import torch

from regard import masks
from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks import Causal, Window
from regard.span import Span

KEEP = torch.tensor([[True, False, True], [True, True, False]])


def test_drop_is_the_opposite_polarity() -> None:
    drop = torch.nn.Transformer.generate_square_subsequent_mask(4).isneginf()
    assert masks.from_drop(drop).table.equal(Causal().block(Span(0, 4), Span(0, 4))[0, 0])
    assert masks.to_drop(KEEP).equal(~KEEP)
    assert masks.from_drop(masks.to_drop(KEEP)).table.equal(KEEP)
    assert not masks.from_drop(drop).table.equal(drop)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_additive(dtype: torch.dtype) -> None:
    least = torch.finfo(dtype).min
    x = torch.tensor([[0.0, -math.inf, least, least / 2, -0.0]], dtype=dtype)
    assert masks.from_additive(x).table.tolist() == [[True, False, False, False, True]]
    back = masks.to_additive(KEEP, dtype)
    assert back.dtype == dtype
    assert back.tolist() == [[0, -math.inf, 0], [0, 0, -math.inf]]
    assert masks.from_additive(back).table.equal(KEEP)


def test_additive_refuses_a_bias() -> None:
    with pytest.raises(
        ArgumentError,
        match=re.escape(
            "additive mask has -10000.0 at [0, 1]; it must be 0 or at most finfo.min / 2: numbers "
            "in between are a bias, pass them as bias="
        ),
    ):
        masks.from_additive(torch.tensor([[0.0, -10000.0]]))
    for bad in (math.nan, math.inf, 1.0):
        with pytest.raises(ArgumentError, match="additive mask has"):
            masks.from_additive(torch.tensor([[bad]]))


def test_types_are_refused() -> None:
    for make, message in (
        (lambda: masks.from_drop(KEEP.int()), "drop is int32; it must be a bool tensor: use"),
        (lambda: masks.to_drop([True]), "keep is list; it must be a bool tensor: use keep.bool()"),
        (lambda: masks.to_additive(KEEP.float()), "keep is float32; it must be a bool tensor: use"),
        (lambda: masks.to_additive(KEEP, torch.int32), "dtype is torch.int32; an additive mask"),
        (lambda: masks.from_additive(KEEP), "additive mask is bool; it must be a float tensor"),
        (lambda: masks.from_additive(None), "additive mask is NoneType; it must be a float tensor"),
    ):
        with pytest.raises(ArgumentTypeError, match=f"^{re.escape(message)}"):
            make()


def test_lengths() -> None:
    assert masks.from_lengths([2, 3]) == masks.Padding.right([2, 3])
    assert masks.from_lengths(torch.tensor([2, 3])) == masks.Padding.right((2, 3))


@pytest.mark.parametrize(
    "left, right, low, high",
    [(3, 0, 3, 0), (0, 0, 0, 0), (8, 8, 8, 8), (-1, 0, 99, 0), (2, -1, 2, 99), (-1, 3, 99, 3)],
)
def test_flash_attention_counts_keys_beside_the_own(
    left: int, right: int, low: int, high: int
) -> None:
    mask = masks.from_window_size(left, right)
    assert mask is not None
    want = [[-low <= k - q <= high for k in range(20)] for q in range(20)]
    assert mask.block(Span(0, 20), Span(0, 20))[0, 0].tolist() == want
    assert mask.visible(Span(0, 20), Span(0, 20))[0, 0].tolist() == [sum(row) for row in want]


def test_window_conventions_differ_by_one() -> None:
    assert masks.from_window_size(-1, -1) is None
    assert masks.from_window_size(4) == Causal() & Window(5)
    assert masks.from_sliding_window(4) == Causal() & Window(4)
    assert masks.from_window_size(4) != masks.from_sliding_window(4)
    assert masks.from_sliding_window(None) == Causal()
    for left, right, name in ((-2, 0, "left"), (0, -2, "right")):
        with pytest.raises(
            ArgumentError, match=f"{name} is -2; it must be -1 or more: -1 is no limit"
        ):
            masks.from_window_size(left, right)
