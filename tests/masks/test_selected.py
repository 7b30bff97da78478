"""The mask of a selection against brute force: rows are slots of the call, columns are blocks of
positions.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

import regard
from regard import masks
from regard.masks import Causal, Mask, Selected
from regard.span import Positions, Span, as_tensor

B, H, T, N, SIZE = 2, 3, 5, 4, 3
TABLE = torch.rand(B, H, T, N, generator=torch.Generator().manual_seed(1)) < 0.5
TABLE[0, 0, 1:3], TABLE[1, 2, :, 1] = True, True
FIRST = torch.tensor([0, 2])
E = -1
KEYS: dict[str, Positions] = {
    "span": Span(0, 14),
    "span from inside": Span(4, 9),
    "span from below 0": Span(-3, 12),
    "no keys": Span(0, 0),
    "holes": torch.tensor([[5, E, 0, 9, 2, E, 7, 1, 13], [E, E, 4, 8, 0, 6, 11, E, 17]]),
    "one row": torch.tensor([[6, 7, 8, E, 9]]),
    "int32": torch.tensor([[6, 7, 8, E, 9]], dtype=torch.int32),
    "holes only": torch.full((2, 5), E),
}
QUERIES = torch.tensor([[3, E, 8, 11, 20], [9, 4, 4, E, 0]])


def brute(table: Tensor, first: Tensor | None, k: Positions, *, causal: bool = False) -> list:
    keys, q = as_tensor(k).expand(B, -1).tolist(), QUERIES.tolist()
    firsts = [0] * B if first is None else first.expand(B).tolist()
    rows = table.expand(B, H, T, -1).tolist()

    def sees(b: int, h: int, i: int, p: int) -> bool:
        column = p // SIZE - firsts[b]
        inside = p >= 0 and q[b][i] >= 0 and 0 <= column < len(rows[b][h][i])
        return inside and rows[b][h][i][column] and (not causal or p <= q[b][i])

    return [
        [[[sees(b, h, i, p) for p in keys[b]] for i in range(T)] for h in range(H)]
        for b in range(B)
    ]


def tiles(dense: list, bq: int, bk: int) -> list:
    def state(rows: list, j: int) -> int:
        cells = [x for row in rows for x in row[j : j + bk]]
        return 2 if all(cells) else 1 if any(cells) else 0

    return [
        [
            [
                [state(rows[i : i + bq], j) for j in range(0, len(rows[0]), bk)]
                for i in range(0, T, bq)
            ]
            for rows in heads
        ]
        for heads in dense
    ]


@pytest.mark.full(keep="each")
@pytest.mark.parametrize("first", [None, FIRST, FIRST[1:]], ids=["0", "per row", "one"])
@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("causal", [False, True])
def test_a_selection_equals_brute_force(name: str, first: Tensor | None, causal: bool) -> None:
    k = KEYS[name]
    for table in (TABLE, TABLE[:, :1], TABLE[:1], TABLE[:1, :1]):
        if first is not None and len(first) > len(table):
            continue
        mask: Mask = Selected(table, SIZE, first)
        mask = mask & Causal() if causal else mask
        dense = brute(table, first, k, causal=causal)
        S = len(dense[0][0][0])
        found = mask.block(QUERIES, k).expand(B, H, T, S)
        assert found.tolist() == dense
        assert (
            mask.block(QUERIES, k, slice(1, 4), slice(2, None))
            .expand(B, H, -1, -1)
            .equal(found[:, :, 1:4, 2:])
        )
        assert mask.visible(QUERIES, k).expand(B, H, T).tolist() == found.sum(-1).tolist()
        for bq, bk in ((2, 3), (1, 1), (5, 4), (64, 64)):
            states = mask.tiles(QUERIES, k, (bq, bk)).expand(B, H, -1, -1)
            assert states.tolist() == tiles(dense, bq, bk), (bq, bk)


def test_tiles_are_decided_without_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("evaluated")

    monkeypatch.setattr(Mask, "block", refuse)
    Selected(TABLE, SIZE).tiles(Span(7, T), Span(0, 12), (2, 3))
    with pytest.raises(AssertionError, match="evaluated"):  # a rule without structure must be
        masks.Strided(3).tiles(QUERIES, Span(0, 12), (2, 3))


@pytest.mark.parametrize("first", [None, FIRST])
def test_mask_mod_is_the_rule_under_vmap(first: Tensor | None) -> None:
    for table in (TABLE, TABLE[:, :1]):
        for name in ("span", "holes"):
            k, dense = KEYS[name], brute(table, first, KEYS[name])
            S = len(dense[0][0][0])
            mod = Selected(table, SIZE, first).mask_mod(QUERIES, k)
            assert create_mask(mod, B, H, T, S, device="cpu").tolist() == dense


def test_a_table_shifted_by_one_block_is_caught() -> None:
    wrong = Selected(TABLE, SIZE, FIRST + 1).block(QUERIES, Span(0, 14))
    assert wrong.tolist() != brute(TABLE, FIRST, Span(0, 14))


@pytest.mark.parametrize("backend", ["tiled", "sdpa", "reference"])
def test_kernels_agree(backend: str) -> None:
    q, k, v = (torch.randn(B, H, n, 8, dtype=torch.float64) for n in (T, 40, 40))
    mask = Selected(TABLE, 10) & Causal()
    where = {"mask": mask, "q_positions": QUERIES.clamp(min=0) + 20, "k_positions": Span(0, 40)}
    dense = masks.Dense(mask.block(where["q_positions"], Span(0, 40)))
    expected = regard.attend(q, k, v, mask=dense, backend="reference")
    assert float((regard.attend(q, k, v, backend=backend, **where) - expected).abs().max()) < 1e-14


def test_words_and_errors() -> None:
    mask = Selected(TABLE, SIZE, FIRST)
    assert (str(mask), repr(mask)) == ("selected(2x3x5x4, 3)", "Selected(bool[2, 3, 5, 4], 3)")
    for make, error, message in (
        (lambda: Selected(TABLE, 0), ValueError, "Selected size is 0; it must be 1 or more"),
        (lambda: Selected(TABLE.int(), 3), TypeError, "Selected table is torch.int32; it must be"),
        (lambda: Selected([True], 3), TypeError, "Selected table is list; it must be a bool"),
        (lambda: Selected(TABLE[0], 3), ValueError, "Selected table is (3, 5, 4); it must be"),
        (
            lambda: Selected(TABLE, 3, torch.zeros(3, dtype=torch.int64)),
            ValueError,
            (
                "Selected first is torch.int64 (3,); it must be int64 (2,) or (1,): the number of "
                "the first block of each row"
            ),
        ),
        (lambda: mask.require(3, H, T, 9), ValueError, "Selected holds 2 batch rows, but the call"),
        (lambda: mask.require(B, 6, T, 9), ValueError, "Selected holds 3 heads, but the call has"),
        (lambda: mask.require(B, H, 1, 9), ValueError, "Selected holds 5 queries, but the call"),
        (lambda: mask.allows(torch.tensor(0), torch.tensor(0)), ValueError, "a Selected mask has"),
    ):
        with pytest.raises(error) as caught:
            make()
        assert isinstance(caught.value, regard.RegardError)
        assert message in str(caught.value)
