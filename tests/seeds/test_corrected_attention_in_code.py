"""What x-jeff's notes on chapter 3 of "Build a Large Language Model" get wrong, done right.

docs/seeds.md lists each error.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.masks import Causal
from regard.nn import Attention
from regard.nn.variants import causal, mha, mha_per_head, stacked
from tests.golden import ENTRIES, one, tensor


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, dtype=torch.float64)


def apart(x: Tensor, y: Tensor) -> float:
    return float((x - y).detach().abs().max())


# --- half of the weights, in expectation only


def test_the_printed_dropout_drops_15_of_36_and_empties_a_row() -> None:
    printed = tensor(ENTRIES["dropout.of_ones"]["printed"])
    assert int((printed == 0).sum()) == 15
    assert set(printed.flatten().tolist()) == {0.0, 2.0}
    weights = tensor(ENTRIES["dropout.of_causal_weights"]["printed"])
    assert [int(row.count_nonzero()) for row in weights].index(0) == 1, "the second row"
    v = one(torch.eye(6, dtype=torch.float64) + 1)
    context = (weights @ v[0, 0])[1]
    assert not context.any(), "that token's context is the zero vector"


def test_how_many_weights_dropout_takes_is_binomial() -> None:
    n, draws = 36, 400
    zero, one_key = torch.zeros(draws, 1, n, 1), torch.zeros(draws, 1, 1, 1)
    kept = regard.attend(zero, one_key, one_key + 1, dropout=0.5, backend="reference")[:, 0, :, 0]
    lost = (kept == 0).sum(-1).double()
    assert abs(float(lost.mean()) - n / 2) < 5 * math.sqrt(n / 4 / draws)
    # the variance of a binomial, and five times its own deviation over so many draws
    assert abs(float(lost.var()) - n / 4) < 5 * (n / 4) * math.sqrt(2 / draws)
    assert float((lost == n / 2).double().mean()) < 0.25, "exactly half is the exception"


# --- the list of heads and the split projection


def test_the_two_forms_of_several_heads_differ_until_three_things_are_equal() -> None:
    x = draw(2, 6, 3)
    heads = [causal(3, head_dim=2).double() for _ in range(2)]
    listed = torch.cat([head(x) for head in heads], -1)
    total = mha(3, 2, head_dim=1, bias=True, is_causal=True)
    assert (listed.shape[-1], total.project.shape.H * total.project.shape.E) == (4, 2)
    assert (heads[0].project.shape.D ** -0.5, total.project.shape.D**-0.5) == (2**-0.5, 1.0)
    assert total.output.bias is not None
    per_head = mha_per_head(3, 2, head_dim=2).double()
    with torch.no_grad():
        for name in "qkv":
            for i, head in enumerate(heads):
                getattr(per_head.project, name).linear[i].weight.copy_(
                    getattr(head.project, name).linear.weight
                )
    split = stacked(per_head)
    same = Attention(split.project, nn.Identity(), mask=Causal())
    assert apart(same(x), listed) < 1e-14
    for broken in (
        Attention(split.project, per_head.output, mask=Causal()),  # an output projection
        Attention(split.project, nn.Identity(), mask=Causal(), scale=1.0),  # another head size
    ):
        out = broken(x)
        assert out.shape != listed.shape or apart(out, listed) > 0.01
    with torch.no_grad():
        split.project.q.linear.weight.copy_(split.project.q.linear.weight.flip(0))  # not stacked
    assert apart(same(x), listed) > 0.01


# --- nothing that grows with the context is saved


def test_a_mask_is_in_no_state_dict() -> None:
    module = mha(8, 2, is_causal=True)
    assert list(module.buffers()) == []
    assert sum(x.numel() for x in module.state_dict().values()) == 4 * 8 * 8
    module(torch.zeros(1, 300, 8))
    assert sum(x.numel() for x in module.state_dict().values()) == 4 * 8 * 8


# --- what "masking is renormalizing" needs


def both(q: Tensor, k: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Weights masked before the softmax, and softmax first, then the mask, then division by the
    sums.
    """
    before = regard.attention_weights(q, k, mask=allowed)[0, 0]
    kept = regard.attention_weights(q, k)[0, 0] * allowed
    return before, kept / kept.sum(-1, keepdim=True)


def test_masking_before_and_after_are_equal_under_three_conditions() -> None:
    q, k = draw(1, 1, 6, 4, scale=3), draw(1, 1, 6, 4, scale=3)
    allowed = torch.ones(6, 6, dtype=torch.bool).tril()
    before, after = both(q, k, allowed)
    assert apart(before, after) < 1e-14
    # a row without a key: softmax and division are 0 / 0, ours is 0
    holed = allowed.clone()
    holed[2] = False
    before, after = both(q, k, holed)
    assert bool(after[2].isnan().all())
    assert not before[2].any()
    assert bool(torch.softmax(torch.full((4,), -math.inf), -1).isnan().all())
    # a score that is not finite, behind the mask: multiplied by 0 it is in every weight of the row
    spoiled = k.clone()
    spoiled[0, 0, 5, 0] = math.inf
    before, after = both(q, spoiled, allowed)
    assert bool(after[:5].isnan().any())
    assert apart(before[:5], both(q, k, allowed)[0][:5]) == 0
    # scores far apart: what is visible underflows beside what is hidden
    tall = k.clone()
    tall[0, 0, 5] = q[0, 0, 0] * 1e4
    before, after = both(q, tall, allowed)
    assert float(before[0, 0]) == 1
    assert bool(after[0].isnan().any())
    # dropout in between
    weights = both(q, k, allowed)[0]
    dropped = torch.dropout(weights, 0.5, True)
    again = dropped / dropped.sum(-1, keepdim=True)
    assert bool(again.isnan().any()) or apart(again, dropped) > 0.1


@pytest.mark.parametrize("backend", ["reference", "tiled", "sdpa"])
def test_a_row_of_nothing_is_zero_on_every_kernel(backend: str) -> None:
    q, k, v = draw(3, 1, 2, 32, 8).unbind()
    allowed = torch.ones(32, 32, dtype=torch.bool)
    allowed[3] = False
    out, lse = regard.attend_partial(q, k, v, mask=allowed, backend=backend)
    assert not out[:, :, 3].any()
    assert bool((lse[:, :, 3] == -math.inf).all())
    assert bool(out[:, :, :3].isfinite().all())
