"""config.json -> the frozen config of its family: every key is understood, or the folder is refused."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from regard.errors import ArgumentError, FileError
from regard.files.regular import inside, present
from regard.files.strict import LONGEST
from regard.files.strict import read_json as read_json_file
from regard.foreign import shown, told
from regard.models.checkpoint.family import Family, Raw

_PER_TENSOR = 64  # experts that one tensor may hold
_SIZES = (
    # the first word that stands in a key's name decides
    ("window_layers", 1 << 31), ("layer", 1 << 9), ("expert", 1 << 14), ("vocab", 1 << 24), ("theta", 1 << 53), ("base", 1 << 53),
    *((word, 1 << 31) for word in ("position", "length", "seq", "ctx", "window", "distance", "chunk", "context", "token_id")),
    ("dim", 1 << 20), ("head", 1 << 16), ("", 1 << 20),
)  # fmt: skip
"""Part of a key's name -> the largest whole number that is believed: ten times what any published model has, and more."""

IGNORED = frozenset({
    "_name_or_path", "architectures", "attention_dropout", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
    "chunk_size_feed_forward", "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype", "early_stopping",
    "encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty", "finetuning_task",
    "forced_bos_token_id", "forced_eos_token_id", "gradient_checkpointing", "id2label", "initializer_range", "label2id",
    "length_penalty", "max_length", "min_length", "model_type", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
    "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores", "pad_token_id", "prefix",
    "pretraining_tp", "problem_type", "quantization_config", "remove_invalid_values", "repetition_penalty", "return_dict",
    "return_dict_in_generate", "sep_token_id", "suppress_tokens", "task_specific_params", "temperature",
    "tf_legacy_loss", "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript", "transformers_version",
    "typical_p", "use_bfloat16", "use_cache",
})  # fmt: skip
"""Keys that do not shape the computation of any family: how to train, how to generate, how the file came to be."""

FIXED: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
    "tie_encoder_decoder": (False,),
}
"""Keys that every family understands with these values only, unless it says otherwise."""


def read_raw(folder: Path, family_of: Callable[[str], Family | None]) -> tuple[Family, Raw]:
    """The family that config.json names, and the file as it is.

    Raises:
        FileError: config.json is missing, no JSON object, of another family, or asks for code of its own.
    """
    path = folder / "config.json"
    if present(folder, "config.json") is None:
        raise FileError(
            f"{path} is missing; a model folder holds config.json and model.safetensors"
        )
    raw = read_json(folder, "config.json")
    name = raw.get("model_type")
    family = family_of(name) if isinstance(name, str) else None
    if family is None:
        raise FileError(f"{path}: model_type {shown(name)} is not supported{_known_types(name)}")
    if raw.get("auto_map") is not None and "auto_map" not in family.ignored:
        raise FileError(
            f"{path}: auto_map asks for code that comes with the checkpoint, which is never run; "
            "use a checkpoint of the family's own code"
        )
    return family, raw


def read_config(folder: Path, family: Family, raw: Raw, *, tensors: int) -> Any:
    """The config of a family, from a raw config.json.

    Args:
        folder: for messages.
        family: what config.json names.
        raw: what it holds.
        tensors: how many the folder holds: a config that speaks of more layers would only cost memory.

    Raises:
        FileError: it says something that is not understood, or cannot be.
    """
    try:
        _check_counts(raw, tensors)
        check_dtypes(raw)
        return parse(family, raw)
    except ArgumentError as e:
        raise FileError(f"{folder / 'config.json'}: {told(e)}") from e


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


def _check_sizes(name: str, value: object) -> None:
    """Whole numbers of a key, of a list or of an object are not larger than anybody means them.

    Raises:
        ArgumentError: one is: it would only cost time and memory.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_sizes(f"{name}.{key}", inner)
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            _check_sizes(f"{name}[{i}]", inner)
    elif type(value) is int:
        last = name.rpartition(".")[2].lower()
        most = next(limit for word, limit in _SIZES if word in last)
        if abs(value) > most:
            raise ArgumentError(f"{name} is {value}; at most {most} is believed")


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A file of a model folder that holds one JSON object.

    Raises:
        FileError: it is missing, lies elsewhere, is larger than a config is, or holds something else.
    """
    found: dict[str, Any] = read_json_file(inside(folder, name), limit=LONGEST)
    return found


def parse(family: Family, raw: Raw) -> Any:
    """Check every key: it shapes the model, is known not to, or has a value that is understood.

    Raises:
        ArgumentError: a key is unknown, missing, of the wrong type, or out of range.
    """
    model_type = raw.get("model_type")
    known = {f.name: f for f in fields(family.config)}
    found = family.plain(raw)
    fixed = {k: v for k, v in {**FIXED, **family.fixed}.items() if k not in known}
    for key, value in found.items():
        if key in fixed and value not in fixed[key]:
            allowed = " or ".join(repr(v) for v in fixed[key])
            raise ArgumentError(f"{key} is {value!r}; only {allowed} is supported for {model_type}")
        if not (key in known or key in fixed or key in IGNORED or key in family.ignored):
            close = difflib.get_close_matches(key[:60], [*known, *fixed], 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ArgumentError(f"unknown key {key!r}{hint}")
    required = [
        n for n, f in known.items() if f.default is MISSING and f.default_factory is MISSING
    ]
    if missing := [name for name in required if name not in found]:
        raise ArgumentError(f"it lacks {', '.join(missing)}")
    for name in known.keys() & found.keys():
        _check_sizes(name, found[name])
    hints = typing.get_type_hints(family.config)
    return family.config(**{n: _typed(n, found[n], hints[n]) for n in known if n in found})


def check_dtypes(raw: Raw) -> None:
    """`dtype` and its older name do not contradict one another."""
    new, old = raw.get("dtype"), raw.get("torch_dtype")
    if new is not None and old is not None and new != old:
        raise ArgumentError(
            f"dtype is {new!r} and torch_dtype is {old!r}; they mean the same: keep one"
        )


def _typed(name: str, value: Any, wanted: Any) -> Any:
    """A JSON value as the type that a field has; lists become tuples."""
    for kind in _alternatives(wanted):
        origin = typing.get_origin(kind) or kind
        if origin is tuple and isinstance(value, list):
            inner = typing.get_args(kind)[0]
            return tuple(_typed(f"{name}[{i}]", x, inner) for i, x in enumerate(value))
        if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, dict):
            return value
        if type(value) is origin or (origin is float and type(value) is int):
            return value
    allowed = " or ".join(_shown(kind) for kind in _alternatives(wanted))
    raise ArgumentError(f"{name} is {value!r}; it must be {allowed}")


def _alternatives(wanted: Any) -> tuple[Any, ...]:
    union = typing.get_origin(wanted) in (typing.Union, types.UnionType)
    return typing.get_args(wanted) if union else (wanted,)


def _shown(kind: Any) -> str:
    if kind is type(None):
        return "null"
    if typing.get_origin(kind) is tuple:
        return f"a list of {typing.get_args(kind)[0].__name__}"
    return "an object" if typing.get_origin(kind) else str(kind.__name__)


def _known_types(name: object) -> str:
    from regard.models.families import FAMILIES

    close = difflib.get_close_matches(name[:60], FAMILIES, 1, 0.75) if isinstance(name, str) else []
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{hint}; supported: {', '.join(FAMILIES)}"
