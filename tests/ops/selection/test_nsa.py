"""NSA's compressed blocks, their importance and the choice, against the paper's equations in plain
loops.
"""

from __future__ import annotations

import math

import pytest
import torch

import regard
from regard.ops.selection import NSABlocks, block_layout, selection_mask
from regard.ops.selection.nsa import block_importance, compression_positions, compression_windows
from regard.span import Positions, Span
from tests.ops.selection.test_best_blocks import rows
from tests.oracles import selected as oracle

E = -1
B, H, G, D = 2, 4, 2, 4
SIZES = [
    NSABlocks(4, 2, 4, 4, 6),
    NSABlocks(4, 2, 8, 3, 6, initial=0, local=1),
    NSABlocks(3, 3, 3, 3, 6),  # one blocking for both: the importance is the weight itself
    NSABlocks(6, 2, 6, 4, 6, initial=2, local=2),
    NSABlocks(2, 1, 4, 1, 1, initial=0, local=1),
]
CALLS: dict[str, tuple[Positions, Positions]] = {
    "square": (Span(0, 25), Span(0, 25)),
    "shorter than a block": (Span(0, 2), Span(0, 2)),
    "one query": (Span(24, 1), Span(0, 25)),
    "keys from inside a block": (Span(5, 14), Span(5, 14)),
    "left padded": (
        torch.tensor([[E] * 5 + list(range(13)), list(range(18))]),
        torch.tensor([[E] * 5 + list(range(13)), list(range(18))]),
    ),
    "any order, with gaps": (
        torch.tensor([[19, E, 12], [18, 17, 3]]),
        torch.tensor(
            [
                [19, 2, E, 9, 0, 8, 1, 3, 4, 5, 6, 7, 10, 12, 13],
                [3, 14, E, 13, 6, 12, 18, 0, 1, 17, 16, 15, 2, 11, 10],
            ]
        ),
    ),
}


def mean(block: list[list[float]]) -> list[float]:
    return [math.fsum(x) / len(block) for x in zip(*block, strict=True)]


@pytest.mark.full(keep="each")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_choice_equals_the_definition(sizes: NSABlocks, call: str) -> None:
    q_at, k_at = CALLS[call]
    T, S = len(rows(q_at)[0]), len(rows(k_at)[0])
    q, k = torch.randn(B, H, T, D).double() * 2, torch.randn(B, G, S, D).double() * 2
    laid = block_layout(k_at, sizes.select)
    at = compression_positions(laid, sizes)
    short = compression_windows(k, laid, sizes).mean(3)
    exact = oracle.compressed(k, sizes.compress, sizes.stride, rows(k_at), mean)
    for b in range(B):  # every complete block, and no other
        found = {int(p): c for c, p in enumerate(at.expand(B, -1)[b]) if p >= 0}
        assert set(found) == {i * sizes.stride + sizes.compress - 1 for i in exact[b][0]}
        for g in range(G):
            for i, key in exact[b][g].items():
                c = found[i * sizes.stride + sizes.compress - 1]
                assert (
                    float((short[b, g, c] - torch.tensor(key, dtype=torch.float64)).abs().max())
                    < 1e-14
                )
    _, weights = oracle.nsa_compressed_attention(
        q, exact, exact, sizes.compress, sizes.stride, rows(q_at)
    )
    numbers = (sizes.compress, sizes.stride, sizes.select, sizes.count, sizes.initial, sizes.local)
    chosen = oracle.nsa_chosen(weights, G, numbers, rows(q_at), rows(k_at))
    mask = selection_mask(q, short, laid, sizes, q_positions=q_at, k_positions=at)
    expected = [
        [[[p in seen for p in rows(k_at)[b]] for seen in head] for head in heads]
        for b, heads in enumerate(chosen)
    ]
    assert mask.block(q_at, k_at).expand(B, H, -1, -1).tolist() == expected


def test_importance_is_equation_9_with_indices_from_1() -> None:
    sizes = NSABlocks(32, 16, 64, 16, 512)
    p = torch.randn(1, 2, 3, 63, dtype=torch.float64).exp()  # 1024 tokens: 63 compressed, 16 blocks
    found = block_importance(p, 1, sizes)
    for t in range(3):
        for j in range(1, 17):
            terms = [
                float(p[0, h, t, i - 1])
                for h in range(2)
                for m in range(4)
                for n in range(2)
                if 1 <= (i := 4 * j - m - n) <= 63
            ]
            assert abs(float(found[0, 0, t, j - 1]) - math.fsum(terms)) < 1e-13
    assert found.shape == (1, 1, 3, 16)


def test_rows_in_turns_choose_the_same() -> None:
    sizes, at = SIZES[0], Span(0, 25)
    q, k = torch.randn(B, H, 25, D), torch.randn(B, G, 25, D)

    laid = block_layout(at, sizes.select)
    short = compression_windows(k, laid, sizes).mean(3)
    where = {"q_positions": at, "k_positions": compression_positions(laid, sizes)}
    whole = selection_mask(q, short, laid, sizes, **where).block(at, at)
    assert selection_mask(q, short, laid, sizes, **where, max_bytes=1).block(at, at).equal(whole)


def test_errors() -> None:
    need = "stride must divide both, and compress must be at most select; allowed strides:"
    for arguments, message in (
        ((32, 12, 64), f"compress 32, stride 12, select 64: {need} 1, 2, 4, 8, 16, 32"),
        ((8, 4, 6), f"compress 8, stride 4, select 6: {need} 1, 2"),
        ((8, 4, 4), f"compress 8, stride 4, select 4: {need} 1, 2, 4"),
        ((4, 2, 4, 2), "count is 2, fewer than the forced blocks, 1 initial + 2 local; give at"),
        ((0, 2, 4), "NSABlocks(compress=0, stride=2, select=4, count=16, window=512, initial=1,"),
        ((4, 2, 4, 4, 0), "NSABlocks(compress=4, stride=2, select=4, count=4, window=0,"),
    ):
        with pytest.raises(regard.ArgumentError) as error:
            NSABlocks(*arguments)
        assert message in str(error.value)
