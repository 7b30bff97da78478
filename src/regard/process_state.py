"""State that a process keeps: of torch and Python (random numbers, compilation flag, warning
filters), changed through this module by one thread at a time, as threads would see each other's;
and constants, with one copy for each device.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import RLock
from typing import TypeVar

import torch
from torch import Tensor
from torch._guards import CompileContext, TracingContext
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import forward_ad

from regard.argument_checks import check_seed
from regard.errors import ArgumentError
from regard.units import plural

F = TypeVar("F", bound=Callable[..., object])


def constant_in_graphs(function: F) -> F:
    """Mark a function that dynamo calls once per traced graph, as
    `torch.compiler.assume_constant_result` does, without importing dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


_lock = RLock()


def _new_lock_after_fork() -> None:
    """Replace the lock in a forked child, in which the thread that held it does not exist."""
    global _lock
    _lock = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock_after_fork)


def is_compiling() -> bool:
    """Return whether this thread compiles, exports or traces a graph, so that values cannot be
    read; `torch.compiler.is_compiling()` is one flag for all threads.
    """
    # Inside a graph, dynamo evaluates the first term to True and stops; outside it is False. The
    # flag in the second term is the one that `torch.compiler.is_compiling()` reads. It is read here
    # directly, because this line runs for every layer and token.
    return (
        torch.compiler.is_dynamo_compiling()
        or torch._C._get_tracing_state() is not None
        or (torch.compiler._is_compiling_flag and _this_thread_compiles())
    )


def is_exporting() -> bool:
    """Return whether this thread makes a program that must serve all lengths: `torch.export`,
    `torch.onnx.export` or `torch.jit.trace`. Nothing may then depend on the current lengths.
    """
    return torch.compiler.is_exporting() or is_jit_tracing()


def is_exporting_onnx() -> bool:
    """Return whether this thread makes an ONNX file by `torch.onnx.export`, for inference."""
    return is_exporting() and _in_onnx_export()


@constant_in_graphs
def _in_onnx_export() -> bool:
    """Return whether a call of `torch.onnx.export` runs in this process. Dynamo, which the exporter
    tries after another way has failed, takes torch's own function for False.
    """
    return torch.onnx.is_in_onnx_export()


def drops_conditions() -> bool:
    """Return whether this thread records a graph without its conditions: ONNX, jit.trace."""
    return is_jit_tracing() or is_exporting_onnx()


def is_jit_tracing() -> bool:
    """Return whether this thread runs `torch.jit.trace`, or `torch.onnx.export(dynamo=False)`."""
    return torch._C._get_tracing_state() is not None


def is_tracing_onnx() -> bool:
    """Return whether `torch.onnx.export(dynamo=False)` runs, which knows fewer operators."""
    return is_jit_tracing() and torch.onnx.is_in_onnx_export()


_MODES = torch._C._TorchDispatchModeKey
_TRACING = (_MODES.FAKE, _MODES.PROXY, _MODES.FUNCTIONAL)


def _this_thread_compiles() -> bool:
    """Return whether eager code is part of a compilation or an export of this thread."""
    if CompileContext.try_get() is not None or TracingContext.try_get() is not None:
        return True
    return any(torch._C._get_dispatch_mode(mode) is not None for mode in _TRACING)


def values_are_readable(*tensors: torch.Tensor) -> bool:
    """Return whether Python may look at the numbers in these tensors: not on "meta", in a fake
    tensor, under a transform of `torch.func`, or in forward-mode differentiation.
    """
    if is_transformed():
        return False
    return not any(
        x.is_meta or (type(x) not in (torch.Tensor, torch.nn.Parameter) and is_fake(x))
        for x in tensors
    )


@constant_in_graphs
def is_in_transform() -> bool:
    """Return whether a transform of `torch.func`, such as `vmap`, runs this code."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_transformed() -> bool:
    """Return whether this thread runs under a transform of `torch.func` or in forward mode, where
    tensors stand for more than the numbers at their address.
    """
    return is_in_transform() or differentiates_forward()


def differentiates_forward() -> bool:
    """Return whether derivatives are computed in forward mode (`jvp`, `jacfwd`, `forward_ad`)."""
    return forward_ad._current_level >= 0


@contextmanager
def exclusive() -> Iterator[None]:
    """Block other threads from the context managers of this module; blocks may be nested."""
    with _lock:
        yield


@contextmanager
def seeded(seed: int | None, devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Set torch's global random seed in the block, and restore the random state afterwards."""
    with exclusive(), torch.random.fork_rng(devices=list(devices)):
        if seed is not None:
            set_seed(seed)
        yield


def random_generator(seed: int) -> torch.Generator:
    """Return a generator of random numbers on the CPU with a seed."""
    return torch.Generator("cpu").manual_seed(check_seed(seed))


def set_seed(seed: int) -> None:
    """Set torch's global random seed."""
    torch.manual_seed(check_seed(seed))


_finite: ContextVar[bool] = ContextVar("finite", default=False)


@contextmanager
def checks(*, finite: bool = True) -> Iterator[None]:
    """Check the inputs of every attention call in the block for NaN and infinities.

    Off by default, because it reads every input once more.

    Args:
        finite: whether q, k and v must be finite.

    Yields:
        None.

    Raises:
        ArgumentError: from the attention call, which names the tensor and the first index.

    >>> import torch, regard
    >>> q = torch.full((1, 1, 2, 4), float("nan"))
    >>> with regard.checks(finite=True):
    ...     regard.attend(q, q.nan_to_num(), q.nan_to_num())
    Traceback (most recent call last):
    regard.errors.ArgumentError: query has 8 non-finite values, first at [0, 0, 0, 0]; ...
    """
    token = _finite.set(finite)
    try:
        yield
    finally:
        _finite.reset(token)


def finite_checks_enabled() -> bool:
    """Return whether a `checks(finite=True)` block is active."""
    return _finite.get()


def check_finite(**tensors: Tensor) -> None:
    """Raise for the first tensor with NaN or infinity, if `checks(finite=True)` is active."""
    if is_compiling() or not _finite.get():
        return
    for name, x in tensors.items():
        bad = ~x.isfinite()
        if bool(bad.any()):
            n, first = int(bad.sum()), bad.nonzero()[0].tolist()
            raise ArgumentError(
                f"{name} has {plural(n, 'non-finite value')}, first at {first}; find the operation "
                "that produced it (regard.checks(finite=True) enables this check)",
                argument=name,
            )


@contextmanager
def ignore_warnings() -> Iterator[None]:
    """Ignore all warnings in the block, and restore the warning filters afterwards."""
    with exclusive(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class ConstantTensor:
    """A constant on the CPU, and its copies on other devices.

    `tensor.to(device)` would copy it in every layer and step, and wait for the device.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._copies: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """Return the constant on a device."""
        if device == self.tensor.device:
            return self.tensor
        copy = self._copies.get(device)
        if copy is not None:
            return copy
        if is_compiling():  # a graph's tensors end with it
            return self.tensor.to(device)
        with torch.inference_mode(False):  # a later call may save the copy for its gradient
            copy = self.tensor.to(device)
        if values_are_readable(copy):
            self._copies[device] = copy
        return copy

    def __deepcopy__(self, memo: dict[int, object]) -> ConstantTensor:
        return type(self)(self.tensor)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.tensor,)
