"""Reading of files of unknown origin: only regular files are opened, and JSON is parsed strictly.

A pipe, device or folder is refused without waiting for it, and so is JSON that only Python accepts.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

from regard.errors import ArgumentError, FileError
from regard.untrusted_text import short_repr

_MAX_NAME_LENGTH = 255
_SHARED_BLOB_NAME = re.compile(r"[0-9a-f]{64}")
"""Names of files in the store that huggingface_hub 2 shares among repositories: SHA-256 hashes."""
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


@dataclass(frozen=True)
class FileState:
    """The device, inode, size and time of a file, which change when it is replaced or written."""

    device: int
    inode: int
    size: int
    changed: int


def checked_path(folder: Path, name: str) -> Path:
    """Return the path of a regular file in a model folder, whose name has no separator, "..", drive
    or control character; a link may only point into its folder or Hugging Face's cache
    (`models--x--y/blobs/`, `blobs/12/1234...`).
    """
    check_file_name(folder, name)
    path = folder / name
    try:
        if path.is_symlink():
            _check_link(path, folder.resolve(strict=True))
        _check_regular(path, path.stat())
    except FileNotFoundError:
        raise FileError(f"{path} is missing") from None
    except FileError:
        raise
    # Python before 3.13 raises RuntimeError for a loop of links
    except (OSError, RuntimeError) as e:
        raise _unreadable(path, e) from e
    return path


def check_file_name(folder: Path, name: str) -> None:
    """Raise if a file name could lead out of its folder."""
    plain = name not in ("", ".", "..") and len(name) <= _MAX_NAME_LENGTH and name.isprintable()
    if not plain or any(mark in name for mark in "/\\:"):
        raise FileError(
            f"{folder}: {short_repr(name)} is not a plain file name; a model's files lie in its "
            "own folder"
        )


def _check_link(path: Path, folder: Path) -> None:
    try:
        target = path.resolve(strict=True)
    except FileNotFoundError:
        raise FileError(
            f"{path} is a link to {short_repr(str(path.readlink()))}, which is missing; is it a "
            "partial download?"
        ) from None
    allowed = [folder]
    for snapshot in (folder, *folder.parents):
        repository = snapshot.parent.parent
        if snapshot.parent.name == "snapshots" and repository.name.startswith("models--"):
            allowed.append(repository / "blobs")
            if _SHARED_BLOB_NAME.fullmatch(target.name):
                allowed.append(repository.parent / "blobs" / target.name[:2])
    if target.parent not in allowed:
        raise FileError(
            f"{path} is a link out of its folder, to {short_repr(str(target))}, and is not "
            f"followed; if that is meant, copy the files: `cp -rL {folder} COPY`"
        )


def _check_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = next((kind for is_kind, kind in _KINDS if is_kind(status.st_mode)), "something else")
        raise FileError(f"{path} is {kind}; it must be a regular file")


def _unreadable(path: Path, error: Exception) -> FileError:
    reason = error.strerror if isinstance(error, OSError) else None
    return FileError(f"{path} cannot be read: {reason or error}")


def checked_path_or_none(folder: Path, name: str) -> Path | None:
    """Return the checked path of an optional file, or None; a broken link counts as an entry."""
    try:
        (folder / name).lstat()
    except (OSError, ValueError):
        return None
    return checked_path(folder, name)


@contextmanager
def open_regular(path: Path) -> Iterator[tuple[FileIO, FileState]]:
    """Open a regular file for reading, unbuffered; a pipe without a writer is refused at once."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        _check_regular(path, path.stat())
        with os.fdopen(os.open(path, flags | getattr(os, "O_CLOEXEC", 0)), "rb", 0) as file:
            status = os.fstat(file.fileno())
            _check_regular(path, status)
            yield file, _state_from_stat(status)
    except FileNotFoundError:
        raise FileError(f"{path} is missing") from None
    except FileError:
        raise
    except OSError as e:
        raise _unreadable(path, e) from e


def file_state(file: FileIO) -> FileState:
    """Return the present state of an open file."""
    return _state_from_stat(os.fstat(file.fileno()))


def _state_from_stat(status: os.stat_result) -> FileState:
    return FileState(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def read_bytes(path: Path, limit: int) -> bytes:
    """Return all bytes of a regular file of at most `limit` bytes."""
    with open_regular(path) as (file, mark):
        if mark.size > limit:
            raise FileError(f"{path} has {mark.size} bytes; at most {limit} are read")
        return read_exactly(file, mark.size, path)


def read_text(path: Path, limit: int) -> str:
    """Return a regular file of at most `limit` bytes as UTF-8 text."""
    try:
        return read_bytes(path, limit).decode("utf-8")
    except UnicodeDecodeError as e:
        raise FileError(f"{path} is not text: not UTF-8 at byte {e.start}") from None


def read_exactly(file: FileIO, count: int, path: Path) -> bytes:
    """Read the next `count` bytes of a file."""
    buffer = bytearray(count)
    read_into(file, memoryview(buffer), path)
    return bytes(buffer)


def read_into(file: FileIO, place: memoryview, path: Path) -> None:
    """Read from a file until a buffer is full; one system call may return less."""
    done = 0
    while done < len(place):
        got = file.readinto(place[done:])
        if not got:
            raise FileError(
                f"{path} ended {len(place) - done} bytes early: it became shorter while it was read"
            )
        done += got


INFINITY = {"__float__": "Infinity"}
"""How a file of transformers has infinity in JSON."""
MAX_DEPTH = 128
"""The deepest nesting of lists and objects."""
MAX_BYTES = 16 << 20
"""The default limit for a JSON file: a config.json with the longest label tables has some 2 MB."""

_MAX_PARTS = 1 << 22  # brackets and commas
_MAX_DIGITS = 20  # digits of the largest unsigned 64-bit number
_MAX_FLOAT_LENGTH = 400  # characters of a number with a fraction or an exponent
# also matches an unterminated string, so that matching takes linear time
_STRING = re.compile(rb'"[^"\\]*(?:\\.?[^"\\]*)*(?:"|\Z)', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_json(
    path: Path, *, limit: int = MAX_BYTES, kind: type[object] = dict, infinity: bool = False
) -> Any:
    """Read a JSON file of bounded size and depth."""
    try:
        return parse_json(read_bytes(path, limit), kind, infinity=infinity)
    except ArgumentError as e:
        raise FileError(f"{path} {e}") from None


def parse_json(raw: bytes, kind: type[object] = dict, *, infinity: bool = False) -> Any:
    """Parse a JSON object or list strictly: UTF-8, no repeated keys, no NaN, bounded numbers and
    nesting, and parts counted first, as Python needs up to 25 bytes per bracket.
    """
    if b"\0" in raw:  # as in a file with holes, of which no copy is made
        raise ArgumentError("is not JSON: it has a zero byte")
    marks = sum(raw.count(mark) for mark in (b"{", b"[", b","))
    if marks > _MAX_PARTS:
        raise ArgumentError(f"has {marks} brackets and commas; at most {_MAX_PARTS} are read")
    if _depth(raw) > MAX_DEPTH:
        raise ArgumentError(f"is nested too deep; at most {MAX_DEPTH} levels are read")
    try:
        value = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_int=_int,
            parse_float=_float,
            parse_constant=_constant_or_infinity if infinity else _constant,
        )
    except ArgumentError:
        raise
    except ValueError as e:  # includes UnicodeDecodeError and JSONDecodeError
        raise ArgumentError(f"is not JSON: {e}") from None
    if not isinstance(value, kind):
        wanted = "an object" if kind is dict else "a list"
        raise ArgumentError(f"is a JSON {type(value).__name__}; it must be {wanted}")
    if _SURROGATE.search(raw):
        broken = next((text for text in _texts(value) if _has_unpaired_surrogate(text)), None)
        if broken is not None:
            raise ArgumentError(f"has an unpaired surrogate in {short_repr(broken)}")
    return value


def _depth(raw: bytes) -> int:
    """Return how deep the brackets outside of strings are nested."""
    brackets = _STRING.sub(b"", raw).translate(None, _NOT_BRACKETS)
    return max(accumulate(1 if mark in b"[{" else -1 for mark in brackets), default=0)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        earlier: set[str] = set()
        repeated = next(key for key, _ in pairs if key in earlier or earlier.add(key))  # type: ignore[func-returns-value]
        raise ArgumentError(f"has the key {short_repr(repeated)} twice")
    return mapping


def _int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ArgumentError(f"has a number of {len(digits)} digits; at most {_MAX_DIGITS} are read")
    return int(digits)


def _float(digits: str) -> float:
    if len(digits) > _MAX_FLOAT_LENGTH or not math.isfinite(number := float(digits)):
        raise ArgumentError(
            f"has the number {short_repr(digits, 20)}, which float64 cannot represent"
        )
    return number


def _constant(name: str) -> NoReturn:
    raise ArgumentError(f"has the constant {name}, which is not JSON")


def _constant_or_infinity(name: str) -> dict[str, str]:
    return dict(INFINITY) if name == "Infinity" else _constant(name)


def _texts(value: object) -> Iterator[str]:
    """Iterate over all strings in a JSON value, including keys."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            pending += [*item, *item.values()]
        elif isinstance(item, list):
            pending += item


def _has_unpaired_surrogate(text: str) -> bool:
    return any("\ud800" <= letter <= "\udfff" for letter in text)
