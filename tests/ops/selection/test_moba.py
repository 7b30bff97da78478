"""MoBA's choice against the paper's equations in plain loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import regard
from regard.masks import Causal
from regard.ops.selection import moba_mask
from regard.span import Positions, Span, as_tensor
from tests.oracles import selected as oracle
from tests.oracles.plain import several_plains
from tests.rules import assert_close_rule

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
def test_the_choice_equals_the_definition(call: str, topk: int) -> None:
    for scale in (1.0, 30.0):
        q, k, v, q_at, k_at = inputs(call, scale)
        mask = moba_mask(q, k, size=3, topk=topk, q_positions=q_at, k_positions=k_at)
        chosen = oracle.moba(q, k, 3, topk, rows(q_at), rows(k_at))
        assert mask.block(q_at, k_at).expand(B, H, -1, -1).equal(dense(chosen, k_at))
        z = regard.attend(q, k, v, mask=mask, q_positions=q_at, k_positions=k_at)
        exact = oracle.attend_chosen(q, k, v, chosen, rows(k_at))
        # a sum of at most 14 products of numbers up to 4 scale, in fp64
        assert float((z - exact).abs().max()) < 1e-13 * scale**2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in inputs("square")[:3])
    chosen = oracle.moba(q, k, 3, 2, rows(Span(0, 14)), rows(Span(0, 14)))
    exact = oracle.attend_chosen(q, k, v, chosen, rows(Span(0, 14)))
    plains = several_plains(q, k, v, visible=dense(chosen, Span(0, 14)))
    z = regard.attend(q, k, v, mask=moba_mask(q, k, size=3, topk=2))
    assert_close_rule(z, [x for x, _ in plains], exact)


def test_topk_1_is_the_own_block_and_not_full_attention() -> None:
    q, k, *_ = inputs("square")
    found = moba_mask(q, k, size=5, topk=1).visible(Span(0, 14), Span(0, 14))
    assert found.expand(B, H, -1).eq(torch.arange(14) % 5 + 1).all()


def test_enough_blocks_are_dense_causal_attention() -> None:
    q, k, v, *_ = inputs("square")
    for topk in (5, 100):
        z = regard.attend(q, k, v, mask=moba_mask(q, k, size=3, topk=topk))
        assert float((z - regard.attend(q, k, v, mask=Causal())).abs().max()) < 1e-12


def test_future_keys_change_no_choice() -> None:
    q, k, *_ = inputs("square")
    before = moba_mask(q, k, size=3, topk=2).block(Span(0, 14), Span(0, 14))
    for t in range(14):
        changed = k.clone()
        changed[:, :, t + 1 :] = torch.nan
        after = moba_mask(q, changed, size=3, topk=2).block(Span(0, 14), Span(0, 14))
        assert after[:, :, : t + 1].equal(before[:, :, : t + 1])


def test_a_nan_in_a_past_key_shows() -> None:
    q, k, v, *_ = inputs("square")
    k[0, 0, 1] = torch.nan
    z = regard.attend(q, k, v, mask=moba_mask(q, k, size=3, topk=2))
    assert z[0, :2, 3:].isnan().all()
    assert z[0, 2:].isfinite().all()
    assert z[1].isfinite().all()


def test_equal_blocks_are_taken_from_the_front() -> None:
    q = torch.randn(1, 2, 1, D)
    k = torch.randn(1, 1, 1, D).expand(1, 1, 12, D)
    found = moba_mask(q, k, size=3, topk=3).block(Span(11, 1), Span(0, 12))
    assert found[0, :, 0].int().tolist() == [[1] * 6 + [0] * 3 + [1] * 3] * 2


def test_rows_in_turns_choose_the_same() -> None:
    q, k, *_ = inputs("square")
    whole = moba_mask(q, k, size=3, topk=2).block(Span(0, 14), Span(0, 14))
    assert moba_mask(q, k, size=3, topk=2, max_bytes=1).block(Span(0, 14), Span(0, 14)).equal(whole)


def test_wrong_choices_are_caught() -> None:
    q, k, _, at, _ = inputs("square")
    right = dense(oracle.moba(q, k, 3, 2, rows(at), rows(at)), at)
    for wrong in (
        moba_mask(q, k, size=3, topk=3),  # the own block not counted
        moba_mask(q.flip(1), k, size=3, topk=2),  # another head's choice
        moba_mask(q, k, size=4, topk=2),
        moba_mask(q, k, size=3, topk=2, q_positions=Span(-1, 14), k_positions=Span(0, 14)),
        Causal(),
    ):
        assert not wrong.block(at, at).expand(right.shape).equal(right)


def test_no_gradient_flows_through_the_choice_and_the_gradient_is_exact() -> None:
    q, k, v = (torch.randn(1, h, 6, 2, dtype=torch.float64, requires_grad=True) for h in (2, 1, 1))
    mask = moba_mask(q, k, size=2, topk=2)
    assert torch.autograd.gradcheck(
        lambda q, k, v: regard.attend(q, k, v, mask=moba_mask(q, k, size=2, topk=2)), (q, k, v)
    )
    assert all(
        not x.requires_grad
        for term in mask.terms()
        for x in vars(term).values()
        if isinstance(x, Tensor)
    )


def test_autocast_does_not_change_the_choice() -> None:
    q, k, *_ = (x.float() for x in inputs("square")[:2])
    plain = moba_mask(q, k, size=3, topk=2).block(Span(0, 14), Span(0, 14))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert moba_mask(q, k, size=3, topk=2).block(Span(0, 14), Span(0, 14)).equal(plain)


def test_errors() -> None:
    q, k, *_ = inputs("square")
    for size, topk in ((0, 1), (3, 0)):
        with pytest.raises(
            regard.ArgumentError,
            match=rf"^MoBA with blocks of {size} and topk {topk}: both must be 1 or more \(the "
            rf"own block counts among the topk\)$",
        ):
            moba_mask(q, k, size=size, topk=topk)
    with pytest.raises(regard.ArgumentError, match="query dim 3 and key dim 4 must be equal"):
        moba_mask(q[..., :3], k, size=3, topk=2)
    with pytest.raises(regard.ArgumentError, match="k_positions is Span"):
        moba_mask(q, k, size=3, topk=2, k_positions=Span(0, 3))
    with pytest.raises(regard.ArgumentError, match="q_positions is Span"):
        moba_mask(q, k, size=3, topk=2, q_positions=Span(0, 3))
