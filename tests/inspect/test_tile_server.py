"""The server of `regard view` against strangers: hosts, origins, tokens, methods, paths, floods;
and what it answers to the reader.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.errors import ArgumentError
from regard.inspect import Recording
from regard.view.page import content_policy, tile_page

starlette = pytest.importorskip("starlette")
pytest.importorskip("httpx2")
pytest.importorskip("uvicorn")

from starlette.testclient import TestClient  # noqa: E402

from regard.inspect.tile_server.app import Policy, application  # noqa: E402
from regard.inspect.tile_server.connections import (  # noqa: E402
    LOG_LINES,
    BoundedProtocol,
    Limits,
    bounded_log,
)
from regard.inspect.tile_server.page_answers import HEADER, page_facts  # noqa: E402
from regard.inspect.tile_server.running import RunningRecording  # noqa: E402
from regard.inspect.tile_server.serve import Server  # noqa: E402
from regard.inspect.tile_server.session import ViewSession  # noqa: E402

TOKEN = "t" * 43
HOST = "127.0.0.1:8123"
READER = {"Authorization": f"Bearer {TOKEN}", "Host": HOST}
TEXT = "to be or not to be"


@pytest.fixture(scope="module")
def recording() -> Recording:
    return regard.inspect.record(regard.load("tiny"), TEXT)


@contextlib.contextmanager
def served(session: ViewSession, **options: Any) -> Iterator[TestClient]:
    """A client of the application of a session."""
    page = tile_page()
    policy = Policy(TOKEN, frozenset({HOST, "localhost:8123"}), content_policy(page))
    app, endpoints = application(session, page, policy, **options)
    with TestClient(app, base_url=f"http://{HOST}", raise_server_exceptions=False) as running:
        yield running
    endpoints.close()
    session.close()


@pytest.fixture(scope="module")
def client(recording: Recording) -> Iterator[TestClient]:
    with served(ViewSession(recording)) as running:
        yield running


MINE = {"Host": HOST}
STRANGERS: dict[str, dict[str, str]] = {
    "another host (DNS rebinding)": READER | {"Host": "evil.example:8123"},
    "another port": READER | {"Host": "127.0.0.1:80"},
    "no port": READER | {"Host": "127.0.0.1"},
    "empty host": READER | {"Host": ""},
    "another origin": READER | {"Origin": "http://evil.example"},
    "an encrypted origin": READER | {"Origin": f"https://{HOST}"},
    "null origin": READER | {"Origin": "null"},
    "another site": READER | {"Sec-Fetch-Site": "cross-site"},
    "a site beside": READER | {"Sec-Fetch-Site": "same-site"},
    "no token": MINE,
    "a wrong token": MINE | {"Authorization": "Bearer wrong"},
    "half a token": MINE | {"Authorization": f"Bearer {TOKEN[:-1]}"},
    "an empty token": MINE | {"Authorization": "Bearer "},
    "another scheme": MINE | {"Authorization": f"Basic {TOKEN}"},
    "the token in a cookie": MINE | {"Cookie": f"token={TOKEN}"},
}


@pytest.mark.parametrize("who", STRANGERS)
def test_a_stranger_is_refused(client: TestClient, who: str) -> None:
    answer = client.get("/meta", headers=STRANGERS[who])
    assert answer.status_code == 403
    assert set(answer.json()) == {"error"}
    assert "access-control-allow-origin" not in answer.headers
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_the_reader_is_answered(client: TestClient) -> None:
    same = {"Origin": f"http://{HOST}"}
    for more in ({}, same, {"Sec-Fetch-Site": "same-origin"}, {"Host": "localhost:8123"}):
        assert client.get("/meta", headers=READER | more).status_code == 200
    token_in_query = client.get(f"/meta?token={TOKEN}", headers={"Host": HOST})
    assert token_in_query.status_code == 403, "an address is written to logs; a header is not"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
def test_only_get_is_answered(client: TestClient, method: str) -> None:
    assert client.request(method, "/meta", headers=READER).status_code == 405


def test_every_answer_has_the_headers(client: TestClient) -> None:
    for path in ("/", "/meta", "/nowhere", "/tile/0/0/0/0/0"):
        headers = client.get(path, headers=READER).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["cache-control"] == "no-store"
        assert "frame-ancestors 'none'" in headers["content-security-policy"]


def test_the_page_itself_contains_no_data(client: TestClient) -> None:
    page = client.get("/", headers={"Host": HOST})
    assert page.status_code == 200
    assert TOKEN not in page.text
    assert "·be" not in page.text
    policy = page.headers["content-security-policy"]
    assert "unsafe" not in policy
    assert re.findall(r"script-src [^;]+", policy)[0].count("'sha256-") == 1
    assert set(re.findall(r"https?://[^\s\"'`]*", page.text)) == {"http://www.w3.org/2000/svg"}
    assert client.get("/", headers={"Host": "evil.example"}).status_code == 403


PATHS = (
    "/../etc/passwd",
    "/%2e%2e/%2e%2e/etc/passwd",
    "/static/..%2f..%2fetc%2fpasswd",
    "//etc/passwd",
    "/tile/0/0/0/0/..%2f..%2fx",
    "/tile/0/0/0/0/%00",
    "/tile/-1/0/0/0/0",
    "/tile/0/0/0/0",
    "/tile/99/0/0/0/0",
    "/tile/0/99/0/0/0",
    "/tile/0/0/9/0/0",
    "/tile/0/0/0/1/0",
    "/tile/0/0/0/0/99999999999999999999",
    "/row/0/0/6",
    "/column/0/0/6",
    "/cell/0/0/6/0",
    "/cell/0/0/0/1e9",
    "/heads/32",
    "/audit/4",
    "/favicon.ico",
    "/docs",
    "/openapi.json",
)


@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_is_none_finds_nothing(client: TestClient, path: str) -> None:
    answer = client.get(path, headers=READER)
    assert answer.status_code == 404
    assert "root:" not in answer.text


def test_an_address_has_a_limit(client: TestClient) -> None:
    assert client.get("/" + "x" * 300, headers=READER).status_code == 414
    assert client.get("/meta?q=" + "x" * 900, headers=READER).status_code == 414


def test_answers_are_the_recordings(client: TestClient, recording: Recording) -> None:
    meta = client.get("/meta", headers=READER).json()
    assert [place["name"] for place in meta["places"]] == list(recording.places)
    assert meta["texts"][0] == list(recording.pieces)
    tile = client.get("/tile/1/2/0/0/0", headers=READER).content
    assert HEADER.unpack(tile[: HEADER.size])[:5] == (b"RGT1", 1, 0, 6, 6)
    cell = client.get("/cell/1/2/5/3", headers=READER).json()
    assert cell["weight"] == pytest.approx(float(recording.weights(1, 2)[5, 3]), rel=1e-12)
    row = client.get("/row/1/2/5", headers=READER).json()
    assert row["seen"] == 6
    assert client.get("/column/1/2/0", headers=READER).json()["seen"] == 6
    assert len(client.get("/row-weights/1/2/5", headers=READER).content) == HEADER.size + 24
    assert len(client.get("/column-weights/1/2/5", headers=READER).content) == HEADER.size + 24
    heads = client.get("/heads/0", headers=READER).content
    assert int.from_bytes(heads[:4], "little") == 32
    audit = client.get("/audit/1", headers=READER).json()
    assert audit["sound"]


def test_a_flood_is_refused(recording: Recording) -> None:
    """Of 40 requests at once, while both threads are busy, 8 wait and the others get 429."""
    session, hold = ViewSession(recording), threading.Event()
    original = session.tile

    def slow(*where: Any) -> Any:
        hold.wait(20)
        return original(*where)

    session.tile = slow  # type: ignore[method-assign]
    codes: list[int] = []
    with served(session, max_queue=8) as flooded:

        def ask() -> None:
            codes.append(flooded.get("/tile/0/0/0/0/0", headers=READER).status_code)

        threads = [threading.Thread(target=ask) for _ in range(40)]
        for thread in threads:
            thread.start()
        until = time.monotonic() + 20
        while len(codes) < 32 and time.monotonic() < until:
            time.sleep(0.01)
        refused = list(codes)
        hold.set()
        for thread in threads:
            thread.join(30)
        assert refused == [429] * 32
        assert sorted(codes) == [200] * 8 + [429] * 32
        assert flooded.get("/tile/0/0/0/0/0", headers=READER).status_code == 200


def test_a_failure_does_not_tell_its_details(recording: Recording) -> None:
    session = ViewSession(recording)

    def fail(*where: Any) -> Any:
        raise ValueError("a secret")

    session.tile = fail  # type: ignore[method-assign]
    with served(session) as client:
        answer = client.get("/tile/0/0/0/0/0", headers=READER)
    assert answer.status_code == 500
    assert "secret" not in answer.text


def status(url: str, token: str | None = None) -> int:
    """The status of the answer of a running server."""
    request = urllib.request.Request(url)
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_the_link_of_a_running_server(recording: Recording) -> None:
    with regard.inspect.view(recording) as server:
        found = re.fullmatch(r"http://127\.0\.0\.1:\d+/#token=([\w-]{43})", server.url)
        assert found is not None, "256 bits, in the fragment"
        assert status(f"{server.origin}/meta") == 403
        assert status(f"{server.origin}/meta", found[1]) == 200
        second = regard.inspect.view(recording)
        assert second.token != server.token
        second.close()
        with pytest.raises(ArgumentError, match=r"cannot listen on 127\.0\.0\.1 port"):
            regard.inspect.view(recording, port=int(server.origin.rpartition(":")[2]))
    with pytest.raises(urllib.error.URLError):
        status(f"{server.origin}/meta")


def test_silent_connections_neither_stay_nor_lock_the_reader_out(recording: Recording) -> None:
    """Of 200 connections without a whole request, 8 are held; the reader is answered beside them;
    after the limit, none is left.
    """
    limits = Limits(connections=8, idle_seconds=3.0, head_seconds=2.0)
    with Server(ViewSession(recording), "127.0.0.1", 0, "en", limits) as server:
        address = ("127.0.0.1", int(server.origin.rpartition(":")[2]))
        beginnings = (b"", b"GET /meta HTTP/1.1\r\nHost: a", b"GET / HTTP/1.1\r\n")
        silent = []
        for n in range(200):
            silent.append(socket.create_connection(address, timeout=20))
            silent[-1].sendall(beginnings[n % 3])
        assert status(f"{server.origin}/meta", server.token) == 200
        with contextlib.suppress(ConnectionResetError):
            assert silent[0].recv(1) == b"", "the oldest is closed for a newer one"
        for one in silent:  # the server closes every one of them
            with one, contextlib.suppress(ConnectionResetError):
                assert one.recv(1) == b""
        assert status(f"{server.origin}/meta", server.token) == 200


def read_slowly(address: tuple[str, int], host: str) -> socket.socket:
    """Send a hundred requests for the page, and read no answer."""
    one = socket.socket()
    one.settimeout(20)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.connect(address)
    request = f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode() * 100
    with contextlib.suppress(ConnectionResetError):
        one.sendall(request)
    return one


def test_who_reads_no_answer_leaves_the_place_to_others(recording: Recording) -> None:
    """Each place is taken by one who is being answered and does not read; the server waits with the
    rest of the answer, and gives one of the places away.
    """
    with Server(ViewSession(recording), "127.0.0.1", 0, "en", Limits(connections=4)) as server:
        host = server.origin.removeprefix("http://")
        address = ("127.0.0.1", int(host.rpartition(":")[2]))
        deaf = [read_slowly(address, host) for _ in range(4)]
        held = server._server.server_state.connections
        until = time.monotonic() + 20
        while sum(x.flow.write_paused for x in list(held)) < 4 and time.monotonic() < until:
            time.sleep(0.01)
        assert [x.flow.write_paused for x in list(held)] == [True] * 4
        assert status(f"{server.origin}/meta", server.token) == 200
    for one in deaf:
        one.close()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_connections_are_accepted_one_at_a_time(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of fifty that come at once, the server has few more open at any time than its limit."""
    counted, connection_made = list[int](), BoundedProtocol.connection_made

    def count(protocol: BoundedProtocol, transport: Any) -> None:
        counted.append(open_files())
        connection_made(protocol, transport)

    monkeypatch.setattr(BoundedProtocol, "connection_made", count)
    with Server(ViewSession(recording), "127.0.0.1", 0, "en", Limits(connections=4)) as server:
        address = ("127.0.0.1", int(server.origin.rpartition(":")[2]))
        all_are_there = threading.Event()
        server._server.servers[0].get_loop().call_soon_threadsafe(all_are_there.wait)
        waiting = [socket.create_connection(address, timeout=20) for _ in range(50)]
        before = open_files()
        all_are_there.set()
        assert status(f"{server.origin}/meta", server.token) == 200
    for one in waiting:
        one.close()
    assert len(counted) == 51
    assert max(counted[:50]) - before <= 3 * 4, "some have ended, and are not closed yet"


@pytest.mark.full
def test_two_thousand_silent_connections_are_survived(tmp_path: Path) -> None:
    """The command with few file descriptors, half of the connections silent, half of them
    slowloris: pages are served, no connection in excess is held, nothing spins or fills the log.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 2300:
        pytest.skip(f"this process may open {hard} files, fewer than 2,300")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard > 0 else 4096, hard))
    log = tmp_path / "log"
    command = [sys.executable, "-m", "regard", "view", "tiny", TEXT]
    begin = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (96, {hard})); "
    run = f"import os, sys; os.execv(sys.executable, {command!r})"
    with log.open("wb") as heard:
        process = subprocess.Popen(
            [sys.executable, "-c", begin + run], stdout=subprocess.PIPE, stderr=heard
        )
    assert process.stdout is not None
    silent = []
    try:
        found = None
        while found is None:
            line = process.stdout.readline()
            assert line, log.read_text()
            found = re.search(rb"http://(127\.0\.0\.1:(\d+))/#token=(\S+)", line)
        host, token = found[1].decode(), found[3].decode()
        for n in range(2000):
            silent.append(socket.create_connection(("127.0.0.1", int(found[2])), timeout=60))
            if n % 2:
                silent[-1].sendall(b"GET / HTTP/1.1\r\nX: ")
        before = processor_seconds(process.pid)
        for _ in range(5):
            for one in silent[1::2]:
                with contextlib.suppress(OSError):
                    one.sendall(b"y")
            assert status(f"http://{host}/", token) == 200
            assert status(f"http://{host}/meta", token) == 200
            time.sleep(0.4)
        spent = processor_seconds(process.pid) - before
        assert spent < 1.0, "two seconds of silence, and ten pages"
        assert len(list(Path(f"/proc/{process.pid}/fd").iterdir())) < 60, (
            "24 connections, and the rest"
        )
        assert log.stat().st_size < 2000, log.read_text()[:2000]
    finally:
        for one in silent:
            one.close()
        process.send_signal(signal.SIGINT)
        process.stdout.close()
        assert process.wait(60) == 0
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "Traceback" not in log.read_text()


def processor_seconds(process: int) -> float:
    """Processor time of a process, in seconds."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_the_log_of_a_server_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    log = bounded_log()
    for n in range(5 * LOG_LINES):
        log.error("fault %d", n)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == LOG_LINES
    assert said[0] == "fault 0"
    assert said[-1] == f"fault {LOG_LINES - 1} (later errors are not printed)"
    bounded_log().error("another server")
    assert caplog.records[-1].getMessage() == "another server"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host": "0.0.0.0"}, r"host is '0\.0\.0\.0', which other machines can reach"),
        ({"batch": 1}, r"batch is 1; layers\.0 has batch rows 0 to 0"),
    ],
)
def test_what_cannot_be_served(recording: Recording, options: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        regard.inspect.view(recording, **options)
    with pytest.raises(ArgumentError, match="contains no attention call"):
        regard.inspect.view(replace(recording, places={}))


def test_layers_are_served_while_the_model_runs() -> None:
    model, held = regard.load("tiny"), threading.Event()
    hook = model.decoder.layers[2].register_forward_pre_hook(lambda *_: held.wait() and None)
    running = RunningRecording(model, TEXT, {"places": None, "heads": None})
    try:
        first = running.first()
        assert set(first.places) <= {"layers.0", "layers.1"}
        session = ViewSession(first, running.overviews)
        running.serve(session)
        with served(session) as client:
            meta = client.get("/meta", headers=READER).json()
            assert meta["texts"][0] == list(first.pieces)
            assert meta["progress"]["expected"] == 4
            assert client.get("/tile/0/2/0/0/0", headers=READER).status_code == 200
            assert client.get("/tile/3/2/0/0/0", headers=READER).status_code == 404
            held.set()
            whole = running.follow()
            assert client.get("/progress", headers=READER).json()["expected"] == 0
            assert client.get("/tile/3/2/0/0/0", headers=READER).status_code == 200
            names = [x["name"] for x in client.get("/meta", headers=READER).json()["places"]]
            assert names == [f"layers.{n}" for n in range(4)]
    finally:
        held.set()
        hook.remove()
        running.end()
    alone = regard.inspect.record(model, TEXT)
    assert torch.equal(whole.weights(3, 2), alone.weights(3, 2))


def test_a_run_that_fails_says_so() -> None:
    running = RunningRecording(regard.load("tiny"), TEXT, {"places": [9], "heads": None})
    with pytest.raises(ArgumentError, match=r"no calls at the places \[9\]"):
        running.first()


def test_a_place_that_goes_on_is_served_anew() -> None:
    q = k = torch.eye(4)[None, None]
    with regard.inspect.Recorder(keep=()) as recorder:
        regard.attend(q[:, :, :2], k[:, :, :2], k[:, :, :2], mask=regard.masks.Causal())
        session = ViewSession(recorder.recording())
        assert session.tile(0, 0, 0, 0, 0).max.shape == (2, 2)  # type: ignore[union-attr]
        positions = torch.arange(2, 4)[None]
        regard.attend(q[:, :, 2:], k, k, mask=regard.masks.Causal(), q_positions=positions)
    before = session.version
    session.arrived(recorder.recording(), 0)
    assert session.version > before
    assert session.tile(0, 0, 0, 0, 0).max.shape == (4, 4)  # type: ignore[union-attr]


def test_hostile_tokens_travel_as_escaped_json(recording: Recording) -> None:
    hostile = ("</script><script>x", "\u202etfel", "nul\x00", "\u200b", "<img onerror=x>", "a\nb")
    with served(ViewSession(replace(recording, pieces=hostile))) as client:
        answer = client.get("/meta", headers=READER)
    assert answer.headers["content-type"] == "application/json"
    texts = json.loads(answer.content)["texts"][0]
    assert texts[0] == hostile[0], "markup is data here; the page inserts it as text"
    assert texts[1] == "‹202E›tfel"
    assert "\x00" not in texts[2]


def test_two_recordings_are_served_one_after_the_other(recording: Recording) -> None:
    other = regard.inspect.record(regard.load("tiny"), "to see or not")
    session = ViewSession(recording, b=other)
    names = list(recording.places)
    assert session.names == [*names, *other.places]
    assert session.sources == [0] * len(names) + [1] * len(names)
    facts = page_facts(session)
    assert len(facts["sources"]) == 2
    assert [place["source"] for place in facts["places"]] == session.sources
    last = facts["places"][-1]
    assert facts["texts"][last["k_text"]] == list(other.pieces)
    tile = session.tile(len(names), 0, 0, 0, 0)
    assert tile is not None
    assert float(tile.max[3, 2]) == pytest.approx(float(other.weights(0, 0)[3, 2]), rel=1e-5)
    session.close()
    with pytest.raises(ArgumentError, match="contains no attention call"):
        ViewSession(recording, b=replace(recording, places={}))
