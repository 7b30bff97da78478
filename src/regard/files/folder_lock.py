"""Who writes where: a folder belongs to one process at a time, and what a killed one left is known
from what is in use.

A lock is the system's own (`flock`) on the folder itself: it needs no file, and it ends with the
process that holds it, however that ends. Where a system or a file system has no such locks, nothing
is refused.
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
"""What the name of a folder begins with while it is being written."""


@contextmanager
def folder_locked(folder: Path) -> Iterator[None]:
    """Keep every other process, and every other part of this one, from locking a folder while the
    block runs.

    Args:
        folder: a folder that exists.

    Raises:
        FileError: it is locked already; or it cannot be opened.

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
    """The error of a folder that another run is writing."""
    return FileError(
        f"{folder} is being written by another run; wait until that ends, or give another folder"
    )


def try_lock(folder: Path) -> int | None:
    """Lock a folder and give the descriptor that holds the lock until it is closed; None if
    somebody else has it.

    Raises:
        OSError: the folder is missing, a link, or no folder, or it was replaced by another one
            meanwhile.
    """
    flags = getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
    # a folder that the user names may be a link; those that are swept may not
    folder = folder if folder.name.startswith(WRITING_PREFIX) else folder.resolve()
    handle = os.open(folder, os.O_RDONLY | flags)
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError:
        pass  # a file system without locks
    if not is_same_folder(handle, folder):
        os.close(handle)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    return handle


def is_same_folder(handle: int, folder: Path) -> bool:
    """Whether a path is still the folder that a descriptor has open."""
    try:
        return os.path.samestat(os.fstat(handle), folder.stat(follow_symlinks=False))
    except OSError:
        return False


def delete_abandoned(folder: Path, name: str | None = None) -> int:
    """Delete the folders that killed writers left; those of living ones, which hold their locks,
    stay.

    Args:
        folder: where to look.
        name: only what was to become a file or folder of this name; None: everything.

    Returns:
        How many were deleted.

    >>> Path(".writing-model-1").mkdir()
    >>> delete_abandoned(Path())
    1
    >>> delete_abandoned(Path("no/such/folder"))
    0
    """
    start = WRITING_PREFIX if name is None else f"{WRITING_PREFIX}{short_label(name)}-"
    try:
        left = [path for path in folder.iterdir() if f"{path.name}-".startswith(start)]
    except OSError:
        return 0
    swept = 0
    for path in left:
        try:
            handle = try_lock(path)
        except OSError:  # gone, or none of ours
            continue
        if handle is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(handle)
            swept += 1
    return swept


def short_label(name: str) -> str:
    """A name as it stands in the name of a folder that is being written: no longer than a file
    system allows.
    """
    whole = name.encode("utf-8", "surrogateescape")
    return name if len(whole) <= 100 else f"{name[:20]}-{zlib.crc32(whole):08x}"
