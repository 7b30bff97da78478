"""Tensors in huge pages of 2 MiB, which a CPU reads faster than pages of 4 KiB."""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from regard.process_state import is_compiling

HUGE_PAGE_THRESHOLD = 4 << 20
"""The size in bytes from which numpy asks the operating system for huge pages."""

HUGE_PAGE = 2 << 20
"""The size in bytes of a huge page."""

CACHE_LINE = 64
"""Bytes of a cache line; tensors are aligned to it."""


def empty(
    shape: Sequence[int], *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """Return an uninitialized tensor, in huge pages if it is large and on the CPU: 32 instead of 23
    GB/s per core (LOG.md).
    """
    size = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or size < HUGE_PAGE_THRESHOLD or is_compiling():
        return torch.empty(shape, dtype=dtype, device=device)
    memory = np.empty(size + CACHE_LINE, np.uint8)
    first = -memory.ctypes.data % CACHE_LINE
    return torch.from_numpy(memory[first : first + size]).view(dtype).view(*shape)


def empty_like(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return an uninitialized tensor of another shape, with the dtype and device of x."""
    return empty(shape, dtype=x.dtype, device=x.device)


class HugePageBlock:
    """Memory in huge pages from which tensors of `size` bytes in all are cut one after another; a
    tensor that does not fit, or a system without huge pages, gets memory from `empty`.
    """

    def __init__(self, size: int) -> None:
        self._map: mmap.mmap | None = None
        if size < HUGE_PAGE_THRESHOLD or not hasattr(mmap, "MADV_HUGEPAGE"):
            return
        try:
            self._map = mmap.mmap(-1, size + 2 * HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._map.madvise(mmap.MADV_HUGEPAGE)
        except (OSError, ValueError):  # the system reserves no more memory, or has no huge pages
            self._map = None
            return
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._next = -self._bytes.ctypes.data % HUGE_PAGE
        self._end = self._next + size + HUGE_PAGE  # tensors begin at cache lines

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor that lies behind the last one."""
        size = math.prod(shape) * dtype.itemsize
        if self._map is None or not size or self._next + size > self._end:
            return empty(shape, dtype=dtype)
        first, last = self._next, self._next + size
        self._next = last + -last % CACHE_LINE
        memory = self._bytes[first:last]
        # only the map, because the array would keep itself alive
        weakref.finalize(memory, _give_back, self._map, first, last).atexit = False
        return torch.from_numpy(memory).view(dtype).view(*shape)

    def copy(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a copy of a tensor."""
        if not x.is_cpu:
            return x.to(dtype or x.dtype, copy=True)
        return self.empty(x.shape, dtype=dtype or x.dtype).copy_(x)


def _give_back(memory: mmap.mmap, first: int, last: int) -> None:
    """Give the pages that lie between two places of a map back to the operating system."""
    first, last = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        memory.madvise(mmap.MADV_DONTNEED, first, last - first)


def to_huge_pages(x: Tensor) -> Tensor:
    """Return a copy of a tensor in huge pages; itself if it is small or not on the CPU."""
    return empty_like(x, x.shape).copy_(x) if x.is_cpu and x.nbytes >= HUGE_PAGE_THRESHOLD else x


def aligned_bytes(tensors: Iterable[Tensor]) -> int:
    """Return how many bytes some tensors need in a `HugePageBlock`."""
    return sum(x.nbytes + -x.nbytes % CACHE_LINE for x in tensors)


def module_to_huge_pages(module: nn.Module) -> None:
    """Move the CPU parameters of a module into huge pages, as `regard.load` does."""
    block = HugePageBlock(aligned_bytes(module.parameters()))
    for parameter in module.parameters():  # yields a shared parameter once
        if parameter.is_cpu:
            parameter.data = block.copy(parameter.data)
