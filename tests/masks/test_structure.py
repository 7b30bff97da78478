"""What a mask says of itself equals brute force: dense blocks, intervals, tiles, counts, for any
positions.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard import masks
from regard.masks import Mask
from regard.span import Positions, Span
from tests.masks.brute import (
    CASES,
    WITH_INTERVALS,
    WITHOUT_INTERVALS,
    B,
    Case,
    assert_brute_force,
    pairs,
)

E = -1
Tree = str | tuple  # of an operator and trees
UNORDERED = torch.tensor([[5, E, 0, 9, 2, E, 7, 1, 3], [E, E, 4, 8, 0, 6, 1, E, 2]])
CALLS: dict[str, tuple[Positions, Positions]] = {
    "square": (Span(0, 11), Span(0, 11)),
    "last queries": (Span(6, 4), Span(0, 10)),
    "one query": (Span(13, 1), Span(0, 14)),
    "queries before the first key": (Span(-3, 8, tokens=True), Span(2, 9)),
    "empty queries of a span": (Span(-3, 8), Span(2, 9)),
    "no query at all": (torch.full((2, 3), E), Span(0, 7)),
    "keys before 0": (Span(0, 6), Span(-5, 11)),
    "more queries than keys": (Span(0, 9), Span(4, 3)),
    "far away": (Span(30, 3), Span(0, 12)),
    "unordered keys with holes": (Span(3, 6), UNORDERED),
    "unordered queries": (torch.tensor([[4, E, 0, 8], [1, 9, 9, 3]]), UNORDERED),
    "one row for all": (torch.tensor([[6, 7, 8]]), torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8]])),
    "int32": (torch.tensor([[6, 7, 8]], dtype=torch.int32), UNORDERED.int()),
    "holes only": (Span(0, 3), torch.full((2, 5), E)),
}


@pytest.mark.full(keep="each")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", CASES)
def test_mask_equals_brute_force(name: str, call: str) -> None:
    mask, rule = CASES[name]
    assert_brute_force(mask, rule, *CALLS[call], sizes=((3, 4), (1, 1), (64, 64)))


@pytest.mark.parametrize("name", CASES)
def test_intervals_exist_where_promised(name: str) -> None:
    found = CASES[name].mask.intervals(torch.arange(5)[None])
    assert (found is None) == (name in WITHOUT_INTERVALS)


@pytest.mark.full(keep=24)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("T, S", [(0, 3), (3, 0), (0, 0)])
def test_nothing_to_see(name: str, T: int, S: int) -> None:
    mask = CASES[name].mask
    for k in (Span(0, S), torch.arange(S).expand(2, S)):
        assert mask.block(Span(0, T), k).shape[2:] == (T, S)
        assert mask.visible(Span(0, T), k).shape[2] == T
        assert mask.count(Span(0, T), k) == 0
        assert mask.tiles(Span(0, T), k, (2, 2)).shape[2:] == (-(-T // 2), -(-S // 2))


def trees(depth: int = 3) -> st.SearchStrategy[Tree]:
    """A random expression: the name of a case, or an operator and its operands."""
    leaf = st.sampled_from(sorted(CASES))
    if depth == 0:
        return leaf
    below = trees(depth - 1)
    return leaf | st.tuples(st.just("~"), below) | st.tuples(st.sampled_from("&|"), below, below)


def grow(tree: Tree) -> Case:
    """The mask of an expression, and its rule in plain Python."""
    if isinstance(tree, str):
        return CASES[tree]
    a = grow(tree[1])
    if tree[0] == "~":
        return Case(~a.mask, lambda q, k, b, h: not a.rule(q, k, b, h))
    c = grow(tree[2])
    if tree[0] == "&":
        return Case(a.mask & c.mask, lambda q, k, b, h: a.rule(q, k, b, h) and c.rule(q, k, b, h))
    return Case(a.mask | c.mask, lambda q, k, b, h: a.rule(q, k, b, h) or c.rule(q, k, b, h))


@st.composite
def positions(draw: st.DrawFn) -> Positions:
    """A span or stored positions, with holes, in any order."""
    if draw(st.booleans()):
        return Span(draw(st.integers(-4, 8)), draw(st.integers(0, 10)), draw(st.booleans()))
    n = draw(st.integers(1, 9))
    rows = [
        draw(st.lists(st.integers(-1, 16), min_size=n, max_size=n))
        for _ in range(draw(st.integers(1, B)))
    ]
    return torch.tensor(rows * (B // len(rows)) if draw(st.booleans()) else rows[:1])


@given(trees(), positions(), positions(), st.integers(1, 5), st.integers(1, 5))
def test_random_expressions(tree: Tree, q: Positions, k: Positions, bq: int, bk: int) -> None:
    assert_brute_force(*grow(tree), q, k, sizes=((bq, bk),))


def test_masks_with_intervals_are_never_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("evaluated")

    with monkeypatch.context() as patch:
        patch.setattr(Mask, "block", refuse)
        n = 1 << 15
        sliding = masks.Causal() & (masks.Window(1000) | masks.Sinks(4))
        found = sliding.tiles(Span(0, n), Span(0, n), (1024, 128))
        assert sliding.count(Span(0, n), Span(0, n)) == 1000 * 1001 // 2 + (n - 1000) * 1000 + sum(
            min(4, max(0, q + 1 - 1000)) for q in range(1000, n)
        )
        for case in WITH_INTERVALS.values():
            for k in (Span(0, 12), UNORDERED):
                case.mask.tiles(Span(0, 9), k, (3, 4))
    assert int(found.count_nonzero()) < 32 * 18  # a band and the first block, of 32 x 256 tiles


def test_kleene_logic_decides_without_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    rule = masks.Fn(lambda q, k: bool(seen.append(k.numel())) | (q == q) & (k % 2 == 0), "even")
    n = 256
    (masks.Causal() & masks.Window(16) & rule).tiles(Span(0, n), Span(0, n), (16, 16))
    assert sum(seen) <= 2 * n  # the diagonal and its neighbour, not 16 x 16 tiles
    seen.clear()
    assert (masks.Full() | rule).tiles(Span(0, n), Span(0, n), (64, 64)).eq(masks.FULL).all()
    assert (~masks.Full() & rule).tiles(Span(0, n), Span(0, n), (64, 64)).eq(masks.EMPTY).all()
    assert seen == []


@pytest.mark.full(keep=10)
@pytest.mark.parametrize("name", CASES)
def test_mask_mod_is_the_rule_under_vmap(name: str) -> None:
    from torch.nn.attention.flex_attention import create_mask

    mask, rule = CASES[name]
    for q, k in (CALLS["last queries"], CALLS["unordered queries"]):
        dense = pairs(rule, q, k)
        found = create_mask(
            mask.mask_mod(q, k), 2, 2, len(dense[0][0]), len(dense[0][0][0]), device="cpu"
        )
        assert found.tolist() == dense


class TopLeft(masks.Causal):
    """torch's is_causal: the triangle starts at the first query, wherever that stands."""

    def allows(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return k <= q - q.flatten()[0]

    def _intervals(self, q: torch.Tensor) -> None:
        return None


class LooseIntervals(masks.Causal):
    """Right rule, wrong intervals."""

    def _intervals(self, q: torch.Tensor) -> masks.Intervals:
        return masks.Intervals(torch.zeros_like(q), q + 2)


class Overlapping(masks.Causal):
    """Tiles that forget that holes are not seen."""

    def tile_row(self, *where: object, **options: object) -> torch.Tensor:
        return super().tile_row(*where, **options).clamp(max=1)


@pytest.mark.parametrize(
    "wrong",
    [
        Case(masks.Window(5), CASES["window"].rule),
        Case(masks.Window(3), CASES["window"].rule),
        Case(TopLeft(), CASES["causal"].rule),
        Case(LooseIntervals(), CASES["causal"].rule),
        Case(Overlapping(), CASES["causal"].rule),
        Case(masks.Window(3, ahead=2), CASES["window, two sides"].rule),
        Case(masks.Document((0, 3, 8)), CASES["documents"].rule),
        Case(masks.Padding.right([4, 7]), CASES["left padding"].rule),
        Case(masks.Strided(4, fixed=1), CASES["fixed"].rule),
        Case(masks.Heads((masks.Prefix((2, 5)), masks.Causal())), CASES["heads"].rule),
        Case(~masks.Causal(), CASES["causal"].rule),
    ],
    ids=lambda wrong: f"{type(wrong.mask).__name__} {wrong.mask}",
)
def test_wrong_masks_are_caught(wrong: Case) -> None:
    with pytest.raises(AssertionError):
        assert_brute_force(*wrong, Span(5, 6), Span(0, 11))
