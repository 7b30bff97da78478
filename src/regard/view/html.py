"""The page of `regard explain` as one file: it carries its data, style and script, and asks nothing of any network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import tempfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from regard.errors import FileError
from regard.view import palette
from regard.view.glyphs import inert

SCRIPTS = ("parts.js", "grid.js", "page.js")
"""In this order they make the one script of the page."""


def page(data: Mapping[str, Any]) -> str:
    """The HTML of an explanation.

    Tokens are untrusted: they travel as JSON whose markup characters are escaped, reach the page as text only, and a
    content policy lets no other script run than the page's own, known by its hash.

    Args:
        data: `Explanation.as_dict()`.

    >>> page({"text": "</script>"}).count("</script>")
    2
    """
    script = "\n".join(['(() => {\n"use strict";', *map(_asset, SCRIPTS), "})();"])
    style = palette.css() + _asset("page.css")
    content = {"explanation": _shown(data), "weights": palette.WEIGHTS, "signed": palette.SIGNED}
    return Template(_asset("page.html")).substitute(
        title=html.escape(inert(f"regard explain: {data['text'][:60]}")),
        style=style,
        script=script,
        style_hash=content_hash(style),
        script_hash=content_hash(script),
        data=_json(content),
    )


def _asset(name: str) -> str:
    return resources.files("regard.view").joinpath(name).read_text("utf-8")


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


def _shown(data: Mapping[str, Any]) -> dict[str, Any]:
    """The data, its texts with everything that a page would obey or hide shown by number."""
    found = dict(data)
    for name in ("text", "model"):
        if name in found:
            found[name] = inert(found[name])
    if "pieces" in found:
        found["pieces"] = [inert(piece) for piece in found["pieces"]]
    if "predictions" in found:
        found["predictions"] = [{**p, "piece": inert(p["piece"])} for p in found["predictions"]]
    return found


def _json(content: Any) -> str:
    """JSON that no HTML parser and no script engine reads as anything else: ASCII, without <, > and &."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def content_hash(text: str) -> str:
    """The hash by which a content policy knows an inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode()
