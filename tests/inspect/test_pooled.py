"""Pooled patterns against sums and maxima over the whole pattern, in loops; and what composes,
composes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from regard import masks
from regard.inspect import Pooled, Recording
from tests.inspect.recorded import recorded_call

AT = torch.tensor([[*[-1] * 5, *range(18)], [*range(23)]])


def some(T: int = 23, **options: Any) -> Recording:
    make = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 4, T, 8, generator=make), torch.randn(2, 2, 23, 8, generator=make)
    return recorded_call(q, k, **{"mask": masks.Causal(), **options})


def by_loops(p: Tensor, seen: Tensor, tall: int, wide: int) -> tuple[Tensor, ...]:
    """mass, max, rows that see, visible pairs and all pairs of each block."""
    rows, columns = range(0, p.shape[0], tall), range(0, p.shape[1], wide)
    found = [[], [], [], [], []]  # type: ignore[var-annotated]
    for i in rows:
        who = [r for r in range(i, min(i + tall, p.shape[0])) if bool(seen[r].any())]
        found[2].append(len(who))
        for j in columns:
            here = range(j, min(j + wide, p.shape[1]))
            cells = [(r, c) for r in range(i, min(i + tall, p.shape[0])) for c in here]
            mass = [sum(float(p[r, c]) for c in here) for r in who]
            found[0].append(sum(mass) / len(who) if who else 0.0)
            found[1].append(max(float(p[cell]) for cell in cells))
            found[3].append(sum(int(seen[cell]) for cell in cells))
            found[4].append(len(cells))
    shape = (len(rows), len(columns))
    mass_, most, seeing, visible, pairs = (torch.tensor(x) for x in found)
    return mass_.view(shape), most.view(shape), seeing, visible.view(shape), pairs.view(shape)


def assert_right(x: Pooled, recording: Recording, head: int, batch: int) -> None:
    seen = recording.scores(0, head, batch=batch).isfinite()
    mass, most, seeing, visible, pairs = by_loops(
        recording.weights(0, head, batch=batch), seen, *x.size
    )
    assert (x.mass - mass).abs().max() < 1e-6  # the loops sum in fp32
    assert torch.equal(x.max.float(), most.float())
    assert torch.equal(x.seeing, seeing)
    assert torch.equal(x.visible, visible)
    assert torch.equal(x.pairs, pairs)
    assert torch.allclose(x.density * visible, mass.double() * seeing[:, None], atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 5, (3, 7), (7, 2), 23, 64])
def test_blocks_are_sums_and_maxima(size: int | tuple[int, int]) -> None:
    found = some(q_positions=AT, k_positions=AT)
    for batch in (0, 1):
        assert_right(found.pooled(0, 3, size, batch=batch), found, 3, batch)


def test_fewer_queries_than_keys_and_a_sink() -> None:
    sink = torch.tensor([0.0, 1.0, -1.0, 2.0])
    found = some(T=9, mask=None, sink=sink)
    assert_right(found.pooled(0, 1, 4), found, 1, 0)
    share = 1 - found.sums(0, 1)
    assert float(share.min()) > 0
    for size in (1, 3, 9):
        x = found.pooled(0, 1, size)
        expected = torch.stack([part.mean() for part in (1 - share).split(size)])
        assert (x.mass.sum(1) - expected).abs().max() < 1e-12


@pytest.mark.parametrize("times", [1, 2, (2, 3), (5, 1), 99])
def test_coarser_blocks_are_those_of_the_pattern(times: int | tuple[int, int]) -> None:
    """Ragged at every level: 23 = 7 * 3 + 2 = 11 * 2 + 1."""
    found = some(q_positions=AT, k_positions=AT)
    down, across = times if isinstance(times, tuple) else (times, times)
    for batch in (0, 1):
        x = found.pooled(0, 2, (3, 2), batch=batch).coarser(times)
        y = found.pooled(0, 2, (3 * down, 2 * across), batch=batch)
        assert (x.mass - y.mass).abs().max() < 1e-12
        for name in ("max", "seeing", "visible", "pairs"):
            assert torch.equal(getattr(x, name), getattr(y, name)), name


def test_padding_that_asks_is_nobody() -> None:
    """Without a causal mask a padded query sees every key; it is no token, and no part of a
    mean.
    """
    found = some(mask=None, q_positions=AT, k_positions=AT)
    x = found.pooled(0, 0, 4, batch=0)
    assert x.seeing.tolist() == [0, 3, 4, 4, 4, 3]
    rows = found.weights(0, 0, slice(5, 8), batch=0)
    expected = torch.stack([part.sum(1).mean() for part in rows.split(4, 1)])
    assert (x.mass[1] - expected).abs().max() < 1e-12
    assert x.coarser(6).mass.sum().item() == pytest.approx(1, abs=1e-6)
    assert x.coarser(6).visible.item() == 18 * 18
