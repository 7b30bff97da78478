"""The connections of the server behind `regard view`: how many it holds, and for how long it waits.

A connection that sends nothing, or a request that never ends, would stay for ever and keep a file
descriptor of the process. So a request must be complete, and an answer must be read, within a time.
Where there are as many connections as are allowed, the one that has waited longest without a
request is closed for the new one, so that no number of silent connections locks the reader out.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from uvicorn.protocols.http.h11_impl import H11Protocol


class Limits(NamedTuple):
    """How many connections a server holds, and for how long it waits.

    Args:
        connections: number of connections.
        request_seconds: time from the connection, or from the answer before, to a whole request; a
            browser keeps idle connections for about the default.
        answer_seconds: time from a request until its answer is read.
    """

    connections: int = 64
    request_seconds: float = 75.0
    answer_seconds: float = 120.0


class BoundedProtocol(H11Protocol):
    """A connection with a deadline, one of a limited number.

    Args:
        limits: the limits of the server.
        options: what uvicorn gives to a connection.
    """

    def __init__(self, limits: Limits, **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection; one too many replaces the one that has waited longest."""
        super().connection_made(transport)
        self._expect(self._limits.request_seconds)
        others = [x for x in self.connections if isinstance(x, BoundedProtocol) and x is not self]
        if len(others) < self._limits.connections:
            return
        waiting = [x for x in others if not x._is_answering]
        oldest = min(waiting, key=BoundedProtocol._due, default=self)
        oldest._end()

    def data_received(self, data: bytes) -> None:
        """Take a part of a request; the deadline of the answer begins when it is complete."""
        was_answering = self._is_answering
        super().data_received(data)
        if self._is_answering and not was_answering:
            self._expect(self._limits.answer_seconds)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._expect(self._limits.request_seconds)
        super().on_response_complete()
        if self._is_answering:  # it was in the buffer already
            self._expect(self._limits.answer_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """Take a connection that has ended off the list."""
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

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
        self._deadline = self.loop.call_later(seconds, self._end)

    def _end(self) -> None:
        """Close the connection at once, and leave its place to others."""
        self.connections.discard(self)
        self.transport.abort()
