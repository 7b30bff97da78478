"""Is a checkpoint whole? Sums of files and tensors, and what differs from the manifest."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

MANIFEST = "manifest.json"


def damage(path: Path) -> str:
    """What is wrong with a checkpoint folder, or "" when it is whole."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"]
        if manifest["format"] != 1:
            return f"{MANIFEST} has format {manifest['format']!r}, this version reads 1"
        for name, expected in files.items():
            if Path(name).name != name:
                return f"{MANIFEST} names {name!r}, which is outside the folder"
            size = (path / name).stat().st_size
            if size != expected["bytes"]:
                return f"{name} has {size} bytes, not {expected['bytes']}"
            if _sha256(path / name) != expected["sha256"]:
                return f"{name} does not match its checksum{_which(path / name, expected)}"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"cannot be read: {error!r}"
    return "" if "state.json" in files else "state.json is not in the manifest"


def _which(path: Path, expected: Mapping[str, Any]) -> str:
    """Names the tensors whose own sums differ."""
    try:
        named = load_file(path) if expected.get("tensors") else {}
    except (SafetensorError, OSError, ValueError, KeyError):
        return " (its header)"
    changed = [
        name for name, tensor in named.items() if crc(tensor) != expected["tensors"].get(name)
    ]
    return f" (tensor {', '.join(changed[:3])})" if changed else ""


def describe(path: Path) -> dict[str, Any]:
    """Size and sum of a file, as the manifest holds them."""
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def crc(tensor: Tensor) -> int:
    """CRC-32 of a tensor's bytes: finds which tensor of a damaged file changed."""
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def sync(path: Path) -> None:
    """Have a file or folder reach the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
