"""Threads for compiled loops: torch's own OpenMP threads where they are found, otherwise Python
threads.

Between two operations torch's threads spin while they wait for work. Threads of another pool would
lose up to a fifth of the memory bandwidth to them (LOG.md) and wake up a hundred times more slowly.
A compiled loop is therefore run by torch's own threads, by `GOMP_parallel`, which GNU's, LLVM's and
Intel's libraries all have. Where it is not found (another system than Linux, a torch without
OpenMP), and in a forked process (a child has none of its parent's threads), `run_entry` uses as
many Python threads, with the same results.
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

from regard.ops.cpu.arguments import PackedStruct

ParallelFunction = Callable[[int, int, int, int], None]
"""`GOMP_parallel(function, argument of the function, threads, flags)`, addresses as integers."""


class ThreadPool:
    """Runs work in Python threads that it keeps."""

    def __init__(self) -> None:
        self.forked = False  # whether this is a child, which must not use torch's threads either
        self._lock, self._size = Lock(), 0
        self._executor: ThreadPoolExecutor | None = None
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def run(self, work: Callable[[int, int], object], parts: int) -> None:
        """Call `work(part, parts)` for part = 0 ... parts - 1 at the same time, part 0 in this
        thread, and return when all are finished; an exception in any of them is raised.

        >>> done = []
        >>> ThreadPool().run(lambda part, parts: done.append((part, parts)), 1)
        >>> done
        [(0, 1)]
        """
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
        """Return an executor of at least `size` threads, and keep it for later calls."""
        with self._lock:
            if self._executor is None or self._size < size:
                self._executor = ThreadPoolExecutor(size, thread_name_prefix="regard")
                self._size = size
            return self._executor

    def _forget(self) -> None:
        """Begin without threads: a forked child has none of its parent's."""
        self._lock, self._executor, self._size, self.forked = Lock(), None, 0, True


THREAD_POOL = ThreadPool()
_EntryPrototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def thread_count() -> int:
    """Return the number of threads that torch uses, `torch.get_num_threads()`."""
    return torch.get_num_threads()


def run_entry(entry: int, record: PackedStruct, workers: int) -> None:
    """Call compiled code (`library.entry`) with a struct in so many threads, the calling one
    included, and return when all have finished. The threads share the counters of the struct;
    `take_task` of `csrc/tasks.h` assigns the tasks.
    """
    address = record.buffer_info()[0]
    if workers <= 1:
        _callable_at(entry)(address)
    elif not THREAD_POOL.forked and (parallel := torch_openmp()) is not None:
        parallel(entry, address, workers, 0)
    else:
        function = _callable_at(entry)
        THREAD_POOL.run(lambda _part, _of: function(address), workers)


@cache
def _callable_at(entry: int) -> Callable[[int], None]:
    """Return the code at an address as a Python function, which releases the interpreter lock while
    it runs.
    """
    return _EntryPrototype(entry)


@cache
def torch_openmp() -> ParallelFunction | None:
    """Return `GOMP_parallel` of the OpenMP library that torch uses, or None if there is none."""
    return find_gomp_parallel(loaded_openmp_libraries())


def find_gomp_parallel(paths: Iterable[str]) -> ParallelFunction | None:
    """Return `GOMP_parallel` of the first library that can be opened and has it, or None."""
    for path in paths:
        try:
            symbol: Any = ctypes.CDLL(path).GOMP_parallel
        except (OSError, AttributeError):
            continue
        symbol.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        symbol.restype = None
        function: ParallelFunction = symbol
        return function
    return None


def loaded_openmp_libraries(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Return the paths of the OpenMP libraries that this process has loaded, torch's own first; an
    empty list on systems other than Linux.
    """
    if not maps.exists():
        return []
    named = {x.split()[-1] for x in maps.read_text("utf-8", "replace").splitlines() if "omp" in x}
    loaded = [x for x in sorted(named) if re.search(r"lib(gomp|omp|iomp5)[^/]*\.so", x)]
    own = str(Path(torch.__file__).parent)
    return sorted(loaded, key=lambda x: not x.startswith(own))
