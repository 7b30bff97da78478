"""The preallocated cache: written in place, views given out, refused beyond its capacity, right
under autograd.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import regard
from regard import masks
from regard.caches import Cache, Fixed, Paged, Ring, Streaming
from regard.nn import Attention, HeadProjection, SeparateQKV
from regard.positions import Rotary
from regard.span import Span


def memory(T: int, B: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(seed)
    return torch.randn(B, 3, T, 4, generator=make), torch.randn(B, 1, T, 5, generator=make)


class Allocated(TorchDispatchMode):
    """Counts the bytes of every storage that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {
            x.untyped_storage().data_ptr()
            for x in tree_leaves((args, kwargs))
            if isinstance(x, Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in known:
                self.bytes += x.untyped_storage().nbytes()
        return out


def test_it_answers_views_of_buffers_that_never_move() -> None:
    cache, (k, v) = Fixed(50), memory(40)
    starts, start = set(), 0
    for n in (5, 1, 0, 7, 1, 26):
        (a, b), seen = cache.update(
            (k[:, :, start : start + n], v[:, :, start : start + n]), Span(start, n)
        )
        start += n
        starts.add((a.data_ptr(), b.data_ptr()))
        assert seen == Span(0, start)
        assert a.stride() == (3 * 50 * 4, 50 * 4, 4, 1), "a view of [B,n,50,d]"
        assert torch.equal(a, k[:, :, :start])
        assert torch.equal(b, v[:, :, :start])
    assert len(starts) == 1, "one buffer per part, from the first update on"
    assert cache.bytes == 2 * 50 * (3 * 4 + 5) * 4
    assert len(cache) == 40


@pytest.mark.parametrize("rows", [False, True])
def test_a_step_allocates_nothing_that_grows(rows: bool) -> None:
    bytes_ = []
    for held in (10, 3000):
        cache = Fixed(4096)
        where = Span(0, held).tensor().expand(2, -1).contiguous() if rows else Span(0, held)
        cache.update(memory(held), where)
        one, at = memory(1), cache.next(1)
        with Allocated() as counted:
            cache.update(one, at)
        bytes_.append(counted.bytes)
    assert bytes_[0] == bytes_[1] == 0, "the step is copied into the buffer, and nothing else"


def test_positions_are_a_span_while_they_are_one_run() -> None:
    cache = Fixed(12)
    _, seen = cache.update(memory(3), Span(7, 3))
    assert seen == Span(7, 3)
    _, seen = cache.update(memory(2), Span(20, 2))
    assert seen.tolist() == [[7, 8, 9, 20, 21]]  # type: ignore[union-attr]
    before = seen
    _, seen = cache.update(memory(2), torch.tensor([[22, -1], [22, 23]], dtype=torch.int32))
    assert seen.tolist() == [[7, 8, 9, 20, 21, 22, -1], [7, 8, 9, 20, 21, 22, 23]]  # type: ignore[union-attr]
    cache.crop(22)
    assert len(cache) == 5
    _, after = cache.update(memory(1), torch.tensor([[30]]))
    assert after.tolist() == [[7, 8, 9, 20, 21, 30]] * 2  # type: ignore[union-attr]
    assert before.tolist() == [[7, 8, 9, 20, 21]], "positions that were given out stay"  # type: ignore[union-attr]
    assert seen.tolist()[1] == [7, 8, 9, 20, 21, 22, 23]  # type: ignore[union-attr]


def test_no_room() -> None:
    cache, (k, v) = Fixed(5), memory(4)
    cache.update((k, v), Span(0, 4))
    message = (
        r"^Fixed holds 4 of 5 slots and 2 more do not fit; crop it, or start with a larger "
        r"capacity, a Growing cache, or a "
        r"Ring for a windowed mask$"
    )
    with pytest.raises(regard.ArgumentError, match=message):
        cache.update(memory(2), Span(4, 2))
    (a, _), seen = cache.update(memory(1), Span(4, 1))
    assert seen == Span(0, 5)
    assert torch.equal(a[:, :, :4], k)
    with pytest.raises(regard.ArgumentError, match="holds 0 of 5 slots and 6 more do not fit"):
        Fixed(5).update(memory(6), Span(0, 6))
    cache.crop(3)
    assert cache.update(memory(2), Span(3, 2))[1] == Span(0, 5)
    for capacity in (0, -3):
        with pytest.raises(
            regard.ArgumentError, match=f"^Fixed capacity is {capacity}; it must be at least 1$"
        ):
            Fixed(capacity)


# Gradients, for every cache that writes in place.

PLACED = {
    "fixed": (lambda: Fixed(40), masks.Causal()),
    "ring": (lambda: Ring(5), masks.Causal() & masks.Window(5)),
    "ring, rewind": (lambda: Ring(5, rewind=3), masks.Causal() & masks.Window(5)),
    "streaming": (lambda: Streaming(2, 5), masks.Causal() & (masks.Window(5) | masks.Sinks(2))),
}
placed = pytest.mark.parametrize("make, mask", PLACED.values(), ids=PLACED)


def attention(mask: masks.Mask) -> Attention:
    rotary = Rotary(4)
    project = SeparateQKV(
        HeadProjection(8, 4, 4, rotary), HeadProjection(8, 2, 4, rotary), HeadProjection(8, 2, 3)
    )
    return Attention(project, nn.Linear(12, 8), mask=mask).double()


@placed
@pytest.mark.parametrize("padded", [False, True])
def test_gradients_through_the_cache_are_those_of_one_pass(
    make: Any, mask: masks.Mask, padded: bool
) -> None:
    module, x = attention(mask), torch.randn(2, 19, 8, dtype=torch.float64)
    where: Any = Span(0, 19)
    if padded:
        where = torch.tensor([[-1, -1, *range(17)], [*range(12), -1, -1, *range(12, 17)]])
    real = torch.ones(2, 19, 1) if not padded else (where >= 0)[..., None]
    weights = torch.randn(2, 19, 8, dtype=torch.float64) * real
    found = []
    for cache in (None, make()):
        module.zero_grad()
        if cache is None:
            out = module(x, where)
        else:
            parts, start = [], 0
            for n in (2, 1, 1, 6, 1, 1, 1, 3, 1, 2):
                at = where[:, start : start + n] if padded else None
                parts.append(module(x[:, start : start + n], at, cache))
                start += n
            out = torch.cat(parts, 1)
        (out * weights).sum().backward()
        found.append([p.grad.clone() for p in module.parameters()])  # type: ignore[union-attr]
    for ours, right in zip(*found, strict=True):
        assert float((ours - right).abs().max()) < 1e-11 * max(1.0, float(right.abs().max()))


@placed
def test_a_cache_filled_with_gradients_goes_on_without_and_back(
    make: Any, mask: masks.Mask
) -> None:
    module, x = attention(mask), torch.randn(1, 16, 8, dtype=torch.float64)
    whole, cache, parts = module(x), make(), []
    with torch.inference_mode():
        parts.append(module(x[:, :4], None, cache))
    parts.append(module(x[:, 4:9], None, cache))
    with torch.no_grad():
        parts.append(module(x[:, 9:11], None, cache))
        parts.append(module(x[:, 11:12], None, cache))
    with torch.inference_mode():
        parts.append(module(x[:, 12:13], None, cache))
    parts.append(module(x[:, 13:], None, cache))
    parts[1].sum().backward()  # nothing that it needs was overwritten
    assert float((torch.cat(parts, 1) - whole).detach().abs().max()) < 1e-13


@placed
def test_what_a_trace_heard_is_not_overwritten(make: Any, mask: masks.Mask) -> None:
    module, x = attention(mask), torch.randn(1, 14, 8, dtype=torch.float64)
    cache: Cache = make()
    found = []
    with torch.no_grad(), regard.Trace("k", "v") as trace:
        for t in range(14):
            module(x[:, t : t + 1], None, cache)
            found.append((trace["k"].clone(), trace["v"].clone()))
    for (k, v), then_k, then_v in zip(found, trace.every("k"), trace.every("v"), strict=True):
        assert torch.equal(k, then_k)
        assert torch.equal(v, then_v)


@pytest.mark.parametrize(
    "make", [Fixed, lambda slots: Paged(16, slots // 16), lambda slots: Ring(1, rewind=slots - 1)]
)
def test_memory_that_the_system_refuses_is_named(make: Any) -> None:
    """A capacity costs nothing before it is used; 8 PiB are beyond every address."""
    slots = 1 << 50
    cache, x = make(slots), torch.zeros(1, 1, 1, 1)
    at = torch.tensor([[slots - 1]]) if isinstance(cache, Ring) else Span(0, 1)
    with pytest.raises(
        regard.ArgumentError,
        match=rf"^a cache of {slots} slots needs 8\.00 PiB .* choose a smaller max_context",
    ) as error:
        cache.update((x, x), at)
    assert (error.value.argument, error.value.value) == ("max_context", slots)
