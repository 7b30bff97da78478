"""Threads for compiled loops that let go of the interpreter: plain Python threads, as many as torch
uses.

Numba's own threading layers are not used: one of them dies when two Python threads call it, another
after a fork, and all keep threads beside torch's that spin for work.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Lock
from typing import Any

import torch


class Pool:
    """Runs `work(part, parts)` for every part at once; the caller's thread does part 0.

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


POOL = Pool()


def threads() -> int:
    """How many: as many as torch uses."""
    return torch.get_num_threads()
