"""Caches that evict by a rule: the numbers of the fixed example, the definition token by token, and
generation with them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.caches import Growing
from regard.caches.eviction import (
    AcrossHeads,
    EvictionRule,
    ExpectedAttention,
    HeavyHitters,
    HeldTokens,
    KeyDifference,
    LastQuery,
    ObservedWindow,
    SmallKeyNorm,
    pyramid_budget,
    tokens_to_keep,
)
from regard.errors import ArgumentError
from regard.models.generation.cache_config import CacheConfig
from regard.nn import EvictingAttention
from regard.nn.projections.fused import IdentityProjection
from regard.nn.projections.heads import Projection, ProjectionShape
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
    "expected_attention": (ExpectedAttention(8, 1), oracle.expected_attention(8, 1)),
}
KINDS = (*RULES, "adakv")


class GivenHeads(Projection, nn.Module):
    """A projection whose queries, keys and values are x itself, one head: D, D and E numbers."""

    def query(self, x: Tensor, positions: Any) -> Tensor:
        return x[:, None, :, :3]

    def remember(self, x: Tensor, positions: Any) -> tuple[Tensor, Tensor]:
        return x[:, None, :, 3:6], x[:, None, :, 6:]

    def recall(self, memory: Any, positions: Any) -> tuple[Tensor, Tensor]:
        return memory

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
    ("name", "right"), [("h2o", [0, 2, 6, 7]), ("tova", [0, 3, 6, 7]), ("key_norm", [0, 2, 3, 5])]
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
@pytest.mark.parametrize("name", RULES)
def test_the_module_is_its_definition(name: str, interval: int) -> None:
    layer = small(VARIANTS[name])
    assert isinstance(layer, EvictingAttention)
    layer.interval = interval
    x = tokens(14, B=1)
    q, positions = layer.project.query(x, regard.Span(0, 14)), regard.Span(0, 14)
    k, v = layer.project.recall(layer.project.remember(x, positions), positions)
    heads = []
    if name in (
        "h2o",
        "tova",
        "snapkv",
        "expected_attention",
    ):  # these add the heads of a group, and the oracle has one
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


@pytest.mark.parametrize(("interval", "floor"), [(1, 0.4), (3, 0.0), (3, 1.0)])
def test_heads_share_a_budget(interval: int, floor: float) -> None:
    """Against the loops of all heads together; a floor of 1 is the rule in each head."""
    layer = small(VARIANTS["adakv"])
    layer.interval, layer.rule = interval, AcrossHeads(ObservedWindow(2, 3), floor)
    x, positions = tokens(19, B=2), regard.Span(0, 19)
    layer.project.q.linear.weight.data = _same_heads(layer.project.q.linear.weight.data)
    q = layer.project.query(x, positions)
    k, v = layer.project.recall(layer.project.remember(x, positions), positions)
    rule = oracle.observed_window(2, 3)
    cache = layer.new_cache()
    whole, stored = layer(x), layer(x, None, cache)
    uneven = False
    for b in range(2):
        rows = (
            [y[b, g].tolist() for g in heads]
            for y, heads in ((q, (0, 2)), (k, (0, 1)), (v, (0, 1)))
        )
        out, held = oracle.evicting_across_heads(*rows, rule, 5, interval, 2, floor)
        z = torch.tensor([out[0], out[0], out[1], out[1]], dtype=torch.float64)
        right = z.transpose(0, 1).flatten(1) @ layer.output.weight.T
        for found in (whole, stored):
            assert (found[b] - right).abs().max() < 1e-12
        where = cache.state[2][b]
        if floor < 1:
            heads = cache.state[-1][b, 0]
            assert [sorted(where[0][heads == g].tolist()) for g in (0, 1)] == held
        uneven |= len(held[0]) != len(held[1])
    assert uneven == (floor < 1), "negative control: the heads keep different numbers"
    assert cache.bytes == 8 * 2 * layer.describe(19).cached_values


def test_expected_queries_are_those_of_the_text() -> None:
    """What the covariance and the values add, and that chunks of queries join to one mean."""
    torch.manual_seed(0)
    layer, x = small(VARIANTS["expected_attention"]), tokens(14)
    whole, parts = layer.new_cache(), layer.new_cache()
    with torch.no_grad():
        layer(x, None, whole)
        for part in x.split((1, 6, 3, 4), 1):
            layer(part, None, parts)
        assert whole.state[-3].tolist() == [[13, 13]] * 2, "position 0 is a sink"
        for a, b in zip(whole.state[-2:], parts.state[-2:], strict=True):
            assert (a - b).abs().max() < 1e-12
        q = regard.positions.rotate(
            layer.project.query(x, regard.Span(0, 14)),
            -torch.arange(14)[None],
            layer.project.q.steps[-1].inv_freq,
        )[:, :, 1:]
        mean = q.mean(2).unflatten(1, (2, 2))
        assert (whole.state[-2] - mean).abs().max() < 1e-12
        spread = torch.stack([torch.cov(y.mT, correction=0) * 13 for y in q.flatten(0, 1)])
        assert (whole.state[-1].flatten(0, 2) - spread).abs().max() < 1e-11
    right = oracle.expected_attention(8, 1)
    q, k, v = (torch.randn(1, 9, 8, dtype=torch.float64)[0].tolist() for _ in range(3))
    run = oracle.Run(q, k, v)
    for i in range(9):
        run.read(i)
        run.last = i
    assert right(run) != oracle.expected_attention(9, 1)(run), "the next positions matter"
    assert right(run)[0] == float("inf")


def test_expected_attention_needs_rotated_heads_and_what_attention_gives() -> None:
    rule, plain = ExpectedAttention(8, 1), separate_qkv(8, 4, 2, 2)
    with pytest.raises(ArgumentError, match="the last step on queries is None"):
        EvictingAttention(plain, nn.Identity(), rule=rule, budget=4)
    rotated = separate_qkv(8, 4, 2, 2, Rotary(2))
    with pytest.raises(ArgumentError, match=r"is not known with softcap=3.0; use another rule"):
        EvictingAttention(rotated, nn.Identity(), rule=rule, budget=4, softcap=3.0)
    with pytest.raises(ArgumentError, match="0 of the newest tokens and 5 of the first"):
        EvictingAttention(rotated, nn.Identity(), rule=ExpectedAttention(8, 5), budget=4)
    zeros = torch.zeros(1, 3)
    with pytest.raises(ArgumentError, match="needs values, positions and expected queries"):
        rule.score(HeldTokens(torch.zeros(1, 3, 2), zeros == 0, zeros, zeros))
    with pytest.raises(ArgumentError, match=r"positions=0, first=4.*positions must be at least 1"):
        ExpectedAttention(0)
    for wrong in (lambda: AcrossHeads(rule, 1.5), lambda: AcrossHeads(AcrossHeads(rule))):
        with pytest.raises(ArgumentError, match="least must be from 0 to 1, and the rule one"):
            wrong()


def test_lower_layers_keep_more() -> None:
    for layers in (1, 2, 5, 32):
        budgets = [pyramid_budget(256, layer, layers, window=8) for layer in range(layers)]
        assert abs(sum(budgets) - 256 * layers) <= layers / 2, "rounded, layer by layer"
        assert budgets == sorted(budgets, reverse=True)
    assert budgets[0] == round(8 + 2 * 248 - 248 / 20)
    assert budgets[-1] == round(8 + 248 / 20)
    for wrong in ((4, 4, 8, 20.0), (0, 4, 300, 20.0), (0, 4, 8, 0.5)):
        layer, layers, window, steepness = wrong
        with pytest.raises(ArgumentError, match="layer must be below layers, window at most"):
            pyramid_budget(256, layer, layers, window=window, steepness=steepness)


def test_generation_with_budgets_by_layer() -> None:
    model = regard.load("tiny")
    ids = torch.randint(0, 1000, (1, 60), generator=torch.Generator().manual_seed(0))
    config = CacheConfig("pyramidkv", 32)
    narrow, L = config.restrict(model.decoder), len(model.decoder.layers)
    caches = config.new_caches(narrow, 1)
    with torch.no_grad():
        found = narrow(ids, None, caches)
        parts = config.new_caches(narrow, 1)
        again = torch.cat([narrow(part, None, parts) for part in ids.split((20, 1, 1, 38), 1)], 1)
        assert torch.allclose(found, again, atol=1e-4)
        assert torch.allclose(found[:, :8], model.decoder(ids)[:, :8], atol=1e-4)
        assert (found - model.decoder(ids)).abs().max() > 0.01, "negative control"
    budgets = [layer.attention.budget for layer in narrow.layers]
    assert budgets == [pyramid_budget(28, i, L, window=7) for i in range(L)]
    assert [cache.state[2].shape[2] for cache in caches] == [n + 4 for n in budgets]


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
    held = (caches[0].state[2] >= 0).sum((1, 2)) / whole.layers[0].attention.project.shape.G
    assert held.max() < 16


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
    with pytest.raises(ArgumentError, match=r"layer 1 is Attention .*; cache='tova' chooses"):
        CacheConfig("tova", 16).restrict(biased)
