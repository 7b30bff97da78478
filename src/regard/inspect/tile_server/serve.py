"""`view`: serve a recording to a browser on this machine."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
import time
import webbrowser
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from regard.errors import ArgumentError
from regard.inspect.record.recording import Recording
from regard.inspect.record.recording_file import load
from regard.inspect.tile_server.head_overviews import Overviews
from regard.inspect.tile_server.running import RunningRecording
from regard.view.page import content_policy, tile_page

if TYPE_CHECKING:
    from regard.inspect.tile_server.connections import Limits
    from regard.inspect.tile_server.session import ViewSession

LOOPBACK = ("127.0.0.1", "localhost", "::1")
START_SECONDS = 60.0
"""How long `Server.start` waits for the server to answer."""


class Server:
    """A running server of one recording: a context manager, or call `close` at the end."""

    def __init__(
        self,
        session: ViewSession,
        host: str,
        port: int,
        lang: str | None,
        limits: Limits | None = None,
        running: RunningRecording | None = None,
    ) -> None:
        import uvicorn

        from regard.inspect.tile_server.app import Policy, application
        from regard.inspect.tile_server.connections import BoundedProtocol, Limits, bounded_log

        self.session, self._limits = session, (limits or Limits()).for_this_process()
        self._log = bounded_log()
        self._running = running
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise ArgumentError(
                f"the server cannot listen on {host} port {port}: {error.strerror}; leave the port "
                "out, and a free one is chosen"
            ) from error
        port = self._socket.getsockname()[1]
        self.token = secrets.token_urlsafe(32)
        shown = f"[{host}]" if ":" in host else host
        self.origin = f"http://{shown}:{port}"
        self.url = f"{self.origin}/#token={self.token}"
        page = tile_page(lang)
        names = {f"{shown}:{port}", f"127.0.0.1:{port}", f"localhost:{port}"}
        policy = Policy(self.token, frozenset(names), content_policy(page))
        app, self.endpoints = application(session, page, policy)
        config = uvicorn.Config(
            app,
            log_level="error",
            access_log=False,
            server_header=False,
            http=partial(BoundedProtocol, self._limits, self._log),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            timeout_keep_alive=int(self._limits.idle_seconds),
            h11_max_incomplete_event_size=16384,
            backlog=1,  # so that one connection is accepted at a time; see `BoundedProtocol`
        )
        self._server = uvicorn.Server(config)
        self._thread: threading.Thread | None = None
        # not `Thread.join`: interrupted by Ctrl-C, it takes a running thread for one that has ended
        self._ended = threading.Event()

    def start(self) -> Self:
        """Serve in a thread, until `close`."""

        async def serve() -> None:
            asyncio.get_running_loop().set_exception_handler(self._log_error)
            await self._server.serve(sockets=[self._socket])

        def run() -> None:
            try:
                asyncio.run(serve())
            finally:
                self._ended.set()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        self.endpoints.prepare()
        # so that the link answers when it is printed, and `close` finds a server that has begun
        until = time.monotonic() + START_SECONDS
        while not self._server.started and not self._ended.is_set() and time.monotonic() < until:
            time.sleep(0.005)
        self._socket.listen(self._limits.waiting)
        return self

    def _log_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Write an error of the event loop to the bounded log."""
        self._log.error(context["message"], exc_info=context.get("exception"))

    def wait(self) -> None:
        """Wait until the server ends, or Ctrl-C is pressed."""
        try:
            while self._thread is not None and not self._ended.wait(0.5):
                pass
        except KeyboardInterrupt:
            pass
        finally:
            self.close()

    def close(self) -> None:
        """End the server and its threads."""
        if self._running is not None:
            self._running.end()
        self._server.should_exit = True
        if self._thread is not None:
            self._ended.wait(10)
        self.endpoints.close()
        self.session.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *problem: object) -> None:
        self.close()


def require_server_packages() -> None:
    """Raise an error that says what to install if starlette or uvicorn is missing."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ArgumentError(
            "regard view needs starlette and uvicorn; install them with "
            "`pip install 'regard[view]'`"
        ) from error


def view(
    recording: Recording | RunningRecording | str | Path,
    b: Recording | str | Path | None = None,
    *,
    overviews: Overviews | None = None,
    batch: int = 0,
    host: str = "127.0.0.1",
    port: int = 0,
    allow_remote: bool = False,
    lang: str | None = None,
    open_browser: bool = False,
) -> Server:
    """Serve a recording to a browser on this machine, with exact tiles at any length.

    Every tile is computed from q, k and the lse when it is looked at, so that a recording of
    131,072 tokens opens at once. The server answers only requests that carry the token of its
    link. It runs in threads of this process until `close`.

    Args:
        recording: a recording; one whose model still runs, as `regard view` starts it; or the path
            of one that was saved.
        b: a second one to compare with, of another text, model, checkpoint or kernel.
        overviews: overviews of more heads than the recording keeps (`OverviewRecorder`).
        host: the address to listen on.
        port: the port; 0 lets the system choose a free one.
        allow_remote: whether an address other than the loopback is allowed. The connection is not
            encrypted: whoever can read it reads the token.
        lang: language in which the page opens; None is that of the browser.
        open_browser: whether to open the link in the default browser.

    Returns:
        The running server; `server.url` is the link.

    Raises:
        ArgumentError: the address is not the loopback and `allow_remote` is not set; the port is
            taken; nothing was recorded; there is no such row of the batch; or starlette or
            uvicorn is not installed.

    >>> import regard
    >>> recording = regard.inspect.record(regard.load("tiny"), "to be or not to be")
    >>> with regard.inspect.view(recording) as server:
    ...     server.url.startswith("http://127.0.0.1:")
    True
    """
    if host not in LOOPBACK and not allow_remote:
        raise ArgumentError(
            f"host is {host!r}, which other machines can reach; the connection is not encrypted. "
            "Use 127.0.0.1, or allow it with allow_remote=True (--allow-remote)",
            argument="host",
        )
    require_server_packages()
    from regard.inspect.tile_server.session import ViewSession

    running = None
    second = b if b is None or isinstance(b, Recording) else load(b)
    if isinstance(recording, RunningRecording):
        running = recording
        # two recordings are shown one after the other, so the first one must be whole
        first = running.first() if second is None else running.follow()
        overviews = running.overviews
    else:
        first = recording if isinstance(recording, Recording) else load(recording)
    session = ViewSession(first, overviews, b=second, batch=batch)
    if running is not None:
        running.serve(session)
    server = Server(session, host, port, lang, running=running).start()
    if open_browser:
        webbrowser.open(server.url)
    return server
