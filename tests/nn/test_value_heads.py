"""Recurrent modules with more value heads than key heads: equal to modules in which each state has
a key head with the same weights, and right in caches, costs and explanations.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.inspect import explain
from regard.inspect.explain.random_model import random_model
from regard.nn import GroupedValueQKV, HeadProjection, Recurrent
from regard.nn.recurrence.delta import DeltaRule
from regard.nn.variants import build
from tests.nn.catalogue import randomize, tokens

NAMES = ("linear_attention", "retention", "gated_linear", "delta_net", "gated_delta_net")
HEADS = [(2, 2, 4), (2, 1, 4), (4, 2, 4), (4, 1, 2)]
"""Query, key and value heads."""
SIZES: dict[str, Any] = {"head_dim": 6, "value_dim": 8}


def module(name: str, heads: tuple[int, int, int]) -> Recurrent:
    """A small module in float64 with random weights."""
    H, G, N = heads
    made = build(name, 32, H, groups=G, value_heads=N, **SIZES)
    found = randomize(made.double(), 3).eval()
    assert isinstance(found, Recurrent)
    return found


def repeat_rows(x: Tensor, heads: int, times: int) -> Tensor:
    """The rows of each head of a weight [heads * d, M], several times."""
    return x.unflatten(0, (heads, -1)).repeat_interleave(times, 0).flatten(0, 1)


def with_own_keys(name: str, heads: tuple[int, int, int], small: Recurrent) -> Recurrent:
    """The same function with O query heads and N key heads, whose weights are repeated."""
    H, G, N = heads
    outputs = max(H, N)
    weights = small.state_dict()
    for part, n, to in (("q", H, outputs), ("k", G, N)):
        key = f"project.{part}.linear.weight"
        weights[key] = repeat_rows(weights[key], n, to // n)
    large = build(name, 32, outputs, groups=N, **SIZES).double().eval()
    large.load_state_dict(weights)
    assert isinstance(large, Recurrent)
    return large


@pytest.mark.full(keep=6)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_equals_a_module_with_repeated_weights(name: str, heads: tuple[int, int, int]) -> None:
    small, x = module(name, heads), tokens(21)
    large = with_own_keys(name, heads, small)
    torch.testing.assert_close(small(x), large(x), rtol=1e-12, atol=1e-12)
    cache, wide = small.new_cache(), large.new_cache()
    parts = [small(part, cache=cache) for part in x.split([1, 12, 1, 7], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), small(x), rtol=1e-12, atol=1e-12)
    large(x, cache=wide)
    assert cache.state is not None
    assert wide.state is not None
    torch.testing.assert_close(cache.state[0], wide.state[0], rtol=1e-12, atol=1e-12)
    assert cache.state[0].shape == (2, heads[2], 6, 8)
    assert sum(part[0].numel() for part in cache.state) == small.spec.state.value


@pytest.mark.parametrize("name", NAMES)
def test_keys_in_turn_would_be_far(name: str) -> None:
    """A negative control: value heads 0 1 2 3 with keys 0 1 0 1, where they are 0 0 1 1."""
    small, x = module(name, (2, 2, 4)), tokens(9)
    large = with_own_keys(name, (2, 2, 4), small)
    with torch.no_grad():
        for part in (large.project.q, large.project.k):
            weight = part.linear.weight
            weight.copy_(weight.unflatten(0, (4, -1))[[0, 2, 0, 2]].flatten(0, 1))
    assert float((small(x) - large(x)).detach().abs().max()) > 1e-3


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("head", [0, 3, 7])
def test_is_explained(name: str, head: int) -> None:
    text = "a fluffy blue creature roamed"
    model = random_model(name, text, options={"value_heads": 8})
    found = explain(model, head=head)
    assert found.kind == "linear"
    assert found.check < 2e-5, found.checks


def test_sizes_that_do_not_fit_are_refused() -> None:
    q, k, v = (HeadProjection(8, heads, 2) for heads in (2, 2, 4))
    with pytest.raises(ArgumentError, match="value heads 3 must be a multiple of key heads 2"):
        build("delta_net", 32, 4, groups=2, value_heads=3)
    with pytest.raises(ArgumentError, match="query heads 3 and value heads 2 do not fit; one must"):
        build("gated_delta_net", 33, 3, groups=1, value_heads=2)
    with pytest.raises(ArgumentError, match="they must have the same head dim"):
        GroupedValueQKV(q, HeadProjection(8, 2, 3), v)
    with pytest.raises(ArgumentError, match=re.escape("it must be 4 heads of 2, as the rule")):
        Recurrent(GroupedValueQKV(q, k, v), DeltaRule(8, 4), nn.Linear(8, 8), gate=q)
