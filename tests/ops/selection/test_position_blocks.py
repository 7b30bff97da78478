"""Slots in the order of their positions, and the choice of the largest, against plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.ops.selection.position_blocks import (
    block_layout,
    in_query_chunks,
    select_blocks,
    top_k_mask,
)
from regard.span import Positions, Span, as_tensor

E = -1
CASES: dict[str, Positions] = {
    "span": Span(0, 12),
    "span, not a multiple": Span(0, 7),
    "span from inside a block": Span(7, 6),
    "span from far away": Span(1_000_001, 5),
    "span from below 0": Span(-2, 6),
    "one token": Span(5, 1),
    "nothing": Span(0, 0),
    "no slots": torch.zeros(2, 0, dtype=torch.int64),
    "left padded": torch.tensor([[E, E, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]),
    "rows far apart": torch.tensor([[3, 4, 5, 6], [900, 901, 902, 903]]),
    "any order": torch.tensor([[5, 2, E, 7, 0], [9, E, E, 1, 14]]),
    "int32": torch.tensor([[5, 2, E, 7, 0]], dtype=torch.int32),
    "empty row": torch.tensor([[E, E, E], [4, E, 5]]),
}


@pytest.mark.full(keep="each")
@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_order(name: str, size: int) -> None:
    positions = CASES[name]
    where = as_tensor(positions).expand(2, -1).tolist()
    x = torch.randn(2, 3, len(where[0]), 2, dtype=torch.float64)
    x[torch.tensor(where)[:, None, :, None].expand(x.shape) < 0] = (
        math.nan
    )  # what an empty slot holds
    laid = block_layout(positions, size)
    found, held = laid.to_blocks(x), laid.occupied.expand(2, -1).tolist()
    assert found.shape == (2, 3, laid.blocks, size, 2)
    first, N = laid.first.expand(2).tolist(), laid.blocks
    for b in range(2):
        slot = {p: j for j, p in enumerate(where[b]) if p >= 0}
        assert all(0 <= p // size - first[b] < N for p in slot)
        for i in range(N * size):
            j = slot.get(first[b] * size + i)
            assert held[b][i] == (j is not None)
            expected = torch.zeros(3, 2) if j is None else x[b, :, j]
            assert torch.equal(found.flatten(2, 3)[b, :, i], expected.double())
        counts = [sum(p // size == first[b] + n for p in slot) for n in range(N)]
        assert laid.token_counts.expand(2, -1)[b].tolist() == counts
        assert laid.block_numbers.expand(2, -1)[b].tolist() == [first[b] + n for n in range(N)]
    assert max(1, max(len(w) for w in where), 16 // size + 1) >= N, "memory follows the slots"


def reference_top(row: list[float], k: int) -> list[bool]:
    rank = {i: math.inf if math.isnan(x) else x for i, x in enumerate(row)}
    order_ = sorted((i for i in rank if rank[i] > -math.inf), key=lambda i: (-rank[i], i))
    return [i in order_[: max(k, 0)] for i in range(len(row))]


NUMBERS = st.sampled_from([0.0, -0.0, 1.0, 1.0, -2.5, math.inf, -math.inf, math.nan, 3e38, 1e-45])


@given(
    st.lists(st.lists(NUMBERS, min_size=6, max_size=6), min_size=1, max_size=4), st.integers(-1, 8)
)
def test_top_takes_the_first_of_equals_and_never_minus_infinity(rows: list, k: int) -> None:
    assert top_k_mask(torch.tensor(rows), k).tolist() == [reference_top(row, k) for row in rows]
    taken = torch.arange(len(rows))[:, None]
    found = top_k_mask(torch.tensor(rows), k, taken).tolist()
    assert found == [reference_top(row, k - i) for i, row in enumerate(rows)]


def test_forced_blocks_count_among_the_best() -> None:
    scores = torch.tensor([5.0, 4.0, math.nan, 1.0, 9.0])
    forced = torch.tensor([False, False, False, True, True])
    allowed = torch.tensor(
        [True, True, True, True, False]
    )  # a forced block that is not allowed takes no place
    for k, expected in ((0, [3]), (1, [3]), (2, [2, 3]), (3, [0, 2, 3]), (9, [0, 1, 2, 3])):
        found = select_blocks(*(x[None, None, None] for x in (scores, forced, allowed)), k)
        assert found[0, 0, 0].nonzero()[:, 0].tolist() == expected


def test_rows_in_turns_equal_all_at_once() -> None:
    x = torch.randn(1, 2, 11, 5)
    seen: list[int] = []

    def choose(rows: slice) -> torch.Tensor:
        seen.append(x[:, :, rows].shape[2])
        return x[:, :, rows] > 0

    assert in_query_chunks(choose, 11, 10, max_bytes=40).equal(x > 0)
    assert seen == [4, 4, 3]


def test_a_compiled_graph_takes_rows_without_gaps_and_refuses_others() -> None:
    def lay(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return block_layout(positions, 4).to_position_order(x)

    compiled = torch.compile(lay, fullgraph=True, backend="eager")
    x, positions = torch.randn(2, 1, 6, 2), CASES["left padded"]
    found, plain = compiled(x, positions), lay(x, positions)
    assert torch.equal(found[:, :, : plain.shape[2]], plain)
    assert found[:, :, plain.shape[2] :].eq(0).all()
    with pytest.raises(RuntimeError, match="positions of a row have gaps"):
        compiled(x, torch.tensor([[0, 1, 2, 3, 4, 900]]))
