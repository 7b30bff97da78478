"""The number of visible pairs of a whole text from the period of a mask: equal to counting them."""

from __future__ import annotations

import pytest

from regard.masks import Causal, Chunk, Dilated, Full, Mask, Sinks, Strided, Window
from regard.masks.patterns import count_pairs, period
from regard.span import Span

PERIODIC = {
    "strided": (Causal() & Strided(8), 1),
    "fixed": (Causal() & Strided(8, fixed=2), 8),
    "dilated": (Causal() & Dilated(5, 3), 1),
    "both sides": (Dilated(4, 3, ahead=2), 1),
    "later tokens too": (Strided(6, fixed=1), 6),
    "not": (Causal() & ~Dilated(5, 3), 1),
    "two periods": (Causal() & (Strided(6, fixed=1) | Chunk(4)), 12),
    "ranges": (Causal() & Window(5), 1),
    "all": (Full(), 1),
}


@pytest.mark.parametrize("name", PERIODIC)
@pytest.mark.parametrize("n", [1, 7, 48, 101])
def test_pairs_by_period_are_the_pairs_counted_one_by_one(name: str, n: int) -> None:
    mask, expected = PERIODIC[name]
    assert period(mask) == expected
    dense = mask.block(Span(0, n), Span(0, n))
    assert count_pairs(mask, n) == int(dense.sum())


def test_a_mask_without_period_is_counted_as_before() -> None:
    mask: Mask = Causal() & (Sinks(3) | Dilated(4, 2))
    assert period(mask) is None
    assert count_pairs(mask, 50) == int(mask.block(Span(0, 50), Span(0, 50)).sum())
    assert period(Causal() & Sinks(3)) is None
