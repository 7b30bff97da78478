"""Results that are computed once for all threads that ask for them, and kept while they are new."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from threading import Lock
from typing import Generic, TypeVar

R = TypeVar("R")


class KeptResults(Generic[R]):
    """The results that were asked for last. A thread that asks for a result that another thread
    computes waits for it, and does not compute it a second time.

    Args:
        limit: number of results that are kept.

    >>> kept = KeptResults[int](limit=1)
    >>> kept.get("a", lambda: 1), kept.get("a", lambda: 2), kept.get("b", lambda: 3)
    (1, 1, 3)
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._lock = limit, Lock()
        self._results: OrderedDict[Hashable, Future[R]] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], R]) -> R:
        """Return a result; it is computed if it is not kept. A failed computation is not kept."""
        with self._lock:
            result = self._results.get(key)
            is_new = result is None
            if result is None:
                result = self._results[key] = Future()
            self._results.move_to_end(key)
            while len(self._results) > self._limit:
                self._results.popitem(last=False)
        if is_new:
            try:
                result.set_result(make())
            except BaseException as error:
                with self._lock:
                    self._results.pop(key, None)
                result.set_exception(error)
        return result.result()
