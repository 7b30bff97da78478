"""Numbers that the papers and the field agree on, 64 positions unless said."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from regard import masks
from regard.masks import BigBird, Causal, Global, Mask, Sinks, Strided, Window
from regard.span import Span

N = 64
ALL = Span(0, N)

COUNTS = [
    (Causal(), 2080),
    (Causal() & Window(8), 484),
    (Causal() & Window(9), 540),
    (Causal() & (Window(8) | Sinks(4)), 702),
    (Causal() & Strided(8), 708),
    (Causal() & Strided(8, fixed=1), 512),
    (Causal() & Strided(8, fixed=2), 736),
    (Window(9, ahead=8) | Global((0, 1)), 1234),
    (Window(9, ahead=8) | Global((0, 63)), 1234),
    (Window(9, ahead=8) | Global((10, 20)), 1202),
    (Window(9, ahead=8) | Global((30, 40)), 1202),
    (masks.Full(), 4096),
    (~Causal(), 2016),
]


def dense(mask: Mask, n: int = N) -> Tensor:
    return mask.block(Span(0, n), Span(0, n))[0, 0]


@pytest.mark.parametrize("mask, pairs", COUNTS, ids=str)
def test_pairs(mask: Mask, pairs: int) -> None:
    assert mask.count(ALL, ALL) == pairs
    assert int(dense(mask).sum()) == pairs
    stored = torch.arange(N)[None]
    assert mask.count(stored, stored) == pairs


def test_numbers_of_batch_rows_add_up() -> None:
    assert (Causal() & masks.Padding.right([64, 1])).count(ALL, ALL) == 2080 + 64
    assert masks.Heads((Causal(), Causal() & Window(8))).count(ALL, ALL) == 2080 + 484


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_bigbird_blocks(seed: int) -> None:
    mask = BigBird(64, 32, seed=seed)
    visible = mask.visible(Span(0, 2048), Span(0, 2048))[0, 0]
    assert visible[64 * 2 : 64 * 30].eq(512).all()  # 2 global, 3 window, 3 random blocks
    assert visible[:64].eq(2048).all()
    assert visible[-64:].eq(2048).all()
    assert visible[64:128].eq(64 * (3 + 1 + 3)).all()  # its window touches the first block
    drawn = []
    for i in range(2, 30):
        random = set(mask.table[i].nonzero()[:, 0].tolist()) - {0, 31, i - 1, i, i + 1}
        assert len(random) == 3
        drawn.append(frozenset(random))
    assert len(set(drawn)) > 20  # really random: not one draw for all blocks
    assert max(sum(j in random for random in drawn) for j in range(32)) < 14


def test_bigbird_draws_from_its_seed_alone() -> None:
    before = torch.random.get_rng_state()
    first = BigBird(2, 40, seed=11).table
    assert torch.random.get_rng_state().equal(before)
    torch.manual_seed(99)
    assert masks.blocks._bigbird_table.__wrapped__(40, 3, 3, 11, False).equal(first)
    assert not BigBird(2, 40, seed=12).table.equal(first)


def test_causal_bigbird_draws_from_the_past() -> None:
    mask = BigBird(4, 16, seed=3, causal=True)
    table = mask.table
    assert not table.triu(1).any()
    assert (
        table.sum(1)[6:-1] == 1 + 2 + 3
    ).all()  # the first block, two of the window, three drawn
    assert table[-1].all()
    assert not dense(mask).triu(1).any()
    assert dense(mask).diagonal().all()
