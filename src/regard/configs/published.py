"""The sizes of published models in `published.json`, as keys of their config.json."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from regard.configs.reader import SizeCount, read_sizes, read_sizes_file
from regard.cost.model import ModelSpec
from regard.cost.stored_forms import stored_as
from regard.did_you_mean import suggest
from regard.errors import ArgumentError


@dataclass(frozen=True)
class PublishedModel:
    """The keys of a published model's config.json that define sizes, and their source; `weights` is
    the form of `regard.cost.stored_forms` in which it was released, if not in 16 or 32 bits;
    `context` is the longest that its maker gives, 0 if its learned positions say it.
    """

    config: Mapping[str, object]
    source: str
    note: str = ""
    weights: str = ""
    context: int = 0


PUBLISHED_MODELS: dict[str, PublishedModel] = {
    name: PublishedModel(**row)
    for name, row in json.loads(
        Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
    ).items()
}
"""Name -> config and source."""


SIZES_NOT_PUBLISHED = {
    "mistral-medium": "Mistral AI has not published the sizes of Mistral Medium",
}
"""Beginnings of the names of models that readers ask for, and why no sizes stand here."""


@functools.cache
def _published_model(name: str) -> ModelSpec:
    """Return the sizes of a model of the table, which suggestions of sizes ask for many times."""
    entry = PUBLISHED_MODELS[name]
    model = read_sizes(entry.config, name, name)
    notes = (f"sizes: {entry.source}", *((entry.note,) if entry.note else ()), *model.notes)
    stored = stored_as(model, entry.weights) if entry.weights else None
    return replace(model, notes=notes, stored=stored, stated_context=entry.context or None)


def model_of(source: str, count_stored: SizeCount | None = None) -> ModelSpec:
    """Return the sizes of a published model, of a config.json, or of a folder with one.

    Args:
        source: a name in `PUBLISHED_MODELS`, in any case; `tiny`; or a path.
        count_stored: counts the weights of a quantized folder as stored.

    Returns:
        The sizes, with their source as a note.

    Raises:
        ArgumentError: neither a model nor a file has this name.
        FileError: the path has no readable config.json.

    >>> model_of("gpt3").attention_parameters
    57982058496
    """
    name = source.lower()
    if name in PUBLISHED_MODELS:
        return _published_model(name)
    if name == "tiny":  # the model that comes with the package
        return replace(read_sizes_file(Path(__file__).parents[1] / "assets" / "tiny"), name=name)
    path = Path(source)
    if path.exists() or path.suffix == ".json":
        return read_sizes_file(path, count_stored)
    for beginning, reason in SIZES_NOT_PUBLISHED.items():
        if name.startswith(beginning):
            raise ArgumentError(
                f"{reason}; give sizes of your own: regard cost --layers 60 --dim 8192 --heads 64"
            )
    hint = suggest(name, PUBLISHED_MODELS, most=4, cutoff=0.4, otherwise=".")
    raise ArgumentError(
        f"{source!r} is neither a known model nor a path{hint} regard cost --list prints the known "
        "models; for another one give a config.json, org/name on the hub, or the sizes as flags",
        argument="source",
        value=source,
    )
