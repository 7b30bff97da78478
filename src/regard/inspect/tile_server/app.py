"""The web application behind `regard view`: who may ask, what may be asked, and how much at once.

The server binds the loopback, but every page in the reader's browser can reach the loopback too.
So each request is checked before anything else: its method, its Host (DNS rebinding), its Origin
and Sec-Fetch-Site (other pages), and, except for the empty page itself, a token of 256 bits that
only the printed link contains, in its fragment, which browsers send to no server. No path of a
request reaches the file system, indices are checked against the recording, and requests that a
browser has given up are dropped before they are computed.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from regard.inspect.tile_server.head_overviews import METRICS
from regard.inspect.tile_server.page_answers import (
    audit_facts,
    column_weights,
    describe_cell,
    describe_column,
    describe_row,
    encode_overview,
    encode_tile,
    encode_weights,
    page_facts,
    progress_facts,
    row_weights,
)
from regard.inspect.tile_server.session import ViewSession
from regard.view.page import to_page_value

MAX_QUEUE = 64
"""Requests that may wait or be computed at once; more are answered with 429."""
MAX_QUERY = 200
MAX_PATH = 200
THREADS = 2
HEADS_AT_ONCE = 64
"""Number of overviews in one answer."""

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


class Policy(NamedTuple):
    """Which requests are answered; `hosts` are the values of Host, with the port."""

    token: str
    hosts: frozenset[str]
    content: str

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return the status and the reason for which a request is refused, or None."""
        headers: dict[str, str] = {}
        for raw, value in scope["headers"]:
            name = raw.decode("latin-1").lower()
            if name in headers and name in ("host", "origin", "authorization"):
                return 403, f"the header {name} stands there twice"
            headers[name] = value.decode("latin-1")
        if scope["method"] != "GET":
            return 405, "only GET is answered"
        if headers.get("host", "") not in self.hosts:
            return 403, "the Host is not that of the printed link"
        origin = headers.get("origin")
        if origin is not None and origin.removeprefix("http://") not in self.hosts:
            return 403, "another origin asks"
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return 403, "another site asks"
        if len(scope["path"]) > MAX_PATH or len(scope.get("query_string", b"")) > 4 * MAX_QUERY:
            return 414, "the address is too long"
        if scope["path"] == "/":
            return None  # the page without data; the token stands in the fragment of its address
        scheme, _, given_token = headers.get("authorization", "").partition(" ")
        same = secrets.compare_digest(given_token.encode(), self.token.encode())
        if scheme != "Bearer" or not same:
            return 403, "the token is missing or wrong; open the printed link"
        return None


def guarded(app: Application, policy: Policy) -> Application:
    """Return an application with the policy's refusals, and with protective headers."""
    headers = [
        (b"content-security-policy", policy.content.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"x-frame-options", b"DENY"),
        (b"referrer-policy", b"no-referrer"),
        (b"cross-origin-resource-policy", b"same-origin"),
        (b"cross-origin-opener-policy", b"same-origin"),
        (b"cache-control", b"no-store"),
    ]

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await app(scope, receive, send)
            return
        if scope["type"] != "http":  # there are no sockets here
            return

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *headers]
            await send(message)

        refused = policy.refusal(scope)
        if refused is not None:
            status, why = refused
            response = JSONResponse({"error": why}, status)
            await response(scope, receive, send_with_headers)
            return
        await app(scope, receive, send_with_headers)

    return answer


class Endpoints:
    """Answers questions about a session in threads; at most `max_queue` requests wait."""

    def __init__(self, session: ViewSession, page: str, *, max_queue: int = MAX_QUEUE) -> None:
        self._session, self._page, self._max_queue = session, page, max_queue
        self._pool = ThreadPoolExecutor(THREADS, "regard-view", self._begin_thread)
        self._queued = 0
        self._facts: tuple[int, Response] | None = None
        self._making_facts = threading.Lock()
        self.dropped = 0

    @staticmethod
    def _begin_thread() -> None:
        """Give each thread of the pool one core, because both compute at once."""
        torch.set_num_threads(1)

    def routes(self) -> list[Route]:
        """Return the routes of the application."""
        cell = "{place:int}/{head:int}/{i:int}/{j:int}"
        one = "{place:int}/{head:int}/{at:int}"
        tile = "{place:int}/{head:int}/{level:int}/{i:int}/{j:int}"
        return [
            Route("/", self._answer_page),
            Route("/meta", self._meta),
            Route("/progress", self._progress),
            Route(f"/tile/{tile}", self._answer_tile),
            Route(f"/row/{one}", partial(self._row, make=describe_row)),
            Route(f"/column/{one}", partial(self._column, make=describe_column)),
            Route(f"/row-weights/{one}", partial(self._row, make=row_weights)),
            Route(f"/column-weights/{one}", partial(self._column, make=column_weights)),
            Route(f"/cell/{cell}", self._cell),
            Route("/heads/{first:int}", self._heads),
            Route("/audit/{place:int}", self._audit),
        ]

    def close(self) -> None:
        """End the threads that compute answers."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def prepare(self) -> None:
        """Compute what a page asks for first, before it asks."""
        for work in (self._make_facts, self._session.prepare):
            self._pool.submit(work)

    def _make_facts(self) -> Response:
        """Return the answer with the facts about the recording, which is made once a version."""
        with self._making_facts:
            version = self._session.version
            if self._facts is None or self._facts[0] != version:
                self._facts = version, _response(page_facts(self._session))
            return self._facts[1]

    async def _answer_page(self, request: Request) -> Response:
        """Answer with the page, which contains no data."""
        return HTMLResponse(self._page)

    async def _meta(self, request: Request) -> Response:
        """Answer with the places, heads and texts of the recording."""
        return await self._answer(request, self._make_facts)

    async def _progress(self, request: Request) -> Response:
        """Answer with the number of places, what is still to come, and the most notable weight."""
        return await self._answer(request, lambda: progress_facts(self._session))

    async def _answer_tile(self, request: Request) -> Response:
        """Answer with a tile: exact, or the best that is known so far."""
        place, head = self._head(request)
        level, i, j = self._tile(request, place, head)
        return await self._answer(
            request, lambda: encode_tile(self._session.tile(place, head, level, i, j), level)
        )

    async def _row(self, request: Request, make: Callable[..., Any]) -> Response:
        """Answer with what a function says of a query."""
        tiles = self._session.head(*self._head(request))
        i = _index("row", request.path_params["at"], tiles.T)
        return await self._answer(request, lambda: make(tiles, i))

    async def _column(self, request: Request, make: Callable[..., Any]) -> Response:
        """Answer with what a function says of a key."""
        tiles = self._session.head(*self._head(request))
        j = _index("column", request.path_params["at"], tiles.N)
        return await self._answer(request, lambda: make(tiles, j))

    async def _cell(self, request: Request) -> Response:
        """Answer with the chain of numbers of a cell."""
        tiles = self._session.head(*self._head(request))
        i = _index("row", request.path_params["i"], tiles.T)
        j = _index("column", request.path_params["j"], tiles.N)
        return await self._answer(request, lambda: describe_cell(tiles, i, j))

    async def _heads(self, request: Request) -> Response:
        """Answer with the overviews of some heads: their number, and each as `encode_overview`."""
        first = request.path_params["first"]
        keys = self._session.all_heads()[first : first + HEADS_AT_ONCE]
        if not keys:
            raise HTTPException(404, f"there is no head number {first}")

        def make() -> bytes:
            parts = [len(keys).to_bytes(4, "little"), len(METRICS).to_bytes(4, "little")]
            for place, head in keys:
                parts.append(encode_overview(self._session.overview(place, head)))
            return b"".join(parts)

        return await self._answer(request, make)

    async def _audit(self, request: Request) -> Response:
        """Answer with the audit of a place."""
        place = _index("place", request.path_params["place"], len(self._session.places))
        return await self._answer(request, lambda: audit_facts(self._session, place))

    async def _answer(self, request: Request, make: Callable[[], object]) -> Response:
        """Compute an answer in the pool; drop it if the browser gives up before it begins."""
        if self._queued >= self._max_queue:
            raise HTTPException(429, f"{self._queued} requests wait already; ask again later")
        given_up = threading.Event()

        def run() -> Response:
            if given_up.is_set():
                self.dropped += 1
                return Response()
            with self._session:
                return _response(make())

        self._queued += 1
        try:
            future = asyncio.get_running_loop().run_in_executor(self._pool, run)
            while not (await asyncio.wait({future}, timeout=0.05))[0]:
                if await request.is_disconnected():
                    given_up.set()
            return await future
        finally:
            self._queued -= 1

    def _head(self, request: Request) -> tuple[int, int]:
        """Return the place and the head of a request, or refuse it."""
        place = _index("place", request.path_params["place"], len(self._session.places))
        head = request.path_params["head"]
        if head not in self._session.places[place].heads:
            raise HTTPException(404, f"head {head} was not recorded at this place")
        return place, head

    def _tile(self, request: Request, place: int, head: int) -> tuple[int, int, int]:
        """Return level and indices of a tile, or refuse it."""
        tiles = self._session.head(place, head)
        level = _index("level", request.path_params["level"], tiles.top_level + 1)
        size = 256 << level
        i = _index("tile row", request.path_params["i"], max(1, -(-tiles.T // size)))
        j = _index("tile column", request.path_params["j"], max(1, -(-tiles.N // size)))
        return level, i, j


def application(
    session: ViewSession, page: str, policy: Policy, *, max_queue: int = MAX_QUEUE
) -> tuple[Application, Endpoints]:
    """Return the application and its endpoints."""
    endpoints = Endpoints(session, page, max_queue=max_queue)
    app = Starlette(
        routes=endpoints.routes(),
        exception_handlers={HTTPException: _error, Exception: _failure},
    )
    return guarded(app, policy), endpoints


def _index(name: str, index: int, count: int) -> int:
    """Return an index from 0 to count - 1, or refuse the request."""
    if not 0 <= index < count:
        raise HTTPException(404, f"{name} is {index}; it must be from 0 to {count - 1}")
    return index


def _response(answer: object) -> Response:
    """Return bytes and weights as they are, and all else as JSON, without numbers that it lacks."""
    if isinstance(answer, Response):
        return answer
    if isinstance(answer, torch.Tensor):
        answer = encode_weights(answer)
    if isinstance(answer, bytes):
        return Response(answer, media_type="application/octet-stream")
    return Response(
        json.dumps(to_page_value(answer), allow_nan=False), media_type="application/json"
    )


async def _error(_request: Request, error: Exception) -> Response:
    """Answer a request that was refused, with the reason."""
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": str(error.detail)}, error.status_code)


async def _failure(_request: Request, _error: Exception) -> Response:
    """Answer a failed request without its details, which stay in the terminal."""
    return JSONResponse({"error": "the server failed; its terminal says why"}, 500)
