"""Pages as files: written whole or not at all, and their scripts known by hash."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from regard.files.write import check_target, replacing

__all__ = ["check_target", "content_hash", "write"]


def write(path: Path, text: str) -> int:
    """Put a whole file in place, or none: write beside it, then rename. Gives the bytes written.

    Raises:
        FileError: as `check_target`, or the disk refuses.
    """
    content = text.encode("utf-8")
    with replacing(path) as place:
        place.write_bytes(content)
    return len(content)


def content_hash(text: str) -> str:
    """The hash by which a content policy knows an inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode()
