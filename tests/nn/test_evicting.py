"""Caches that evict by a rule: the numbers of the fixed example, the definition token by token, and
generation with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.caches import Growing, load, save
from regard.caches.eviction import (
    EvictionRule,
    HeavyHitters,
    HeldTokens,
    KeyDifference,
    LastQuery,
    ObservedWindow,
    SmallKeyNorm,
    tokens_to_keep,
)
from regard.errors import ArgumentError
from regard.models.generation.cache_config import CacheConfig
from regard.nn import EvictingAttention
from regard.nn.projections import IdentityProjection, ProjectionShape
from regard.nn.variants import VARIANTS, build
from regard.nn.variants.projections import separate_qkv
from regard.positions import Rotary
from tests.fixture_f import example
from tests.nn.catalogue import example as small
from tests.nn.catalogue import tokens
from tests.oracles import eviction as oracle

RULES: dict[str, tuple[EvictionRule, oracle.Score]] = {
    "h2o": (HeavyHitters(2), oracle.heavy_hitters),
    "tova": (LastQuery(), oracle.last_query),
    "snapkv": (ObservedWindow(2, 3), oracle.observed_window(2, 3)),
    "key_norm": (SmallKeyNorm(), oracle.key_norm),
    "keydiff": (KeyDifference(), oracle.key_difference),
}
KINDS = tuple(RULES)


class GivenHeads(nn.Module):
    """A projection whose queries, keys and values are x itself, one head: D, D and E numbers."""

    cache_unsafe_reason = None

    def query(self, x: Tensor, positions: Any) -> Tensor:
        return x[:, None, :, :3]

    def remember(self, x: Tensor, positions: Any) -> tuple[Tensor, Tensor]:
        return x[:, None, :, 3:6], x[:, None, :, 6:]

    def recall(self, memory: Any, positions: Any) -> tuple[Tensor, Tensor]:
        return memory

    def postprocess(self, z: Tensor, x: Tensor) -> Tensor:
        return z

    @property
    def shape(self) -> ProjectionShape:
        return ProjectionShape(1, 1, 3, 2, (3, 2))


def fixed(rule: EvictionRule, budget: int, interval: int = 1) -> tuple[Tensor, list[int]]:
    """Output and held positions after 8 tokens of the fixed example."""
    layer = EvictingAttention(
        GivenHeads(), nn.Identity(), rule=rule, budget=budget, interval=interval
    )
    x = torch.cat([part[:, 0] for part in example(8)], -1)
    cache = layer.new_cache()
    out = layer(x, None, cache)[0]
    positions = cache.state[2][0, 0]
    return out, sorted(positions[positions >= 0].tolist())


@pytest.mark.parametrize(
    ("name", "right"),
    [("h2o", [0, 2, 6, 7]), ("tova", [0, 3, 6, 7]), ("key_norm", [0, 2, 3, 5])],
)
def test_what_stays_of_the_fixed_example(name: str, right: list[int]) -> None:
    out, held = fixed(RULES[name][0], 4)
    assert held == right
    q, k, v = (x[0, 0].tolist() for x in example(8))
    recent = RULES[name][0].recent
    expected, same = oracle.evicting(q, k, v, RULES[name][1], 4, 1, recent)
    assert same == right
    assert (out - torch.tensor(expected, dtype=torch.float64)).abs().max() < 1e-12


def test_snapkv_on_the_fixed_example() -> None:
    """Of the old tokens, 3 is the best and 1 the second."""
    for budget, right in ((3, [3, 6, 7]), (4, [1, 3, 6, 7])):
        rule = ObservedWindow(2, 3)
        assert fixed(rule, budget, 8 - budget)[1] == right
        q, k, v = (x[0, 0].tolist() for x in example(8))
        score = oracle.observed_window(2, 3)
        assert oracle.evicting(q, k, v, score, budget, 8 - budget, 2)[1] == right


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("name", KINDS)
def test_the_module_is_its_definition(name: str, interval: int) -> None:
    layer = small(VARIANTS[name])
    assert isinstance(layer, EvictingAttention)
    layer.interval = interval
    x = tokens(14, B=1)
    q, positions = layer.project.query(x, regard.Span(0, 14)), regard.Span(0, 14)
    k, v = layer.project.recall(layer.project.remember(x, positions), positions)
    heads = []
    if name in ("h2o", "tova", "snapkv"):  # these add the heads of a group, and the oracle has one
        q = q[:, ::2].repeat_interleave(2, 1)
        layer.project.q.linear.weight.data = _same_heads(layer.project.q.linear.weight.data)
    for h in range(4):
        rows = (y[0, n].tolist() for y, n in ((q, h), (k, h // 2), (v, h // 2)))
        score, recent = RULES[name][1], layer.rule.recent
        heads.append(oracle.evicting(*rows, score, 5, interval, recent)[0])
    z = torch.tensor(heads, dtype=torch.float64).transpose(0, 1).flatten(1)
    right = z @ layer.output.weight.T
    cache = layer.new_cache()
    for found in (layer(x), layer(x, None, cache)):
        assert (found[0] - right).abs().max() < 1e-12
    plain = build("gqa", 32, 4, groups=2).double()
    plain.load_state_dict(layer.state_dict())
    assert (plain(x)[0] - right).abs().max() > 1e-3, "negative control: nothing is evicted"
    assert (plain(x)[0] - right)[: 5 + interval].abs().max() < 1e-12, "until the cache is full"


def _same_heads(weight: Tensor) -> Tensor:
    """Rows of 4 query heads of which two in a group are the same."""
    return weight.unflatten(0, (2, 2, 8))[:, :1].expand(-1, 2, -1, -1).reshape(weight.shape)


@pytest.mark.parametrize("name", KINDS)
def test_a_budget_as_long_as_the_text_is_plain_attention(name: str) -> None:
    own = {k: v for k, v in VARIANTS[name].example_options.items() if k != "budget"}
    layer, plain = build(name, 32, 4, budget=17, **own), build("gqa", 32, 4, groups=2)
    plain.load_state_dict(layer.state_dict())
    x = tokens(17, dtype=torch.float32)
    if name == "h2o":
        with pytest.raises(ArgumentError, match="always keeps 256 of the newest tokens"):
            build("h2o", 32, 4, budget=17, newest=256)
    with torch.no_grad():
        assert torch.allclose(layer(x), plain(x), atol=1e-6)
        assert torch.allclose(layer(x, None, layer.new_cache()), plain(x), atol=1e-6)


def test_a_learned_sink_stays_in_the_denominator() -> None:
    sink = nn.Parameter(torch.randn(4).double())
    project = separate_qkv(32, 4, 2, 8, Rotary(8)).double()
    layer = EvictingAttention(
        project, nn.Identity(), rule=SmallKeyNorm(), budget=5, interval=2, sink=sink
    )
    x = tokens(14)
    with torch.no_grad():
        assert (layer(x, None, layer.new_cache()) - layer(x)).abs().max() < 1e-12
        layer.sink = None
        assert (layer(x, None, layer.new_cache()) - layer(x)).abs().max() < 1e-12


def test_equal_scores_and_empty_slots() -> None:
    keys = torch.ones(2, 4, 1)
    is_held = torch.tensor([[True] * 4, [True, True, False, False]])
    zeros = torch.zeros(2, 4)
    keep, count = tokens_to_keep(SmallKeyNorm(), HeldTokens(keys, is_held, zeros, zeros), 3)
    assert keep.tolist() == [[False, True, True, True], [True, True, False, False]]
    assert count.tolist() == [4, 2]


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("kind", KINDS)
def test_generation_with_a_budget(kind: str) -> None:
    model = regard.load("tiny")
    ids = torch.randint(0, 1000, (2, 30), generator=torch.Generator().manual_seed(0))
    config = CacheConfig(kind, 16)
    assert config.forgets
    narrow, whole = config.restrict(model.decoder), model.decoder
    caches, full = config.new_caches(narrow, 2), whole.new_caches()
    with torch.no_grad():
        one = narrow(ids[:, :16], None, caches)
        assert torch.allclose(one, whole(ids[:, :16], None, full), atol=1e-4)
        steps = [narrow(ids[:, i : i + 1], None, caches) for i in range(16, 30)]
        found, right = torch.cat(steps, 1), narrow(ids)[:, 16:]
        assert torch.allclose(found, right, atol=1e-4)
        assert (found - whole(ids)[:, 16:]).abs().max() > 0.01, "negative control"
    assert all(cache.bytes < 4 * other.bytes for cache, other in zip(caches, full, strict=True))
    assert (caches[0].state[2] >= 0).sum(-1).max() < 16


@pytest.mark.parametrize("name", KINDS)
def test_a_saved_cache_goes_on(name: str, tmp_path: Path) -> None:
    layer, x = small(VARIANTS[name]), tokens(14)
    cache = layer.new_cache()
    with torch.no_grad():
        layer(x[:, :9], None, cache)
        save(cache, tmp_path / "cache")
        again = load(tmp_path / "cache")
        assert torch.equal(layer(x[:, 9:], None, again), layer(x[:, 9:], None, cache))


def test_what_cannot_evict_is_refused() -> None:
    project = separate_qkv(8, 4, 2, 2)
    rule = SmallKeyNorm()
    with pytest.raises(ArgumentError, match="budget is 0 and interval 1"):
        EvictingAttention(project, nn.Identity(), rule=rule, budget=0)
    with pytest.raises(ArgumentError, match=r"stores parts of .* per token; eviction needs keys"):
        EvictingAttention(IdentityProjection(8), nn.Identity(), rule=rule, budget=4)
    with pytest.raises(ArgumentError, match="pool odd and at least 1"):
        ObservedWindow(2, 2)
    with pytest.raises(ArgumentError, match="newest"):
        HeavyHitters(-1)
    layer = EvictingAttention(project, nn.Identity(), rule=rule, budget=4)
    with pytest.raises(ArgumentError, match="needs an Evicting cache: use new_cache"):
        layer(torch.zeros(1, 2, 8), None, Growing())
    cache = layer.new_cache()
    layer(torch.zeros(1, 9, 8), None, cache)
    with pytest.raises(ArgumentError, match="start a new cache for another batch or model"):
        layer(torch.zeros(2, 1, 8), None, cache)
    with pytest.raises(ArgumentError, match="a part of the sum cannot be removed"):
        cache.crop(3)
    with pytest.raises(NotImplementedError, match="has no rule for 4"):
        type(cache).rule_for(4)
    with pytest.raises(ArgumentError, match="needs max_context"):
        CacheConfig("h2o")


def test_models_that_cannot_evict_are_refused() -> None:
    from regard.models.assembly.shared_memory import cross_layer, share_memory
    from tests.models.test_shared_memory import plain

    shared = share_memory(plain(), cross_layer(4, 2))
    with pytest.raises(ArgumentError, match="layers of this model share their keys"):
        CacheConfig("h2o", 16).restrict(shared)
    biased = plain()
    biased.layers[1].attention.bias = regard.biases.ALiBi(4)
    with pytest.raises(ArgumentError, match=r"layer 1 is Attention .*; cache='tova' evicts"):
        CacheConfig("tova", 16).restrict(biased)
