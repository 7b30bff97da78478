"""Shards: they cover a sequence once, share the work of a mask, and say which keys must move."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard import masks
from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks import Mask
from regard.parallel import Shards
from regard.parallel.shards import needed_keys, needed_queries
from regard.span import Span
from tests.parallel.ranks import MASKS, S

DOCUMENTS = masks.Causal() & masks.Document(((0, 300, 1900, 2000, 3500, 4096),))


@given(st.integers(0, 70), st.integers(1, 9), st.integers(0, 5))
def test_every_position_is_held_once(length: int, W: int, start: int) -> None:
    made = (
        Shards.even(length, W, start=start),
        Shards.zigzag(length, W, start=start),
        Shards.balanced(length, W, masks.Causal(), start=start),
    )
    for shards in made:
        held = [p for r in range(W) for p in shards.positions(r)[0].tolist()]
        assert sorted(held) == list(range(start, start + length))
        assert len(shards) == length
        assert shards.world == W
        x = torch.randn(2, length, 3)
        parts = [shards.take(x, r, dim=1) for r in range(W)]
        assert [len(p[0]) for p in parts] == [shards.count(r) for r in range(W)]
        assert torch.equal(shards.join(parts, dim=1), x)


def test_the_first_ranks_have_one_more() -> None:
    assert [Shards.even(8, 3).count(r) for r in range(3)] == [3, 3, 2]
    assert [len(x) for x in Shards.zigzag(8, 3).ranks] == [2, 2, 1]


def test_zigzag_shares_causal_work_and_even_does_not() -> None:
    causal = masks.Causal()
    assert Shards.zigzag(4096, 8).efficiency(causal) > 0.999
    assert Shards.even(4096, 8).efficiency(causal) == pytest.approx(0.533, abs=0.001)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize(
    "mask", [masks.Causal(), DOCUMENTS, masks.Full(), masks.Causal() & masks.Window(512)], ids=str
)
def test_balanced_shards_are_balanced_to_95_percent(mask: Mask) -> None:
    shards = Shards.balanced(4096, 8, mask)
    work = shards.work(mask)
    assert sum(work) == mask.count(Span(0, 4096), Span(0, 4096))
    least = 0.93 if "window" in str(mask) else 0.95  # of a window the halo is worth more than 2 %
    assert shards.efficiency(mask) >= least
    assert shards.efficiency(mask) == pytest.approx(sum(work) / 8 / max(work))


def test_documents_are_not_balanced_by_the_schemes_alone() -> None:
    assert Shards.even(4096, 8).efficiency(DOCUMENTS) < 0.7
    assert Shards.zigzag(4096, 8).efficiency(DOCUMENTS) < 0.8
    assert Shards.balanced(4096, 8, DOCUMENTS).efficiency(DOCUMENTS) > 0.95


def test_work_is_counted_pair_by_pair() -> None:
    for name, mask in MASKS.items():
        if mask is None:
            continue
        dense = mask.block(Span(0, S), Span(0, S))
        for shards in (Shards.even(S, 3), Shards.zigzag(S, 3)):
            by_hand = [
                int(sum(dense[:, :, p].sum() for p in shards.positions(r)[0])) for r in range(3)
            ]
            assert list(shards.work(mask)) == by_hand, name


@pytest.mark.parametrize("name", [name for name, mask in MASKS.items() if mask is not None])
def test_the_keys_that_are_needed_are_the_shortest_runs(name: str) -> None:
    mask = MASKS[name]
    assert mask is not None
    dense = mask.block(Span(0, S), Span(0, S)).flatten(0, 1).any(0)
    for shards in (Shards.even(S, 3), Shards.zigzag(S, 3)):
        for receiver in range(3):
            for sender in range(3):
                found = needed_keys(mask, shards.spans(receiver), shards.spans(sender))
                rows = shards.positions(receiver)[0]
                by_hand = []
                for n, span in enumerate(shards.spans(sender)):
                    columns = dense[rows][:, span.start : span.stop].any(0).nonzero()[:, 0]
                    if len(columns):
                        first, last = int(columns[0]), int(columns[-1])
                        by_hand.append((n, span.start + first, span.start + last + 1))
                assert list(found) == by_hand
                for q in shards.spans(receiver):
                    for k in shards.spans(sender):
                        tile = dense[q.start : q.stop, k.start : k.stop]
                        seeing = tile.any(1).nonzero()[:, 0].tolist()
                        expected = (seeing[0], seeing[-1] + 1) if seeing else None
                        assert needed_queries(mask, q, k) == expected


def test_they_print_their_spans() -> None:
    assert str(Shards(((Span(0, 1), Span(2, 3)), (), (Span(1, 1),)))) == (
        "5 tokens on 3 ranks\n  0: 0 2-4\n  1: nothing\n  2: 1"
    )


REFUSED = [
    (lambda: Shards(()), ArgumentTypeError, "at least one rank"),
    (lambda: Shards(((Span(0, 3),), (Span(2, 3),))), ArgumentError, "0-2 and 2-4 overlap"),
    (lambda: Shards(((Span(0, 3),), (Span(4, 3),))), ArgumentError, "0-2 and 4-6 leave a gap"),
    (lambda: Shards(((Span(-1, 3),),)), ArgumentError, "begins at -1"),
    (lambda: Shards.even(4, 0), ArgumentError, "the number of ranks is 0"),
    (lambda: Shards.even(-1, 2), ArgumentError, "the number of positions is -1"),
    (lambda: Shards.even(4, 2).spans(2), ArgumentError, "ranks 0 to 1"),
    (lambda: Shards.even(4, 2).take(torch.zeros(3), 0, 0), ArgumentError, "hold 4 positions"),
    (
        lambda: Shards.even(4, 2).join([torch.zeros(2)], 0),
        ArgumentError,
        "1 part given for 2 ranks",
    ),
    (
        lambda: Shards.even(4, 2).join([torch.zeros(1), torch.zeros(3)], 0),
        ArgumentError,
        "the part of rank 0 has length 1",
    ),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_does_not_fit_is_refused(case: int) -> None:
    make, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        make()
