"""Where a model's sizes come from: a known name, or a config.json."""

from __future__ import annotations

import difflib
from dataclasses import replace
from pathlib import Path

from regard.cost import config
from regard.cost.known import KNOWN
from regard.cost.model import Model
from regard.errors import ArgumentError


def model_of(source: str) -> Model:
    """The model of a known name, of a config.json, or of a folder that holds one.

    Args:
        source: a name in `regard.cost.known.KNOWN`, in any case; or a path.

    Raises:
        ArgumentError: no model has this name, and no file either; the message has the nearest names.
        FileError: the path has no readable config.json.

    >>> model_of("gpt3").attention_parameters
    57982058496
    """
    name = source.lower()
    if name in KNOWN:
        entry = KNOWN[name]
        found = config.read(entry.config, name, name)
        notes = (f"sizes: {entry.source}", *((entry.note,) if entry.note else ()), *found.notes)
        return replace(found, notes=notes)
    path = Path(source)
    if path.exists() or path.suffix == ".json":
        return config.read_file(path)
    close = difflib.get_close_matches(name, KNOWN, 4, 0.4)
    better = f"; did you mean {', '.join(map(repr, close))}?" if close else ""
    raise ArgumentError(
        f"{source!r} is neither a known model nor a path{better} "
        "regard cost --list names all; a config.json, org/name on the hub, or sizes as flags, serve for others"
    )
