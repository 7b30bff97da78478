"""Writing a file or a folder whole or not at all: in a folder beside it, synced, then renamed."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from regard.errors import FileError
from regard.files.folder_lock import (
    WRITING_PREFIX,
    delete_abandoned,
    in_use_error,
    is_same_folder,
    short_label,
    try_lock,
)


@contextmanager
def temporary_folder(target: Path, *, alone: bool = False) -> Iterator[Path]:
    """A new folder beside a target, which is gone at the end unless it was renamed; what killed
    writers left is swept.

    Args:
        target: what will be written; its parent folder exists.
        alone: refuse while somebody else is writing the same target; otherwise the last one to
            rename wins.

    Raises:
        FileError: `alone`, and another run writes the target.
        OSError: the folder cannot be made.

    >>> with temporary_folder(Path("model")) as folder:
    ...     _ = (folder / "config.json").write_text("{}")
    ...     _ = folder.rename("model")
    >>> [path.name for path in Path("model").iterdir()]
    ['config.json']
    """
    delete_abandoned(target.parent, target.name)
    made, handle = _locked_new_folder(target, alone=alone)
    try:
        yield made
    finally:
        if is_same_folder(handle, made):
            shutil.rmtree(made, ignore_errors=True)
        os.close(handle)


def _locked_new_folder(target: Path, *, alone: bool) -> tuple[Path, int]:
    """A folder that is there, empty, and locked by this process."""
    while True:
        mark = "" if alone else f"-{secrets.token_hex(4)}"
        made = target.parent / f"{WRITING_PREFIX}{short_label(target.name)}{mark}"
        made.mkdir(exist_ok=alone)
        try:
            handle = try_lock(made)
        except FileNotFoundError:  # swept, or renamed by its owner, before the lock was had
            continue
        if handle is not None:
            return made, handle
        if alone:
            raise in_use_error(target)
        # another writer looks whether this new folder was left behind: take a new name


@contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Where to write a file, which is then synced and put in its place; after an error the old one
    is as it was.

    A file that is replaced keeps its permissions.

    Args:
        path: the file; its folder exists.

    Raises:
        OSError: the disk refuses.

    >>> with write_atomically(Path("notes")) as place:
    ...     _ = place.write_text("whole")
    >>> Path("notes").read_text()
    'whole'
    """
    with temporary_folder(path) as folder:
        made = folder / path.name
        yield made
        if path.exists():
            made.chmod(stat.S_IMODE(path.stat().st_mode))
        sync_to_disk(made)
        made.replace(path)
        sync_to_disk(path.parent)


@contextmanager
def write_user_file(path: Path) -> Iterator[Path]:
    """Write a file whose name a user gave, whole or not at all, and raise the package's own error
    if that fails.

    Raises:
        FileError: as `check_writable`, or the disk refuses.

    >>> with write_user_file(Path("page.html")) as place:
    ...     _ = place.write_text("<p>")
    """
    check_writable(path)
    try:
        with write_atomically(path) as place:
            yield place
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror or error}") from error


def check_is_file_name(path: Path) -> None:
    """Refuse a path that does not name a file of a folder that is there.

    Raises:
        FileError: it is a folder or a device, or its folder is missing.

    >>> check_is_file_name(Path("no such folder/page.html"))
    Traceback (most recent call last):
    regard.errors.FileError: no such folder/page.html: there is no folder
    'no such folder'; make it first
    """
    if path.exists() and not (path.is_dir() or path.is_file()):
        raise FileError(f"{path} is a device or a pipe; give the name of a file")
    if path.is_dir():
        raise FileError(
            f"{path} is a folder; give the name of a file, such as {path / 'page.html'}"
        )
    if not path.parent.is_dir():
        raise FileError(f"{path}: there is no folder {str(path.parent)!r}; make it first")


def check_writable(path: Path) -> None:
    """Refuse a path that cannot be written, before anything is computed.

    Raises:
        FileError: as `check_is_file_name`; or the file or its folder cannot be written.

    >>> check_writable(Path("page.html"))
    """
    check_is_file_name(path)
    if not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise FileError(f"{path} cannot be written: permission denied; choose another place")


def sync_to_disk(path: Path) -> None:
    """Have a file or folder reach the disk: a rename must not be there before what it names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
