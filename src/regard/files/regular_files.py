"""Opening of regular files only: a pipe, device or folder is refused without waiting for it."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from regard.errors import FileError
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
