"""config.json -> the frozen config of its family: every key is understood, or the folder is refused."""

from __future__ import annotations

import difflib
import json
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from regard.errors import ArgumentError, FileError
from regard.models.checkpoint.family import Family, Raw

IGNORED = frozenset({
    "_name_or_path", "architectures", "attention_dropout", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
    "chunk_size_feed_forward", "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype", "early_stopping",
    "encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty", "finetuning_task",
    "forced_bos_token_id", "forced_eos_token_id", "gradient_checkpointing", "id2label", "initializer_range", "label2id",
    "length_penalty", "max_length", "min_length", "model_type", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
    "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores", "pad_token_id", "prefix",
    "pretraining_tp", "problem_type", "remove_invalid_values", "repetition_penalty", "return_dict",
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
    "quantization_config": (None,),
    "tie_encoder_decoder": (False,),
}
"""Keys that every family understands with these values only, unless it says otherwise."""


def read_config(folder: Path, family_of: Callable[[str], Family | None]) -> tuple[Family, Any, Raw]:
    """The family that config.json names, its config, and the raw file.

    Raises:
        FileError: config.json is missing, no JSON object, or says something that is not understood.
    """
    path = folder / "config.json"
    raw = read_json(path, "a model folder holds config.json and model.safetensors")
    name = raw.get("model_type")
    family = family_of(name) if isinstance(name, str) else None
    if family is None:
        raise FileError(f"{path}: model_type {name!r} is not supported{_known_types(name)}")
    if raw.get("auto_map") is not None:
        raise FileError(
            f"{path}: auto_map asks for code that comes with the checkpoint, which is never run; "
            "use a checkpoint of the family's own code"
        )
    try:
        check_dtypes(raw)
        return family, parse(family, raw), raw
    except ArgumentError as e:
        raise FileError(f"{path}: {e}") from e


def read_json(path: Path, where: str) -> dict[str, Any]:
    """A file that holds one JSON object.

    Raises:
        FileError: it does not; `where` is told of a file that is missing.
    """
    try:
        raw = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise FileError(f"{path} is missing; {where}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as e:
        raise FileError(f"{path} cannot be read as JSON: {e}") from e
    if not isinstance(raw, dict):
        raise FileError(f"{path} holds {type(raw).__name__}; it must be a JSON object")
    return raw


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
            close = difflib.get_close_matches(key, [*known, *fixed], 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ArgumentError(f"unknown key {key!r}{hint}")
    required = [n for n, f in known.items() if f.default is MISSING and f.default_factory is MISSING]
    if missing := [name for name in required if name not in found]:
        raise ArgumentError(f"it lacks {', '.join(missing)}")
    hints = _hints(family.config)
    return family.config(**{n: _typed(n, found[n], hints[n]) for n in known if n in found})


def check_dtypes(raw: Raw) -> None:
    """`dtype` and its older name do not contradict one another."""
    new, old = raw.get("dtype"), raw.get("torch_dtype")
    if new is not None and old is not None and new != old:
        raise ArgumentError(f"dtype is {new!r} and torch_dtype is {old!r}; they mean the same: keep one")


@lru_cache
def _hints(config: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(config)


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

    close = difflib.get_close_matches(name, FAMILIES, 1, 0.75) if isinstance(name, str) else []
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{hint}; supported: {', '.join(FAMILIES)}"
