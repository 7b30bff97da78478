"""The tables that a `Rotary` keeps: whatever they depend on, a call gets those of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from regard.positions import DynamicNTK, Rotary
from regard.span import Positions, Span

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def make() -> Rotary:
    return Rotary(8)


def fresh(x: Tensor, positions: Positions) -> Tensor:
    return make()(x, positions)


def exactly(found: Tensor, right: Tensor) -> bool:
    return found.dtype == right.dtype and found.device == right.device and torch.equal(found, right)


@pytest.mark.parametrize("second", DTYPES)
@pytest.mark.parametrize("first", DTYPES)
@pytest.mark.parametrize(
    "where", [Span(1000, 3), torch.tensor([[1000, 1001, 1002]])], ids=["span", "stored"]
)
def test_each_dtype_has_its_own(where: Positions, first: torch.dtype, second: torch.dtype) -> None:
    """Tables of a shorter dtype round the angles' cosines, those of a longer one change the
    result's dtype.
    """
    x, rotary = torch.randn(1, 2, 3, 8, dtype=torch.float64), make()
    rotary(x.to(first), where)
    assert exactly(rotary(x.to(second), where), fresh(x.to(second), where))
    if first != second:
        assert not torch.equal(
            fresh(x.to(first), where).double(), fresh(x.to(second), where).double()
        )


def test_each_device_has_its_own() -> None:
    x, rotary = torch.randn(1, 2, 3, 8), make()
    rotary(x, Span(0, 3))
    assert rotary(x.to("meta"), Span(0, 3)).device.type == "meta"
    assert exactly(rotary(x, Span(0, 3)), fresh(x, Span(0, 3)))


@pytest.mark.parametrize(
    "other",
    [Span(1, 3), Span(0, 3), torch.tensor([[5, 6, 7]]), torch.tensor([[5, -1, 0]])],
    ids=str,
)
@pytest.mark.parametrize("first", [Span(0, 3), torch.tensor([[0, 1, 2]])], ids=["span", "stored"])
def test_each_position_has_its_own(first: Positions, other: Positions) -> None:
    x, rotary = torch.randn(1, 2, 3, 8), make()
    for where in (first, other, first):
        assert exactly(rotary(x, where), fresh(x, where))


def test_positions_that_are_written_to_are_looked_at_again() -> None:
    x, rotary, where = torch.randn(1, 2, 3, 8), make(), torch.tensor([[0, 1, 2]])
    for step in range(3):
        assert exactly(rotary(x, where), fresh(x, torch.tensor([[step, step + 1, step + 2]])))
        where += 1
    with torch.inference_mode():  # where no tensor counts its changes
        where = torch.tensor([[0, 1, 2]])
        for step in range(3):
            assert exactly(rotary(x, where), fresh(x, torch.tensor([[step, step + 1, step + 2]])))
            where += 1


def test_positions_in_the_memory_of_others_that_are_gone() -> None:
    """An address, or a number of an object, is used again as soon as its owner is gone."""
    x, rotary, first = torch.randn(1, 2, 3, 8), make(), torch.tensor([[0, 1, 2]])
    rotary(x, first)
    number = id(first)
    del first
    others = [torch.tensor([[7, 8, 9]]) for _ in range(1000)]
    again = [where for where in others if id(where) == number]
    assert all(exactly(rotary(x, where), fresh(x, Span(7, 3))) for where in again)


def test_tables_of_inference_serve_no_gradient() -> None:
    x, rotary = torch.randn(1, 2, 3, 8), make()
    with torch.inference_mode():
        rotary(x, Span(0, 3))
    learned = x.clone().requires_grad_()
    rotary(learned, Span(0, 3)).sum().backward()
    right = x.clone().requires_grad_()
    fresh(right, Span(0, 3)).sum().backward()
    assert exactly(learned.grad, right.grad)


def test_a_length_that_is_followed() -> None:
    scaling = DynamicNTK(2.0, original_length=4)
    x, rotary = torch.randn(1, 1, 3, 8), Rotary(8, scaling=scaling, length="current")
    for start in (0, 20, 3, 1, 0):
        where = Span(start, 3)
        alone = Rotary(8, scaling=scaling, length=start + 3)
        assert exactly(rotary(x, where), alone(x, where))
        stored = where.tensor()
        assert exactly(rotary(x, stored), alone(x, stored))


def every_table() -> None:
    for first in DTYPES[:2]:
        test_each_dtype_has_its_own(Span(1000, 3), first, torch.bfloat16)
    test_each_position_has_its_own(Span(0, 3), Span(1, 3))
    test_each_device_has_its_own()


@pytest.mark.parametrize(
    "forget",
    [lambda key: (key[0], *key[2:]), lambda key: key[1:], lambda key: (key[0], key[1])],
    ids=["the dtype", "the positions", "device and mode"],
)
def test_a_table_that_forgets_what_it_depends_on_is_caught(
    forget: Callable[[tuple[object, ...]], tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from regard.positions import rotary as module

    whole = module._table_key
    monkeypatch.setattr(module, "_table_key", lambda x, where: forget(whole(x, where)))
    with pytest.raises((AssertionError, RuntimeError)):
        every_table()
