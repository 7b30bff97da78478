"""Memory that is read fast: a processor finds its way in pages of 2 MiB, where it may, rather than
of 4 KiB.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from regard.process_state import is_compiling

HUGE_PAGE_THRESHOLD = 4 << 20
"""Bytes from which on numpy asks the system for large pages."""

CACHE_LINE = 64
"""Bytes of a cache line, at which memory begins."""


def empty(
    shape: Sequence[int], *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """As `torch.empty`, in large pages on a CPU where it is large and the system gives them.

    One core read weights and caches of a decoding model at 32 instead of 23 GB/s so (LOG.md).

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
    """Another shape in the dtype and on the device of a tensor.

    >>> empty_like(torch.zeros(3).half(), (2,)).dtype
    torch.float16
    """
    return empty(shape, dtype=x.dtype, device=x.device)


def to_huge_pages(x: Tensor) -> Tensor:
    """A tensor's numbers in large pages; the tensor itself where it is small, or not on a CPU.

    >>> x = torch.randn(2, 3)
    >>> to_huge_pages(x) is x
    True
    """
    return empty_like(x, x.shape).copy_(x) if x.is_cpu and x.nbytes >= HUGE_PAGE_THRESHOLD else x


def module_to_huge_pages(module: nn.Module) -> None:
    """Move the large parameters of a module on a CPU into large pages; nothing else about them
    changes. `regard.load` has done so.

    >>> layer = nn.Linear(2048, 2048)
    >>> before = layer.weight.detach().clone()
    >>> module_to_huge_pages(layer)
    >>> torch.equal(layer.weight, before)
    True
    """
    for parameter in module.parameters():  # each once, shared or not
        parameter.data = to_huge_pages(parameter.data)
