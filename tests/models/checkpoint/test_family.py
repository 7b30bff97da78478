"""What a family builds: the same model with and without values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from regard.configs.reader import parse
from regard.models.families import FAMILIES, family
from tests.cost.tiny import TINY


def layout(network: nn.Module) -> list[tuple[str, torch.Size, int]]:
    """Name and shape of each parameter, and the first of those that share it."""
    first: dict[int, int] = {}
    every = list(network.named_parameters(remove_duplicate=False))
    return [(name, x.shape, first.setdefault(id(x), i)) for i, (name, x) in enumerate(every)]


@pytest.mark.full(keep=30)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_without_values_is_the_same_model(name: str) -> None:
    found = family(name)
    config = parse(found.config, TINY[name])
    empty, full = found.build_empty(config), found.build(config)
    assert layout(empty) == layout(full)
    assert all(x.is_meta for x in empty.parameters())
    assert not any(x.is_meta for x in full.parameters())
    for buffer, (key, other) in zip(empty.buffers(), full.named_buffers(), strict=True):
        assert torch.equal(buffer, other), f"{key} follows from the config and has its values"


def test_values_are_drawn_where_there_are_some() -> None:
    """A negative control: the mode that leaves empty tensors alone must leave others to torch."""
    found = family("llama")
    config = parse(found.config, TINY["llama"])
    found.build_empty(config)
    made = nn.init.constant_(torch.zeros(3), 2.0)
    assert made.tolist() == [2.0] * 3
    head = found.build(config).head
    assert isinstance(head, nn.Linear)
    assert 0.01 < head.weight.std().item() < 0.03
