"""The device on which audited code runs; the checks compute on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

M = TypeVar("M", bound=nn.Module)

_CPU = torch.device("cpu")
_device: ContextVar[torch.device] = ContextVar("device", default=_CPU)


@contextmanager
def run_on(device: torch.device | str | None) -> Iterator[None]:
    """Run audited code on a device in the block; None is the CPU."""
    token = _device.set(_CPU if device is None else torch.device(device))
    try:
        yield
    finally:
        _device.reset(token)


def is_moved() -> bool:
    """Return whether audited code runs on another device than the CPU."""
    return _device.get() != _CPU


def to_run_device(x: Any) -> Any:
    """Return the tensors in x on the device where audited code runs."""
    return _moved(x, _device.get())


def to_checks(x: Any) -> Any:
    """Return the tensors in x on the CPU, where the checks compute."""
    return _moved(x, _CPU)


def placed(module: M) -> M:
    """Move a module to the device where audited code runs.

    Its calls take tensors of the CPU and return such tensors. A cache that is an object of its own
    stays where the module made it.
    """
    device = _device.get()
    to_device(module)
    if device == _CPU:
        return module

    def before(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return _moved(args, device), _moved(kwargs, device)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(lambda _, __, result: to_checks(result))
    return module


def to_device(module: M) -> M:
    """Move a module to the device where audited code runs, and return it."""
    return module.to(_device.get())


def moved_function(function: Callable[..., object]) -> Callable[..., object]:
    """Return a function that runs on the device, with tensors of the CPU as its arguments and
    results.
    """
    device = _device.get()
    if device == _CPU:
        return function

    def run(*args: object, **kwargs: object) -> object:
        return to_checks(function(*_moved(args, device), **_moved(kwargs, device)))

    return run


def _moved(x: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda y: y.to(device), x)
