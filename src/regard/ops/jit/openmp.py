"""Threads for compiled loops: torch's own OpenMP threads where they are found, and Python threads
where they are not.

Between its products torch's threads spin for work. Threads of ours beside them lose up to a fifth
of the memory's speed to that (LOG.md), and wake up a hundred times more slowly: so an entry is run
by the same team of threads, from its address. This module is the only one that looks for OpenMP:

1. `libraries` lists the OpenMP libraries that this process has loaded, torch's own first. It reads
   /proc/self/maps, so it finds them on Linux only.
2. `openmp_of` asks each of them for `GOMP_parallel`, which GNU's, LLVM's and Intel's all have.
3. Where none has it (another system, a torch without OpenMP), and in a process that was forked off
   (a child has none of the team), `run` falls back to `Pool`: plain Python threads, as many, with
   the same results.

Numba's own threading layers are not used: one of them dies when two Python threads call it, another
after a fork, and all keep threads beside torch's that spin for work.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from regard.ops.jit.argument_structs import PackedStruct

ParallelFunction = Callable[[int, int, int, int], None]
"""`GOMP_parallel(function, its argument, threads, flags)`, addresses as numbers."""

PROC_MAPS = Path("/proc/self/maps")
"""What this process has loaded, on Linux."""


class ThreadPool:
    """Runs `work(part, parts)` for every part at once in Python threads; the caller's thread does
    part 0.

    >>> done = []
    >>> Pool().run(lambda part, parts: done.append((part, parts)), 1)
    >>> done
    [(0, 1)]
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._size = 0
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def run(self, work: Callable[[int, int], Any], parts: int) -> None:
        """Do all parts, and come back when they are done; an exception of any of them is raised."""
        if parts <= 1:
            work(0, 1)
            return
        executor = self._at_least(parts - 1)
        others = [executor.submit(work, part, parts) for part in range(1, parts)]
        try:
            work(0, parts)
        finally:
            wait(others)
        for other in others:
            other.result()

    def _at_least(self, size: int) -> ThreadPoolExecutor:
        with self._lock:
            if self._executor is None or self._size < size:
                self._executor = ThreadPoolExecutor(size, thread_name_prefix="regard")
                self._size = size
            return self._executor

    def _forget(self) -> None:
        """A child has none of its parent's threads."""
        self._lock, self._executor, self._size = Lock(), None, 0


THREAD_POOL = ThreadPool()
_EntryPrototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_forked = False


def _mark_as_forked() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_mark_as_forked)


def thread_count() -> int:
    """How many: as many as torch uses."""
    return torch.get_num_threads()


def run_entry(entry: int, record: PackedStruct, workers: int) -> None:
    """Call an entry with a record in so many threads at once, and come back when all are done.

    Args:
        entry: the address of the compiled code (`regard.ops.jit.entry_points.compile_entry`).
        record: as `regard.ops.jit.argument_structs.StructLayout.pack` makes it. The threads share its counters:
            `regard.ops.jit.entry_points.take_task` hands out the tasks.
        workers: threads, the caller's among them.
    """
    address = record.buffer_info()[0]
    if workers <= 1:
        _callable_at(entry)(address)
    elif not _forked and (parallel := torch_openmp()) is not None:
        parallel(entry, address, workers, 0)
    else:
        function = _callable_at(entry)
        THREAD_POOL.run(lambda _part, _of: function(address), workers)


@cache
def _callable_at(entry: int) -> Callable[[int], None]:
    """It lets go of the interpreter while it runs."""
    return _EntryPrototype(entry)


@cache
def torch_openmp() -> ParallelFunction | None:
    """The threads of the OpenMP library that torch uses; None where there are none to be had."""
    return find_gomp_parallel(loaded_openmp_libraries())


def find_gomp_parallel(paths: Iterable[str]) -> ParallelFunction | None:
    """`GOMP_parallel` of the first library that can be opened and has it."""
    for path in paths:
        try:
            found: Any = ctypes.CDLL(path).GOMP_parallel
        except (OSError, AttributeError):
            continue
        found.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        found.restype = None
        function: ParallelFunction = found
        return function
    return None


def loaded_openmp_libraries(maps: Path = PROC_MAPS) -> list[str]:
    """Loaded OpenMP libraries, torch's own first; none where the system does not list what is
    loaded.
    """
    if not maps.exists():
        return []
    named = {x.split()[-1] for x in maps.read_text("utf-8", "replace").splitlines() if "omp" in x}
    loaded = [x for x in sorted(named) if re.search(r"lib(gomp|omp|iomp5)[^/]*\.so", x)]
    own = str(Path(torch.__file__).parent)
    return sorted(loaded, key=lambda x: not x.startswith(own))
