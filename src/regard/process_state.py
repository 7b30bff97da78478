"""What belongs to the whole process and not to a thread: torch's random numbers, its sign of a
compilation, the warnings filters.

Saving such a state, changing it and putting it back is right in one thread only. Two threads that
do so at once get each other's random numbers, and may leave the other's change behind for good.
Whoever in this package changes one of them does it here: one thread at a time, while the others
wait. Code of others that changes them in another thread meanwhile is not held back.
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
    global _lock
    _lock = RLock()  # the thread that held it is not in the child


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock_after_fork)


def is_compiling() -> bool:
    """Whether this thread compiles or exports a graph, so that numbers cannot be looked at.

    `torch.compiler.is_compiling()` is one flag for the whole process: while one thread compiles, it
    is True for all others, which would leave out their checks and choose other kernels.

    >>> is_compiling()
    False
    """
    # In a graph dynamo takes the first for True and sees no more; elsewhere it is False. The second
    # is what `torch.compiler.is_compiling()` reads: this line is passed for every layer and token.
    return torch.compiler.is_dynamo_compiling() or (
        torch.compiler._is_compiling_flag and _this_thread_compiles()
    )


_MODES = torch._C._TorchDispatchModeKey
_TRACING = (_MODES.FAKE, _MODES.PROXY, _MODES.FUNCTIONAL)


def _this_thread_compiles() -> bool:
    """Whether code that runs eagerly is part of a compilation, or of an export, of its own
    thread.
    """
    if CompileContext.try_get() is not None or TracingContext.try_get() is not None:
        return True
    return any(torch._C._get_dispatch_mode(mode) is not None for mode in _TRACING)


@contextmanager
def exclusive() -> Iterator[None]:
    """Keep other threads out of every block of this module while the block runs; blocks may be
    nested.

    >>> with exclusive(), exclusive():
    ...     pass
    """
    with _lock:
        yield


@contextmanager
def seeded(seed: int | None, devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Draw torch's global random numbers from a seed in the block, and put their state back
    afterwards.

    Args:
        seed: where the block begins; None: where the state is.
        devices: CUDA devices whose state is put back, too.

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
    """Ignore all warnings in the block, and put the filters back afterwards.

    >>> with ignore_warnings():
    ...     warnings.warn("unheard")
    """
    with exclusive(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
