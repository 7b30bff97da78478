"""The one door to compiled code: the memory that it writes, and the addresses of what it reads.

Compiled code checks nothing: a tensor of another dtype, device or layout would give wrong numbers,
or end the process. No other module of compiled code therefore takes the address of a tensor, or
makes a tensor. What is made here does not depend on torch's default dtype and device, which belong
to the user (`torch.set_default_dtype`, `torch.device("meta")`), nor on inference mode.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.errors import KernelRefusal


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return uninitialized memory on the CPU.

    >>> empty(2, 3, dtype=torch.float32).shape
    torch.Size([2, 3])
    """
    return torch.empty(shape, dtype=dtype, device="cpu")


def full(shape: tuple[int, ...], value: float, *, dtype: torch.dtype) -> Tensor:
    """Return memory on the CPU in which every number is `value`."""
    return torch.full(shape, value, dtype=dtype, device="cpu")


def constant(shape: tuple[int, ...], value: int = 0, *, dtype: torch.dtype) -> Tensor:
    """Return a tensor that is kept: it may be used in and outside of inference mode."""
    with torch.inference_mode(mode=False):
        return full(shape, value, dtype=dtype)


def arange(start: int, stop: int) -> Tensor:
    """Return the int64 numbers from `start` to `stop` - 1, which may be kept like a `constant`."""
    with torch.inference_mode(mode=False):
        return torch.arange(start, stop, dtype=torch.int64, device="cpu")


NO_POSITIONS = constant((1, 0), dtype=torch.int64)
"""The positions of keys that are contiguous, and the pages of keys that lie in none."""

NO_RANGES = constant((1, 1, 1, 0), dtype=torch.int64)
"""The ranges of a mask that is given as `visible`."""

NO_VISIBLE = constant((1, 1, 1, 0), dtype=torch.bool)
"""The field `visible` of a mask that is given by ranges."""

NO_BIAS, NO_SLOPES = (constant(x, dtype=torch.float32) for x in ((1, 1, 1, 0), (0,)))
"""The table and the slopes of a call without a bias."""


def address(x: Tensor, dtype: torch.dtype) -> int:
    """Return the address of a tensor that compiled code reads or writes as contiguous memory.

    Args:
        x: the tensor, which the caller must keep alive.
        dtype: the dtype that compiled code takes it for.

    Raises:
        KernelRefusal: it has another dtype or layout, or is not on a CPU.

    >>> address(torch.ones(2).double(), torch.float32)
    Traceback (most recent call last):
    regard.errors.KernelRefusal: compiled code was given a float64 tensor (2,) on cpu; it reads ...
    """
    if x.dtype is dtype and x.is_cpu and x.is_contiguous():
        pointer: int = x.data_ptr()
        if pointer % dtype.itemsize == 0:
            return pointer
    raise _refusal(x, dtype, "contiguous")


def row_address(x: Tensor, dtype: torch.dtype) -> int:
    """Return the address of a tensor of any strides whose last dimension is contiguous."""
    if x.dtype is dtype and x.is_cpu and (x.stride(-1) == 1 or x.shape[-1] <= 1):
        pointer: int = x.data_ptr()
        if pointer % dtype.itemsize == 0:
            return pointer
    raise _refusal(x, dtype, "contiguous in its last dimension")


def with_rows(x: Tensor) -> Tensor:
    """Return a tensor, copied only if its last dimension is not contiguous."""
    x = x.detach()
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _refusal(x: Tensor, dtype: torch.dtype, layout: str) -> KernelRefusal:
    name, wanted = (str(y).removeprefix("torch.") for y in (x.dtype, dtype))
    kind = "" if x.layout is torch.strided and x.is_contiguous() else " of other strides"
    return KernelRefusal(
        f"compiled code was given a {name} tensor {tuple(x.shape)}{kind} on {x.device}; it reads "
        f"{wanted} on a CPU, {layout} and aligned: choose another backend, and report this call"
    )
