"""Ctrl-C and SIGTERM during long work: the first asks, the second insists."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """A list that is empty until SIGINT or SIGTERM comes, and then holds its number.

    A second signal exits with 128 + its number. Outside the main thread, where Python takes no
    signals, the list stays empty. The former handlers come back at the end.

    >>> with interrupts() as caught:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     print([signal.Signals(number).name for number in caught])
    ['SIGTERM']
    """
    caught: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        if caught:
            raise SystemExit(128 + number)
        caught.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
