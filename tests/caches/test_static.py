"""The static forms of caches: step by step the contents of the cache that they were made from, in
memory that stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from regard.caches import Cache, CrossLayer, Fixed, Growing, Memory, Ring, State, Streaming
from regard.caches.base import StaticSize
from regard.caches.joined import Joined
from regard.caches.state import StaticState
from regard.caches.static import StaticSlots, to_static
from regard.errors import ArgumentError
from regard.span import Positions, Span, as_tensor

PROMPT, STEPS = 6, 13
SIZE = StaticSize(PROMPT + STEPS, 2, torch.device("cpu"))
PADDED = torch.tensor([[-1, -1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]])


def part(T: int, seed: int) -> Tensor:
    return torch.randn(2, 3, T, 4, generator=torch.Generator().manual_seed(seed))


def by_position(memory: Tensor, positions: Positions, row: int) -> dict[int, list[float]]:
    """The numbers of a row's tokens by their position."""
    places = as_tensor(positions).expand(2, -1)[row].tolist()
    return {p: memory[row, :, j].flatten().tolist() for j, p in enumerate(places) if p >= 0}


CACHES: dict[str, Callable[[], Cache]] = {
    "growing": Growing,
    "fixed": lambda: Fixed(PROMPT + STEPS),
    "ring": lambda: Ring(4),
    "ring, rewind": lambda: Ring(4, rewind=2),
    "ring, longer than the text": lambda: Ring(64),
    "streaming": lambda: Streaming(2, 3),
}


@pytest.mark.parametrize("positions", [Span(0, PROMPT), PADDED], ids=["run", "padded"])
@pytest.mark.parametrize("name", CACHES)
def test_every_step_holds_what_the_cache_holds(name: str, positions: Positions) -> None:
    cache = CACHES[name]()
    cache.update((part(PROMPT, 0), part(PROMPT, 1)), positions)
    static = cache.to_static(SIZE)
    first = None
    for i in range(STEPS):
        new = part(1, 2 + 2 * i), part(1, 3 + 2 * i)
        expected, where = cache.update(new, cache.next(1))
        memory, there = static.update(new, static.next(1))
        for row in range(2):
            for old, now in zip(expected, memory, strict=True):
                assert by_position(old, where, row) == by_position(now, there, row)
        places = [x.data_ptr() for x in (*memory, as_tensor(there))]
        assert first is None or places == first
        first = places
    assert as_tensor(static.next(1)).tolist() == as_tensor(cache.next(1)).expand(2, 1).tolist()
    assert len(static) == int((as_tensor(there) >= 0).any(0).sum())


@pytest.mark.parametrize("positions", [Span(0, PROMPT), PADDED], ids=["run", "padded"])
def test_a_state_is_overwritten_in_place(positions: Positions) -> None:
    cache = State()
    cache.store((part(1, 0), part(2, 1)), positions)
    (static,) = to_static([cache], SIZE)
    assert isinstance(static, StaticState)
    assert static.state is not None
    places = [x.data_ptr() for x in static.state]
    for i in range(3):
        new = part(1, 2 + i), static.state[1]
        cache.store(new, cache.next(1))
        static.store(new, static.next(1))
    assert cache.state is not None
    assert all(torch.equal(x, y) for x, y in zip(cache.state, static.state, strict=True))
    assert [x.data_ptr() for x in static.state] == places
    assert as_tensor(static.next(1)).tolist() == as_tensor(cache.next(1)).expand(2, 1).tolist()


def test_layers_share_the_table_of_their_positions() -> None:
    caches: list[Cache] = [Growing(), Joined([Growing(), State()]), Ring(4), CrossLayer(), Ring(4)]
    for cache in (caches[0], caches[1].parts[0], caches[2], caches[4]):  # type: ignore[attr-defined]
        cache.update((part(PROMPT, 0),), PADDED)
    caches[1].parts[1].store((part(1, 0),), PADDED)  # type: ignore[attr-defined]
    static = to_static(caches, SIZE)
    one, two, three, _, four = static
    assert isinstance(two, Joined)
    tables = [x.table for x in (one, two.parts[0], three, four) if isinstance(x, StaticSlots)]
    assert tables[0] is tables[1]
    assert tables[2] is tables[3]
    assert tables[0] is not tables[2]
    positions = one.next(1)
    for cache in (one, two.parts[0], three, four):
        cache.update((part(1, 1),), positions)
    assert as_tensor(one.next(1)).tolist() == [[5], [7]]


def full(evicts: bool = False, steps: int = STEPS) -> Cache:
    cache: Cache = Ring(4) if evicts else Growing()
    cache.update((part(PROMPT, 0),), PADDED)
    return cache.to_static(SIZE._replace(slots=PROMPT + steps))


def test_new_contents_take_the_same_memory() -> None:
    static = full()
    (memory,), _ = static.update((part(1, 1),), static.next(1))
    other = Growing()
    other.update((part(2, 7),), Span(0, 2))
    static.fill(other.to_static(SIZE).contents())
    (again,), where = static.update((part(1, 8),), static.next(1))
    assert again.data_ptr() == memory.data_ptr()
    assert as_tensor(where)[:, :4].tolist() == [[0, 1, 2, -1]] * 2
    assert torch.equal(again[:, :, :3], torch.cat([part(2, 7), part(1, 8)], 2))
    fork = static.fork()
    static.reset()
    assert as_tensor(static.next(1)).tolist() == [[0], [0]]
    assert as_tensor(fork.next(1)).tolist() == [[3], [3]]


def test_what_a_static_cache_refuses() -> None:
    static = full(steps=1)
    with pytest.raises(ArgumentError, match=r"positions that its next\(1\) did not return"):
        static.update((part(1, 1),), torch.tensor([[4], [6]]))
    with pytest.raises(ArgumentError, match="2 tokens for each row of a StaticSlots cache"):
        static.update((part(2, 1),), static.next(2))
    static.update((part(1, 1),), static.next(1))
    with pytest.raises(ArgumentError, match="all 7 slots of a StaticSlots cache hold tokens"):
        static.update((part(1, 1),), static.next(1))
    with pytest.raises(ArgumentError, match="crop to 3, but a StaticSlots cache cannot go back"):
        static.crop(3)
    with pytest.raises(ArgumentError, match="contents have 1 row, and this StaticSlots cache has"):
        StaticSlots(static.table.layout, SIZE, evicts=False).fill(  # type: ignore[attr-defined]
            {"memory.0": part(1, 0)[:1], "positions": torch.tensor([[0]])}
        )
    with pytest.raises(ArgumentError, match="holds nothing yet; fill it"):
        StaticSlots(static.table.layout, SIZE, evicts=False).update(  # type: ignore[attr-defined]
            (part(1, 0),), static.next(1)
        )
    static.crop(0)
    assert len(static) == 0


def test_tokens_that_would_share_a_slot_are_refused() -> None:
    cache = Growing()
    cache.update((part(2, 0),), torch.tensor([[0, 7]]))
    with pytest.raises(ArgumentError, match="2 tokens would share a slot with another one: 7"):
        cache.to_static(SIZE._replace(slots=7))


def test_a_step_that_raises_leaves_a_cache_that_is_refused() -> None:
    """It has overwritten memory; an error before that changes nothing."""
    static = full()
    mark = static.mark()
    static.restore(mark)
    static.update((part(1, 1),), static.next(1))
    static.restore(mark)
    with pytest.raises(ArgumentError, match="an earlier step of this StaticSlots cache raised"):
        static.update((part(1, 1),), static.next(1))
    static.fill(full().contents())
    static.update((part(1, 1),), static.next(1))
    state = State()
    state.store((part(1, 0),), PADDED)
    other = state.to_static(SIZE)
    assert isinstance(other, StaticState)
    with pytest.raises(ArgumentError, match="does not fit the contents of the cache"):
        other.store((part(2, 0),), other.next(1))


def test_a_cache_without_contents_or_static_form() -> None:
    with pytest.raises(ArgumentError, match="a Growing cache that holds nothing has no static"):
        Growing().to_static(SIZE)
    memory = Memory(4)
    memory.update((part(2, 0),), Span(0, 2))
    with pytest.raises(ArgumentError, match="a Memory cache has no static form: a step that fills"):
        memory.to_static(SIZE)
