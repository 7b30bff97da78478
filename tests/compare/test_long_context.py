"""Loss behind more context, and passages found again: against loops, and against models whose
answer is known.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from regard.compare.context_extension import losses_by_length, needle_in_haystack, perplexity
from regard.errors import ArgumentError


class Induction(nn.Module):
    """Thinks that what followed the last time will follow again; sees `reach` tokens back."""

    def __init__(self, vocabulary: int, reach: int = 10**6) -> None:
        super().__init__()
        self.vocabulary, self.reach = vocabulary, reach

    def forward(self, ids: Tensor) -> Tensor:
        out = torch.zeros(*ids.shape, self.vocabulary)
        for b, row in enumerate(ids.tolist()):
            for t, now in enumerate(row):
                for s in range(t - 1, max(-1, t - 1 - self.reach), -1):
                    if row[s] == now:
                        out[b, t, row[s + 1]] = 10.0
                        break
        return out


class Sums(nn.Module):
    """Logits that depend on everything before."""

    def forward(self, ids: Tensor) -> Tensor:
        total = ids.double().cumsum(1)
        return torch.stack([torch.sin(total * (k + 1)) for k in range(5)], -1)


def by_loops(ids: list[int], length: int, counted: int, ends: list[int]) -> float:
    total = 0.0
    for end in ends:
        for i in range(counted):
            target = end - i
            before = sum(ids[end - length : target])
            logits = [math.sin(before * (k + 1)) for k in range(5)]
            total -= logits[ids[target]] - math.log(sum(map(math.exp, logits)))
    return total / (counted * len(ends))


def test_losses_are_of_the_same_tokens_behind_more_context() -> None:
    ids = torch.randint(5, (60,))
    found = losses_by_length(Sums(), ids, [10, 40], counted=4, windows=3)
    for length, nats in zip((10, 40), found.tolist(), strict=True):
        assert nats == pytest.approx(by_loops(ids.tolist(), length, 4, [40, 49, 59]), abs=1e-12)
    # a shorter longest length moves the ends, and so the targets
    assert float(losses_by_length(Sums(), ids, [10], counted=4, windows=3)[0]) != pytest.approx(
        float(found[0]), abs=1e-6
    )


def test_a_model_that_looks_back_finds_the_passage_and_one_that_sees_less_does_not() -> None:
    ids = torch.randperm(400)
    whole = needle_in_haystack(Induction(400), ids, 80, [0.0, 0.5, 1.0], trials=3, key=4, mark=3)
    assert [one.right for one in whole] == [1.0, 1.0, 1.0]
    assert all(one.saved > 4 for one in whole)
    assert [one.depth for one in whole] == [0.0, 0.5, 1.0]
    assert len({one.guessed for one in whole}) == 1
    assert whole[0].guessed < 0.5
    near = needle_in_haystack(
        Induction(400, reach=30), ids, 80, [0.0, 1.0], trials=3, key=4, mark=3
    )
    assert near[1].right == 1.0
    assert near[0].right == near[0].guessed
    assert near[0].saved == pytest.approx(0.0, abs=1e-6)


def test_needles_repeat_with_their_seed() -> None:
    ids = torch.randint(5, (200,))
    one, same, other = (
        needle_in_haystack(Sums(), ids, 60, [0.5], trials=2, key=4, mark=3, seed=s)
        for s in (0, 0, 5)
    )
    assert one == same
    assert one[0].saved != other[0].saved


@pytest.mark.parametrize(
    ("lengths", "size", "message"),
    [
        ([3], 60, r"lengths are \[3\], counted is 4 and windows is 2"),
        ([60], 60, r"the text has 60 tokens, but a context of 60 needs 61"),
    ],
)
def test_losses_refuse(lengths: list[int], size: int, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        losses_by_length(Sums(), torch.zeros(size, dtype=torch.long), lengths, counted=4, windows=2)


@pytest.mark.parametrize(("length", "depths"), [(19, [0.5]), (90, [0.5]), (40, [1.5])])
def test_needles_refuse(length: int, depths: list[float]) -> None:
    with pytest.raises(ArgumentError, match=r"a passage of 7 tokens cannot be placed twice in"):
        needle_in_haystack(Induction(9), torch.arange(80), length, depths, key=4, mark=3)


def test_perplexity() -> None:
    assert perplexity(1.5) == math.exp(1.5)
    assert perplexity(800) == math.inf
