"""Quest as a layer: the bounds that its cache stores, what a step reads, and generation with it."""

from __future__ import annotations

import pytest
import torch

import regard
from regard.caches import BoundedPages, Growing
from regard.cost.selected import BlockMaximumSelection, PageSelection
from regard.errors import ArgumentError
from regard.models.generation.cache_config import CacheConfig
from regard.nn import QuestAttention
from regard.nn.attention.selected import MoBA, Quest
from regard.nn.variants import VARIANTS, build
from regard.nn.variants.projections import separate_qkv
from regard.ops.selection import block_layout
from regard.ops.selection.best_blocks import page_bounds
from regard.span import Span
from tests.nn.catalogue import example, tokens


@pytest.mark.parametrize("start", [0, 7])
@pytest.mark.parametrize("cuts", [(1,) * 23, (5, 0, 1, 12, 5), (23,)])
def test_bounds_that_grow_are_those_of_all_keys(start: int, cuts: tuple[int, ...]) -> None:
    cache, x, i = BoundedPages(4), torch.randn(2, 3, 23, 5), 0
    for n in cuts:
        cache.update((x[:, :, i : i + n],) * 2, Span(start + i, n))
        i += n
        found = cache.bounds()
        right = page_bounds(x[:, :, :i], block_layout(Span(start, i), 4))
        assert found is not None
        for a, b in zip(found, right, strict=True):
            assert torch.equal(a, b)
    pages = -(-(start % 4 + 23) // 4)
    assert cache.bytes == 4 * 2 * 3 * 5 * (2 * 23 + 2 * pages)
    old = cache.bounds()
    cache.crop(start + 10)
    right = page_bounds(x[:, :, :10], block_layout(Span(start, 10), 4))
    found = cache.bounds()
    assert found is not None
    assert old is not None
    assert torch.equal(found[1], right.high)
    assert not torch.equal(old[1][:, :, : found[1].shape[2]], found[1]), "negative control"


def test_a_step_computes_the_bounds_of_one_page(monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.caches import bounded_pages

    seen, right = [], bounded_pages._page_bounds

    def counted(keys: torch.Tensor, before: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(keys.shape[2])
        return right(keys, before, size)

    monkeypatch.setattr(bounded_pages, "_page_bounds", counted)
    layer, x = example(VARIANTS["quest"]), tokens(29)
    cache = layer.new_cache()
    with torch.no_grad():
        for part in x.split([17] + [1] * 12, 1):
            layer(part, None, cache)
    assert seen[0] == 17
    assert max(seen[1:]) == 4, "the keys of one page"
    assert len(seen) == 13


def test_positions_that_are_no_run_have_no_stored_bounds() -> None:
    cache = BoundedPages(4)
    assert cache.bounds() is None
    cache.update((torch.zeros(1, 1, 2, 3),) * 2, torch.tensor([[-1, 0]]))
    assert cache.bounds() is None
    with pytest.raises(ArgumentError, match="BoundedPages size is 0; it must be at least 1"):
        BoundedPages(0)


def test_what_a_step_reads() -> None:
    """8 key heads of 128 in fp16 at 32,768 tokens: a budget of 2,048 tokens and all bounds."""
    layer = build("quest", 1024, 8, groups=8, head_dim=128)
    spec, S = layer.spec, 32768
    keys, bounds = 2 * 8 * 128 * 2048, 2 * 8 * 128 * S // 16
    assert spec.read(S).values == keys + bounds
    assert spec.cached(S).values == 2 * 8 * 128 * S + bounds
    assert spec.describe(S).cached_values == spec.cached(S).values
    assert spec.cached(S).values / spec.read(S).values == 8.5
    assert PageSelection(16, 128).keys_read(S, 32, 8) == 16 + 4 * 127 * 16, "heads may differ"
    assert PageSelection(16, 128).keys_read(100, 32, 8) == 100
    assert BlockMaximumSelection(8, 128, 128, 16).keys_read(S, 32, 8) == 2048
    msa = build("msa", 1024, 8, groups=8, head_dim=128).spec
    assert msa.read(S).values == keys + 128 * S
    moba = build("moba", 1024, 8, groups=8, head_dim=128).spec
    assert moba.read(S).values == moba.cached(S).values, "its means are computed from all keys"


@pytest.mark.full
def test_generation_reads_pages() -> None:
    model = regard.load("tiny")
    ids = torch.randint(0, 1000, (2, 70), generator=torch.Generator().manual_seed(0))
    config = CacheConfig("quest", 40)
    assert config.forgets
    narrow, whole = config.restrict(model.decoder), model.decoder
    caches = config.new_caches(narrow, 2)
    assert all(type(cache) is BoundedPages for cache in caches)
    assert narrow.layers[0].attention.selector.spec == PageSelection(16, 2)
    with torch.no_grad():
        steps = [narrow(part, None, caches) for part in ids.split([32] + [1] * 38, 1)]
        found = torch.cat(steps, 1)
        assert torch.allclose(found[:, :32], whole(ids)[:, :32], atol=1e-4)
        assert torch.allclose(found, narrow(ids), atol=1e-4)
        assert (found - whole(ids))[:, 48:].abs().max() > 0.01, "negative control"
    text = "".join(model.generate("once", max_tokens=8, cache="quest", max_context=64))
    plain = "".join(model.generate("once", max_tokens=8))
    assert text == plain, "less text than pages"
    with pytest.raises(ArgumentError, match="max_context is 31; it must be at least 32"):
        CacheConfig("quest", 31)


def test_models_whose_pages_cannot_be_bounded_are_refused() -> None:
    project = build("mla", 32, 4, **VARIANTS["mla"].example_options).project
    with pytest.raises(ArgumentError, match="has several forms, whose keys have other bounds"):
        QuestAttention(project, Quest(4, 2), torch.nn.Identity())
    plain = separate_qkv(32, 4, 2, 8)
    with pytest.raises(ArgumentError, match="selector is MoBA; QuestAttention needs a Quest"):
        QuestAttention(plain, MoBA(4, 2), torch.nn.Identity())
    layer, x = QuestAttention(plain, Quest(4, 2), torch.nn.Linear(32, 32)), torch.zeros(1, 3, 32)
    with pytest.raises(ArgumentError, match="pages of 8 positions, and the selector of 4"):
        layer(x, None, BoundedPages(8))
    assert layer(x, None, Growing()).shape == x.shape
    from tests.models.test_shared_memory import plain as decoder

    capped = decoder()
    capped.layers[1].attention.softcap = 3.0
    with pytest.raises(ArgumentError, match=r"layer 1 has softcap=3.0 and a learned sink: False"):
        CacheConfig("quest", 32).restrict(capped)
