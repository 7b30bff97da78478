"""Preallocated buffers, and writes into them, in place unless a gradient needs the old values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.caches.base import Parts
from regard.errors import ArgumentError
from regard.huge_pages import empty_like
from regard.process_state import is_compiling
from regard.units import size

LARGE = 1 << 30
"""Bytes of buffers from which an error of their allocation is one of memory."""


def new_buffers(
    memory: Parts, shapes: Sequence[Sequence[int]], slots: int, *, zeros: bool = False
) -> Parts:
    """Allocate a buffer of each shape, like the part of memory beside it, for so many slots.

    Raises:
        ArgumentError: the system refuses the memory.
    """

    def allocate() -> Parts:
        make = torch.Tensor.new_zeros if zeros else empty_like
        return tuple(make(x, shape) for x, shape in zip(memory, shapes, strict=True))

    pairs = zip(memory, shapes, strict=True)
    needed = sum(math.prod(shape) * x.element_size() for x, shape in pairs)
    if is_compiling():
        return allocate()
    try:
        return allocate()
    except (MemoryError, RuntimeError, ValueError) as error:
        if needed < LARGE:
            raise
        raise ArgumentError(
            f"a cache of {slots} slots needs {size(needed)} for each layer, and the system "
            "refuses this memory; choose a smaller max_context (the capacity, pages or window), "
            'or cache="growing", which takes what the text needs',
            argument="max_context",
            value=slots,
        ) from error


def can_write_in_place(buffers: Parts, new: Parts) -> bool:
    """Return whether the buffers may be overwritten: no gradient or inference tensor forbids it."""
    if any(x.requires_grad for x in buffers):
        return False  # the autograd graph may have saved it
    outside = not is_compiling() and not torch.is_inference_mode_enabled()
    if outside and any(x.is_inference() for x in buffers):
        return False  # torch forbids writes to inference tensors
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in new))


def write_slots(buffers: Parts, new: Parts, start: int) -> Parts:
    """Write new slots `[B, n, T, d]` at slots start, start + 1, ... of the buffers."""
    if can_write_in_place(buffers, new):
        for old, x in zip(buffers, new, strict=True):
            old[:, :, start : start + x.shape[2]] = x
        return buffers
    return tuple(
        torch.slice_scatter(old, x, 2, start, start + x.shape[2])
        for old, x in zip(buffers, new, strict=True)
    )


def scatter_slots(
    buffers: Parts, new: Parts, slots: Int[Tensor, "b T"], real: Bool[Tensor, "b T"]
) -> tuple[Parts, OverwrittenSlots | None]:
    """Write new slots to the slot numbers in `slots`, where `real` is True."""
    safe, results, before = can_write_in_place(buffers, new), [], []
    for old, x in zip(buffers, new, strict=True):
        index = slots[:, None, :, None].expand(x.shape)
        overwritten = old.gather(2, index)
        x = torch.where(real[:, None, :, None], x, overwritten)
        results.append(old.scatter_(2, index, x) if safe else old.scatter(2, index, x))
        before.append(overwritten)
    return tuple(results), OverwrittenSlots(slots, tuple(before)) if safe else None


class OverwrittenSlots:
    """Values that a write in place has overwritten, at `slots` `[B or 1, T]`, to undo it."""

    def __init__(self, slots: Tensor, values: Parts) -> None:
        self.slots, self.values = slots, values

    def put_back(self, buffers: Parts) -> None:
        """Write the old values into the buffers, in place."""
        for old, x in zip(buffers, self.values, strict=True):
            old.scatter_(2, self.slots[:, None, :, None].expand(x.shape), x)


def fill_slots(buffers: Parts, new: Parts, source: Int[Tensor, "b S"]) -> Parts:
    """Return copies of the buffers with new slot source[b, j] at slot j; -1 keeps the old one."""
    index, is_new = source.clamp(min=0)[:, None, :, None], (source >= 0)[:, None, :, None]
    return tuple(
        torch.where(is_new, x.gather(2, index.expand(old.shape)), old)
        for old, x in zip(buffers, new, strict=True)
    )
