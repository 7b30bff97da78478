"""Positions: spans, tensors, and how they join."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard
from regard.span import (
    EMPTY,
    Span,
    as_tensor,
    concat_positions,
    find_empty_slots,
    next_positions,
    slice_positions,
    slot_count,
)


def test_a_span_is_its_positions() -> None:
    span = Span(3, 4)
    assert (span.start, span.stop, span.length, len(span)) == (3, 7, 4, 4)
    assert torch.equal(span.tensor(), torch.tensor([[3, 4, 5, 6]]))
    assert span.tensor().dtype == torch.int64
    assert Span(-2, 3).tensor().tolist() == [[-2, -1, 0]]
    assert Span(5, 0).tensor().shape == (1, 0)
    assert span == Span(3, 4)
    assert hash(span) == hash(Span(3, 4))
    assert EMPTY == -1


@given(
    start=st.integers(-5, 5),
    length=st.integers(0, 9),
    a=st.none() | st.integers(-12, 12),
    b=st.none() | st.integers(-12, 12),
)
def test_slices_are_those_of_the_tensor(
    start: int, length: int, a: int | None, b: int | None
) -> None:
    span, where = Span(start, length), slice(a, b)
    assert torch.equal(slice_positions(span, where).tensor(), span.tensor()[:, where])  # type: ignore[union-attr]
    assert torch.equal(as_tensor(slice_positions(span.tensor(), where)), span.tensor()[:, where])


def test_count_and_as_tensor() -> None:
    rows = torch.tensor([[0, 1, -1], [5, 6, 7]])
    assert slot_count(rows) == 3
    assert slot_count(Span(9, 2)) == 2
    assert as_tensor(rows) is rows
    assert torch.equal(as_tensor(Span(9, 2)), torch.tensor([[9, 10]]))


def test_follow() -> None:
    assert concat_positions(Span(0, 3), Span(3, 2)) == Span(0, 5)
    assert concat_positions(Span(4, 0), Span(4, 2)) == Span(4, 2)
    gap = concat_positions(Span(0, 2), Span(5, 2))
    assert isinstance(gap, torch.Tensor)
    assert gap.tolist() == [[0, 1, 5, 6]]
    rows = torch.tensor([[-1, 0], [0, 1]])
    joined = concat_positions(rows, Span(2, 1))
    assert isinstance(joined, torch.Tensor)
    assert joined.tolist() == [[-1, 0, 2], [0, 1, 2]]
    other = concat_positions(Span(0, 1), rows + 1)
    assert isinstance(other, torch.Tensor)
    assert other.tolist() == [[0, 0, 1], [0, 1, 2]]


def test_next_positions_follow_the_last_token() -> None:
    rows = torch.tensor([[-3, -2], [-1, 4]])
    assert as_tensor(next_positions(rows, 2)).tolist() == [[0, 1], [5, 6]]
    assert next_positions(rows[:, :0], 2) == next_positions(Span(-2, 0), 2) == Span(0, 2)
    assert next_positions(Span(3, 4), 2) == Span(7, 2)


def test_errors() -> None:
    with pytest.raises(regard.ArgumentError) as error:
        Span(0, -1)
    assert str(error.value) == "Span length is -1; it must be 0 or more"
    with pytest.raises(regard.ArgumentError) as error:
        Span(0, 5)[::2]
    assert str(error.value) == "a Span takes slices of step 1, not 2"
    with pytest.raises(regard.ArgumentError, match="not -1"):
        Span(0, 5)[::-1]
    with pytest.raises(AttributeError):
        Span(0, 5).start = 3  # type: ignore[misc]


def test_which_slots_hold_nothing() -> None:
    stored = torch.tensor([[-1, 0, 5], [2, -1, -2]])
    assert find_empty_slots(stored).tolist() == [[True, False, False], [False, True, True]]
    assert find_empty_slots(Span(-2, 4)).tolist() == [[True, True, False, False]]
    for tokens in (Span(0, 4), Span(7, 1), Span(-1, 0), Span(-2, 4, tokens=True)):
        assert find_empty_slots(tokens) is None
    assert Span(-2, 4, tokens=True)[1:3] == Span(-1, 2, tokens=True)
    assert (Span(-2, 4).all_tokens, Span(0, 4).all_tokens) == (False, True)
    assert (repr(Span(1, 2)), repr(Span(-1, 2, tokens=True))) == (
        "Span(start=1, length=2)",
        "Span(start=-1, length=2, tokens=True)",
    )
