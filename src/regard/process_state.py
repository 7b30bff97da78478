"""State that torch and Python keep per process: random numbers, compilation flag, warning filters.

Saving such a state, changing it and restoring it is correct in one thread only: two threads that do
this at once see each other's random numbers, and may leave a change behind. All code of this
package that changes such a state does it through this module, one thread at a time. Code outside
the package is not blocked.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import RLock

import torch
from torch._guards import CompileContext, TracingContext

_lock = RLock()


def _new_lock_after_fork() -> None:
    """Replace the lock in a forked child, in which the thread that held it does not exist."""
    global _lock
    _lock = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock_after_fork)


def is_compiling() -> bool:
    """Return whether this thread compiles or exports a graph, so that tensor values cannot be read.

    `torch.compiler.is_compiling()` is one flag for the whole process: while one thread compiles, it
    is True for all others, which would skip their checks and choose other kernels.

    >>> is_compiling()
    False
    """
    # Inside a graph, dynamo evaluates the first term to True and stops; outside it is False. The
    # flag in the second term is the one that `torch.compiler.is_compiling()` reads. It is read here
    # directly, because this line runs for every layer and token.
    return torch.compiler.is_dynamo_compiling() or (
        torch.compiler._is_compiling_flag and _this_thread_compiles()
    )


_MODES = torch._C._TorchDispatchModeKey
_TRACING = (_MODES.FAKE, _MODES.PROXY, _MODES.FUNCTIONAL)


def _this_thread_compiles() -> bool:
    """Return whether code that runs eagerly is part of a compilation or an export of this
    thread.
    """
    if CompileContext.try_get() is not None or TracingContext.try_get() is not None:
        return True
    return any(torch._C._get_dispatch_mode(mode) is not None for mode in _TRACING)


@contextmanager
def exclusive() -> Iterator[None]:
    """Block other threads from all context managers of this module while the block runs.

    Blocks may be nested.

    >>> with exclusive(), exclusive():
    ...     pass
    """
    with _lock:
        yield


@contextmanager
def seeded(seed: int | None, devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Set torch's global random seed in the block, and restore the random state afterwards.

    Args:
        seed: the seed; None keeps the current random state.
        devices: CUDA devices whose random state is restored too.

    >>> with seeded(0):
    ...     first = torch.rand(2)
    >>> with seeded(0):
    ...     torch.equal(torch.rand(2), first)
    True
    """
    with exclusive(), torch.random.fork_rng(devices=list(devices)):
        if seed is not None:
            torch.manual_seed(seed)
        yield


@contextmanager
def ignore_warnings() -> Iterator[None]:
    """Ignore all warnings in the block, and restore the warning filters afterwards.

    >>> with ignore_warnings():
    ...     warnings.warn("unheard")
    """
    with exclusive(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
