"""The file of `regard train --config`: the options of the command, in sections, as TOML.

[model]
attention = "gqa"
kv_heads = 2
[model.options]
base = 50000.0
[train]
steps = 200
[data]
source = "my-text.txt"
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regard.errors import ArgumentError, FileError
from regard.files.regular import text
from regard.foreign import shown, told

LONGEST = 1 << 20
"""Bytes of such a file, at most."""
SECTIONS = {
    "model": (
        "dim", "layers", "heads", "kv_heads", "hidden", "vocab", "tie", "attention", "position", "window",
    ),
    "train": (
        "steps", "batch", "lr", "warmup", "accumulate", "clip", "weight_decay", "seed", "save_every", "bf16", "threads",
        "device", "dtype",
    ),
    "data": ("source", "context", "repeat", "repeat_first"),
}  # fmt: skip
"""Section -> the options of the command that stand there; [model.options] has those of the mechanism, as --set."""


def read(path: Path) -> dict[str, Any]:
    """Option -> its text, as it would stand behind the flag; "option" -> the name=value of [model.options].

    Raises:
        FileError: the file cannot be read, or is no TOML.
        ArgumentError: a section or a key is unknown or stands in the wrong place, or a value is not a plain one.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "small.toml"
    >>> _ = file.write_text("[model]\\nattention = 'gqa'\\nkv-heads = 2\\noptions.base = 5e4\\n[train]\\nbf16 = true")
    >>> read(file)
    {'attention': 'gqa', 'kv_heads': '2', 'option': ['base=50000.0'], 'bf16': 'True'}
    """
    try:
        content = tomllib.loads(text(path, LONGEST))
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise FileError(f"{path}: is not TOML: {told(error)}") from error
    found: dict[str, Any] = {}
    for section, keys in content.items():
        if section not in SECTIONS or not isinstance(keys, dict):
            raise ArgumentError(f"{path}: {told(_stray(section))}")
        for key, value in keys.items():
            name = key.replace("-", "_")
            if (section, name) == ("model", "options") and isinstance(value, dict):
                found["option"] = _settings(path, value)
            elif name not in SECTIONS[section]:
                raise ArgumentError(f"{path}: {told(_unknown(section, key, name))}")
            elif name in found:
                raise ArgumentError(f"{path}: [{section}] has {name} twice; keep one")
            else:
                found[name] = _text(f"{path}: [{section}] {told(key)}", value)
    return found


def _settings(path: Path, options: Mapping[str, Any]) -> list[str]:
    """name=value for each option of a mechanism; lists are allowed."""
    for name, value in options.items():
        for part in value if isinstance(value, list) else [value]:
            _text(f"{path}: [model.options] {told(name)}", part)
    return [f"{name}={value!r}" for name, value in options.items()]


def _text(where: str, value: Any) -> str:
    if not isinstance(value, (str, int, float)):
        raise ArgumentError(
            f"{where} is {shown(value)}; it must be a string, a number, true or false"
        )
    return str(value)


def _stray(section: str) -> str:
    """What is said of a name at the top that is no section."""
    home = next((s for s, keys in SECTIONS.items() if section.replace("-", "_") in keys), None)
    if home:
        return f"{section} stands in no section; put it under [{home}]"
    return f"unknown section [{section}]{_near(section, SECTIONS)}; there are [{'], ['.join(SECTIONS)}]"


def _unknown(section: str, key: str, name: str) -> str:
    home = next((s for s, keys in SECTIONS.items() if name in keys), None)
    if home:
        return f"{key} stands in [{section}]; its place is [{home}]"
    keys = (*SECTIONS[section], *(("options",) if section == "model" else ()))
    return f"[{section}] has no {key}{_near(name, keys)}; it has {', '.join(keys)}"


def _near(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name[:60], list(known), 1)
    return f"; did you mean {close[0]}?" if close else ""
