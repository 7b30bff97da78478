"""The lightning indexer against its equations in plain loops, and against the published layer in
transformers.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import regard
from regard.ops.selection import index_mask, index_scores, indexer_loss
from regard.span import Positions, Span
from tests.ops.selection.test_best_blocks import dense, rows
from tests.oracles import selected as oracle
from tests.rules import assert_close_rule

E = -1
B, J, d = 2, 3, 4
CALLS: dict[str, tuple[Positions, Positions]] = {
    "square": (Span(0, 11), Span(0, 11)),
    "one token": (Span(0, 1), Span(0, 1)),
    "one query": (Span(10, 1), Span(0, 11)),
    "left padded": (
        torch.tensor([[E, E, 0, 1, 2, 3], list(range(6))]),
        torch.tensor([[E, E, 0, 1, 2, 3], list(range(6))]),
    ),
    "any order": (
        torch.tensor([[9, E, 2], [20, 13, 14]]),
        torch.tensor([[5, 2, E, 9, 0, 8, 1], [3, 14, E, 13, 6, 12, 0]]),
    ),
}


def inputs(call: str, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    T, S = (len(rows(x)[0]) for x in CALLS[call])
    q, k = torch.randn(B, J, T, d).double() * scale, torch.randn(B, 1, S, d).double() * scale
    return q, k, torch.randn(B, T, J).double()


@pytest.mark.parametrize("topk", [1, 3, 100])
@pytest.mark.parametrize("call", CALLS)
def test_scores_and_choice_equal_the_definition(call: str, topk: int) -> None:
    q_at, k_at = CALLS[call]
    for scale in (1.0, 100.0):
        q, k, w = inputs(call, scale)
        scores, chosen = oracle.indexer(q, k, w, topk, rows(q_at), rows(k_at), 1)
        found = index_scores(q, k, w)
        for b, keys in enumerate(rows(k_at)):
            for t, expected in enumerate(scores[b]):
                for j, p in enumerate(keys):
                    if p in expected:
                        assert abs(float(found[b, t, j]) - expected[p]) <= 1e-13 * scale**2
        mask = index_mask(q, k, w, topk=topk, q_positions=q_at, k_positions=k_at)
        assert mask.block(q_at, k_at).equal(dense(chosen, k_at))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_by_the_error_rule(dtype: torch.dtype) -> None:
    q, k, w = (x.to(dtype) for x in inputs("square"))
    exact = index_scores(q.double(), k.double(), w.double())
    plains = [
        sum(w[..., j, None].float() * (q[:, j].float() @ k[:, 0].float().mT).relu() for j in order)
        for order in ((0, 1, 2), (2, 0, 1))
    ]
    found = index_scores(q, k, w)
    assert found.dtype == torch.float32
    assert_close_rule(found, plains, exact)


def test_equal_scores_go_to_the_earlier_position_wherever_it_is_stored() -> None:
    q, k, w = (
        torch.randn(1, J, 1, d),
        torch.randn(1, 1, 1, d).expand(1, 1, 6, d),
        torch.rand(1, 1, J),
    )
    order = torch.tensor([[4, 0, E, 3, 1, 5]])
    found = index_mask(q, k, w, topk=3, q_positions=Span(5, 1), k_positions=order)
    assert found.block(Span(5, 1), order)[0, 0, 0].tolist() == [
        False,
        True,
        False,
        True,
        True,
        False,
    ]


def test_the_future_changes_no_choice_and_rows_in_turns_neither() -> None:
    q, k, w = inputs("square")
    at = Span(0, 11)

    def choose(k: Tensor, **memory: int) -> Tensor:
        mask = index_mask(q, k, w, topk=3, q_positions=at, k_positions=at, **memory)
        return mask.block(at, at)

    before = choose(k)
    for t in range(11):
        changed = k.clone()
        changed[:, :, t + 1 :] = math.nan
        assert choose(changed)[:, :, : t + 1].equal(before[:, :, : t + 1])
    assert choose(k, max_bytes=1).equal(before)


def test_wrong_choices_are_caught() -> None:
    q, k, w = inputs("square")
    at = Span(0, 11)
    right = dense(oracle.indexer(q, k, w, 3, rows(at), rows(at), 1)[1], at)
    for wrong in ((q, k, w.abs()), (q.flip(-1), k, w), (-q, k, w), (q.flip(1), k, w)):
        found = index_mask(*wrong, topk=3, q_positions=at, k_positions=at).block(at, at)
        assert not found.equal(right)


def kl(p: list[float], scores: list[float]) -> float:
    top = max(scores)
    lse = top + math.log(math.fsum(math.exp(s - top) for s in scores))
    return math.fsum(x * (math.log(x) - s + lse) for x, s in zip(p, scores, strict=True) if x > 0)


def test_the_loss_equals_the_definition() -> None:
    T, H = 6, 4
    scores = torch.randn(B, T, T, dtype=torch.float64) * 3
    visible = torch.rand(B, T, T) < 0.6
    visible[0, 2] = False  # a query that sees nothing
    pattern = torch.randn(B, H, T, T, dtype=torch.float64).exp()
    pattern[1, :, 3] = 0  # a query whose attention lies elsewhere
    pattern[..., 0, 1] = 0
    found = indexer_loss(scores, pattern, visible)
    for b in range(B):
        for t in range(T):
            at = visible[b, t].nonzero()[:, 0].tolist()
            p = [math.fsum(pattern[b, :, t, j].tolist()) for j in at]
            whole = math.fsum(p)
            expected = kl([x / whole for x in p], scores[b, t, at].tolist()) if whole else 0.0
            assert abs(float(found[b, t]) - expected) < 1e-13 * max(1, expected)
            assert expected >= 0
    assert float(found[0, 2]) == float(found[1, 3]) == 0


def test_the_gradient_of_the_loss_is_softmax_minus_pattern() -> None:
    scores = torch.randn(1, 4, 4, dtype=torch.float64, requires_grad=True)
    pattern = torch.randn(1, 2, 4, 4, dtype=torch.float64).exp().requires_grad_()
    visible = torch.ones(1, 4, 4, dtype=torch.bool).tril(-1)  # the first sees nothing
    assert torch.autograd.gradcheck(lambda s: indexer_loss(s, pattern, visible), (scores,))
    indexer_loss(scores, pattern, visible).sum().backward()
    assert pattern.grad is None
    p = pattern.detach().sum(1).masked_fill(~visible, 0)
    share = scores.detach().masked_fill(~visible, -math.inf)[:, 1:].softmax(-1)
    expected = share - p[:, 1:] / p[:, 1:].sum(-1, keepdim=True)
    assert scores.grad is not None
    assert float((scores.grad[:, 1:] - expected).abs().max()) < 1e-14
    assert scores.grad[:, 0].eq(0).all()


def test_errors() -> None:
    q, k, w = inputs("square")
    for wrong, message in (
        ((q, k[..., :2], w), r"^k is \(2, 1, 11, 2\), which is \[B, 1, S, d\], but d is 4 in q"),
        ((q, k, w[..., :2]), r"^w is \(2, 11, 2\), which is \[B, T, J\], but J is 3 in q"),
        ((q, k.expand(-1, 2, -1, -1), w), r"^k is \(2, 2, 11, 4\), which is \[B, 1, S, d\], but"),
    ):
        with pytest.raises(regard.ArgumentError, match=message):
            index_scores(*wrong)
    with pytest.raises(regard.ArgumentTypeError, match=r"^index w is int64; it must be float64"):
        index_scores(q, k, w.long())
    mixed = index_scores(q, k.float(), w.float())  # summed in the widest of them
    assert torch.equal(mixed, index_scores(q, k.float().double(), w.float().double()))
    with pytest.raises(regard.ArgumentError, match=r"^topk is 0; it must be 1 or more$"):
        index_mask(q, k, w, topk=0, q_positions=Span(0, 11), k_positions=Span(0, 11))
    with pytest.raises(
        regard.ArgumentError,
        match=r"^pattern is \(1, 4, 2, 2\), which is \[B, H, T, S\], but S is 3 in scores \(1, 2, "
        r"3\); all must agree$",
    ):
        indexer_loss(torch.zeros(1, 2, 3), torch.zeros(1, 4, 2, 2), torch.ones(1, 2, 3).bool())
