"""The growing cache: any chunks are one pass, positions, a refused update changes nothing,
bytes.
"""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard.caches import Cache, Growing
from regard.span import Positions, Span, as_tensor


def memory(T: int, B: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(seed)
    return torch.randn(B, 3, T, 4, generator=make), torch.randn(B, 1, T, 5, generator=make)


@given(chunks=st.lists(st.integers(0, 5), min_size=1, max_size=8), as_tensors=st.booleans())
def test_any_chunks_are_one_pass(chunks: list[int], as_tensors: bool) -> None:
    total = sum(chunks)
    whole, cache, start = memory(total), Growing(), 0
    for n in chunks:
        positions: Positions = Span(start, n)
        if as_tensors:
            positions = as_tensor(positions)
        held, seen = cache.update(tuple(m[:, :, start : start + n] for m in whole), positions)
        start += n
        assert torch.equal(as_tensor(seen), Span(0, start).tensor())
        assert as_tensors or seen == Span(0, start), (
            "a span stays one: nothing is read to know the alignment"
        )
        for mine, right in zip(held, whole, strict=True):
            assert torch.equal(mine, right[:, :, :start])
    assert len(cache) == total
    assert cache.bytes == 2 * total * (3 * 4 + 5) * 4
    assert isinstance(cache, Cache)


def test_an_empty_cache() -> None:
    cache = Growing()
    assert (len(cache), cache.bytes) == (0, 0)


def test_positions_of_a_padded_batch() -> None:
    cache = Growing()
    left = torch.tensor([[-1, 0, 1], [0, 1, 2]])
    cache.update(memory(3), left)
    _, seen = cache.update(memory(1), torch.tensor([[2], [3]]))
    assert as_tensor(seen).tolist() == [[-1, 0, 1, 2], [0, 1, 2, 3]]
    _, seen = cache.update(memory(2), Span(9, 2))
    assert as_tensor(seen).tolist() == [[-1, 0, 1, 2, 9, 10], [0, 1, 2, 3, 9, 10]]


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


def test_a_refused_update_leaves_it_as_it_was() -> None:
    k, v = memory(3)
    held = "[((2, 3, 4), torch.float32), ((2, 1, 5), torch.float32)]"
    fits = f"does not fit the contents of the cache, {held}; start a new cache for another batch or model"  # noqa: E501
    cases = [
        (
            (k[:, :, 0], v),
            Span(3, 3),
            (
                "memory 0 is (2, 3, 4) at 3 positions; it must be [batch, heads, length, dim] with "
                "one position per slot"
            ),
        ),
        (
            (k, v[:, :, :2]),
            Span(3, 3),
            (
                "memory 1 is (2, 1, 2, 5) at 3 positions; it must be [batch, heads, length, dim] "
                "with one position per slot"
            ),
        ),
        (
            (k[:1], v[:1]),
            Span(3, 3),
            f"memory [((1, 3, 4), torch.float32), ((1, 1, 5), torch.float32)] {fits}",
        ),
        ((k,), Span(3, 3), f"memory [((2, 3, 4), torch.float32)] {fits}"),
        (
            (k[..., :2], v),
            Span(3, 3),
            f"memory [((2, 3, 2), torch.float32), ((2, 1, 5), torch.float32)] {fits}",
        ),
        (
            (k[:, :1], v),
            Span(3, 3),
            f"memory [((2, 1, 4), torch.float32), ((2, 1, 5), torch.float32)] {fits}",
        ),
        (
            (k.bfloat16(), v),
            Span(3, 3),
            f"memory [((2, 3, 4), torch.bfloat16), ((2, 1, 5), torch.float32)] {fits}",
        ),
        (
            (k, v),
            torch.zeros(3, 3, dtype=torch.int64),
            "positions are (3, 3) for memory of batch 2; they must be (2, 3) or (1, 3)",
        ),
    ]
    for given_memory, positions, message in cases:
        cache = Growing()
        cache.update((k, v), Span(0, 3))
        with pytest.raises(regard.ArgumentError) as error:
            cache.update(given_memory, positions)
        assert str(error.value) == message
        assert len(cache) == 3
        (a, b), seen = cache.update(memory(1), Span(3, 1))
        assert seen == Span(0, 4)
        assert torch.equal(a[:, :, :3], k)
        assert torch.equal(b[:, :, :3], v)


def test_a_first_update_is_checked_as_well() -> None:
    k, v = memory(3)
    for parts in ((k, v[:1]),):
        cache = Growing()
        with pytest.raises(
            regard.ArgumentError,
            match=r"^memory has parts of batch 2 and 1; all must have the same batch size$",
        ):
            cache.update(parts, Span(0, 3))
        assert len(cache) == 0


def test_what_a_mark_has_is_not_written_by_steps_after_a_crop() -> None:
    cache = Growing()
    cache.update((torch.zeros(1, 1, 3, 2),), Span(0, 3))

    def step() -> None:
        slot = cache.open_slot(cache.next(1))
        assert slot is not None
        slot.buffers[0][:, :, slot.slot] = slot.slot
        cache.fill_slot(slot, Span(0, slot.slot + 1))

    step()
    before, mark = cache.contents()["memory.0"], cache.mark()
    assert isinstance(before, Tensor)
    before = before.clone()
    cache.crop(1)
    step()
    cache.restore(mark)
    assert torch.equal(cache.contents()["memory.0"], before)  # type: ignore[arg-type]
