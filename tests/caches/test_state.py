"""The caches of a state: a recurrence's, and a memory's with its open segment."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import regard
from regard.caches import Memory, State
from regard.span import Span

ROWS = torch.tensor([[0, 1, 2, 3], [-1, 0, 1, 2]])


def sums(n: float) -> tuple[Tensor, Tensor]:
    return torch.full((2, 1, 3), n), torch.full((2, 4), n)


def tokens(T: int, start: int = 0) -> tuple[Tensor]:
    """Parts [2,1,T,1] whose numbers are their positions."""
    return (torch.arange(start, start + T).view(1, 1, T, 1).expand(2, -1, -1, -1).float(),)


def test_a_state_is_replaced_and_stays_as_it_was_given() -> None:
    cache = State()
    assert (cache.state, len(cache), cache.bytes, cache.contents()) == (None, 0, 0, {})
    first = sums(1.0)
    cache.store(first, Span(0, 5))
    assert cache.next(2) == Span(5, 2)
    cache.store(sums(2.0), Span(5, 1))
    assert first[0].eq(1).all()
    assert cache.state is not None
    assert cache.state[0].eq(2).all()
    assert (len(cache), cache.next(1), cache.bytes) == (1, Span(6, 1), (6 + 8) * 4)


def test_a_state_of_no_tokens() -> None:
    cache = State()
    cache.store(sums(0.0), Span(0, 0))
    assert cache.next(2) == Span(0, 2)
    cache.store(sums(0.0), Span(0, 3))
    cache.store(sums(0.0), Span(3, 0))
    assert cache.next(2) == Span(3, 2)
    cache = State()
    cache.store(sums(0.0), torch.zeros(2, 0, dtype=torch.int64))
    assert cache.next(1).tolist() == [[0], [0]]  # type: ignore[union-attr]


def test_each_row_of_a_state_goes_on_from_its_last_token() -> None:
    cache = State()
    cache.store(sums(1.0), Span(0, 1))
    cache.store(sums(2.0), ROWS)
    assert cache.next(1).tolist() == [[4], [3]]  # type: ignore[union-attr]
    cache.store(sums(3.0), Span(4, 1))
    assert cache.next(1).tolist() == [[5], [5]]  # type: ignore[union-attr]
    cache.select(torch.tensor([1]))
    assert cache.batch == 1


def test_a_state_forgets_everything_or_nothing() -> None:
    for positions in (Span(0, 5), torch.arange(5).expand(2, -1)):
        cache = State()
        cache.crop(3)
        cache.store(sums(1.0), positions)
        cache.crop(5)
        assert len(cache) == 1
        with pytest.raises(regard.ArgumentError, match="crop to 4, but the state sums over 5"):
            cache.crop(4)
        fork = cache.fork()
        cache.crop(0)
        assert (len(cache), len(fork)) == (0, 1)


def memory(positions: Span | Tensor, parts: tuple[Tensor, ...], segment: int = 4) -> Memory:
    cache = Memory(segment)
    cache.update(parts, positions)
    cache.store(sums(1.0), positions)
    return cache


@pytest.mark.parametrize("length, held", [(6, [4, 5]), (4, []), (3, [0, 1, 2]), (8, [])])
def test_a_memory_holds_the_open_segment(length: int, held: list[int]) -> None:
    cache = memory(Span(0, length), tokens(length))
    assert len(cache) == len(held)
    (found,), _ = cache.update(tokens(1, length), Span(length, 1))
    assert found[0].flatten().tolist() == [*held, length]
    rows = memory(torch.arange(length).expand(2, -1), tokens(length))
    (found,), where = rows.update(tokens(1, length), Span(length, 1))
    assert where[:, : len(held)].tolist() == [held, held]  # type: ignore[index]
    assert found[0].flatten().tolist() == [*held, length]


def test_each_row_of_a_memory_has_its_own_segment() -> None:
    cache = memory(ROWS, tokens(4))
    assert cache.contents()["held.positions"].tolist() == [[-1, -1, -1], [0, 1, 2]]  # type: ignore[union-attr]
    with pytest.raises(regard.ArgumentError, match="the tokens before position 4 are in the"):
        cache.crop(2)
    cache.crop(4)
    assert cache.next(1).tolist() == [[4], [3]]  # type: ignore[union-attr]


def test_a_memory_is_cropped_to_its_open_segment() -> None:
    cache = memory(Span(0, 7), tokens(7))
    assert cache.bytes == (6 + 8 + 2 * 3) * 4
    cache.crop(5)
    assert (len(cache), cache.next(1)) == (1, Span(5, 1))
    with pytest.raises(regard.ArgumentError, match="crop to 3, but the tokens before posit"):
        cache.crop(3)
    rows = memory(torch.arange(7).expand(2, -1), tokens(7))
    rows.crop(5)
    assert rows.next(1).tolist() == [[5], [5]]  # type: ignore[union-attr]
    with pytest.raises(regard.ArgumentError, match="crop to 3, but the tokens before posit"):
        rows.crop(3)
    for cache in (memory(Span(0, 7), tokens(7)), rows):
        again = cache.fork()
        again.crop(0)
        assert (len(again), again.state) == (0, None)
        assert len(cache) > 0


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda: State().update(tokens(1), Span(0, 1)),
            regard.ArgumentError,
            "a State cache keeps a recurrence's state, not tokens",
        ),
        (lambda: [State().crop(-1)], regard.ArgumentError, "crop length is -1; it must be 0 or"),
        (lambda: Memory(0), regard.ArgumentError, "segment is 0; it must be at least 1"),
        (lambda: Memory(True), regard.ArgumentTypeError, "segment is bool; it must be an int"),
        (
            lambda: memory(Span(0, 5), tokens(5)).update(tokens(1), Span(4, 1)),
            regard.ArgumentError,
            "include one that is not after the last position, 4",
        ),
        (
            lambda: memory(ROWS, tokens(4)).update(tokens(1), torch.tensor([[4], [2]])),
            regard.ArgumentError,
            "include one that is not after the last position",
        ),
    ],
)
def test_refused(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_state_of_another_shape_is_refused() -> None:
    cache = State()
    cache.store(sums(1.0), Span(0, 1))
    with pytest.raises(regard.ArgumentError, match="does not fit the contents of the cache"):
        cache.store((torch.zeros(2, 1, 3),), Span(1, 1))
    assert cache.next(1) == Span(1, 1)
