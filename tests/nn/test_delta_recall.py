"""What the delta rule is for: it learns to answer with the last value of a key, which a sum over
all tokens cannot.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.nn.variants import delta_net

KEYS, VALUES, PAIRS = 32, 16, 8


class Sum(nn.Module):
    """Linear attention without a normalizer: S <- S + k v^T."""

    def forward(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, state: None, positions: object, form: str
    ) -> tuple[Tensor, tuple[Tensor]]:
        return (q @ k.mT).tril() @ v, (k.mT @ v,)


def batch(n: int, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """8 keys in any order, then again in another, with other values; keys [n,16], values [n,16],
    answers [n,8].
    """
    first = torch.rand(n, KEYS, generator=draw).argsort(1)[:, :PAIRS]
    again = torch.rand(n, PAIRS, generator=draw).argsort(1)
    values = torch.randint(VALUES, (n, 2 * PAIRS), generator=draw)
    answers = values[:, PAIRS:].gather(1, again.argsort(1))
    return torch.cat([first, first.gather(1, again)], 1), values, answers


def recall(rule: nn.Module | None, rate: float) -> float:
    """The share of keys that are answered right, asked in their first order, after 200 steps of
    training.
    """
    draw = torch.Generator().manual_seed(0)
    key, value = torch.randn(KEYS, 16), torch.randn(VALUES, 16)
    mixer, head = delta_net(32, 2), nn.Linear(32, VALUES)
    mixer.rule = mixer.rule if rule is None else rule
    optimizer = torch.optim.Adam([*mixer.parameters(), *head.parameters()], lr=rate)

    def answer(keys: Tensor, values: Tensor) -> Tensor:
        told = torch.cat([key[keys], value[values]], -1)
        asked = F.pad(key[keys[:, :PAIRS]], (0, 16))
        logits: Tensor = head(mixer(torch.cat([told, asked], 1)))
        return logits[:, 2 * PAIRS :]

    for _ in range(200):
        keys, values, right = batch(32, draw)
        optimizer.zero_grad()
        F.cross_entropy(answer(keys, values).flatten(0, 1), right.flatten()).backward()
        optimizer.step()
    keys, values, right = batch(128, draw)
    with torch.no_grad():
        return float((answer(keys, values).argmax(-1) == right).float().mean())


@pytest.mark.full
def test_the_last_value_of_a_key_is_learnt() -> None:
    """A sum does not know which of two values came last: it is right in (1 + 1/16) / 2 = 53 % of
    1024, give or take 1.6.
    """
    assert recall(None, 0.01) > 0.9
    assert recall(Sum(), 0.01) < 0.53 + 6 * 0.016
