"""Quest's choice against the paper's algorithm in plain loops: the bound of a page, its numbers of
the fixed example, and what it promises.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import regard
from regard.masks import Causal
from regard.ops.selection import PageBounds, block_layout, moba_mask, quest_mask
from regard.ops.selection.best_blocks import page_bounds, page_scores
from regard.span import Span
from tests.fixture_f import example
from tests.ops.selection.test_moba import CALLS, B, H, dense, inputs, rows
from tests.oracles import selected as oracle
from tests.oracles.plain import several_plains
from tests.rules import assert_close_rule


@pytest.mark.full(keep="each")
@pytest.mark.parametrize("topk", [1, 2, 50])
@pytest.mark.parametrize("call", CALLS)
def test_the_choice_equals_the_definition(call: str, topk: int) -> None:
    for scale in (1.0, 30.0):
        q, k, v, q_at, k_at = inputs(call, scale)
        mask = quest_mask(q, k, size=3, topk=topk, q_positions=q_at, k_positions=k_at)
        chosen = oracle.quest(q, k, 3, topk, rows(q_at), rows(k_at))
        assert mask.block(q_at, k_at).expand(B, H, -1, -1).equal(dense(chosen, k_at))
        z = regard.attend(q, k, v, mask=mask, q_positions=q_at, k_positions=k_at)
        exact = oracle.attend_chosen(q, k, v, chosen, rows(k_at))
        # a sum of at most 14 products of numbers up to 4 scale, in fp64
        assert float((z - exact).abs().max()) < 1e-13 * scale**2


def test_the_bounds_of_the_fixed_example() -> None:
    q, k, _ = example(8)
    pages = block_layout(Span(0, 8), 4)
    found = page_scores(q[:, :, -1:], page_bounds(k, pages))[0, 0, 0].tolist()
    assert [round(x, 10) for x in found] == [1.8786625294, 1.8444021121]
    products = (q[0, 0, -1] @ k[0, 0].mT).view(2, 4).amax(1).tolist()
    assert [round(x, 10) for x in products] == [0.9187155084, 1.0624224985]
    assert found[0] > found[1], "the page of the best key is the second one, and would be left out"


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in inputs("square")[:3])
    chosen = oracle.quest(q, k, 3, 2, rows(Span(0, 14)), rows(Span(0, 14)))
    exact = oracle.attend_chosen(q, k, v, chosen, rows(Span(0, 14)))
    plains = several_plains(q, k, v, visible=dense(chosen, Span(0, 14)))
    z = regard.attend(q, k, v, mask=quest_mask(q, k, size=3, topk=2))
    assert_close_rule(z, [x for x, _ in plains], exact)


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


def test_future_keys_change_no_choice() -> None:
    q, k, *_ = inputs("square")
    before = quest_mask(q, k, size=3, topk=2).block(Span(0, 14), Span(0, 14))
    for t in range(14):
        changed = k.clone()
        changed[:, :, t + 1 :] = torch.nan
        after = quest_mask(q, changed, size=3, topk=2).block(Span(0, 14), Span(0, 14))
        assert after[:, :, : t + 1].equal(before[:, :, : t + 1])


def test_a_nan_in_a_past_key_shows() -> None:
    q, k, v, *_ = inputs("square")
    k[0, 0, 1] = torch.nan
    z = regard.attend(q, k, v, mask=quest_mask(q, k, size=3, topk=2))
    assert z[0, :2, 3:].isnan().all()
    assert z[0, 2:].isfinite().all()
    assert z[1].isfinite().all()


def test_wrong_choices_are_caught() -> None:
    q, k, _, at, _ = inputs("square")
    right = dense(oracle.quest(q, k, 3, 2, rows(at), rows(at)), at)
    wrongs: list[regard.masks.Mask] = [
        quest_mask(q, k, size=3, topk=3),  # the own page not counted
        quest_mask(q.flip(1), k, size=3, topk=2),
        quest_mask(q.abs(), k, size=3, topk=2),  # the largest numbers only
        moba_mask(q, k, size=3, topk=2),
        Causal(),
    ]
    for wrong in wrongs:
        assert not wrong.block(at, at).expand(right.shape).equal(right)


def test_no_gradient_flows_through_the_choice_and_the_gradient_is_exact() -> None:
    q, k, v = (torch.randn(1, h, 6, 2, dtype=torch.float64, requires_grad=True) for h in (2, 1, 1))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return regard.attend(q, k, v, mask=quest_mask(q, k, size=2, topk=2))

    assert torch.autograd.gradcheck(run, (q, k, v))


def test_errors() -> None:
    q, k, *_ = inputs("square")
    for size, topk in ((0, 1), (3, 0)):
        with pytest.raises(
            regard.ArgumentError,
            match=rf"^Quest with pages of {size} and topk {topk}: both must be 1 or more \(the "
            r"own page counts among the topk\)$",
        ):
            quest_mask(q, k, size=size, topk=topk)
    stored = page_bounds(k, block_layout(Span(0, 14), 4))
    with pytest.raises(
        regard.ArgumentError, match=r"bounds.low is \(2, 2, 4, 4\) in torch.float64"
    ):
        quest_mask(q, k, size=3, topk=2, bounds=stored)
