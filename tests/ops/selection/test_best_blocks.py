"""The choices of MoBA and of Quest against the papers in plain loops, and what Quest's bound
promises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.masks import Causal, Mask
from regard.ops.selection import PageBounds, block_layout, moba_mask, quest_mask
from regard.ops.selection.best_blocks import page_bounds, page_scores
from regard.span import Positions, Span, as_tensor
from tests.oracles import selected as oracle
from tests.oracles.plain import several_plains
from tests.rules import assert_close_rule

SELECTIONS: dict[str, tuple[Callable[..., Mask], Callable[..., oracle.Chosen]]] = {
    "moba": (moba_mask, oracle.moba),
    "quest": (quest_mask, oracle.quest),
}
each = pytest.mark.parametrize("name", SELECTIONS)
E = -1
B, H, G, D = 2, 4, 2, 4
CALLS: dict[str, tuple[Positions, Positions]] = {
    "square": (Span(0, 14), Span(0, 14)),
    "shorter than a block": (Span(0, 2), Span(0, 2)),
    "last queries": (Span(9, 3), Span(0, 12)),
    "one query": (Span(12, 1), Span(0, 13)),
    "keys from inside a block": (Span(5, 9), Span(5, 9)),
    "left padded": (
        torch.tensor([[E, E, E, 0, 1, 2, 3, 4, 5], list(range(9))]),
        torch.tensor([[E, E, E, 0, 1, 2, 3, 4, 5], list(range(9))]),
    ),
    "any order, with gaps": (
        torch.tensor([[9, E, 2], [20, 13, 14]]),
        torch.tensor([[5, 2, E, 9, 0, 8, 1], [3, 14, E, 13, 6, 12, 0]]),
    ),
}


def rows(positions: Positions) -> list[list[int]]:
    return as_tensor(positions).expand(B, -1).tolist()


def dense(chosen: oracle.Chosen, k_positions: Positions) -> Tensor:
    keys = rows(k_positions)
    return torch.tensor(
        [
            [[[p in seen for p in keys[b]] for seen in head] for head in heads]
            for b, heads in enumerate(chosen)
        ]
    )


def inputs(call: str, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Positions, Positions]:
    q_at, k_at = CALLS[call]
    T, S = len(rows(q_at)[0]), len(rows(k_at)[0])
    q, k, v = (
        torch.randn(B, h, n, D, dtype=torch.float64) * scale for h, n in ((H, T), (G, S), (G, S))
    )
    return q, k, v, q_at, k_at


@pytest.mark.full(keep="each")
@pytest.mark.parametrize("topk", [1, 2, 3, 50])
@pytest.mark.parametrize("call", CALLS)
@each
def test_the_choice_equals_the_definition(call: str, topk: int, name: str) -> None:
    select, definition = SELECTIONS[name]
    for scale in (1.0, 30.0):
        q, k, v, q_at, k_at = inputs(call, scale)
        mask = select(q, k, size=3, topk=topk, q_positions=q_at, k_positions=k_at)
        chosen = definition(q, k, 3, topk, rows(q_at), rows(k_at))
        assert mask.block(q_at, k_at).expand(B, H, -1, -1).equal(dense(chosen, k_at))
        z = regard.attend(q, k, v, mask=mask, q_positions=q_at, k_positions=k_at)
        exact = oracle.attend_chosen(q, k, v, chosen, rows(k_at))
        # a sum of at most 14 products of numbers up to 4 scale, in fp64
        assert float((z - exact).abs().max()) < 1e-13 * scale**2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each
def test_lower_precision(dtype: torch.dtype, name: str) -> None:
    select, definition = SELECTIONS[name]
    q, k, v = (x.to(dtype) for x in inputs("square")[:3])
    chosen = definition(q, k, 3, 2, rows(Span(0, 14)), rows(Span(0, 14)))
    exact = oracle.attend_chosen(q, k, v, chosen, rows(Span(0, 14)))
    plains = several_plains(q, k, v, visible=dense(chosen, Span(0, 14)))
    z = regard.attend(q, k, v, mask=select(q, k, size=3, topk=2))
    assert_close_rule(z, [x for x, _ in plains], exact)


@each
def test_rows_in_turns_choose_the_same(name: str) -> None:
    select, _ = SELECTIONS[name]
    q, k, *_ = inputs("square")
    whole = select(q, k, size=3, topk=2).block(Span(0, 14), Span(0, 14))
    assert select(q, k, size=3, topk=2, max_bytes=1).block(Span(0, 14), Span(0, 14)).equal(whole)


@each
def test_no_gradient_flows_through_the_choice_and_the_gradient_is_exact(name: str) -> None:
    select, _ = SELECTIONS[name]
    q, k, v = (torch.randn(1, h, 6, 2, dtype=torch.float64, requires_grad=True) for h in (2, 1, 1))
    mask = select(q, k, size=2, topk=2)
    assert torch.autograd.gradcheck(
        lambda q, k, v: regard.attend(q, k, v, mask=select(q, k, size=2, topk=2)), (q, k, v)
    )
    assert all(
        not x.requires_grad
        for term in mask.terms()
        for x in vars(term).values()
        if isinstance(x, Tensor)
    )


@each
def test_autocast_does_not_change_the_choice(name: str) -> None:
    select, _ = SELECTIONS[name]
    q, k, *_ = (x.float() for x in inputs("square")[:2])
    plain = select(q, k, size=3, topk=2).block(Span(0, 14), Span(0, 14))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert select(q, k, size=3, topk=2).block(Span(0, 14), Span(0, 14)).equal(plain)


def test_equal_blocks_are_taken_from_the_front() -> None:
    q = torch.randn(1, 2, 1, D)
    k = torch.randn(1, 1, 1, D).expand(1, 1, 12, D)
    found = moba_mask(q, k, size=3, topk=3).block(Span(11, 1), Span(0, 12))
    assert found[0, :, 0].int().tolist() == [[1] * 6 + [0] * 3 + [1] * 3] * 2


@pytest.mark.parametrize("call", CALLS)
def test_no_product_exceeds_the_bound_of_its_page(call: str) -> None:
    q, k, _, _, k_at = inputs(call, 3.0)
    pages = block_layout(k_at, 3)
    bound = page_scores(q, page_bounds(k, pages)).repeat_interleave(3, 3)
    products = q @ pages.to_position_order(k).repeat_interleave(2, 1).mT
    held = pages.occupied[:, None, None].expand_as(products)
    assert float((products - bound)[held].max()) < 1e-12
    mean = pages.to_blocks(k).mean(3).repeat_interleave(2, 1)
    less = (q @ mean.mT).repeat_interleave(3, 3)
    if k.shape[2] > 2:
        assert float((products - less)[held].max()) > 0.1, "negative control: a mean is no bound"


def test_stored_bounds_choose_the_same() -> None:
    q, k, *_ = inputs("square")
    whole = quest_mask(q, k, size=3, topk=2).block(Span(0, 14), Span(0, 14))
    stored = page_bounds(k, block_layout(Span(0, 14), 3))
    for bytes_ in (2**27, 1):
        mask = quest_mask(q, k, size=3, topk=2, bounds=stored, max_bytes=bytes_)
        assert mask.block(Span(0, 14), Span(0, 14)).equal(whole)
    wrong = PageBounds(stored.high, stored.low)
    other = quest_mask(q, k, size=3, topk=2, bounds=wrong).block(Span(0, 14), Span(0, 14))
    assert not other.equal(whole), "negative control"


def test_wrong_choices_are_caught() -> None:
    q, k, _, at, _ = inputs("square")
    for select, definition in SELECTIONS.values():
        right = dense(definition(q, k, 3, 2, rows(at), rows(at)), at)
        wrongs: list[Mask] = [
            select(q, k, size=3, topk=3),  # the own block not counted
            select(q.flip(1), k, size=3, topk=2),  # another head's choice
            select(q, k, size=4, topk=2),
            select(q, k, size=3, topk=2, q_positions=Span(-1, 14), k_positions=Span(0, 14)),
            quest_mask(q.abs(), k, size=3, topk=2),  # the largest numbers only
            (quest_mask if select is moba_mask else moba_mask)(q, k, size=3, topk=2),
            Causal(),
        ]
        for wrong in wrongs:
            assert not wrong.block(at, at).expand(right.shape).equal(right)


@each
@pytest.mark.parametrize(
    "changes, words",
    [
        ({"size": 0}, "both must be 1 or more"),
        ({"topk": 0}, "both must be 1 or more"),
        ({"q": torch.zeros(B, H, 14, 3).double()}, "query dim 3 and key dim 4 must be equal"),
        ({"k_positions": Span(0, 3)}, "k_positions is Span"),
        ({"q_positions": Span(0, 3)}, "q_positions is Span"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], words: str, name: str) -> None:
    q, k, *_ = inputs("square")
    with pytest.raises(regard.ArgumentError, match=words):
        SELECTIONS[name][0](**{"q": q, "k": k, "size": 3, "topk": 2, **changes})


def test_bounds_of_other_pages_are_refused() -> None:
    q, k, *_ = inputs("square")
    stored = page_bounds(k, block_layout(Span(0, 14), 4))
    with pytest.raises(regard.ArgumentError, match=r"bounds\.low is"):
        quest_mask(q, k, size=3, topk=2, bounds=stored)
