"""Layers that read the keys and values of an earlier layer: patterns, the definition, and every way
to run them with caches.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import masks
from regard.caches import CrossLayer, Growing, Ring
from regard.caches.cross_layer import LendingCache
from regard.errors import ArgumentError
from regard.models.assembly.shared_memory import (
    cross_layer,
    last_layers,
    share_memory,
    you_only_cache_once,
)
from regard.models.decoder import Decoder
from regard.models.families.regard import Config, build
from regard.models.generation.cache_config import CacheConfig
from regard.nn import RMSNorm
from regard.nn.attention.cross_layer import (
    QueryProjection,
    SharedMemoryAttention,
    without_own_memory,
)
from regard.nn.variants import build as build_mechanism
from regard.span import Span
from tests.models.step_models import why_not

T = 17


def plain(layers: int = 4, seed: int = 0, window: int | None = None) -> Decoder:
    config = Config(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=4,
        attention="gqa",
        attention_options={"groups": 2},
    )
    torch.manual_seed(seed)
    decoder = build(config).double().eval()
    with torch.no_grad():
        for p in decoder.parameters():
            p.add_(0.3 * torch.randn_like(p))
    for i, layer in enumerate(decoder.layers):
        if window and i % 2 == 0:
            layer.attention.mask = masks.Causal() & masks.Window(window)  # type: ignore[union-attr]
    return decoder


def ids(B: int = 2, n: int = T) -> Tensor:
    return torch.randint(0, 23, (B, n), generator=torch.Generator().manual_seed(3))


def by_hand(decoder: Decoder, x: Tensor, memory_from: tuple[int | None, ...]) -> Tensor:
    """The definition: every layer's whole attention, with k and v of the layer that it reads."""
    h, stored = decoder.embed(x, Span(0, x.shape[1])), {}
    for i, layer in enumerate(decoder.layers):
        a: Any = layer.attention
        norms = [m for m in layer.modules() if isinstance(m, RMSNorm)]
        n = norms[0](h)
        positions = Span(0, x.shape[1])
        if memory_from[i] is None:
            stored[i] = a.project.remember(n, positions)
        k, v = stored[i if memory_from[i] is None else memory_from[i]]
        q = a.project.query(n, positions)
        s = q.unflatten(1, (2, 2)) @ k[:, :, None].mT / q.shape[-1] ** 0.5
        visible = a.mask.block(positions, positions)[0, 0]
        z = (s.masked_fill(~visible, -torch.inf).softmax(-1) @ v[:, :, None]).flatten(1, 2)
        h = h + a.output(z.transpose(1, 2).flatten(2))
        h = h + layer.feed_forward(norms[1](h))
    return decoder.head(decoder.norm(h))  # type: ignore[misc]


def test_patterns() -> None:
    assert cross_layer(6, 3) == (None, 0, 0, None, 3, 3)
    assert cross_layer(3, 1) == (None,) * 3
    assert you_only_cache_once(5) == (None, None, None, 2, 2)
    gemma = (["sliding"] * 4 + ["full"]) * 7  # Gemma 3n E4B: 35 layers, 20 of which share
    found = last_layers(gemma, 20)
    assert found.count(None) == 15
    assert set(found[15:]) == {13, 14}
    assert all(gemma[i] == gemma[j] for i, j in enumerate(found) if j is not None)
    with pytest.raises(ArgumentError, match="both must be at least 1"):
        cross_layer(4, 0)
    with pytest.raises(ArgumentError, match="must be at least 2"):
        you_only_cache_once(1)
    with pytest.raises(ArgumentError, match="shared is 3 for 3 layers"):
        last_layers(["a"] * 3, 3)
    with pytest.raises(ArgumentError, match="no layer before 1 has the kind 'b'"):
        last_layers(["a", "b"], 1)


@pytest.mark.parametrize("pattern", [(None, 0, None, 2), (None, None, 0, 1), (None, 0, 0, 0)])
def test_a_shared_decoder_is_its_definition(pattern: tuple[int | None, ...]) -> None:
    whole = plain(window=5)
    shared = share_memory(copy.deepcopy(whole), pattern)
    x = ids()
    with torch.no_grad():
        found = shared(x)
        assert (found - by_hand(shared, x, pattern)).abs().max() < 1e-12
        assert (found - whole(x)).abs().max() > 0.01, "negative control"


def test_sharing_nothing_is_the_plain_decoder() -> None:
    whole = plain()
    same = share_memory(copy.deepcopy(whole), cross_layer(4, 1))
    assert torch.equal(same(ids()), whole(ids()))


@pytest.mark.parametrize("sizes", [[T], [2, 7, 1, 1, 6], [16, 1], [9] + [1] * 8])
def test_any_chunks_are_one_pass_even_from_a_ring(sizes: list[int]) -> None:
    """Readers of a ring see, in a long call, what the ring forgets at its end."""
    shared, x = share_memory(plain(window=3), (None, None, 0, 1)), ids()
    caches, out, start = shared.new_caches(), [], 0
    assert [type(c) for c in caches] == [Ring, Growing, CrossLayer, CrossLayer]
    with torch.no_grad():
        for n in sizes:
            out.append(shared(x[:, start : start + n], None, caches))
            start += n
        assert (torch.cat(out, 1) - shared(x)).abs().max() < 1e-12
    assert [c.bytes for c in caches[2:]] == [0, 0]


def test_padding_forks_and_gradients() -> None:
    shared, x = share_memory(plain(window=3), (None, None, 0, 1)), ids()
    positions = torch.stack([torch.arange(9), torch.tensor([-1] * 4 + list(range(5)))])
    with torch.no_grad():
        caches = shared.new_caches()
        padded = torch.cat([x[:1, :9], torch.cat([x[1:, :4], x[1:, 4:9]], 1)])
        shared(padded, positions, caches)
        forks = [c.fork() for c in caches]
        for cache in forks:
            cache.reorder(torch.tensor([1, 0]))
        after = torch.stack([x[0, 9:12], x[1, 9:12]])
        out = shared(after, None, caches)
        swapped = shared(after.flip(0), None, forks)
        alone = shared(torch.cat([x[1:, 4:9], x[1:, 9:12]], 1))[:, -3:]
        assert (out[1:] - alone).abs().max() < 1e-12
        assert (out - swapped.flip(0)).abs().max() < 1e-12
    shared(x).square().sum().backward()
    assert all(p.grad is not None for p in shared.parameters())


def test_a_call_that_raises_changes_no_cache() -> None:
    shared, x = share_memory(plain(), cross_layer(4, 2)), ids()
    caches = shared.new_caches()
    with torch.no_grad():
        shared(x[:, :5], None, caches)
        held = caches[0].bytes
        wrong = [*caches[:3], Growing()]
        with pytest.raises(ArgumentError, match="layer 3 reads the memory of layer 2, but its"):
            shared(x[:, 5:7], None, wrong)
        assert caches[0].bytes == held
        assert (shared(x[:, 5:], None, caches) - shared(x)[:, 5:]).abs().max() < 1e-12


@pytest.mark.parametrize("kind", ["ring", "streaming", "fixed", "paged"])
def test_every_cache_of_generation_serves_shared_layers(kind: str) -> None:
    shared, x = share_memory(plain(), cross_layer(4, 2)), ids()
    config = CacheConfig(kind, 8 if kind in ("ring", "streaming") else T)
    narrow = config.restrict(shared)
    whole = narrow(x)
    if config.forgets:
        assert len({str(layer.attention.mask) for layer in narrow.layers}) == 1
        assert (whole - shared(x)).abs().max() > 1e-3
    caches, out = config.new_caches(narrow, 2), []
    assert [type(c) for c in caches[1::2]] == [CrossLayer, CrossLayer]
    with torch.no_grad():
        out = [narrow(x[:, :9], None, caches)]
        out += [narrow(x[:, i : i + 1], None, caches) for i in range(9, T)]
    assert (torch.cat(out, 1) - whole).abs().max() < 1e-12


@pytest.mark.full
def test_it_compiles_and_the_compiled_step_says_why_not() -> None:
    shared, x = share_memory(plain(), cross_layer(4, 2)), ids()
    torch._dynamo.reset()
    compiled = torch.compile(shared, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert (compiled(x) - shared(x)).abs().max() < 1e-12
        single = shared.float()
        reasons = why_not(single, single.new_caches())
    assert "SharedMemoryAttention" in str(reasons)


def test_its_cost_counts_the_memory_once() -> None:
    own = plain().layers[1].attention.spec
    reader = share_memory(plain(), cross_layer(4, 2)).layers[1].attention.spec
    assert own.cached(100).values == 100 * 2 * 2 * 4
    assert reader.cached(100).values == 0
    assert reader.read(100).values == own.read(100).values
    assert reader.weights.total == own.weights.total - 2 * 16 * 8


def test_what_cannot_share_is_refused() -> None:
    for pattern, message in (
        ((None, 0), "memory_from has length 2 for 4 layers"),
        ((None, 0, 1, None), "layer 2 reads the memory of layer 1; it must be an earlier layer"),
        ((0, None, None, None), "layer 0 reads the memory of layer 0"),
    ):
        with pytest.raises(ArgumentError, match=message):
            share_memory(plain(), pattern)
    with pytest.raises(ArgumentError, match="with TensorProductProjection cannot read the memory"):
        without_own_memory(build_mechanism("tpa", 16, 4))  # type: ignore[arg-type]
    other = plain()
    other.layers[1].attention = build_mechanism("gqa", 16, 4, groups=4)
    with pytest.raises(ArgumentError, match=r"layer 1 has .* \(4, 4, 4\), and layer 0"):
        share_memory(other, (None, 0, None, None))
    other.layers[1].attention = build_mechanism("retention", 16, 4)
    with pytest.raises(ArgumentError, match="both must be softmax attention with SeparateQKV"):
        share_memory(other, (None, 0, None, None))
    reader = share_memory(plain(), cross_layer(4, 2)).layers[1].attention
    assert isinstance(reader, SharedMemoryAttention)
    x = torch.zeros(1, 2, 16).double()
    with pytest.raises(ArgumentError, match="was called without a CrossLayer cache"):
        reader(x)
    with pytest.raises(ArgumentError, match="needs a CrossLayer cache: use new_cache"):
        reader(x, None, Growing())
    with pytest.raises(ArgumentError, match="none was lent in this call"):
        reader(x, Span(0, 2), reader.new_cache())
    with pytest.raises(ArgumentError, match="stores no memory"):
        CrossLayer().update((x[None],), Span(0, 2))
    with pytest.raises(ArgumentError, match="groups must divide the query heads"):
        QueryProjection(reader.project.q, 3)  # type: ignore[union-attr,arg-type]
    project = plain().layers[0].attention.project
    project.key_transform = torch.nn.Identity()
    with pytest.raises(ArgumentError, match="sharing needs None"):
        without_own_memory(regard.nn.Attention(project, torch.nn.Identity()))


def test_a_record_is_its_inner_cache() -> None:
    inner = Growing()
    record, part = LendingCache(inner), (torch.ones(1, 1, 3, 2),)
    record.update(part, Span(0, 3))
    assert (len(record), record.bytes) == (3, inner.bytes)
    fork = record.fork()
    record.crop(1)
    assert (len(inner), len(fork)) == (1, 3)
    empty = LendingCache(None)
    empty.restore(empty.mark())
    empty.crop(0)
    empty.fill({})
    assert (len(empty), empty.contents()) == (0, {})
