"""Locks on folders: one process at a time writes a folder, and folders that killed processes left
behind are distinguished from those in use.

A lock is the system's `flock` on the folder itself: it needs no extra file, and it ends with the
process that holds it. On a system or file system without such locks, no folder is refused.
"""

from __future__ import annotations

import errno
import os
import shutil
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
    """Lock a folder while the block runs, against other processes and other parts of this one.

    Args:
        folder: an existing folder.

    Yields:
        None.

    Raises:
        FileError: the folder is locked already, or cannot be opened.

    >>> with folder_locked(Path()):
    ...     with folder_locked(Path()):
    ...         pass
    Traceback (most recent call last):
    regard.errors.FileError: . is being written by another run; wait until that
    ends, or give another folder
    """
    try:
        handle = try_lock(folder)
    except OSError as error:
        raise FileError(f"{folder} cannot be locked: {error.strerror or error}") from error
    if handle is None:
        raise in_use_error(folder)
    try:
        yield
    finally:
        os.close(handle)


def in_use_error(folder: Path) -> FileError:
    """Return the error for a folder that another process is writing."""
    return FileError(
        f"{folder} is being written by another run; wait until that ends, or give another folder"
    )


def try_lock(folder: Path) -> int | None:
    """Lock a folder, and return the file descriptor that holds the lock until it is closed.

    Returns:
        The descriptor; None if the folder is locked already.

    Raises:
        OSError: the folder is missing, a link, or not a folder, or was replaced in the meantime.
    """
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
    """Delete the folders that killed processes left behind; folders in use are locked, and stay.

    Args:
        folder: the folder to search.
        name: delete only what was to become a file or folder of this name; None means everything.

    Returns:
        The number of deleted folders.

    >>> Path(".writing-model-1").mkdir()
    >>> delete_abandoned(Path())
    1
    >>> delete_abandoned(Path("no/such/folder"))
    0
    """
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
