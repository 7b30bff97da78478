"""The config.json and generation_config.json of a checkpoint folder: which family it is, its
config, and which tokens end a text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from regard.configs import LOADABLE
from regard.configs.base import ModelConfig, Raw
from regard.configs.reader import check_dtypes, is_mark, parse_passing_over
from regard.did_you_mean import suggest
from regard.errors import ArgumentError, FileError
from regard.files import strict_json
from regard.files.regular_files import checked_path, checked_path_or_none
from regard.models.checkpoint.family import Family
from regard.models.checkpoint.store import without_config
from regard.models.tokenizer import Tokenizer
from regard.untrusted_text import error_text, short_repr

_PER_TENSOR = 64  # experts that one tensor may hold


def read_raw(folder: Path, family_of: Callable[[str], Family | None]) -> tuple[Family, Raw]:
    """The family that config.json names, and the file as it is.

    Args:
        folder: a checkpoint folder.
        family_of: returns the family of a model_type, or None.

    Raises:
        FileError: config.json is missing, no JSON object, or of another family.
    """
    path = folder / "config.json"
    if checked_path_or_none(folder, "config.json") is None:
        raise without_config(folder)
    raw = read_json(folder, "config.json")
    name = raw.get("model_type")
    family = family_of(name) if isinstance(name, str) else None
    if family is None:
        known = LOADABLE if isinstance(name, str) else ()
        hint = suggest(name, known, cutoff=0.75, otherwise=".")
        raise FileError(
            f"{path}: model_type {short_repr(name)} is not supported{hint} Supported: "
            f"{', '.join(LOADABLE)}"
        )
    return family, raw


def read_config(
    folder: Path, family: Family, raw: Raw, *, tensors: int, ignore: Sequence[str] = ()
) -> tuple[ModelConfig, tuple[str, ...]]:
    """The config of a family, from a raw config.json; and the keys in it that were passed over.

    Passed over are keys that other tools leave in any folder (`reader.MARKS`), and unknown ones
    that `ignore` names.

    Args:
        folder: for messages.
        family: what config.json names.
        raw: what it holds.
        tensors: how many the folder holds: a config that speaks of more layers would only cost
            memory.
        ignore: patterns (`*`, `?`) of unknown keys that the caller knows to change nothing; a key
            of an inner object has the outer one's name and a dot in front.

    Raises:
        FileError: it says something that is not understood, or cannot be.
    """
    text = raw.get("text_config")
    keys = [*raw, *(text if isinstance(text, Mapping) else ())]
    marks = [
        key for key in keys if is_mark(key) or (key == "auto_map" and raw.get(key) is not None)
    ]
    try:
        _check_counts(raw, tensors)
        check_dtypes(raw)
        config, passed = parse_passing_over(
            family.config, raw, lambda key: any(fnmatchcase(key, pattern) for pattern in ignore)
        )
        family.check(config)
    except ArgumentError as e:
        raise FileError(f"{folder / 'config.json'}: {error_text(e)}") from e
    return config, tuple(dict.fromkeys([*marks, *passed]))


def _check_counts(raw: Raw, tensors: int) -> None:
    """No size is absurd, and there are not more layers or experts than tensors could fill."""
    for name, value in raw.items():
        if isinstance(value, Mapping):  # the text_config of a model that also sees pictures
            _check_counts(value, tensors)
        if type(value) is not int:
            continue
        held = tensors if "layer" in name and "window" not in name else _PER_TENSOR * tensors
        if ("layer" in name or "expert" in name) and value > max(held, 64):
            raise ArgumentError(f"{name} is {value}, and the folder holds {tensors} tensors")


def read_json(folder: Path, name: str, *, limit: int = strict_json.MAX_BYTES) -> dict[str, Any]:
    """A file of a model folder that holds one JSON object.

    Args:
        folder, name: the folder and the file's name in it.
        limit: the most bytes that are read.

    Raises:
        FileError: it is missing, lies elsewhere, is larger than a config is, or holds something
            else.
    """
    found: dict[str, Any] = strict_json.read_json(checked_path(folder, name), limit=limit)
    return found


def read_ends(folder: Path, raw: Raw, tokenizer: Tokenizer | None) -> frozenset[int]:
    """The ids at which generation stops: eos_token_id of generation_config.json, else of
    config.json, else `<|endoftext|>`.

    Raises:
        FileError: eos_token_id is neither an id nor a list of ids.
    """
    name = "generation_config.json"
    given = raw if checked_path_or_none(folder, name) is None else read_json(folder, name)
    found = given.get("eos_token_id", raw.get("eos_token_id"))
    ids = found if isinstance(found, list) else [found] if found is not None else []
    if not all(type(i) is int and i >= 0 for i in ids):
        raise FileError(
            f"{folder}: eos_token_id is {short_repr(found)}; it must be a token id or a list of "
            "token "
            "ids"
        )
    if not ids and tokenizer is not None and tokenizer.end_of_text is not None:
        ids = [tokenizer.end_of_text]
    return frozenset(ids)
