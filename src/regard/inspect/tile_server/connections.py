"""The connections of `regard view`: how many there are, how long each is waited for, and how much
the log says about them.

A connection that sends nothing, or a request that never ends, would stay for ever and keep a file
descriptor of the process. So the head of a request must be complete, and an answer must be read,
within a time. Where there are as many connections as are allowed, one that only waits (without a
request, or without reading its answer) is closed for the new one, the one that is due first: no
number of silent connections locks the reader out. One connection is accepted at a time, so that
those in excess are closed before the process has no file descriptors left.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Any, NamedTuple, Self

from uvicorn.protocols.http.h11_impl import H11Protocol

LOG_LINES = 20
"""Number of errors of connections and requests that a server writes to its log."""


class Limits(NamedTuple):
    """How many connections a server holds, and for how long it waits.

    Args:
        idle_seconds: time from the connection, or from the answer before, to the first byte of a
            request; a browser keeps idle connections for about the default.
        head_seconds: time from the first byte of a request to the end of its head.
        answer_seconds: time from a request until its answer is read.
        waiting: number of connections that the system keeps until they are accepted.
    """

    connections: int = 64
    idle_seconds: float = 75.0
    head_seconds: float = 10.0
    answer_seconds: float = 120.0
    waiting: int = 2048

    def for_this_process(self) -> Self:
        """Return the limits with at most a quarter of the files that the process may open."""
        try:
            import resource
        except ImportError:  # Windows
            return self
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if files == resource.RLIM_INFINITY:
            return self
        return self._replace(connections=max(2, min(self.connections, files // 4)))


class BoundedProtocol(H11Protocol):
    """A connection with a deadline, one of a limited number."""

    def __init__(self, limits: Limits, log: logging.Logger, **options: Any) -> None:
        super().__init__(**options)
        self._limits, self.logger = limits, log
        self._deadline: asyncio.TimerHandle | None = None
        self._in_head = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection; one too many replaces one that only waits."""
        super().connection_made(transport)
        self._expect(self._limits.idle_seconds)
        others = [x for x in self.connections if isinstance(x, BoundedProtocol) and x is not self]
        if len(others) < self._limits.connections:
            return
        waiting = [x for x in others if not x._is_answering or x.flow.write_paused]
        oldest = min(waiting, key=BoundedProtocol._due, default=self)
        oldest._end()

    def data_received(self, data: bytes) -> None:
        """Take a part of a request; each of its two deadlines begins once."""
        was_answering = self._is_answering
        super().data_received(data)
        if self._is_answering and not was_answering:
            self._expect(self._limits.answer_seconds)
        elif not self._is_answering and not self._in_head:
            self._expect(self._limits.head_seconds)
            self._in_head = True

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._expect(self._limits.idle_seconds)
        super().on_response_complete()
        if self._is_answering:  # it was in the buffer already
            self._expect(self._limits.answer_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """Take a connection that has ended off the list."""
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """End with the server, also where no answer is read."""
        self._end()

    @property
    def _is_answering(self) -> bool:
        """Whether a request is being answered."""
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete

    def _due(self) -> float:
        """Return the time at which the connection is closed."""
        assert self._deadline is not None, "it is set when the connection is made"
        return self._deadline.when()

    def _expect(self, seconds: float) -> None:
        """Close the connection after some seconds, unless something else is expected before."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._in_head = False
        self._deadline = self.loop.call_later(seconds, self._end)

    def _end(self) -> None:
        """Close the connection at once, and leave its place to others."""
        self.connections.discard(self)
        self.transport.abort()


def bounded_log() -> logging.Logger:
    """Return a log of one server that passes `LOG_LINES` errors on, and says when it ends."""
    log = logging.Logger("regard.view", logging.ERROR)  # noqa: LOG001  (each server has its own)
    log.parent = logging.getLogger("uvicorn.error")
    numbers = itertools.count(1)

    def may_be_written(record: logging.LogRecord) -> bool:
        number = next(numbers)
        if number == LOG_LINES:
            record.msg, record.args = f"{record.getMessage()} (later errors are not printed)", ()
        return number <= LOG_LINES

    log.addFilter(may_be_written)
    return log
