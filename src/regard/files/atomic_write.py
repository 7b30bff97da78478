"""Writing of files and folders completely or not at all: in a temporary folder beside the target,
synced, then renamed, under the system's `flock`, which ends with its process.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from regard.errors import FileError

try:
    import fcntl
except ImportError:  # pragma: no cover  (Windows)
    fcntl = None  # type: ignore[assignment]

WRITING_PREFIX = ".writing-"
"""The prefix of the name of a folder while it is being written."""


@contextmanager
def folder_locked(folder: Path) -> Iterator[None]:
    """Lock a folder while the block runs, against other processes and other parts of this one, and
    delete what killed processes left in it.
    """
    try:
        handle = try_lock(folder)
    except OSError as error:
        raise FileError(f"{folder} cannot be locked: {error.strerror or error}") from error
    if handle is None:
        raise in_use_error(folder)
    try:
        delete_abandoned(folder)
        yield
    finally:
        os.close(handle)


def in_use_error(folder: Path) -> FileError:
    """Return the error for a folder that another process is writing."""
    return FileError(
        f"{folder} is being written by another run; wait until that ends, or give another folder"
    )


def try_lock(folder: Path) -> int | None:
    """Lock a folder, and return the file descriptor that holds the lock until it is closed."""
    flags = getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
    # only a folder that the user named may be a link
    folder = folder if folder.name.startswith(WRITING_PREFIX) else folder.resolve()
    handle = os.open(folder, os.O_RDONLY | flags)
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError:
        pass  # the file system has no locks
    if not is_same_folder(handle, folder):
        os.close(handle)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    return handle


def is_same_folder(handle: int, folder: Path) -> bool:
    """Return whether a path is still the folder that a descriptor has open."""
    try:
        return os.path.samestat(os.fstat(handle), folder.stat(follow_symlinks=False))
    except OSError:
        return False


def delete_abandoned(folder: Path, name: str | None = None) -> int:
    """Delete the folders that killed processes left behind; folders in use are locked, and stay."""
    start = WRITING_PREFIX if name is None else f"{WRITING_PREFIX}{short_label(name)}-"
    try:
        candidates = [path for path in folder.iterdir() if f"{path.name}-".startswith(start)]
    except OSError:
        return 0
    deleted = 0
    for path in candidates:
        try:
            handle = try_lock(path)
        except OSError:  # already deleted, or not created by regard
            continue
        if handle is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(handle)
            deleted += 1
    return deleted


def short_label(name: str) -> str:
    """Return a name for use in a temporary folder's name, shortened to what file systems allow."""
    encoded = name.encode("utf-8", "surrogateescape")
    return name if len(encoded) <= 100 else f"{name[:20]}-{zlib.crc32(encoded):08x}"


@contextmanager
def temporary_folder(target: Path, *, alone: bool = False) -> Iterator[Path]:
    """Create a folder beside a target, and delete it at the end unless it was renamed; what killed
    processes left goes first.
    """
    delete_abandoned(target.parent, target.name)
    folder, handle = _locked_new_folder(target, alone=alone)
    try:
        yield folder
    finally:
        if is_same_folder(handle, folder):
            shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def _locked_new_folder(target: Path, *, alone: bool) -> tuple[Path, int]:
    """Create an empty folder and lock it; return its path and the file descriptor of the lock."""
    while True:
        mark = "" if alone else f"-{secrets.token_hex(4)}"
        folder = target.parent / f"{WRITING_PREFIX}{short_label(target.name)}{mark}"
        folder.mkdir(exist_ok=alone)
        try:
            handle = try_lock(folder)
        except FileNotFoundError:  # deleted or renamed by another process before it was locked
            continue
        if handle is not None:
            return folder, handle
        if alone:
            raise in_use_error(target)
        # another process is checking whether this new folder is abandoned: use a new name


@contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Yield a path to write a file to, then sync and rename it with the old permissions; an error
    leaves the old file.
    """
    with temporary_folder(path) as workspace:
        new_file = workspace / path.name
        yield new_file
        if path.exists():
            new_file.chmod(stat.S_IMODE(path.stat().st_mode))
        sync_to_disk(new_file)
        new_file.replace(path)
        sync_to_disk(path.parent)


@contextmanager
def write_user_file(path: Path) -> Iterator[Path]:
    """Write a file that the user named, completely or not at all."""
    check_writable(path)
    try:
        with write_atomically(path) as place:
            yield place
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror or error}") from error


def check_is_file_name(path: Path) -> None:
    """Raise unless a path names a file in an existing folder."""
    if path.exists() and not (path.is_dir() or path.is_file()):
        raise FileError(f"{path} is a device or a pipe; give the name of a file")
    if path.is_dir():
        raise FileError(
            f"{path} is a folder; give the name of a file, such as {path / 'page.html'}"
        )
    if not path.parent.is_dir():
        raise FileError(f"{path}: there is no folder {str(path.parent)!r}; make it first")


def check_writable(path: Path) -> None:
    """Raise if a path cannot be written, before anything is computed."""
    check_is_file_name(path)
    if not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise FileError(f"{path} cannot be written: permission denied; choose another place")


def sync_to_disk(path: Path) -> None:
    """Flush a file or folder to disk, so that a rename never comes before the contents."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
