"""What all kernels in Triton share; triton is imported on demand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor


@cache
def has_triton() -> bool:
    """Return whether triton is installed."""
    return find_spec("triton") is not None


@cache
def interprets() -> bool:
    """Return whether triton interprets kernels on a CPU (TRITON_INTERPRET=1 before its import)."""
    if not has_triton():
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def why_not_device(device: str, *, installed: bool, interpreted: bool) -> list[str]:
    """Return why kernels in Triton cannot run on a device."""
    if device != "cuda" and not (device == "cpu" and interpreted):
        return [f"runs on cuda, not on {device}"]
    return [] if installed else ["triton is not installed: pip install 'regard[gpu]'"]


V = TypeVar("V")


@contextmanager
def assigned(variable: ContextVar[V], value: V) -> Iterator[None]:
    """Give a variable a value in a `with` block of this thread."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


_target: ContextVar[int | None] = ContextVar("target", default=None)


def launches_for(capability: int) -> AbstractContextManager[None]:
    """Choose block sizes for a compute capability, whatever the device of the tensors is.

    >>> with launches_for(80):
    ...     capability_of(torch.device("cpu"))
    80
    """
    return assigned(_target, capability)


def capability_of(device: torch.device) -> int:
    """Return the compute capability of a device, such as 90 for 9.0, or 90 without one."""
    if (target := _target.get()) is not None:
        return target
    return _capability_of_gpu(device) if device.type == "cuda" else 90


@cache
def _capability_of_gpu(device: torch.device) -> int:
    """Return the compute capability of a GPU."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


class Launch(NamedTuple):
    """One launch of a kernel."""

    kernel: Any
    grid: tuple[int, int]
    args: tuple[Any, ...]
    options: dict[str, Any]

    def run(self) -> Any:
        """Run the kernel on the device of its first tensor; return what triton compiled."""
        first: Tensor = self.args[0]
        with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
            return self.kernel[self.grid](*self.args, **self.options)
