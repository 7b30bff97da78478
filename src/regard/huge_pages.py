"""Tensors in huge pages of 2 MiB, from which a CPU reads large memory faster than from 4 KiB
pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from regard.process_state import is_compiling

HUGE_PAGE_THRESHOLD = 4 << 20
"""The size in bytes from which numpy asks the operating system for huge pages."""

CACHE_LINE = 64
"""Bytes of a cache line; tensors are aligned to it."""


def empty(
    shape: Sequence[int], *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """Return an uninitialized tensor like `torch.empty`, in huge pages if it is large and on the
    CPU.

    One core read the weights and caches of a decoding model at 32 instead of 23 GB/s this way (see
    LOG.md).

    Args:
        shape: the shape of the tensor.
        dtype: its dtype.
        device: its device; other devices than the CPU use `torch.empty`.

    Returns:
        The tensor.

    >>> empty((2, 3), dtype=torch.float32).shape
    torch.Size([2, 3])
    """
    size = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or size < HUGE_PAGE_THRESHOLD or is_compiling():
        return torch.empty(shape, dtype=dtype, device=device)
    memory = np.empty(size + CACHE_LINE, np.uint8)
    first = -memory.ctypes.data % CACHE_LINE
    return torch.from_numpy(memory[first : first + size]).view(dtype).view(*shape)


def empty_like(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return an uninitialized tensor of another shape, with the dtype and device of x.

    >>> empty_like(torch.zeros(3).half(), (2,)).dtype
    torch.float16
    """
    return empty(shape, dtype=x.dtype, device=x.device)


def to_huge_pages(x: Tensor) -> Tensor:
    """Return a copy of a tensor in huge pages; the tensor itself if it is small or not on the CPU.

    >>> x = torch.randn(2, 3)
    >>> to_huge_pages(x) is x
    True
    """
    return empty_like(x, x.shape).copy_(x) if x.is_cpu and x.nbytes >= HUGE_PAGE_THRESHOLD else x


def together_in_huge_pages(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of small CPU tensors that lie one after another in the same huge pages.

    A core reads a matrix of 2 MB a quarter faster this way than from pages of its own (LOG.md).

    >>> x, y = together_in_huge_pages([torch.ones(3), torch.zeros(2, 2).half()])
    >>> x.tolist(), y.shape, y.data_ptr() - x.data_ptr()
    ([1.0, 1.0, 1.0], torch.Size([2, 2]), 64)
    """
    sizes = [-(-x.nbytes // CACHE_LINE) * CACHE_LINE for x in tensors]
    memory, first = empty((sum(sizes),), dtype=torch.uint8), 0
    copies = []
    for x, size in zip(tensors, sizes, strict=True):
        place = memory[first : first + x.nbytes].view(x.dtype).view(x.shape)
        copies.append(place.copy_(x))
        first += size
    return copies


def module_to_huge_pages(module: nn.Module) -> None:
    """Move the large CPU parameters of a module into huge pages; their values do not change.

    `regard.load` does this already.

    >>> layer = nn.Linear(2048, 2048)
    >>> before = layer.weight.detach().clone()
    >>> module_to_huge_pages(layer)
    >>> torch.equal(layer.weight, before)
    True
    """
    for parameter in module.parameters():  # yields a shared parameter once
        parameter.data = to_huge_pages(parameter.data)
