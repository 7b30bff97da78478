"""Reading config.json and generation_config.json of a checkpoint folder, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from regard.configs import CONFIGS, read_as
from regard.configs.base import ModelConfig, Raw
from regard.configs.reader import (
    check_dtypes,
    counts_layers_or_experts,
    is_tool_key,
    parse_ignoring,
)
from regard.did_you_mean import suggest
from regard.errors import ArgumentError, FileError
from regard.files import reading
from regard.files.reading import checked_path, checked_path_or_none
from regard.models.checkpoint.family import Family
from regard.models.checkpoint.tensors import missing_config_error
from regard.models.tokenizer import Tokenizer
from regard.units import plural
from regard.untrusted_text import error_text, short_repr

_EXPERTS_PER_TENSOR = 64  # some files store all experts of a layer in one tensor


def read_raw(folder: Path, family_of: Callable[[str], Family | None]) -> tuple[Family, Raw]:
    """Return the family that config.json names, and the content of the file."""
    path = folder / "config.json"
    if checked_path_or_none(folder, "config.json") is None:
        raise missing_config_error(folder)
    raw = read_json(folder, "config.json")
    name = read_as(raw)
    family = family_of(name) if isinstance(name, str) else None
    if family is None:
        known = CONFIGS if isinstance(name, str) else ()
        hint = suggest(name, known, cutoff=0.75, otherwise=".")
        raise FileError(
            f"{path}: model_type {short_repr(name)} is not supported{hint} Supported: "
            f"{', '.join(CONFIGS)}"
        )
    return family, raw


def read_config(
    folder: Path,
    family: Family,
    raw: Raw,
    *,
    tensors: int,
    ignore: Sequence[str] = (),
    file: Path | None = None,
) -> tuple[ModelConfig, tuple[str, ...]]:
    """Return the config of a family from config.json, and the keys that were ignored:
    `reader.TOOL_KEYS`, and unknown ones that match `ignore`.
    """
    text = raw.get("text_config")
    keys = [*raw, *(text if isinstance(text, Mapping) else ())]
    tool_keys = [
        key for key in keys if is_tool_key(key) or (key == "auto_map" and raw.get(key) is not None)
    ]
    try:
        _check_counts(raw, tensors)
        check_dtypes(raw)
        config, ignored = parse_ignoring(
            family.config, raw, lambda key: any(fnmatchcase(key, pattern) for pattern in ignore)
        )
        family.check(config)
    except ArgumentError as e:
        raise FileError(f"{file or folder / 'config.json'}: {error_text(e)}") from e
    return config, tuple(dict.fromkeys([*tool_keys, *ignored]))


def _check_counts(raw: Raw, tensors: int) -> None:
    """Check that sizes are plausible, and that layers and experts have enough tensors."""
    for name, value in raw.items():
        if isinstance(value, Mapping):  # the text_config of a model that also reads images
            _check_counts(value, tensors)
        if type(value) is not int or not counts_layers_or_experts(name):
            continue
        most = tensors if "layer" in name else _EXPERTS_PER_TENSOR * tensors
        if value > max(most, 64):
            raise ArgumentError(
                f"{name} is {value}, and the folder has {plural(tensors, 'tensor')}, too few for "
                "that; is a shard missing, or is config.json that of another model?"
            )


def read_json(folder: Path, name: str, *, limit: int = reading.MAX_BYTES) -> dict[str, object]:
    """Read a file of a model folder that contains one JSON object."""
    path = checked_path(folder, name)
    content: dict[str, object] = reading.read_json(path, limit=limit, infinity=True)
    return content


def read_eos_ids(folder: Path, raw: Raw, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Return the ids that end a text: of the files, or else `<|endoftext|>`."""
    name = "generation_config.json"
    source = raw if checked_path_or_none(folder, name) is None else read_json(folder, name)
    value = source.get("eos_token_id", raw.get("eos_token_id"))
    ids = value if isinstance(value, list) else [value] if value is not None else []
    if not all(type(i) is int and 0 <= i < 1 << 31 for i in ids):
        raise FileError(
            f"{folder}: eos_token_id is {short_repr(value)}; it must be a token id or a list of "
            "token ids"
        )
    if not ids and tokenizer is not None and tokenizer.end_of_text is not None:
        ids = [tokenizer.end_of_text]
    return frozenset(ids)
