"""A failed call leaves every cache as it was: for a layer, for a model, and for both in one
another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.caches import Cache, Growing, rollback_on_error
from regard.nn import Attention
from regard.nn.variants import gqa
from regard.span import as_tensor
from tests.caches.contract import Run
from tests.caches.kinds import KINDS, Kind
from tests.models.generation.stacks import D, G, H, M, stack

every = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


class Failure(Exception):
    """What goes wrong in these tests."""


def started(kind: Kind) -> Run:
    """A cache past its window, if it has one."""
    driver = Run(kind)
    for _ in range(7):
        driver.feed(1, attend=False)
    return driver


def update(driver: Run) -> None:
    """A call that changes the cache, and of which the driver knows nothing."""
    positions = driver.cache.next(1)
    driver.cache.update(driver.tokens(positions), positions)


def held(driver: Run) -> tuple[Any, int, list[Any]]:
    back = 2 if driver.kind.rewind is None else min(2, driver.kind.rewind)
    contents = driver.cache.contents()
    shapes = {name: tuple(x.shape) for name, x in contents.items() if isinstance(x, Tensor)}
    following = as_tensor(driver.cache.next(1)).tolist()
    return driver.seen(back=back), len(driver.cache), [shapes, following]


def layer(driver: Run, *, fails: bool = False) -> None:
    """What a layer does with its cache."""
    with rollback_on_error(driver.cache):
        update(driver)
        if fails:
            raise Failure


@every
def test_a_block_that_fails_takes_back_what_it_did(kind: Kind) -> None:
    driver = started(kind)
    before = held(driver)
    with pytest.raises(Failure):
        layer(driver, fails=True)
    assert held(driver) == before
    layer(driver)
    assert held(driver) != before, "a block that succeeds changes the cache"


@pytest.mark.full(keep=6)
@pytest.mark.parametrize("layers", [True, False])
@every
def test_a_failure_behind_the_inner_block_is_taken_back(kind: Kind, layers: bool) -> None:
    driver = started(kind)
    before = held(driver)

    def call() -> None:
        with rollback_on_error(driver.cache, layers=layers):
            layer(driver)
            raise Failure

    with pytest.raises(Failure):
        call()
    assert held(driver) == before


@pytest.mark.full(keep=6)
@pytest.mark.parametrize("layers", [True, False])
@every
def test_a_failure_that_is_caught_between_the_blocks_is_taken_back(
    kind: Kind, layers: bool
) -> None:
    driver = started(kind)
    before = held(driver)
    with rollback_on_error(driver.cache, layers=layers):
        with pytest.raises(Failure):
            layer(driver, fails=True)
        assert held(driver) == before, "the inner block has rolled back"
        layer(driver)
        after = held(driver)
        with pytest.raises(Failure):
            layer(driver, fails=True)
        assert held(driver) == after, "the second call goes back to its own beginning"


class Marks(Growing):
    """A cache that counts its marks."""

    marks = 0

    def mark(self) -> Any:
        self.marks += 1
        return super().mark()


def test_the_outermost_block_alone_marks() -> None:
    cache, other = Marks(), Marks()
    with rollback_on_error(cache, None, other, layers=True):
        for each in (cache, other):
            with rollback_on_error(each, layers=True), rollback_on_error(each):
                pass
    assert (cache.marks, other.marks) == (1, 1)
    with rollback_on_error(cache):
        pass
    assert cache.marks == 2, "nothing is left of the first block"
    with rollback_on_error(cache), rollback_on_error(cache):
        pass
    assert cache.marks == 4, "control: a block that offers nothing lets the inner one mark"


def test_a_mark_is_offered_to_the_first_block_only() -> None:
    cache = Marks()
    with rollback_on_error(cache, layers=True):
        for _ in range(2):
            with rollback_on_error(cache):
                pass
    assert cache.marks == 2


def attention() -> Attention:
    mixer = gqa(M, H, groups=G, head_dim=D)
    assert isinstance(mixer, Attention)
    return mixer


class Broken(Attention):
    """Attention that fails behind its update."""

    broken = False

    def _attend_and_project(self, *args: Any) -> Tensor:
        if self.broken:
            raise Failure
        return super()._attend_and_project(*args)


def broken() -> Broken:
    whole = attention()
    return Broken(whole.project, whole.output, mask=whole.mask)


def make_growing() -> Cache:
    return Growing()


def make_fixed() -> Cache:
    return regard.caches.Fixed(16)


def make_ring() -> Cache:
    return regard.caches.Ring(4)


CACHES = pytest.mark.parametrize("make", [make_growing, make_fixed, make_ring])


def contents(caches: list[Cache]) -> list[dict[str, Any]]:
    return [
        {n: x.tolist() if isinstance(x, Tensor) else x for n, x in cache.contents().items()}
        for cache in caches
    ]


@pytest.mark.full(keep="each")
@CACHES
@pytest.mark.parametrize("at", [0, 1, 2])
@torch.no_grad()
def test_a_decoder_that_fails_in_a_layer_leaves_every_cache(
    make: Callable[[], Cache], at: int
) -> None:
    decoder = stack(*(broken() for _ in range(3)))
    caches, ids = [make() for _ in range(3)], torch.arange(8)[None]
    for i in range(6):
        decoder(ids[:, i : i + 1], None, caches)
    before, fork = contents(caches), [cache.fork() for cache in caches]
    faulty = decoder.layers[at].attention
    assert isinstance(faulty, Broken)
    faulty.broken = True
    with pytest.raises(Failure):
        decoder(ids[:, 6:7], None, caches)
    assert contents(caches) == before
    faulty.broken = False
    again, control = decoder(ids[:, 6:7], None, caches), decoder(ids[:, 6:7], None, fork)
    assert torch.equal(again, control)
    assert contents(caches) != before


@torch.no_grad()
def test_a_decoder_marks_each_cache_once() -> None:
    decoder = stack(attention(), attention())
    caches = [Marks(), Marks()]
    decoder(torch.tensor([[1, 2]]), None, caches)
    assert [cache.marks for cache in caches] == [1, 1]
    shared = Marks()
    decoder(torch.tensor([[1, 2]]), None, [shared, shared])
    assert shared.marks == 3, "the second layer finds a cache that the first one has changed"


class Retries(Attention):
    """Attention that falls back to another kernel where the first refuses."""

    def forward(self, *args: Any, backend: str = "auto", **options: Any) -> Tensor:
        with pytest.raises(regard.KernelRefusal):
            super().forward(*args, backend="cpu", **options)
        return super().forward(*args, backend="reference", **options)


@torch.no_grad()
def test_a_layer_may_try_again_within_a_decoder() -> None:
    whole = attention()
    project, output = whole.project, whole.output
    decoder = stack(Retries(project, output, mask=whole.mask)).double()  # which "cpu" refuses
    caches, ids = decoder.new_caches(), torch.arange(5)[None]
    steps = [decoder(ids[:, i : i + 1], None, caches) for i in range(5)]
    assert [len(cache) for cache in caches] == [5], "each token is stored once"
    whole_pass = stack(Attention(project, output, mask=whole.mask)).double()
    assert torch.allclose(torch.cat(steps, 1), whole_pass(ids), atol=1e-12)
