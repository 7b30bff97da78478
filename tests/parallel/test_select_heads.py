"""Masks and biases of some heads are the blocks of these heads."""

from __future__ import annotations

import pytest
import torch

from regard import biases, masks
from regard.biases import Bias
from regard.errors import ArgumentError
from regard.span import Span

HERE = (Span(3, 5), Span(0, 8))
HEADS = masks.Heads([masks.Causal() & masks.Window(1 + h) for h in range(4)])
MASKS = {
    "one for all heads": masks.Causal() & masks.Window(3),
    "one for each": HEADS,
    "and": HEADS & masks.Sinks(1),
    "or": masks.Sinks(1) | HEADS,
    "not": ~HEADS,
}
BIASES: dict[str, Bias] = {
    "alibi": biases.ALiBi(4),
    "slopes": biases.ALiBi(slopes=torch.randn(4)),
    "symmetric": biases.ALiBi(4, symmetric=True),
    "t5": biases.T5Relative(torch.randn(8, 4)),
    "sum": biases.ALiBi(4) + biases.T5Relative(torch.randn(8, 4)),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask(name: str) -> None:
    whole = MASKS[name].block(*HERE).expand(-1, 4, -1, -1)
    for heads in (slice(0, 2), slice(2, 4), slice(1, 2)):
        some = MASKS[name].select_heads(heads).block(*HERE)
        assert torch.equal(some.expand_as(whole[:, heads]), whole[:, heads])


@pytest.mark.parametrize("name", BIASES)
def test_a_bias(name: str) -> None:
    whole = BIASES[name].block(*HERE)
    for heads in (slice(0, 2), slice(2, 4), slice(1, 2)):
        some = BIASES[name].select_heads(heads)
        assert torch.equal(some.block(*HERE), whole[:, heads])


def test_a_bias_that_cannot_be_cut_says_so() -> None:
    with pytest.raises(ArgumentError, match="cannot be split by heads"):
        biases.FnBias(lambda q, k: -(q - k).abs().float()).select_heads(slice(0, 1))
