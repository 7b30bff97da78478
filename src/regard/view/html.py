"""Pages as files: written whole or not at all, and their scripts known by hash."""

from __future__ import annotations

import base64
import hashlib
import os
import tempfile
from pathlib import Path

from regard.errors import FileError


def check_target(path: Path) -> None:
    """Refuse a path that cannot be written, before anything is computed.

    Raises:
        FileError: it is a folder, its folder is missing, or either cannot be written.

    >>> check_target(Path("no such folder/page.html"))
    Traceback (most recent call last):
    regard.errors.FileError: no such folder/page.html: there is no folder 'no such folder'; make it first
    """
    parent = path.parent
    if path.is_dir():
        raise FileError(
            f"{path} is a folder; give the name of a file, such as {path / 'page.html'}"
        )
    if not parent.is_dir():
        raise FileError(f"{path}: there is no folder {str(parent)!r}; make it first")
    if not os.access(parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise FileError(f"{path} cannot be written: permission denied; choose another place")


def write(path: Path, text: str) -> int:
    """Put a whole file in place, or none: write beside it, then rename. Gives the bytes written.

    Raises:
        FileError: as `check_target`, or the disk refuses.
    """
    check_target(path)
    content = text.encode("utf-8")
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            temporary = Path(file.name)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(_mode(path))
        temporary.replace(path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise FileError(f"{path} cannot be written: {error.strerror or error}") from error
    return len(content)


def _mode(path: Path) -> int:
    """The permissions of the file that is replaced, or those of a new one."""
    if path.exists():
        return path.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def content_hash(text: str) -> str:
    """The hash by which a content policy knows an inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode()
