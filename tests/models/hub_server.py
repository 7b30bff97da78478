"""A stand-in for the Hugging Face hub on loopback: one repository, whose commits are folders, and
faults on request.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

REPOSITORY = "org/small"
COMMIT, OLDER = "a" * 40, "b" * 40


class Hub:
    """What the server gives, and what it was asked.

    Attributes:
        commits: commit -> the folder with its files.
        refs: branch or tag -> commit.
        asked: method and path of every request, in order.
        broken: file -> how it is sent: "short" never sends its second half; an int is a status
            without a body.
        gated: whether nobody may read it.
    """

    def __init__(self, folder: Path) -> None:
        self.commits = {COMMIT: folder}
        self.refs = {"main": COMMIT}
        self.asked: list[str] = []
        self.broken: dict[str, str | int] = {}
        self.gated = False
        self.url = ""

    def files(self, ref: str) -> dict[str, Path] | None:
        """The files of a branch, a tag or a commit, by their names; None if there is none."""
        folder = self.commits.get(self.refs.get(ref, ref))
        if folder is None:
            return None
        return {str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_file()}

    @property
    def downloaded(self) -> set[str]:
        """The files whose bytes were asked for."""
        return {
            path.split("/", 5)[-1]
            for method, path in (asked.split(" ", 1) for asked in self.asked)
            if method == "GET" and "/resolve/" in path
        }


class Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it."""

    def _answer(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        api, resolve = f"/api/models/{REPOSITORY}", f"/{REPOSITORY}/resolve/"
        if self.hub.gated:
            self._fail(403, "GatedRepo")
        elif path in (api, f"{api}/revision/main") or path.startswith(f"{api}/revision/"):
            self._info(path.rpartition("/revision/")[2] if "/revision/" in path else "main")
        elif path.startswith(f"{api}/tree/"):
            self._tree(path.removeprefix(f"{api}/tree/"))
        elif path.startswith(resolve):
            commit, _, name = path.removeprefix(resolve).partition("/")
            self._file(commit, name, body=body)
        else:
            self._fail(404, "RepoNotFound")

    def _info(self, ref: str) -> None:
        files = self.hub.files(ref)
        if files is None:
            return self._fail(404, "RevisionNotFound")
        sha = self.hub.refs.get(ref, ref)
        siblings = [{"rfilename": name} for name in files]
        return self._json(
            {"id": REPOSITORY, "modelId": REPOSITORY, "sha": sha, "siblings": siblings}
        )

    def _tree(self, ref: str) -> None:
        files = self.hub.files(ref)
        if files is None:
            return self._fail(404, "RevisionNotFound")
        return self._json(
            [
                {"type": "file", "path": name, "size": path.stat().st_size, "oid": etag(path)}
                for name, path in files.items()
            ]
        )

    def _file(self, ref: str, name: str, *, body: bool) -> None:
        files = self.hub.files(ref)
        if files is None or name not in files:
            return self._fail(404, "RevisionNotFound" if files is None else "EntryNotFound")
        how, content = self.hub.broken.get(name), files[name].read_bytes()
        if isinstance(how, int):
            return self._fail(how, "")
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{etag(files[name])}"')
        self.send_header("X-Repo-Commit", self.hub.refs.get(ref, ref))
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if body:
            end = len(content) // 2 if how == "short" else len(content)
            self.wfile.write(content[start:end])
        return None

    def _json(self, found: Any) -> None:
        content = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _fail(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", "a stand-in says so")
        self.send_header("Content-Length", "0")
        self.end_headers()


def etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextmanager
def serving(folder: Path) -> Iterator[Hub]:
    """A hub that gives this folder, on a port of its own of the loopback."""
    hub = Hub(folder)
    handler = type("Own", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
