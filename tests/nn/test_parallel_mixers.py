"""Several mechanisms in one layer: the sum, its cache of several parts, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import masks
from regard.caches import Growing, Streaming, save
from regard.caches.joined import Joined
from regard.cost.softmax import SoftmaxSpec
from regard.models.generation.cache_config import CacheConfig
from regard.models.generation.decode_session import DecodeSession
from regard.nn import Attention, HeadProjection, SeparateQKV
from regard.nn.blocks.mixer_block import ParallelMixers
from regard.nn.variants import gqa, mamba2
from regard.nn.weights import Linear
from regard.positions import Rotary
from regard.span import Span
from tests.models.generation import stacks
from tests.nn.catalogue import in_chunks

M, T = 24, 17


def layer(dtype: torch.dtype = torch.float64) -> ParallelMixers:
    torch.manual_seed(0)
    mixers = [gqa(M, 4, groups=2), mamba2(M, 4, head_dim=5)]
    made = ParallelMixers(mixers, in_scales=[0.5, 1.5], out_scales=[2.0, -0.5])
    return made.to(dtype).eval().requires_grad_(False)


def tokens(batch: int = 2) -> Tensor:
    make = torch.Generator().manual_seed(1)
    return torch.randn(batch, T, M, generator=make, dtype=torch.float64)


def test_the_results_are_added_with_their_factors() -> None:
    mixed, x = layer(), tokens()
    attention, recurrence = mixed.mixers
    expected = 2.0 * attention(0.5 * x) - 0.5 * recurrence(1.5 * x)
    assert torch.equal(mixed(x), expected)
    plain = ParallelMixers(list(mixed.mixers))
    assert torch.equal(plain(x), attention(x) + recurrence(x))
    assert not torch.allclose(plain(x), expected)


@pytest.mark.parametrize("sizes", [[T], [5, 1, 9, 2], [1] * T])
def test_chunks_are_one_pass(sizes: list[int]) -> None:
    mixed, x = layer(), tokens()
    cache = mixed.new_cache()
    assert float((in_chunks(mixed, x, sizes, cache) - mixed(x)).abs().max()) < 1e-12
    assert cache.next(1) == Span(T, 1)
    assert len(cache) == T


def test_full_heads_and_streaming_heads_are_duo_attention() -> None:
    """Two groups of heads with caches of their own are one layer with a mask for each head: the
    output maps of the groups are the columns of its map, and their results add.
    """
    D, rotary = 6, Rotary(6)
    near = masks.Causal() & (masks.Window(5) | masks.Sinks(2))
    seen: tuple[masks.Mask, ...] = (masks.Causal(), near)

    def attention(groups: int, mask: masks.Mask) -> Attention:
        sizes = (2 * groups, groups, groups)
        q, k, v = (
            HeadProjection(M, n, D, *steps)
            for n, steps in zip(sizes, ((rotary,), (rotary,), ()), strict=True)
        )
        output = Linear(2 * groups * D, M, bias=False)
        return Attention(SeparateQKV(q, k, v), output, mask=mask).double().requires_grad_(False)

    groups = [attention(1, mask) for mask in seen]
    duo, whole = ParallelMixers(groups), attention(2, masks.Heads((seen[0],) * 2 + (seen[1],) * 2))
    for part in "qkv":
        rows = [getattr(x.project, part).linear.weight for x in groups]
        getattr(whole.project, part).linear.weight.copy_(torch.cat(rows))
    whole.output.weight.copy_(torch.cat([x.output.weight for x in groups], 1))
    x, cache = tokens(), duo.new_cache()
    found = torch.cat([duo(part, None, cache) for part in x.split((7, 1, 1, T - 9), 1)], 1)
    assert float((found - whole(x)).abs().max()) < 1e-12
    assert isinstance(cache, Joined)
    assert [type(part) for part in cache.parts] == [Growing, Streaming]
    assert [len(part) for part in cache.parts] == [T, 7]
    other = ParallelMixers([groups[0], attention(1, masks.Causal())])
    assert float((other(x) - whole(x)).abs().max()) > 1e-3, "negative control"


def test_padding_changes_nothing() -> None:
    mixed, x = layer(), tokens()
    positions = torch.stack([torch.arange(T) - 4, torch.arange(T)]).clamp(min=-1)
    alone = mixed(x[:1, 4:])
    found = mixed(x.masked_fill(positions[..., None] < 0, torch.nan), positions)
    assert float((found[:1, 4:] - alone).abs().max()) < 1e-12


def filled() -> tuple[ParallelMixers, Joined]:
    mixed = layer()
    cache = mixed.new_cache()
    mixed(tokens()[:, :6], None, cache)
    return mixed, cache


def test_forks_and_rows() -> None:
    mixed, cache = filled()
    x = tokens()[:, 6:8]
    fork = cache.fork()
    before = mixed(x, None, fork)
    assert torch.equal(mixed(x, None, cache.fork()), before), "the fork changed the cache"
    cache.reorder(torch.tensor([1, 0]))
    assert float((mixed(x.flip(0), None, cache) - before.flip(0)).abs().max()) < 1e-12
    assert cache.batch == 2
    cache.select(torch.tensor([1]))
    repeated = cache.repeated(3)
    assert repeated.batch == 3
    assert cache.bytes == repeated.bytes // 3
    cache.reset()
    assert cache.batch is None
    assert len(cache) == cache.bytes == 0
    with pytest.raises(regard.ArgumentError, match="rows are"):
        fork.select(torch.tensor([2]))


def test_a_refused_crop_changes_no_part() -> None:
    mixed, cache = filled()
    with pytest.raises(regard.ArgumentError, match="a part of the sum cannot be removed"):
        cache.crop(3)
    assert [len(part) for part in cache.parts] == [6, 1]
    x = tokens()[:, 6:]
    assert float((mixed(x, None, cache) - mixed(tokens())[:, 6:]).abs().max()) < 1e-12
    cache.crop(0)
    assert [len(part) for part in cache.parts] == [0, 0]
    with pytest.raises(regard.ArgumentError, match="crop length is -1"):
        cache.crop(-1)


def test_a_call_that_raises_changes_no_part() -> None:
    mixed, cache = filled()
    broken = mixed.mixers[1].output
    mixed.mixers[1].output = nn.Linear(3, 3)
    with pytest.raises(RuntimeError):
        mixed(tokens()[:, 6:7], None, cache)
    mixed.mixers[1].output = broken
    assert cache.next(1) == Span(6, 1)
    assert [len(part) for part in cache.parts] == [6, 1]


def test_taps_have_the_place_of_their_mechanism() -> None:
    mixed, x = layer(), tokens()
    with regard.Trace("mixers.*.out") as trace:
        y = mixed(x)
    parts = [trace["mixers.0.out"], trace["mixers.1.out"]]
    assert torch.equal(2.0 * parts[0] - 0.5 * parts[1], y)


def test_what_is_refused() -> None:
    mixed, x = layer(), tokens()
    with pytest.raises(regard.ArgumentError, match="at least one mechanism"):
        ParallelMixers([])
    with pytest.raises(regard.ArgumentError, match="out_scales has 1 number for 2 mechanisms"):
        ParallelMixers(list(mixed.mixers), out_scales=[1.0])
    with pytest.raises(regard.ArgumentTypeError, match="the cache is Growing; 2 mechanisms"):
        mixed(x, None, Growing())
    with pytest.raises(regard.ArgumentError, match="the cache has 1 part for 2 mechanisms"):
        mixed(x, None, Joined([Growing()]))
    with pytest.raises(regard.ArgumentTypeError, match="a recurrence needs a State"):
        mixed(x, None, Joined([Growing(), Growing()]))
    with pytest.raises(regard.ArgumentError, match="backend is 'sdpa', and 2 mechanisms"):
        mixed(x, backend="sdpa")
    with pytest.raises(regard.ArgumentError, match="at least one cache"):
        Joined([])
    with pytest.raises(regard.ArgumentError, match="a Joined cache holds 2 caches"):
        mixed.new_cache().update((x,), Span(0, T))
    with pytest.raises(regard.ArgumentError, match="Joined cannot be saved"):
        save(mixed.new_cache(), "never.safetensors")


def test_costs_are_those_of_all_mechanisms() -> None:
    mixed = layer()
    spec, parts = mixed.spec, [mixer.spec for mixer in mixed.mixers]
    assert isinstance(parts[0], SoftmaxSpec)
    assert spec.weights.total == sum(p.numel() for p in mixed.parameters())
    assert spec.cached(9).values == sum(part.cached(9).values for part in parts)
    assert spec.read(9).values == sum(part.read(9).values for part in parts)
    assert spec.prefill_flops(9) == sum(spec.step(t).value for t in range(1, 10))
    assert not spec.bounded
    described = mixed.describe(9)
    assert described.kv_tokens.value == 9
    assert described.cached_values == spec.cached(9).values
    cache = mixed.new_cache()
    mixed(tokens(1)[:, :9], None, cache)
    # the state of the recurrence is in fp32 or better, as its inputs
    assert cache.bytes == 8 * spec.cached(9).values


def test_generation() -> None:
    decoder = stacks.stack(layer(torch.float32), layer(torch.float32))
    ids = torch.arange(10)[None] + 3
    session = DecodeSession(decoder)
    found = stacks.read_in_pieces(session, ids, [4, 1, 5])
    assert torch.allclose(found[:, -1], decoder(ids)[:, -1], atol=1e-4)
    other = session.fork(rows=2)
    assert other.append(torch.tensor([[1], [2]])).shape == (2, stacks.V)
    for cache in ("ring", "fixed", "quantized"):
        with pytest.raises(regard.ArgumentError, match="layer 0 has 2 mechanisms with a cache"):
            DecodeSession(decoder, CacheConfig(cache, 16))
