"""Attention with other distances: the numbers of the papers, loops over the definition, and
equality with the plain mechanism where no distance changes.
"""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks import Causal
from regard.nn import DistanceMap, DualChunk, LMInfinite, RemappedAttention, ReRoPE, SelfExtend
from regard.nn.variants import VARIANTS, gqa
from regard.nn.variants.projections import separate_qkv
from regard.positions import Rotary
from regard.span import Span
from regard.tracing import Trace
from tests.nn.catalogue import DIM, example, randomize, tokens
from tests.oracles import heads as oracle

MAPS: dict[str, DistanceMap] = {
    "dual_chunk": DualChunk(4, 6),
    "self_extend": SelfExtend(2, 4),
    "rerope": ReRoPE(4),
    "lm_infinite": LMInfinite(2, 4),
}
"""As in the examples of the catalogue."""


def expected_distance(name: str, i: int, j: int) -> int | None:
    """The distance by the equation of each paper; None where the key is hidden."""
    if j > i:
        return None
    if name == "dual_chunk":
        c, n = 4, 6
        before = i // c - j // c
        place = {0: i % c, 1: min(i % c + c, n)}.get(before, min(2 * c - 1, n))
        return place - j % c
    if name == "self_extend":
        return i - j if i - j < 4 else i // 2 + 4 - 4 // 2 - j // 2
    if name == "lm_infinite" and i - j >= 4 and j >= 2:
        return None
    return min(i - j, 4)


def row(found: DistanceMap, i: int) -> list[int]:
    return cast("list[int]", found.distance(torch.tensor([i]), torch.arange(i + 1))[0].tolist())


def test_the_rows_of_the_papers() -> None:
    assert row(DualChunk(4, 6), 9) == [6, 5, 4, 3, 5, 4, 3, 2, 1, 0]
    assert row(SelfExtend(2, 4), 11) == [7, 7, 6, 6, 5, 5, 4, 4, 3, 2, 1, 0]
    assert row(ReRoPE(3), 6) == [3, 3, 3, 3, 2, 1, 0]
    assert row(LMInfinite(1, 3), 6) == [3, 0, 0, 0, 2, 1, 0]


@pytest.mark.parametrize("name", MAPS)
def test_each_pair_is_in_one_part(name: str) -> None:
    q = torch.arange(30)
    distance = MAPS[name].distance(q, q)
    count = sum(
        part.mask.block(Span(0, 30), Span(0, 30))[0, 0].int() for part in MAPS[name].parts()
    )
    for i in range(30):
        for j in range(30):
            wanted = expected_distance(name, i, j)
            assert int(cast("Tensor", count)[i, j]) == (wanted is not None)
            if wanted is not None:
                assert int(distance[i, j]) == wanted
    largest = {"dual_chunk": 6, "self_extend": 4 + 29 // 2 - 2, "rerope": 4, "lm_infinite": 4}
    assert int(distance.max()) == largest[name]


@pytest.mark.parametrize("name", MAPS)
def test_scores_have_these_distances(name: str) -> None:
    """Queries and keys without rotation, and one rotation by the distance of each pair."""
    layer, x = example(VARIANTS[name]), tokens(19, B=1)
    project = cast("Any", layer).project
    rotary = cast("Rotary", project.q.steps[-1])
    frequencies = rotary.inv_freq.tolist()
    q, k, v = ((x @ p.linear.weight.T)[0] for p in (project.q, project.k, project.v))
    with torch.no_grad():
        attended: list[Tensor] = []
        cast("Any", layer).output.register_forward_pre_hook(
            lambda module, args: attended.append(args[0])
        )
        layer(x)
    for head in (0, 3):
        group = slice(8 * (head // 2), 8 * (head // 2) + 8)
        keys, values = k[:, group].tolist(), v[:, group].tolist()
        for i in (3, 4, 11, 18):
            query, scores, seen = q[i, 8 * head : 8 * head + 8].tolist(), [], []
            for j in range(i + 1):
                d = expected_distance(name, i, j)
                if d is not None:
                    turned = oracle.rotated(query, d, frequencies)
                    scores.append(oracle.dot(turned, keys[j]) / 8**0.5)
                    seen.append(values[j])
            expected = oracle.weighted(scores, seen)
            found = attended[0][0, i, 8 * head : 8 * head + 8].tolist()
            assert found == pytest.approx(expected, abs=1e-10), (head, i)


@pytest.mark.parametrize("name", MAPS)
def test_short_texts_are_those_of_gqa(name: str) -> None:
    n = MAPS[name].unchanged
    layer = example(VARIANTS[name])
    plain = randomize(gqa(DIM, 4, groups=2).double(), 0)
    x = tokens(n + 1)
    with torch.no_grad():
        assert torch.equal(layer(x[:, :n]), plain(x[:, :n]))
        as_tensor = torch.arange(n)[None]  # positions that are not known without reading them
        assert torch.allclose(layer(x[:, :n], as_tensor), plain(x[:, :n]), atol=1e-12)
        assert not torch.allclose(layer(x), plain(x), atol=1e-4), "one token more is changed"
    assert layer.state_dict().keys() == plain.state_dict().keys()


def test_a_chunk_of_the_training_length_changes_nothing_below_two() -> None:
    assert DualChunk(4, 7).unchanged == 8
    assert DualChunk(4, 6).unchanged == 7
    assert row(DualChunk(4, 7), 7) == [7, 6, 5, 4, 3, 2, 1, 0]


def test_a_sink_is_counted_once() -> None:
    project = separate_qkv(DIM, 4, 2, 8, Rotary(8))
    sink = nn.Parameter(torch.tensor([0.3, -1.0, 2.0, 0.0]))
    layers = [
        randomize(RemappedAttention(project, nn.Identity(), m, sink=sink).double(), 0)
        for m in (ReRoPE(4), ReRoPE(100))
    ]
    x = tokens(5)
    with torch.no_grad():
        assert torch.equal(layers[0](x), layers[1](x))
        moved = layers[0](x, torch.arange(5)[None])
        assert torch.allclose(moved, layers[1](x), atol=1e-12)
        cast("Any", layers[0]).sink.fill_(float("-inf"))
        assert not torch.allclose(layers[0](x), moved, atol=1e-3)


def test_the_cache_of_lm_infinite_forgets() -> None:
    layer = example(VARIANTS["lm_infinite"])
    cache = layer.new_cache()
    with torch.no_grad():
        layer(tokens(30), None, cache)
    assert len(cache) == 6
    assert str(layer.mask) == "causal & (window(4) | sinks(2))"


def test_a_trace_of_scores_is_refused() -> None:
    layer, x = example(VARIANTS["rerope"]), tokens(9)
    with Trace("scores") as trace:
        layer(x[:, :5])
    assert trace["scores"].shape[-2:] == (5, 5)
    pattern = Trace("pattern", missing="ignore")
    with pattern, pytest.raises(ArgumentError, match="which has no single call: its parts"):
        layer(x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DualChunk(4, 3), "length is 3 and chunk is 4; length must be at least chunk"),
        (lambda: DualChunk(0, 3), "chunk is 0; it must be 1 or more"),
        (lambda: SelfExtend(2, 5), "window is 5 and group is 2; group must divide window, such as"),
        (lambda: ReRoPE(0), "window is 0; it must be 1 or more"),
        (lambda: LMInfinite(0, 4), "sinks is 0; it must be 1 or more"),
    ],
)
def test_what_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


def test_wrong_parts_are_refused() -> None:
    project = separate_qkv(8, 4, 2, 2, Rotary(2))
    with pytest.raises(ArgumentTypeError, match="distances is Causal; it must be a DistanceMap"):
        RemappedAttention(project, nn.Identity(), cast("Any", Causal()))
    with pytest.raises(ArgumentError, match="both must be the same Rotary object"):
        RemappedAttention(separate_qkv(8, 4, 2, 2), nn.Identity(), ReRoPE(3))
