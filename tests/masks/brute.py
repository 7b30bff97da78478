"""Masks by brute force: every rule written again in plain Python, and every structure by loops over
pairs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch

from regard import masks
from regard.masks import EMPTY, FULL, PARTIAL, Mask
from regard.span import Positions, Span

B, H = 2, 2
TABLE = torch.rand(4, 5, generator=torch.Generator().manual_seed(1)) < 0.5
TABLES = torch.rand(2, 2, 3, 3, generator=torch.Generator().manual_seed(2)) < 0.5
TABLE_ROWS, TABLES_ROWS = TABLE.tolist(), TABLES.tolist()
BIRD, PAST_BIRD = masks.BigBird(3, 7, random=1, seed=5), masks.BigBird(2, 9, 1, 2, causal=True)
BIRD_ROWS, PAST_BIRD_ROWS = BIRD.table.tolist(), PAST_BIRD.table.tolist()

Rule = Callable[[int, int, int, int], bool]


class Case(NamedTuple):
    """A mask and its rule(q, k, b, h)."""

    mask: Mask
    rule: Rule


def _entry(rows: list[list[bool]], size: int, q: int, k: int) -> bool:
    i, j = q // size, k // size
    return 0 <= i < len(rows) and 0 <= j < len(rows[0]) and rows[i][j]


def _same(bounds: tuple[int, ...], q: int, k: int) -> bool:
    return any(lo <= q < hi and lo <= k < hi for lo, hi in itertools.pairwise(bounds))


def _in(runs: tuple[tuple[int, int], ...], k: int) -> bool:
    return any(lo <= k < hi for lo, hi in runs)


def _diffusion(size: int, n: int, q: int, k: int) -> bool:
    """The blocks that the denoiser of q's block reads: see the text of each branch."""
    if not (0 <= q < 2 * n and 0 <= k < 2 * n):
        return False
    blocks = [list(range(i, min(i + size, n))) for i in range(0, n, size)]
    noisy, clean = blocks, [[x + n for x in block] for block in blocks]
    for i in range(len(blocks)):
        if q in noisy[i]:  # itself, given the clean blocks before it
            return k in noisy[i] or any(k in block for block in clean[:i])
        if q in clean[i]:  # a text, block by block
            return any(k in block for block in clean[: i + 1])
    raise AssertionError


def _near(
    i: int, n: int, K: int, stride: int = 1, dilation: int = 1, causal: bool = False
) -> set[int]:
    """The indices of one dimension of a grid that index i sees.

    Of all windows of K indices in the grid, it is the one whose middle is nearest to the middle of
    the query's group; a causal one ends with the last query of the group, as far as it reaches.
    """
    line = [x for x in range(n) if x % dilation == i % dilation]
    own = line.index(i)
    group = [j for j in range(len(line)) if j // stride == own // stride]
    if causal:
        return {line[j] for j in range(len(line)) if group[-1] - K < j <= own}
    middle = own - own % stride + stride // 2
    middle = min(middle, len(line) - 1)  # the last group may be cut before its middle
    starts = range(len(line) - K + 1)
    start = min(starts, key=lambda first: abs(first + K // 2 - middle))
    return set(line[start : start + K])


def neighbors(
    shape: tuple[int, ...], kernel: tuple[int, ...], q: int, k: int, **more: tuple[int, ...]
) -> bool:
    """Whether the key is near the query in every dimension of a row-major grid."""
    cells = list(itertools.product(*map(range, shape)))
    if not (0 <= q < len(cells) and 0 <= k < len(cells)):
        return False
    return all(
        cells[k][dim]
        in _near(cells[q][dim], shape[dim], kernel[dim], **{x: y[dim] for x, y in more.items()})
        for dim in range(len(shape))
    )


HOLES = torch.tensor(
    [[True, False, True, True, False, True], [False, False, False, False, True, True]]
)
DOCUMENTS = ((0, 2, 2, 9, 14), (1, 6))

WITH_INTERVALS = {
    "full": Case(masks.Full(), lambda q, k, b, h: True),
    "causal": Case(masks.Causal(), lambda q, k, b, h: k <= q),
    "window": Case(masks.Window(4), lambda q, k, b, h: k in range(q - 3, 10**6)),
    "window of 1": Case(masks.Window(1), lambda q, k, b, h: k >= q),
    "window, two sides": Case(
        masks.Window(3, ahead=1), lambda q, k, b, h: k in (q - 2, q - 1, q, q + 1)
    ),
    "earlier chunks": Case(
        masks.EarlierChunks(3, 1, 2), lambda q, k, b, h: k // 3 in (q // 3 - 1, q // 3 - 2)
    ),
    "chunk": Case(masks.Chunk(5), lambda q, k, b, h: k in range(q - q % 5, q - q % 5 + 5)),
    "prefix": Case(masks.Prefix(3), lambda q, k, b, h: k in (0, 1, 2)),
    "prefix per row": Case(masks.Prefix((2, 5)), lambda q, k, b, h: k < (2, 5)[b]),
    "documents": Case(masks.Document((0, 3, 3, 9)), lambda q, k, b, h: _same((0, 3, 9), q, k)),
    "documents per row": Case(
        masks.Document(DOCUMENTS), lambda q, k, b, h: _same(DOCUMENTS[b], q, k)
    ),
    "right padding": Case(masks.Padding.right([4, 7]), lambda q, k, b, h: k < (4, 7)[b]),
    "left padding": Case(masks.Padding.left([4, 7], 8), lambda q, k, b, h: (4, 1)[b] <= k < 8),
    "padding with holes": Case(
        masks.Padding.from_keep(HOLES), lambda q, k, b, h: k < 6 and bool(HOLES[b, k])
    ),
    "all padding": Case(masks.Padding(((), ())), lambda q, k, b, h: False),
    "sinks": Case(masks.Sinks(2), lambda q, k, b, h: k in (0, 1)),
    "globals": Case(masks.Global((7, 1, 8)), lambda q, k, b, h: bool({q, k} & {1, 7, 8})),
    "no globals": Case(masks.Global(()), lambda q, k, b, h: False),
    "bigbird": Case(BIRD, lambda q, k, b, h: _entry(BIRD_ROWS, 3, q, k)),
    "causal bigbird": Case(
        PAST_BIRD, lambda q, k, b, h: k <= q and _entry(PAST_BIRD_ROWS, 2, q, k)
    ),
    "blocks": Case(masks.Blocks(TABLE, 3), lambda q, k, b, h: _entry(TABLE_ROWS, 3, q, k)),
    "blocks per row and head": Case(
        masks.Blocks(TABLES, 4), lambda q, k, b, h: _entry(TABLES_ROWS[b][h], 4, q, k)
    ),
    "heads": Case(
        masks.Heads((masks.Causal(), masks.Prefix((2, 5)))),
        lambda q, k, b, h: k <= q if h == 0 else k < (2, 5)[b],
    ),
    "heads of blocks": Case(
        masks.Heads((masks.Blocks(TABLES, 4), masks.Blocks(TABLES, 4) | masks.Sinks(1))),
        lambda q, k, b, h: _entry(TABLES_ROWS[b][h], 4, q, k) or (h == 1 and k == 0),
    ),
    "all of several": Case(
        masks.And((masks.Causal(), masks.Window(3) | masks.Sinks(2))),
        lambda q, k, b, h: k <= q and (k > q - 3 or k < 2),
    ),
    "any of several": Case(
        masks.Or((masks.Causal() & masks.Window(3), masks.Sinks(2))),
        lambda q, k, b, h: q - 3 < k <= q or k < 2,
    ),
    "not": Case(masks.Not(masks.Window(4)), lambda q, k, b, h: k <= q - 4),
    "block causal": Case(masks.BlockCausal(4), lambda q, k, b, h: k < q - q % 4 + 4),
    "block diffusion": Case(masks.BlockDiffusion(2, 5), lambda q, k, b, h: _diffusion(2, 5, q, k)),
    "block diffusion, one block": Case(
        masks.BlockDiffusion(9, 7), lambda q, k, b, h: _diffusion(9, 7, q, k)
    ),
    "neighborhood": Case(
        masks.Neighborhood(14, 5), lambda q, k, b, h: neighbors((14,), (5,), q, k)
    ),
    "neighborhood, even, strided": Case(
        masks.Neighborhood(14, 4, stride=3),
        lambda q, k, b, h: neighbors((14,), (4,), q, k, stride=(3,)),
    ),
    "neighborhood, dilated, causal": Case(
        masks.Neighborhood(14, 3, stride=2, dilation=3, is_causal=True),
        lambda q, k, b, h: neighbors((14,), (3,), q, k, stride=(2,), dilation=(3,), causal=(True,)),
    ),
    "neighborhood of a plane": Case(
        masks.Neighborhood((3, 5), (2, 3), is_causal=(True, False)),
        lambda q, k, b, h: neighbors((3, 5), (2, 3), q, k, causal=(True, False)),
    ),
    "neighborhood of a plane, dilated": Case(
        masks.Neighborhood((5, 4), 2, dilation=(1, 2), stride=(2, 1)),
        lambda q, k, b, h: neighbors((5, 4), (2, 2), q, k, dilation=(1, 2), stride=(2, 1)),
    ),
    "neighborhood of a space": Case(
        masks.Neighborhood(
            (2, 4, 2), (1, 2, 2), dilation=(2, 2, 1), is_causal=(False, True, False)
        ),
        lambda q, k, b, h: neighbors(
            (2, 4, 2), (1, 2, 2), q, k, dilation=(2, 2, 1), causal=(False, True, False)
        ),
    ),
    "heads of windows": Case(
        masks.Heads((masks.Causal() & masks.Window(2), masks.Sinks(3))),
        lambda q, k, b, h: k in (q - 1, q) if h == 0 else k < 3,
    ),
}

WITHOUT_INTERVALS = {
    "dilated": Case(masks.Dilated(3, 2), lambda q, k, b, h: k > q - 6 and (q - k) % 2 == 0),
    "dilated, two sides": Case(
        masks.Dilated(2, 3, ahead=2), lambda q, k, b, h: k in (q - 3, q, q + 3, q + 6)
    ),
    "dilated by 1": Case(masks.Dilated(3, 1), lambda q, k, b, h: k > q - 3),
    "strided": Case(masks.Strided(4), lambda q, k, b, h: q - k < 4 or (q - k) % 4 == 0),
    "fixed": Case(
        masks.Strided(4, fixed=2), lambda q, k, b, h: q // 4 == k // 4 or k % 4 in (2, 3)
    ),
    "function": Case(
        masks.Fn(lambda q, k: (q + 2 * k) % 3 != 0, "thirds"),
        lambda q, k, b, h: (q + 2 * k) % 3 != 0,
    ),
    "constant function": Case(
        masks.Fn(lambda q, k: torch.tensor(True, device="cpu")), lambda q, k, b, h: True
    ),
    "heads without intervals": Case(
        masks.Heads(
            (
                masks.Strided(3),
                masks.Causal() & masks.Fn(lambda q, k: torch.tensor(True, device="cpu")),
            )
        ),
        lambda q, k, b, h: k <= q if h else q - k < 3 or (q - k) % 3 == 0,
    ),
}

CASES = WITH_INTERVALS | WITHOUT_INTERVALS

BY_SLOT = {
    "dense": "tests/masks/test_atoms.py: its table is of slots, so that no rule on positions is it",
    "selected": "tests/masks/test_selected.py: its rows are slots of queries",
}
"""Masks that the cases here cannot hold, and where they are compared with brute force."""


def covered(cases: dict[str, Case] = CASES) -> set[str]:
    """The kinds of the masks that stand in the cases."""
    found: set[str] = set()
    left = [case.mask for case in cases.values()]
    while left:
        mask = left.pop()
        found.add(mask.kind)
        left += mask.members()
    return found


def stored(positions: Positions) -> list[list[int]]:
    """The positions per batch row."""
    if isinstance(positions, Span):
        return [list(range(positions.start, positions.start + positions.length))] * B
    rows = positions.tolist()
    return rows * B if len(rows) == 1 else rows


Pairs = list[list[list[list[bool]]]]


def pairs(rule: Rule, q: Positions, k: Positions) -> Pairs:
    """[B][H][T][S]: the rule where the query's slot and the key's slot both hold a token."""
    Q, K, least = stored(q), stored(k), least_token(q)
    return [
        [
            [[y >= 0 and x >= least and rule(x, y, b, h) for y in K[b]] for x in Q[b]]
            for h in range(H)
        ]
        for b in range(B)
    ]


def least_token(q: Positions) -> int:
    """The least position at which a query is a token."""
    return -(10**6) if isinstance(q, Span) and q.tokens else 0


def tiles(dense: Pairs, bq: int, bk: int) -> Pairs:
    """[B][H][nQ][nK]: the states of blocks."""

    def state(rows: list[list[bool]], j: int) -> int:
        cells = [x for row in rows for x in row[j : j + bk]]
        return FULL if all(cells) else PARTIAL if any(cells) else EMPTY

    def of_head(rows: list[list[bool]]) -> list[list[int]]:
        S = len(rows[0]) if rows else 0
        return [
            [state(rows[i : i + bq], j) for j in range(0, S, bk)] for i in range(0, len(rows), bq)
        ]

    return [[of_head(rows) for rows in heads] for heads in dense]


def assert_brute_force(
    mask: Mask,
    rule: Rule,
    q: Positions,
    k: Positions,
    sizes: tuple[tuple[int, int], ...] = ((3, 4),),
) -> None:
    """Everything that a mask says about a call equals brute force."""
    dense = pairs(rule, q, k)
    T, S = len(dense[0][0]), len(stored(k)[0])
    block = mask.block(q, k)
    assert block.dtype == torch.bool
    assert block.shape[2:] == (T, S)
    assert block.expand(B, H, T, S).tolist() == dense
    part = mask.block(q, k, slice(1, 4), slice(2, None))
    assert part.expand(B, H, -1, -1).equal(block.expand(B, H, T, S)[:, :, 1:4, 2:])
    visible = mask.visible(q, k).expand(B, H, T)
    assert visible.dtype == torch.int64
    assert visible.tolist() == [[[sum(row) for row in rows] for rows in heads] for heads in dense]
    for bq, bk in sizes:
        found = mask.tiles(q, k, (bq, bk))
        assert found.dtype == torch.int8
        assert found.expand(B, H, -(-T // bq), -(-S // bk)).tolist() == tiles(dense, bq, bk)
        if T > 2:
            row = mask.tile_row(q, k, slice(1, 3), bk).expand(B, H, -(-S // bk))
            cut = [[rows[1:3] for rows in heads] for heads in dense]
            assert row.tolist() == [[rows[0] for rows in heads] for heads in tiles(cut, 2, bk)]
    _assert_intervals(mask, rule, q)


def _assert_intervals(mask: Mask, rule: Rule, q: Positions) -> None:
    Q, least = stored(q), least_token(q)
    found = mask.intervals(q)
    if found is None:
        return
    shape = (B, H, len(Q[0]), found.starts.shape[-1])
    starts, stops = (x.expand(shape).tolist() for x in found)
    far = 40
    for b in range(B):
        for h in range(H):
            for i, x in enumerate(Q[b]):
                ranges = [
                    r for r in zip(starts[b][h][i], stops[b][h][i], strict=True) if r[0] < r[1]
                ]
                assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ranges))
                inside = [y for lo, hi in ranges for y in range(lo, min(hi, far))]
                assert inside == [y for y in range(far) if x >= least and rule(x, y, b, h)]
