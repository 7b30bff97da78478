"""Every cache that stores tokens keeps the contract; caches that are broken on purpose do not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard import masks
from regard.caches import Cache, Fixed, Growing, Parts, Ring, Streaming
from regard.span import Positions, Span, slice_positions, slot_count
from tests.caches import contract
from tests.caches.contract import Run, Step, steps
from tests.caches.kinds import CAUSAL, KINDS, NO_TOKENS, Kind, W, builtin_caches, stored

few = settings(max_examples=max(8, settings.default.max_examples // 3))
every = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
PADDED: list[Step] = [[[False, True, True], [True, False, False]], [[True], [True]]]


def test_every_cache_is_in_the_suite() -> None:
    assert {type(kind.make()).__name__ for kind in KINDS.values()} >= stored()
    assert set(NO_TOKENS) <= {kind.__name__ for kind in builtin_caches()}


@pytest.mark.full(keep=6)
@every
@few
@given(run=steps(), start=st.sampled_from((0, 0, 3, 17)))
def test_any_chunks_are_one_pass(kind: Kind, run: list[Step], start: int) -> None:
    contract.assert_any_chunks_are_one_pass(kind, run, start)


@pytest.mark.full(keep="each")
@every
@pytest.mark.parametrize("n", [1, W - 1, W, W + 1, 3 * W])
def test_steps_of_one_size_far_past_the_window(kind: Kind, n: int) -> None:
    """Bug classes 10 and 12: every size of chunk, to six windows."""
    driver = Run(kind)
    for i in range(-(-6 * W // n)):
        driver.feed(n, attend=i % 3 == 0)
    assert all(row[0].shape[1] == n * -(-6 * W // n) for row in driver.rows)
    padded = Run(kind)
    for i in range(-(-4 * W // n)):
        padded.feed([[True] * n, [(i + j) % 3 > 0 for j in range(n)]], attend=i % 3 == 0)
    padded.assert_next()  # after the last step too, whose answer `feed` has asserted


@pytest.mark.full(keep=5)
@every
@few
@given(run=steps(), more=steps(), back=st.integers(0, 12))
def test_a_crop_forgets(kind: Kind, run: list[Step], more: list[Step], back: int) -> None:
    if kind.slots < 10**6:
        more = more[:1]
    contract.assert_a_crop_forgets(kind, run, more, back)


@pytest.mark.full(keep=4)
@every
@few
@given(run=steps(), more=steps(most=3))
def test_copies_are_apart(kind: Kind, run: list[Step], more: list[Step]) -> None:
    contract.assert_copies_are_apart(kind, run[:4], more[:3])


@pytest.mark.full(keep=4)
@every
@few
@given(run=steps(), more=steps(most=3), rows=st.lists(st.integers(0, 1), max_size=3))
def test_rows_are_selected(kind: Kind, run: list[Step], more: list[Step], rows: list[int]) -> None:
    contract.assert_rows_are_selected(kind, run, more[:3], rows)


@pytest.mark.full(keep=4)
@every
@few
@given(run=steps(), n=st.integers(1, 2 * W + 1))
def test_a_failed_update_is_taken_back(kind: Kind, run: list[Step], n: int) -> None:
    contract.assert_a_failed_update_is_taken_back(kind, run[:4], n)


@every
def test_storage_is_bounded(kind: Kind) -> None:
    """Bug class 11."""
    contract.assert_storage_is_bounded(kind)


@every
def test_reset_forgets_everything(kind: Kind) -> None:
    for run in ([5, 1, 9], PADDED):
        driver = Run(kind)
        for step in run:
            driver.feed(step)
        driver.cache.reset()
        assert (len(driver.cache), driver.cache.bytes, driver.cache.batch) == (0, 0, None)
        assert driver.cache.next(3) == Span(0, 3)
        driver.rows = Run(kind, rows=3).rows  # another batch
        driver.feed([[True, True, False]] * 3)


@every
def test_an_empty_cache(kind: Kind) -> None:
    cache = kind.make()
    assert (len(cache), cache.bytes, cache.batch, cache.contents()) == (0, 0, None, {})
    cache.crop(0)
    cache.restore(cache.mark())
    assert len(cache.fork()) == 0
    assert cache.next(2) == Span(0, 2)


REFUSED: list[tuple[str, Callable[[Parts], Parts], Positions, str]] = [
    ("shape", lambda m: tuple(x[:, :, 0] for x in m), Span(5, 2), r"at 2 positions; it must be"),
    ("length", lambda m: tuple(x[:, :, :1] for x in m), Span(5, 2), "at 2 positions; it must be"),
    ("positions", lambda m: m, torch.zeros(3, 2, dtype=torch.int64), r"positions are \(3, 2\) for"),
    ("batch", lambda m: tuple(x[:1] for x in m), Span(5, 2), "does not fit the contents of the"),
    ("dtype", lambda m: tuple(x.float() for x in m), Span(5, 2), "does not fit the contents of"),
    ("dim", lambda m: tuple(x[..., :1] for x in m), Span(5, 2), "does not fit the contents of the"),
    ("parts", lambda m: (*m, m[0]), Span(5, 2), "does not fit the contents of the cache"),
]


@pytest.mark.full(keep="each")
@every
@pytest.mark.parametrize("case", REFUSED, ids=[case[0] for case in REFUSED])
@pytest.mark.parametrize("run", [[5], [[[True] * 5, [False] + [True] * 4]]], ids=["span", "rows"])
def test_a_refused_update_changes_nothing(kind: Kind, case: Any, run: list[Step]) -> None:
    _, change, positions, message = case
    driver = Run(kind)
    for step in run:
        driver.feed(step)
    before, held = driver.seen(), len(driver.cache)
    with pytest.raises(regard.ArgumentError, match=message):
        driver.cache.update(change(driver.tokens(Span(5, 2))), positions)
    assert driver.seen() == before
    assert len(driver.cache) == held
    driver.feed(run[0])


@every
def test_crop_and_rows_are_checked(kind: Kind) -> None:
    driver = Run(kind)
    driver.feed(5)
    with pytest.raises(regard.ArgumentError, match=r"^crop length is -1; it must be 0 or more$"):
        driver.cache.crop(-1)
    for rows, message in (
        (torch.tensor([0, 2]), r"^rows are \[0, 2\]; the cache holds rows 0 to 1$"),
        (torch.tensor([[0]]), r"^rows are \(1, 1\); they must be 1-D$"),
    ):
        with pytest.raises(regard.ArgumentError, match=message):
            driver.cache.select(rows)
    with pytest.raises(regard.ArgumentError, match=r"^reorder got 1 row for a batch of 2; "):
        driver.cache.reorder(torch.tensor([0]))
    with pytest.raises(regard.ArgumentTypeError, match=r"^rows are torch.bool; "):
        driver.cache.select(torch.tensor([True, False]))
    driver.feed(3)


ORDERED = {name: kind for name, kind in KINDS.items() if kind.in_order}


def test_which_caches_refuse_positions_that_do_not_go_on() -> None:
    assert ORDERED.keys() >= {"ring", "ring, rewind", "streaming", "streaming, rewind"}


@pytest.mark.parametrize("kind", ORDERED.values(), ids=ORDERED)
def test_positions_that_do_not_go_on(kind: Kind) -> None:
    driver = Run(kind)
    driver.feed(5)
    before = driver.seen()
    for positions, message in (
        (Span(4, 2), r"^row 0 has the new position 4, but the cache has position 4 already: "),
        (torch.tensor([[5, 6], [-1, 2]]), r"^row 1 has the new position 2, but the cache has"),
        (torch.tensor([[5, 6], [7, 7]]), r"^row 1 has position 7 twice; "),
    ):
        with pytest.raises(regard.ArgumentError, match=message):
            driver.cache.update(driver.tokens(positions), positions)
        assert driver.seen() == before
    driver.feed(2)


# Negative controls: each is one mistake, and a law must find it.


class TrimsFirst(Ring):
    """Cuts to the window before anybody has attended."""

    def update(self, memory: Parts, positions: Positions) -> tuple[Parts, Positions]:
        memory, positions = super().update(memory, positions)
        last = slice(max(0, slot_count(positions) - self.window), None)
        return tuple(m[:, :, last] for m in memory), slice_positions(positions, last)


class ByLength(Ring):
    """The slot follows from the number of tokens stored, as if no row were padded."""

    def __init__(self, window: int) -> None:
        super().__init__(window)
        self.stored = 0

    def update(self, memory: Parts, positions: Positions) -> tuple[Parts, Positions]:
        start, self.stored = self.stored, self.stored + slot_count(positions)
        return super().update(memory, Span(start, slot_count(positions)))

    def next(self, length: int) -> Positions:
        return Span(self.stored, length)


class NoUndo(Ring):
    """Comes back to the old positions, not to the old tokens."""

    def restore(self, mark: Any) -> None:
        self._overwritten = None
        super().restore((*mark[:2], None, mark[3]))


class Shares(Fixed):
    """A fork without a copy."""

    def fork(self) -> Cache:
        return copy.copy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Cache:
        return copy.copy(self)


class Hoards(Growing):
    """The mask is windowed, the storage is not."""


class OneRow(Ring):
    """Selects tokens, but not their positions."""

    def select(self, rows: Tensor) -> None:
        held = dict(self.contents())
        self.fill({n: x[rows] if n.startswith("memory") else x for n, x in held.items()})  # type: ignore[index]


class NeverCrops(Streaming):
    """Says that it has forgotten."""

    def crop(self, length: int) -> None:
        del length


class Late(Ring):
    """Answers positions one too high."""

    def update(self, memory: Parts, positions: Positions) -> tuple[Parts, Positions]:
        memory, where = super().update(memory, positions)
        return memory, Span(where.start + 1, where.length) if isinstance(where, Span) else where + 1


RING = KINDS["ring"]
SPANS: list[Step] = [3, 6, 1, 1, 9, 1]
BROKEN: dict[str, tuple[Kind, Callable[[Kind], None], str]] = {
    "trims first": (
        replace(RING, make=lambda: TrimsFirst(W)),
        lambda kind: contract.assert_any_chunks_are_one_pass(kind, SPANS),
        "row 0 lacks",
    ),
    "a ring that is one short": (
        replace(RING, make=lambda: Ring(W - 1)),
        lambda kind: contract.assert_any_chunks_are_one_pass(kind, SPANS),
        "row 0 lacks",
    ),
    "a window that is one long": (
        replace(RING, make=lambda: Ring(W + 1), mask=CAUSAL & masks.Window(W + 1)),
        lambda kind: contract.assert_any_chunks_are_one_pass(kind, SPANS),
        "attention is off",
    ),
    "slot by length": (
        replace(RING, make=lambda: ByLength(W)),
        lambda kind: contract.assert_any_chunks_are_one_pass(kind, PADDED),
        "row 0 answers",
    ),
    "positions one too high": (
        replace(RING, make=lambda: Late(W)),
        lambda kind: contract.assert_any_chunks_are_one_pass(kind, SPANS),
        "answers",
    ),
    "no undo": (
        replace(RING, make=lambda: NoUndo(W)),
        lambda kind: contract.assert_a_failed_update_is_taken_back(kind, SPANS, 1),
        "has left something",
    ),
    "a shared fork": (
        replace(KINDS["fixed"], make=lambda: Shares(60)),
        lambda kind: contract.assert_copies_are_apart(kind, [3], [1]),
        "changes",
    ),
    "unbounded": (
        replace(RING, make=Hoards),
        contract.assert_storage_is_bounded,
        "after",
    ),
    "rows mixed up": (
        replace(RING, make=lambda: OneRow(W)),
        lambda kind: contract.assert_rows_are_selected(kind, PADDED, [1], [1, 0]),
        "next is",
    ),
    "never crops": (
        replace(KINDS["streaming"], make=lambda: NeverCrops(2, W)),
        lambda kind: contract.assert_a_crop_forgets(kind, SPANS, [1], 1),
        "next is",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_cache_fails_the_suite(name: str) -> None:
    kind, law, message = BROKEN[name]
    with pytest.raises(AssertionError, match=message):
        law(kind)


def test_the_laws_hold_where_nothing_is_broken() -> None:
    """The controls fail for their mistake alone."""
    sound = {"a shared fork": KINDS["fixed"], "never crops": KINDS["streaming"]}
    failures = {}
    for name, (_, law, _) in BROKEN.items():
        try:
            law(sound.get(name, RING))
        except AssertionError as error:
            failures[name] = str(error)
    assert failures == {}
