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
from regard.files.reading import check_file_name, checked_path_or_none, read_bytes
from regard.files.reading import read_json as read_list
from regard.models.checkpoint.config import read_json
from regard.untrusted_text import escape_controls, short_repr

PoolingMode: TypeAlias = Literal["cls", "max", "mean", "mean_sqrt_len", "weightedmean", "lasttoken"]
"""How the token states become one vector: of the first token, the maximum of each dimension, the
mean, the sum divided by the square root of the number of tokens, the mean with the weights 1, 2, 3
and so on, or of the last token.
"""
Similarity: TypeAlias = Literal["cosine", "dot", "euclidean", "manhattan"]
"""How two vectors are compared: larger is more similar, so that distances are negative."""


@dataclass(frozen=True)
class Pooling:
    """How the token states of a text become one vector.

    Args:
        mode: a `PoolingMode`; the vectors of several are concatenated.
        normalize: whether the vector is divided by its length.
        include_prompt: whether the tokens of a prompt before the text count.
        truncate_dim: the number of dimensions that are kept, after the division; None is all.

    Raises:
        ArgumentError: the mode is unknown, or truncate_dim is less than 1.

    >>> Pooling()
    Pooling(mode='mean', normalize=True, include_prompt=True, truncate_dim=None)
    """

    mode: PoolingMode | tuple[PoolingMode, ...] = "mean"
    normalize: bool = True
    include_prompt: bool = True
    truncate_dim: int | None = None

    def __post_init__(self) -> None:
        names = self.mode if isinstance(self.mode, tuple) else (self.mode,)
        if not names or not set(names) <= {*get_args(PoolingMode)}:
            raise ArgumentError(
                f"mode is {self.mode!r}; it is one of {', '.join(get_args(PoolingMode))}, or "
                "several of them"
            )
        if self.truncate_dim is not None and self.truncate_dim < 1:
            raise ArgumentError(f"truncate_dim is {self.truncate_dim}; it must be at least 1")

    @property
    def modes(self) -> tuple[PoolingMode, ...]:
        """The modes, of which there may be several."""
        return self.mode if isinstance(self.mode, tuple) else (self.mode,)


@dataclass(frozen=True)
class DenseSettings:
    """A linear map after the pooling: y = activation(W x + b), plus x or another map of x.

    Args:
        folder: where its tensors are, in the folder of the model.
        activation: the name of a class of torch.nn in `ACTIVATIONS`.
        residual: whether the input, or its linear map to other sizes, is added.
    """

    folder: str
    inputs: int
    outputs: int
    bias: bool = True
    activation: str = "Tanh"
    residual: bool = False


@dataclass(frozen=True)
class SentenceSettings:
    """The settings of a sentence-transformers folder.

    Args:
        pooling: how `embed` computes one vector for a text; None is the normalized mean over
            tokens.
        max_seq_length: the largest number of tokens of a text; None is no limit.
        default_prompt_name: the prompt of `embed` if none is named; None is no prompt.
        dense: the linear maps between pooling and normalization.
    """

    pooling: Pooling | None = None
    max_seq_length: int | None = None
    lowercase: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    similarity: Similarity = "cosine"
    dense: tuple[DenseSettings, ...] = ()


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
    "weightedmean": "weightedmean",
    "lasttoken": "lasttoken",
}
"""`pooling_mode` of a file -> pooling mode."""
MODULES = ("Transformer", "Pooling", "Dense", "Dropout", "Normalize")
"""The supported modules of a folder in their order; only the first two must exist, and there may be
several linear maps and dropouts, which change nothing when a model is used.
"""
ACTIVATIONS = ("Tanh", "Identity", "ReLU", "GELU", "SiLU", "Sigmoid")
_DENSE_KEYS = {"in_features", "out_features", "bias", "activation_function", "use_residual"}
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
_MODEL_KEYS |= {"similarity_fn_name"}
_MAX_LENGTH = re.compile(rb'"model_max_length"\s*:\s*([0-9]{1,9})\s*[,}]')
_TOKENIZER_CONFIG_BYTES = 64 << 20


def read_sentence_settings(folder: Path) -> SentenceSettings:
    """Read the files of a sentence-transformers folder; without them, settings are defaults."""
    inner = transformer_folder(folder)
    name = next((x for x in TRANSFORMER_FILES if checked_path_or_none(inner, x)), None)
    about_tokens = {} if name is None else read_json(inner, name)
    where = inner / (name or "")
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
    similarity: Any = about_model.get("similarity_fn_name") or "cosine"
    if similarity not in get_args(Similarity):
        raise FileError(
            f"{folder / MODEL_FILE}: similarity_fn_name is {short_repr(similarity)}; it is one of "
            f"{', '.join(get_args(Similarity))}"
        )
    pooling, dense = _read_modules(folder, truncate_dim)
    limit = _whole_number(where, about_tokens, "max_seq_length")
    if limit is None and pooling is not None:
        limit = _length_of_tokenizer(inner)
    if pooling is None and truncate_dim is not None:
        pooling = Pooling(truncate_dim=truncate_dim)
    return SentenceSettings(
        pooling,
        limit,
        _flag(where, about_tokens, "do_lower_case", default=False),
        *_prompts(folder / MODEL_FILE, about_model),
        similarity,
        dense,
    )


def sentence_files(settings: SentenceSettings, dim: int) -> dict[str, object]:
    """Return the files that say the same, without `lowercase`, which the tokenizer's file has."""
    pooling = settings.pooling
    assert pooling is not None, "a model has one"
    places = [("Transformer", ""), ("Pooling", "1_Pooling")]
    places += [("Dense", dense.folder) for dense in settings.dense]
    places += [("Normalize", f"{len(places)}_Normalize")] if pooling.normalize else []
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(places)
    ]
    # in the keys that every version of the library reads
    modes = {key: MODES[name] in pooling.modes for key, name in OLD_MODE_KEYS.items()}
    pooling_file = {"word_embedding_dimension": dim, **modes}
    if not pooling.include_prompt:
        pooling_file["include_prompt"] = False
    files: dict[str, object] = {"modules.json": modules, "1_Pooling/config.json": pooling_file}
    if settings.max_seq_length is not None:
        files[TRANSFORMER_FILES[0]] = {"max_seq_length": settings.max_seq_length}
    for dense in settings.dense:
        files[f"{dense.folder}/config.json"] = {
            "in_features": dense.inputs,
            "out_features": dense.outputs,
            "bias": dense.bias,
            "activation_function": f"torch.nn.{dense.activation}",
            **({"use_residual": True} if dense.residual else {}),
        }
    if settings.prompts or pooling.truncate_dim is not None or settings.similarity != "cosine":
        files[MODEL_FILE] = {
            "similarity_fn_name": settings.similarity,
            "prompts": dict(settings.prompts),
            "default_prompt_name": settings.default_prompt_name,
            "truncate_dim": pooling.truncate_dim,
        }
    return files


def transformer_folder(folder: Path) -> Path:
    """Return the folder of the network's files: that of the first module, where the folder itself
    has no config.json, as the first versions of the library wrote it.
    """
    if checked_path_or_none(folder, "config.json") is not None:
        return folder
    modules = _modules(folder)
    return folder if not modules else _inner(folder, modules[0][1])


def _inner(folder: Path, path: str) -> Path:
    """Return the folder of a module, which is in the folder of the model."""
    inner = folder / path
    if path not in ("", ".") and inner.parent != folder:
        raise FileError(
            f"{folder / 'modules.json'} leads to {short_repr(str(inner))}, which is not in its "
            "folder"
        )
    if inner != folder:
        check_file_name(folder, inner.name)
    return inner


def _read_modules(
    folder: Path, truncate_dim: int | None
) -> tuple[Pooling | None, tuple[DenseSettings, ...]]:
    """Read modules.json and the files of its modules; None without modules.json."""
    modules = _modules(folder)
    if modules is None:
        return None, ()
    kinds = [kind for kind, _ in modules]
    order = [MODULES.index(kind) if kind in MODULES else -1 for kind in kinds]
    after = [-1 if kind == "Dropout" else x for kind, x in zip(kinds, order, strict=True)][2:]
    after = [x for x in after if x >= 0]
    once = kinds.count("Transformer") == kinds.count("Pooling") == 1 >= kinds.count("Normalize")
    if order[:2] != [0, 1] or -1 in order or after != sorted(after) or not once:
        raise FileError(
            f"{folder / 'modules.json'} has the modules "
            f"{escape_controls(', '.join(kinds)[:200])}; only {', '.join(MODULES)} of "
            "sentence_transformers are supported, in this order, and only the first two must be "
            "there; without the file, the model loads, and you can pool its states"
        )
    dense = []
    for kind, path in modules[2:]:
        inner = _inner(folder, path)
        if kind == "Dense":
            dense.append(_read_dense(inner))
        elif checked_path_or_none(inner, "config.json"):
            known = {"dropout"} if kind == "Dropout" else {*_NORMALIZE_VALUES}
            keys = read_json(inner, "config.json")
            _check_keys(inner / "config.json", keys, known, _NORMALIZE_VALUES)
    return _read_pooling(_inner(folder, modules[1][1]), "Normalize" in kinds, truncate_dim), (
        *dense,
    )


def _read_pooling(where: Path, normalize: bool, truncate_dim: int | None) -> Pooling:  # noqa: FBT001
    """Read the file of the module Pooling."""
    file, keys = where / "config.json", read_json(where, "config.json")
    _check_keys(file, keys, _POOLING_KEYS)
    old = [name for key, name in OLD_MODE_KEYS.items() if _flag(file, keys, key, default=False)]
    chosen = keys.get("pooling_mode", old)
    names: list[Any] = chosen if isinstance(chosen, list) else [chosen]
    if not names or not all(isinstance(name, str) and name in MODES for name in names):
        raise FileError(
            f"{file} asks for pooling_mode {short_repr(chosen)}; supported are {', '.join(MODES)}, "
            "and lists of them"
        )
    modes = tuple(MODES[name] for name in names)
    include = _flag(file, keys, "include_prompt", default=True)
    return Pooling(modes if len(modes) > 1 else modes[0], normalize, include, truncate_dim)


def _read_dense(where: Path) -> DenseSettings:
    """Read the file of a module Dense."""
    file, keys = where / "config.json", read_json(where, "config.json")
    _check_keys(file, keys, _DENSE_KEYS | _NORMALIZE_VALUES.keys(), _NORMALIZE_VALUES)
    inputs, outputs = (_whole_number(file, keys, f"{x}_features") for x in ("in", "out"))
    path = str(keys.get("activation_function", "torch.nn.Tanh"))
    package, _, activation = path.rpartition(".")
    if package.split(".")[:2] != ["torch", "nn"] or activation not in ACTIVATIONS:
        raise FileError(
            f"{file}: activation_function is {short_repr(path)}; supported are "
            f"{', '.join(ACTIVATIONS)} of torch.nn"
        )
    if inputs is None or outputs is None:
        raise FileError(f"{file}: in_features and out_features must be numbers above 0")
    bias = _flag(file, keys, "bias", default=True)
    residual = _flag(file, keys, "use_residual", default=False)
    return DenseSettings(where.name, inputs, outputs, bias, activation, residual)


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
