"""Steps on heads and on the result of a head: the numbers of the fixed example, loops over the
definition, and what each step promises.
"""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks import Causal
from regard.nn import HeadProjection
from regard.nn.attention.infini import InfiniAttention
from regard.nn.projections.factored import KeysAsValues, SharedKeyValue
from regard.nn.projections.heads import Projection
from regard.nn.projections.steps import (
    FinishedProjection,
    HeadGate,
    InverseRotary,
    L2Clip,
    OwnValueRemoval,
    PairDifference,
    QueryTemperature,
    QueryTokens,
    UnitNorm,
    WeightlessRMSNorm,
)
from regard.nn.variants import (
    VARIANTS,
    biased_gate,
    clip_qkv,
    differential_v2,
    exclusive,
    head_gate,
    irope,
    keys_as_values,
    l2_clip,
    mla,
    ngpt,
    nope,
    position_temperature,
    shared_kv,
    softplus_gate,
    value_norm,
)
from regard.nn.variants.projections import output_projection, separate_qkv
from regard.positions import Rotary
from regard.span import Span
from tests.fixture_f import example as fixture
from tests.fixture_f import vectors
from tests.nn.catalogue import DIM, example, randomize, tokens
from tests.oracles import heads as oracle


def near(expected: Any) -> Any:
    return pytest.approx(expected, abs=1e-9)


class Values(nn.Module):
    """A projection that knows only the values of the query tokens."""

    def __init__(self, v: Tensor) -> None:
        super().__init__()
        self.stored = v

    def remember(self, x: Tensor, positions: object) -> tuple[Tensor, ...]:
        return (self.stored,)

    def recall(self, memory: tuple[Tensor, ...], positions: object) -> tuple[Tensor, Tensor]:
        return memory[0], memory[0]


def query_tokens(x: Tensor, v: Tensor) -> QueryTokens:
    return QueryTokens(x, Span(0, x.shape[1]), cast("Projection", Values(v)))


def test_differential_v2_on_the_fixed_example() -> None:
    q, k, v = fixture()
    step = PairDifference(1, 1).double()
    with torch.no_grad():
        step.linear.weight.fill_(0.3)  # before the sigmoid
    z = regard.attend(torch.cat([q, vectors()], 1), k, v, mask=Causal())
    found = step(z, query_tokens(torch.ones(1, 4, 1).double(), v))[0, 0, -1]
    assert found.tolist() == near((0.1487039594, 0.2029144149))
    rows, keys, values = q[0, 0].tolist(), k[0, 0].tolist(), v[0, 0].tolist()
    first = oracle.attention_row(rows[-1], keys, values)
    second = oracle.attention_row(vectors()[0, 0, -1].tolist(), keys, values)
    assert found.tolist() == near(
        [a - b / (1 + math.exp(-0.3)) for a, b in zip(first, second, strict=True)]
    )


def test_exclusive_attention_on_the_fixed_example() -> None:
    q, k, v = fixture()
    z = regard.attend(q, k, v, mask=Causal())
    x = torch.zeros(1, 4, 1).double()
    found = OwnValueRemoval(1)(z, query_tokens(x, v))
    assert found[0, 0, -1].tolist() == near((0.0361391054, -0.0196606288))
    assert (found * v).sum(-1).abs().max() < 1e-15
    for i in range(4):
        keys, values = k[0, 0, : i + 1].tolist(), v[0, 0, : i + 1].tolist()
        row = oracle.attention_row(q[0, 0, i].tolist(), keys, values)
        assert found[0, 0, i].tolist() == near(oracle.without_own_value(row, values[-1]))
    learned = OwnValueRemoval(1, learned=True).double()
    assert torch.equal(learned(z, query_tokens(x, v)), z)  # alpha starts at 0
    with torch.no_grad():
        learned.alpha.fill_(0.4)  # type: ignore[union-attr]
    row = oracle.without_own_value(z[0, 0, -1].tolist(), values[-1], math.tanh(0.4))
    assert learned(z, query_tokens(x, v))[0, 0, -1].tolist() == near(row)


def test_a_value_of_length_0_has_no_direction() -> None:
    z, x = torch.ones(1, 1, 2, 3), torch.zeros(1, 2, 1)
    assert torch.equal(OwnValueRemoval(1)(z, query_tokens(x, torch.zeros(1, 1, 2, 3))), z)


@pytest.mark.parametrize("name", ["head_gate", "softplus_gate", "biased_gate"])
def test_a_gate_is_a_factor_on_the_heads_of_gqa(name: str) -> None:
    gated, x = example(VARIANTS[name]), tokens(7)
    project = cast("FinishedProjection", gated.project)
    plain = regard.nn.Attention(project.project, nn.Identity(), mask=Causal())
    z = plain(x).unflatten(-1, (4, -1)).transpose(1, 2)
    gate = cast("HeadGate", project.finishes[0])
    a = (x @ gate.linear.weight.T).unflatten(-1, (4, -1)).transpose(1, 2)
    a = a if gate.bias is None else a + gate.bias[:, None, None]
    a = torch.log1p(a.exp()) if name == "softplus_gate" else 1 / (1 + (-a).exp())
    expected = (z * a).transpose(1, 2).flatten(2) @ cast("Any", gated.output).weight.T
    assert torch.allclose(gated(x), expected, atol=1e-12)
    assert not torch.allclose(gated(x), cast("Any", gated.output)(plain(x)), atol=1e-3)


def test_temperatures_of_released_models() -> None:
    def factors(step: QueryTemperature, *i: int) -> list[float]:
        return cast("list[float]", step.factors(torch.tensor([i])).flatten().tolist())

    llama = QueryTemperature("llama4", scale=0.1, length=8192)
    assert factors(llama, 8190, 8191, 131071) == near((1, 1.0693147181, 1.2833213344))
    beam = QueryTemperature("beam", scale=0.1, length=2048)
    assert factors(beam, 0) == near((1.0000488174,))
    ministral = QueryTemperature("ministral3", scale=0.1, length=8192)
    assert factors(ministral, 8191, 8192) == near((1, 1.0693147181))
    learned = QueryTemperature("mistral_large4", heads=2)
    assert factors(learned, 0, 999) == [1, 1, 1, 1]
    with torch.no_grad():
        cast("Tensor", learned.slope).copy_(torch.tensor([0.5, 2.0]))
    assert factors(learned, 0, 999) == near(
        (1, 1 + 0.5 * math.log(1000), 1, 1 + 2 * math.log(1000))
    )


@pytest.mark.parametrize("form", ["llama4", "ministral3", "inkling", "beam"])
def test_a_temperature_by_loops(form: Any) -> None:
    step, positions = QueryTemperature(form, scale=0.3, length=5), Span(0, 40)
    q = torch.randn(1, 2, 40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = [oracle.temperature(form, i, 0.3, 5) for i in range(40)]
    assert (step(q, positions) / q)[0, 1, :, 2].tolist() == near(expected)
    assert expected[-1] > 1.2


@pytest.mark.parametrize("form", ["llama4", "ministral3", "inkling", "beam", "mistral_large4"])
def test_padding_on_the_left_does_not_shift_the_temperature(form: Any) -> None:
    """An error of released code: a temperature of cache slots, which padding shifts."""
    layer = position_temperature(DIM, 4, groups=2, form=form, length=2.0, scale=2.0)
    layer = randomize(layer.double(), 0).eval()  # type: ignore[assignment]
    x = tokens(9, B=1)
    positions = torch.tensor([[-1, -1, -1, 0, 1, 2, 3, 4, 5]])
    assert torch.allclose(layer(x, positions)[:, 3:], layer(x[:, 3:]), atol=1e-12)
    # negative control: counting slots is another function, because rotary scores do not change
    slots = torch.arange(9)[None]
    assert not torch.allclose(layer(x, slots)[:, -1:], layer(x[:, 3:])[:, -1:], atol=1e-3)
    shifted = layer(x[:, 3:], Span(3, 6))
    assert not torch.allclose(shifted, layer(x[:, 3:]), atol=1e-3)


def test_layers_without_positions() -> None:
    x, moved = tokens(9), Span(5, 9)
    for name, moves in (("nope", False), ("gqa", False), ("position_temperature", True)):
        layer = example(VARIANTS[name])
        assert torch.allclose(layer(x), layer(x, moved), atol=1e-10) is not moves
    # without positions, tokens before the last one may change places
    layer, order = example(VARIANTS["nope"]), [3, 1, 0, 2, 4]
    assert torch.allclose(layer(x[:, order])[:, -1], layer(x[:, :5])[:, -1], atol=1e-12)
    rotary = example(VARIANTS["gqa"])
    assert not torch.allclose(rotary(x[:, order])[:, -1], rotary(x[:, :5])[:, -1], atol=1e-3)


def test_iropes_layers() -> None:
    layers = [
        irope(DIM, 4, groups=2, window=3, layer=i, every=3, temperature="llama4") for i in range(6)
    ]
    steps = [[type(s).__name__ for s in cast("Any", a.project).q.steps] for a in layers]
    assert steps == [["Rotary"], ["Rotary"], ["QueryTemperature"]] * 2
    assert [str(a.mask) for a in layers[:3]] == ["causal & window(3)"] * 2 + ["causal"]
    assert len(cast("Any", irope(DIM, 4, groups=2, layer=3).project).q.steps) == 0
    assert str(irope(DIM, 4, groups=2).mask) == "causal"
    with pytest.raises(ArgumentError, match="layer is -1 and every is 4; layer must be at least 0"):
        irope(DIM, 4, groups=2, layer=-1)


def test_value_norm_and_keys_as_values() -> None:
    x = tokens(6)
    for name in ("value_norm", "keys_as_values"):
        layer = example(VARIANTS[name])
        project = cast("Any", layer.project)
        k, v = project.remember(x, Span(0, 6))
        weight = (project.v if name == "value_norm" else project.k).linear.weight
        y = (x @ weight.T).unflatten(-1, (2, 8)).transpose(1, 2)
        assert torch.allclose(v, y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt(), atol=1e-12)
        assert not torch.allclose(k, v, atol=1e-2)
        assert project.shape.memory == (16, 16)
        assert cast("Any", layer).scale == 1.0
    names = [n for n, _ in keys_as_values(DIM, 4, groups=2).named_parameters()]
    assert not any(".v." in n for n in names)
    assert any(".v." in n for n, _ in value_norm(DIM, 4, groups=2).named_parameters())


def test_one_vector_as_key_and_value() -> None:
    """The result depends on distances only, because it is rotated back."""
    layer, x = example(VARIANTS["shared_kv"]), tokens(9)
    assert torch.allclose(layer(x, Span(100, 9)), layer(x), atol=1e-10)
    project = cast("FinishedProjection", layer.project)
    bare = regard.nn.Attention(project.project, layer.output, mask=Causal())
    assert not torch.allclose(bare(x, Span(100, 9)), bare(x), atol=1e-3), "without the rotation"
    cache = layer.new_cache()
    layer(x, None, cache)
    assert len(cache.contents()) == 2, "one part and the positions"
    assert project.shape.memory == (8,)
    # by loops: the value of key j, as query i reads it, is rotated by j - i
    rotary = cast("InverseRotary", project.finishes[0]).rotary
    q, kv = project.query(x, Span(0, 9)), project.remember(x, Span(0, 9))[0]
    plain = bare.project.kv  # type: ignore[union-attr]
    i, frequencies = 8, rotary.inv_freq.tolist()
    keys = kv[0, 0].tolist()
    unrotated = [oracle.rotated(row, -j, frequencies) for j, row in enumerate(keys)]
    values = [oracle.rotated(row, j - i, frequencies) for j, row in enumerate(unrotated)]
    row = oracle.attention_row(q[0, 1, i].tolist(), keys, values)
    z = project.postprocess_at(regard.attend(q, kv, kv, mask=Causal()), x, Span(0, 9))
    assert z[0, 1, i].tolist() == near(row)
    assert plain is project.project.kv  # type: ignore[union-attr]


@pytest.mark.parametrize("rotary_dim", [0, 4, 8])
def test_shared_vectors_may_be_rotated_in_part(rotary_dim: int) -> None:
    layer = shared_kv(DIM, 4, groups=2, rotary_dim=rotary_dim).double()
    x = tokens(6)
    assert torch.allclose(layer(x, Span(7, 6)), layer(x), atol=1e-10)


def test_limits_of_lengths() -> None:
    make = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 5, 8, generator=make, dtype=torch.float64)
    x[0, 0, 0] = 0
    y, c = L2Clip(2.0)(x), 2.0
    for row, clipped in zip(x.flatten(0, 2).tolist(), y.flatten(0, 2).tolist(), strict=True):
        length = math.sqrt(oracle.dot(row, row))
        assert clipped == near([a * min(1, c / length) if length else 0 for a in row])
    assert 0 < int((x.norm(dim=-1) > c).sum()) < x[..., 0].numel()
    step = L2Clip(2.0, factors=(3, 8)).double()
    with torch.no_grad():
        cast("Tensor", step.weight).mul_(100)
    lengths = step(x).detach().norm(dim=-1).flatten()[1:]
    assert lengths.tolist() == near([2.0] * 29), "the limit holds after the factors"
    zero = torch.zeros(1, 1, 1, 4, requires_grad=True)
    L2Clip(2.0)(zero).sum().backward()
    assert torch.equal(cast("Tensor", zero.grad), torch.ones_like(zero))
    layer = randomize(l2_clip(DIM, 4, groups=2, limit=1.5).double(), 0)
    project = cast("Any", layer).project
    q, (k, _) = project.query(tokens(9), Span(0, 9)), project.remember(tokens(9), Span(0, 9))
    assert max(float(y.detach().norm(dim=-1).max()) for y in (q, k)) <= 1.5 + 1e-12


def test_clipped_projections() -> None:
    layer = clip_qkv(DIM, 4, groups=2, limit=0.5).double()
    project, x = cast("Any", layer).project, 5 * tokens(9)
    k, v = (part.detach() for part in project.remember(x, Span(0, 9)))
    assert float(v.abs().max()) == 0.5
    # clipped before the rotation: a pair may then be longer in one of its dims
    assert 0.5 < float(k.abs().max()) <= 0.5 * math.sqrt(2)


def test_unit_queries_and_keys_bound_the_scores() -> None:
    layer = ngpt(DIM, 4, groups=2).double()
    project, x = cast("Any", layer).project, 50 * tokens(9)
    q, (k, _) = project.query(x, Span(0, 9)), project.remember(x, Span(0, 9))
    assert torch.allclose(q.norm(dim=-1), torch.ones(2, 4, 9).double(), atol=1e-12)
    q, k = q.detach(), k.detach()
    scores = cast("Any", layer).scale * q @ k.repeat_interleave(2, 1).mT
    assert float(scores.abs().max()) <= math.sqrt(8) + 1e-12
    norm = UnitNorm(1, 2, initial=3.0, stored=0.125).double()
    row = norm(torch.tensor([[[[3.0, 4.0]]]]).double()).flatten().tolist()
    assert row == near((1.8, 2.4))
    with torch.no_grad():
        norm.weight[0, 1] = 0.25
    assert norm(torch.tensor([[[[3.0, 4.0]]]]).double()).flatten().tolist() == near((1.8, 4.8))


def test_the_cache_is_that_of_gqa() -> None:
    for build in (head_gate, softplus_gate, biased_gate, differential_v2, exclusive, nope):
        assert build(DIM, 4, groups=2).describe(9).cached_values == 9 * 2 * 16, build


def test_steps_need_what_they_read() -> None:
    x, z = torch.zeros(1, 3, 8), torch.ones(1, 4, 3, 2)
    project = FinishedProjection(separate_qkv(8, 4, 2, 2), OwnValueRemoval(4))
    with pytest.raises(ArgumentError, match="needs the positions of the queries, which this mixer"):
        project.postprocess(z, x)
    infini = InfiniAttention(project, output_projection(8, 4, 2), segment=2)
    with pytest.raises(ArgumentError, match=r"use regard\.nn\.Attention, which does"):
        infini(x)
    latent = mla(DIM, 4, kv_rank=16, nope_dim=8, rope_dim=4, value_dim=8)
    latent.project = FinishedProjection(latent.project, gate := HeadGate(DIM, 4))
    x8 = torch.randn(1, 40, DIM)
    whole, cache = latent(x8), latent.new_cache()
    assert type(latent.project.select_form(1, 40)) is not type(latent.project)
    chunks = [latent(part, None, cache) for part in x8.split([39, 1], 1)]
    torch.testing.assert_close(torch.cat(chunks, 1), whole)
    gate.linear.weight.data.fill_(100.0)
    assert (latent(x8) - whole).abs().max() > 1e-3
    with pytest.raises(ArgumentError, match="FinishedProjection got no step; use the projection"):
        FinishedProjection(separate_qkv(8, 4, 2, 2))
    with pytest.raises(ArgumentTypeError, match="a QueryTemperature got no positions; pass those"):
        HeadProjection(8, 4, 2, QueryTemperature())(x, None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HeadGate(8, 0), r"HeadGate\(dim=8, heads=0, channels=1\): each must be at least"),
        (lambda: HeadGate(8, 4, activation=cast("Any", "relu")), "activation is 'relu'; it must"),
        (lambda: PairDifference(8, 0), "dim=8, heads=0.: each must be at least 1"),
        (lambda: OwnValueRemoval(0), "heads is 0; it must be at least 1"),
        (lambda: QueryTemperature(cast("Any", "yarn")), "form is 'yarn'; it must be one of llama4"),
        (lambda: QueryTemperature(length=0), "length is 0; it must be above 0"),
        (lambda: QueryTemperature("mistral_large4"), "heads is None; the form mistral_large4 has"),
        (lambda: L2Clip(0.0), r"limit is 0\.0; it must be above 0; leave the step out"),
        (lambda: L2Clip(1.0, factors=(0, 2)), r"factors is \(0, 2\); it must be \(heads, head dim"),
        (lambda: UnitNorm(0, 2), r"UnitNorm\(heads=0, dim=2\): each must be at least 1"),
        (lambda: WeightlessRMSNorm(eps=-1.0), r"eps is -1\.0; it must be at least 0"),
        (lambda: differential_v2(DIM, 4, groups=8), "4 query heads are not divisible by 8"),
        (lambda: KeysAsValues(HeadProjection(8, 4, 2), HeadProjection(8, 2, 4)), "q is 4 heads"),
        (
            lambda: SharedKeyValue(HeadProjection(8, 4, 2), HeadProjection(8, 3, 2)),
            "4 query heads are not divisible by 3",
        ),
        (
            lambda: InverseRotary(
                Rotary(4, scaling=regard.positions.DynamicNTK(2.0, 4), length="current")
            ),
            "follows the length of each call; give it a fixed length",
        ),
    ],
)
def test_what_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()
