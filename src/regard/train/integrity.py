"""Is a checkpoint whole? Sums of files and tensors, and what differs from the manifest."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.errors import FileError
from regard.files.reading import load
from regard.files.regular import inside, opened
from regard.files.strict import read_json
from regard.foreign import shown

MANIFEST = "manifest.json"
LONGEST = 64 << 20
"""Bytes of the manifest and of the state, at most: a state holds the random state and the data's
order.
"""


def damage(path: Path) -> str:
    """What is wrong with a checkpoint folder, or "" when it is whole."""
    try:
        manifest = read_json(inside(path, MANIFEST), limit=LONGEST)
        if manifest.get("format") != 1:
            return f"{MANIFEST} has format {shown(manifest.get('format'))}, this version reads 1"
        files = manifest.get("files")
        if not isinstance(files, dict):
            return f"{MANIFEST} has {shown(files)} as files; it must be an object"
        for name, expected in files.items():
            wrong = _differs(path, name, expected)
            if wrong:
                return wrong
    except FileError as error:
        return f"cannot be read: {error}"
    return "" if "state.json" in files else "state.json is not in the manifest"


def _differs(folder: Path, name: str, expected: Any) -> str:
    """How a file is not what the manifest says of it, or ""."""
    if Path(name).name != name:
        return f"{MANIFEST} names {shown(name)}, which is outside the folder"
    if not isinstance(expected, dict):
        return f"{MANIFEST} says {shown(expected)} of {shown(name)}; it must be an object"
    path = inside(folder, name)
    size = path.stat().st_size
    if size != expected.get("bytes"):
        return f"{name} has {size} bytes, not {shown(expected.get('bytes'))}"
    if _sha256(path) != expected.get("sha256"):
        return f"{name} does not match its checksum{_which(path, expected)}"
    return ""


def _which(path: Path, expected: Mapping[str, Any]) -> str:
    """Names the tensors whose own sums differ."""
    sums = expected.get("tensors")
    if not isinstance(sums, dict):
        return ""
    try:
        named, _ = load(path)
    except FileError:
        return " (its header)"
    changed = [shown(name) for name, tensor in named.items() if crc(tensor) != sums.get(name)]
    return f" (tensor {', '.join(changed[:3])})" if changed else ""


def describe(path: Path) -> dict[str, Any]:
    """Size and sum of a file, as the manifest holds them."""
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    with opened(path) as (file, _):
        return hashlib.file_digest(file, "sha256").hexdigest()


def crc(tensor: Tensor) -> int:
    """CRC-32 of a tensor's bytes: finds which tensor of a damaged file changed."""
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
