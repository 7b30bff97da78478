"""What the files of a sentence-transformers folder say about the vector of a text: every key is
read, known to change nothing, or refused, and no code is imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from regard.did_you_mean import suggest
from regard.errors import ArgumentError, FileError
from regard.files.regular_files import checked_path_or_none, read_bytes
from regard.files.strict_json import read_json as read_list
from regard.models.checkpoint.config import read_json
from regard.untrusted_text import escape_controls, short_repr

PoolingMode: TypeAlias = Literal["cls", "max", "mean", "mean_sqrt_len"]
"""How the token states become one vector: of the first token, the maximum of each dimension, the
mean, or the sum divided by the square root of the number of tokens.
"""


@dataclass(frozen=True)
class Pooling:
    """How the token states of a text become one vector.

    Args:
        mode: a `PoolingMode`.
        normalize: whether the vector is divided by its length.
        include_prompt: whether the tokens of a prompt before the text count.
        truncate_dim: the number of dimensions that are kept, after the division; None is all.

    Raises:
        ArgumentError: the mode is unknown, or truncate_dim is less than 1.

    >>> Pooling()
    Pooling(mode='mean', normalize=True, include_prompt=True, truncate_dim=None)
    """

    mode: PoolingMode = "mean"
    normalize: bool = True
    include_prompt: bool = True
    truncate_dim: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(PoolingMode):
            raise ArgumentError(
                f"mode is {self.mode!r}; it is one of {', '.join(get_args(PoolingMode))}"
            )
        if self.truncate_dim is not None and self.truncate_dim < 1:
            raise ArgumentError(f"truncate_dim is {self.truncate_dim}; it must be at least 1")


@dataclass(frozen=True)
class SentenceSettings:
    """The settings of a sentence-transformers folder.

    Args:
        pooling: how `embed` computes one vector for a text; None is the normalized mean over
            tokens.
        max_seq_length: the largest number of tokens of a text; None is no limit.
        default_prompt_name: the prompt of `embed` if none is named; None is no prompt.
    """

    pooling: Pooling | None = None
    max_seq_length: int | None = None
    lowercase: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None


OLD_MODE_KEYS: dict[str, str] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Key of 1_Pooling/config.json before version 6 -> its `pooling_mode` since then."""
MODES: dict[str, PoolingMode] = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
}
"""`pooling_mode` of a file -> pooling mode."""
MODULES = ("Transformer", "Pooling", "Normalize")
"""The supported modules of a folder in their order; the last is optional."""
TRANSFORMER_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""The names of the file about tokens, of which the first that exists is read."""
MODEL_FILE = "config_sentence_transformers.json"
_TEXT = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
_TRANSFORMER_VALUES: dict[str, tuple[object, ...]] = {
    "transformer_task": ("feature-extraction",),
    "modality_config": (_TEXT,),
    "module_output_name": ("token_embeddings",),
    "processing_kwargs": ({}, None),
    "query_length": (None,),
    "document_length": (None,),
    "query_expansion": (None,),
    "tokenizer_name_or_path": (None,),
    "model_args": ({}, None),
    "config_args": ({}, None),
    "tokenizer_args": ({}, None),
    # how the library runs the network, with the same result
    "unpad_inputs": (True, False, None),
}
"""Key of the file about tokens -> the values that are supported."""
_NORMALIZE_VALUES: dict[str, tuple[object, ...]] = {
    "module_input_name": ("sentence_embedding",),
    "module_output_name": ("sentence_embedding", None),
}
_POOLING_KEYS = {"embedding_dimension", "word_embedding_dimension", "include_prompt"}
_POOLING_KEYS |= {"pooling_mode", *OLD_MODE_KEYS}
_MODEL_KEYS = {"__version__", "prompts", "default_prompt_name", "truncate_dim", "model_type"}
_MODEL_KEYS |= {"similarity_fn_name"}  # how two vectors are compared, not how one is computed
_MAX_LENGTH = re.compile(rb'"model_max_length"\s*:\s*([0-9]{1,9})\s*[,}]')
_TOKENIZER_CONFIG_BYTES = 64 << 20


def read_sentence_settings(folder: Path) -> SentenceSettings:
    """Read the files of a sentence-transformers folder; without them, settings are defaults."""
    name = next((x for x in TRANSFORMER_FILES if checked_path_or_none(folder, x)), None)
    about_tokens = {} if name is None else read_json(folder, name)
    where = folder / (name or "")
    known = {"max_seq_length", "do_lower_case", *_TRANSFORMER_VALUES}
    _check_keys(where, about_tokens, known, _TRANSFORMER_VALUES)
    about_model = {}
    if checked_path_or_none(folder, MODEL_FILE):
        about_model = read_json(folder, MODEL_FILE)
        _check_keys(
            folder / MODEL_FILE,
            about_model,
            _MODEL_KEYS,
            {"model_type": (None, "SentenceTransformer")},
        )
    truncate_dim = _whole_number(folder / MODEL_FILE, about_model, "truncate_dim")
    pooling = _read_pooling(folder, truncate_dim)
    limit = _whole_number(where, about_tokens, "max_seq_length")
    if limit is None and pooling is not None:
        limit = _length_of_tokenizer(folder)
    if pooling is None and truncate_dim is not None:
        pooling = Pooling(truncate_dim=truncate_dim)
    return SentenceSettings(
        pooling,
        limit,
        _flag(where, about_tokens, "do_lower_case", default=False),
        *_prompts(folder / MODEL_FILE, about_model),
    )


def sentence_files(settings: SentenceSettings, dim: int) -> dict[str, object]:
    """Return the files that say the same, without `lowercase`, which the tokenizer's file has."""
    pooling = settings.pooling
    assert pooling is not None, "a model has one"
    kinds = MODULES[: 3 if pooling.normalize else 2]
    folders = ("", "1_Pooling", "2_Normalize")
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, folders, strict=False))
    ]
    # in the keys that every version of the library reads
    modes = {
        key: MODES.get(name) == pooling.mode for key, name in OLD_MODE_KEYS.items() if name in MODES
    }
    pooling_file = {"word_embedding_dimension": dim, **modes}
    if not pooling.include_prompt:
        pooling_file["include_prompt"] = False
    files: dict[str, object] = {"modules.json": modules, "1_Pooling/config.json": pooling_file}
    if settings.max_seq_length is not None:
        files[TRANSFORMER_FILES[0]] = {"max_seq_length": settings.max_seq_length}
    if settings.prompts or pooling.truncate_dim is not None:
        files[MODEL_FILE] = {
            "prompts": dict(settings.prompts),
            "default_prompt_name": settings.default_prompt_name,
            "truncate_dim": pooling.truncate_dim,
        }
    return files


def _read_pooling(folder: Path, truncate_dim: int | None) -> Pooling | None:
    """Read modules.json and the files of its modules; None without modules.json."""
    modules = _modules(folder)
    if modules is None:
        return None
    kinds = [kind for kind, _ in modules]
    if kinds not in ([*MODULES[:2]], [*MODULES]) or modules[0][1] not in ("", "."):
        raise FileError(
            f"{folder / 'modules.json'} has the modules "
            f"{escape_controls(', '.join(kinds)[:200])}; only {', '.join(MODULES)} of "
            "sentence_transformers are supported, the first in the folder itself, and the last one "
            "may be missing; without it, the model loads, and you can pool its states"
        )
    for _, path in modules[1:]:
        if (folder / path).parent != folder:
            raise FileError(
                f"{folder / 'modules.json'} leads to {short_repr(str(folder / path))}, which is "
                "not in its folder"
            )
    if len(modules) > 2:
        normalize = folder / modules[2][1]
        if checked_path_or_none(normalize, "config.json"):
            file = normalize / "config.json"
            _check_keys(
                file, read_json(normalize, "config.json"), set(_NORMALIZE_VALUES), _NORMALIZE_VALUES
            )
    where = folder / modules[1][1]
    file, keys = where / "config.json", read_json(where, "config.json")
    _check_keys(file, keys, _POOLING_KEYS)
    old = [name for key, name in OLD_MODE_KEYS.items() if keys.get(key)]
    chosen = keys.get("pooling_mode", old[0] if len(old) == 1 else old)
    if isinstance(chosen, list) and len(chosen) == 1:
        chosen = chosen[0]
    if not isinstance(chosen, str) or chosen not in MODES:
        raise FileError(
            f"{file} asks for pooling_mode {short_repr(chosen)}; one of {', '.join(MODES)} is "
            "supported"
        )
    include = _flag(file, keys, "include_prompt", default=True)
    return Pooling(MODES[chosen], len(kinds) > 2, include, truncate_dim)


def _modules(folder: Path) -> list[tuple[str, str]] | None:
    """Return the class, without the library's package, and the folder of each module, or None."""
    path = checked_path_or_none(folder, "modules.json")
    if path is None:
        return None
    try:
        entries: list[dict[str, Any]] = read_list(path, kind=list)
        for i, entry in enumerate(entries):
            _check_keys(path, entry, {"idx", "name", "path", "type"}, place=f"module {i} has ")
        return [(_class_of(str(entry["type"])), str(entry["path"])) for entry in entries]
    except (TypeError, KeyError, AttributeError):
        raise FileError(f"{path} is not a list of modules, each with type and path") from None


def _class_of(path: str) -> str:
    package, _, name = path.rpartition(".")
    return name if package.partition(".")[0] == "sentence_transformers" else path


def _check_keys(
    file: Path,
    keys: Mapping[str, object],
    known: set[str],
    values: Mapping[str, tuple[object, ...]] | None = None,
    *,
    place: str = "",
) -> None:
    """Raise for a key that is not known, and for a value that is not supported."""
    for key, value in keys.items():
        if key not in known:
            raise FileError(
                f"{file}: {place}the unknown key {short_repr(key)}"
                f"{suggest(key, sorted(known), otherwise=';')} its effect on the vectors is not "
                "known. Remove it if it has none"
            )
        if values and key in values and value not in values[key]:
            allowed = " or ".join(map(repr, values[key]))
            raise FileError(f"{file}: {key} is {short_repr(value)}; supported is {allowed}")


def _whole_number(file: Path, keys: Mapping[str, object], key: str) -> int | None:
    value = keys.get(key)
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise FileError(f"{file}: {key} is {short_repr(value)}; it must be a number above 0")
    return value


def _flag(file: Path, keys: Mapping[str, object], key: str, *, default: bool) -> bool:
    value = keys.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise FileError(f"{file}: {key} is {short_repr(value)}; it must be true or false")
    return value


def _prompts(file: Path, keys: Mapping[str, object]) -> tuple[dict[str, str], str | None]:
    """Return the prompts that are not empty, and the name of the default one."""
    prompts, name = keys.get("prompts") or {}, keys.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(x, str) for x in prompts.values()):
        raise FileError(
            f"{file}: prompts are {short_repr(prompts)}; each must be a name and a text"
        )
    if name is not None and (not isinstance(name, str) or name not in prompts):
        raise FileError(
            f"{file}: default_prompt_name is {short_repr(name)}, which is not one of the prompts "
            f"{short_repr(sorted(prompts))}"
        )
    return {key: text for key, text in prompts.items() if text or key == name}, name


def _length_of_tokenizer(folder: Path) -> int | None:
    """Return model_max_length, or None for 31 digits ("no limit"), which strict JSON refuses."""
    path = checked_path_or_none(folder, "tokenizer_config.json")
    if path is None:
        return None
    match = _MAX_LENGTH.search(read_bytes(path, _TOKENIZER_CONFIG_BYTES))
    return max(int(match[1]), 1) if match else None
