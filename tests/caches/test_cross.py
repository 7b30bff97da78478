"""The cross cache: written once, then read; beams; what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import regard
from regard.caches import Cross
from regard.span import Span

PADDED = torch.tensor([[-1, 0, 1, 2], [0, 1, 2, 3]])


def source(seed: int = 0) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, 4, 5, generator=make), torch.randn(2, 3, 4, 6, generator=make)


def test_what_was_stored_is_read_without_a_copy() -> None:
    cache, parts = Cross(), source()
    assert not cache.written
    stored, where = cache.store(parts, PADDED)
    assert (stored, where) == (parts, PADDED)
    for _ in range(3):
        memory, positions = cache.read()
        assert all(a is b for a, b in zip(memory, parts, strict=True))
        assert positions is PADDED
    assert cache.written
    assert (len(cache), cache.batch, cache.bytes) == (4, 2, 2 * 3 * 4 * 11 * 4)
    other = Cross()
    assert other.update(parts, Span(0, 4))[1] == Span(0, 4)
    assert other.read()[1] == Span(0, 4)


def test_beams() -> None:
    cache, (k, _) = Cross(), source()
    cache.store(source(), PADDED)
    cache.select(torch.tensor([0, 0, 1, 1, 1]))
    (held, _), positions = cache.read()
    assert torch.equal(held, k[[0, 0, 1, 1, 1]])
    assert torch.equal(positions, PADDED[[0, 0, 1, 1, 1]])
    cache.reorder(torch.tensor([4, 3, 2, 1, 0]))
    assert torch.equal(cache.read()[0][0], k[[1, 1, 1, 0, 0]])
    assert torch.equal(cache.read()[1], PADDED[[1, 1, 1, 0, 0]])


def test_forks_marks_and_reset() -> None:
    cache = Cross()
    mark = cache.mark()
    cache.store(source(), PADDED)
    fork = cache.fork()
    fork.select(torch.tensor([1]))
    assert (fork.batch, cache.batch) == (1, 2)
    cache.restore(mark)
    assert not cache.written
    fork.reset()
    fork.store(source(1), Span(0, 4))
    assert torch.equal(fork.read()[0][0], source(1)[0])


def test_crop_is_for_targets() -> None:
    for positions, stop in ((Span(0, 4), 4), (PADDED, 4), (Span(0, 0), 0), (PADDED[:, :0], 0)):
        cache = Cross()
        cache.crop(3)
        n = 4 if stop else 0
        cache.store(tuple(x[:, :, :n] for x in source()), positions)
        cache.crop(stop or 1)
        assert cache.written
        if stop:
            with pytest.raises(regard.ArgumentError, match="crop to 3, but a Cross cache holds a"):
                cache.crop(3)
            assert len(cache) == 4
        cache.crop(0)
        assert not cache.written
    with pytest.raises(regard.ArgumentError, match=r"^crop length is -1; it must be 0 or more$"):
        Cross().crop(-1)


def test_a_second_write_and_an_early_read_are_refused() -> None:
    cache = Cross()
    with pytest.raises(regard.ArgumentError, match=r"^a Cross cache holds no source yet; call"):
        cache.read()
    with pytest.raises(regard.ArgumentError, match="it must be"):
        cache.store(source(), Span(0, 3))
    assert not cache.written
    cache.store(source(), PADDED)
    for again in (cache.store, cache.update):
        with pytest.raises(regard.ArgumentError, match="a Cross cache is written once, and holds"):
            again(source(1), PADDED)
        assert torch.equal(cache.read()[0][0], source()[0])
