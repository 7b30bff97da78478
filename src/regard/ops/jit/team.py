"""Torch's own threads for compiled loops: the OpenMP team that torch has loaded, or plain Python
threads where there is none.

Between its products torch's threads spin for work. Threads of ours beside them lose up to a fifth
of the memory's speed to that (LOG.md), and wake up a hundred times more slowly: so a compiled entry
is run by the same team, from its address.
"""

from __future__ import annotations

import ctypes
import os
import re
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from regard.ops.jit.pool import POOL

BUILT_UPON = "558026228dcd76cd"
"""As for every file here that takes something from another (tests/ops/test_jit.py)."""

_Entry = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_forked = False


def _fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_fork)


def run(entry: int, given: Sequence[int], workers: int) -> None:
    """Call the compiled function at an address in so many threads at once, and come back when all
    are done.

    entry: address of a C function of one pointer, to the numbers given as int64. Number 0 is a
        counter that they share: `regard.ops.jit.tasks.take` hands out the tasks.
    """
    memory = array("q", given)
    at = memory.buffer_info()[0]
    if workers <= 1:
        _as_function(entry)(at)
    elif (parallel := _parallel()) is not None and not _forked:  # a child has none of the team
        parallel(entry, at, workers, 0)
    else:
        function = _as_function(entry)
        POOL.run(lambda _part, _of: function(at), workers)


@cache
def _as_function(entry: int) -> Callable[[int], None]:
    """It lets go of the interpreter while it runs."""
    return _Entry(entry)


@cache
def _parallel() -> Callable[[int, int, int, int], None] | None:
    """`GOMP_parallel` of the OpenMP library that torch uses; GNU's, LLVM's and Intel's have it."""
    for path in _libraries():
        try:
            found: Any = ctypes.CDLL(path).GOMP_parallel
        except (OSError, AttributeError):
            continue
        found.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        found.restype = None
        function: Callable[[int, int, int, int], None] = found
        return function
    return None


def _libraries() -> list[str]:
    """Loaded OpenMP libraries, torch's own first."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    named = {x.split()[-1] for x in maps.read_text("utf-8", "replace").splitlines() if "omp" in x}
    loaded = [x for x in sorted(named) if re.search(r"lib(gomp|omp|iomp5)[^/]*\.so", x)]
    own = str(Path(torch.__file__).parent)
    return sorted(loaded, key=lambda x: not x.startswith(own))
