"""The growing cache, beside the contract: what was given out, gradients, refused updates."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import regard
from regard.caches import Growing
from regard.span import Span


def memory(T: int, B: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(seed)
    return torch.randn(B, 3, T, 4, generator=make), torch.randn(B, 1, T, 5, generator=make)


def test_what_was_given_out_does_not_change() -> None:
    cache = Growing()
    (first, _), _ = cache.update(memory(2), Span(0, 2))
    before = first.clone()
    fork = copy.deepcopy(cache)
    cache.update(memory(3, seed=1), Span(2, 3))
    assert torch.equal(first, before)
    assert (len(fork), len(cache)) == (2, 5)
    other, _ = fork.update(memory(1, seed=2), Span(2, 1))
    assert torch.equal(other[0][:, :, 2:], memory(1, seed=2)[0])


def test_gradients_flow_through_it() -> None:
    cache, (k, v) = Growing(), memory(2)
    k.requires_grad_()
    cache.update((k, v), Span(0, 2))
    (held, _), _ = cache.update(memory(1), Span(2, 1))
    held.sum().backward()
    assert k.grad is not None
    assert k.grad.eq(1).all()


def test_a_first_update_is_checked_as_well() -> None:
    k, v = memory(3)
    for parts in ((k, v[:1]),):
        cache = Growing()
        with pytest.raises(regard.ArgumentError, match=r"^memory has parts of batch 2 and 1; all"):
            cache.update(parts, Span(0, 3))
        assert len(cache) == 0


def test_what_a_mark_has_is_not_written_by_steps_after_a_crop() -> None:
    cache = Growing()
    cache.update((torch.zeros(1, 1, 3, 2),), Span(0, 3))

    def step() -> None:
        slot = cache.open_slot(cache.next(1))
        assert slot is not None
        slot.buffers[0][:, :, slot.slot] = slot.slot
        cache.close_slot(slot, Span(0, slot.slot + 1))

    step()
    before, mark = cache.contents()["memory.0"], cache.mark()
    assert isinstance(before, Tensor)
    before = before.clone()
    cache.crop(1)
    step()
    cache.restore(mark)
    assert torch.equal(cache.contents()["memory.0"], before)  # type: ignore[arg-type]
