"""config.json -> the frozen config of its family: every key is understood, or the folder is
refused.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from regard.errors import ArgumentError, FileError
from regard.files.regular import inside, present
from regard.files.strict import LONGEST
from regard.files.strict import read_json as read_json_file
from regard.foreign import shown, told
from regard.models.checkpoint.advice import without_config
from regard.models.checkpoint.family import Family, Raw, UnknownKey, check_code
from regard.suggest import suggest

_PER_TENSOR = 64  # experts that one tensor may hold
_MOST_IGNORED = 64  # each unknown key costs another reading of the whole config
_SIZES = (
    # the first word that stands in a key's name decides
    ("window_layers", 1 << 31),
    ("layer", 1 << 9),
    ("expert", 1 << 14),
    ("vocab", 1 << 24),
    ("theta", 1 << 53),
    ("base", 1 << 53),
    *(
        (word, 1 << 31)
        for word in (
            "position",
            "length",
            "seq",
            "ctx",
            "window",
            "distance",
            "chunk",
            "context",
            "token_id",
        )
    ),
    ("dim", 1 << 20),
    ("head", 1 << 16),
    ("", 1 << 20),
)
"""Part of a key's name -> the largest whole number that is believed: ten times what any published
model has, and more.
"""

IGNORED = frozenset(
    {
        # what the file and the model are called, where they came from, and in which classes others
        # hold them
        "_commit_hash",
        "_name_or_path",
        "architectures",
        "auto_map",
        "finetuning_task",
        "keys_to_ignore_at_inference",
        "language",
        "model_type",
        "name",
        "name_or_path",
        "sentence_transformers",
        "tokenizer_class",
        "transformers_version",
        # which code computes it elsewhere, in which precision, and what that code returns
        "attn_implementation",
        "chunk_size_feed_forward",
        "dtype",
        "experts_implementation",
        "output_attentions",
        "output_hidden_states",
        "output_past",
        "output_router_logits",
        "pretraining_tp",
        "quantization_config",
        "return_dict",
        "tf_legacy_loss",
        "torch_dtype",
        "torchscript",
        "use_bfloat16",
        "use_cache",
        "xla_device",
        # training: dropout, losses and first weights
        "activation_dropout",
        "attention_dropout",
        "attention_probs_dropout_prob",
        "attn_pdrop",
        "classifier_dropout",
        "dropout",
        "dropout_rate",
        "emb_pdrop",
        "embd_pdrop",
        "gradient_checkpointing",
        "hidden_dropout",
        "hidden_dropout_prob",
        "initializer_factor",
        "initializer_range",
        "neftune_noise_alpha",
        "resid_pdrop",
        "router_aux_loss_coef",
        # a head that sorts texts into classes: its weights, where there are some, are refused by
        # their names
        "_num_labels",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "summary_activation",
        "summary_first_dropout",
        "summary_hidden_size",
        "summary_last_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        # what transformers generates by; generation is told by `generate` here
        "assistant_confidence_threshold",
        "assistant_early_stop",
        "assistant_lookbehind",
        "bad_words_ids",
        "begin_suppress_tokens",
        "cache_implementation",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty",
        "epsilon_cutoff",
        "eta_cutoff",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "guidance_scale",
        "length_penalty",
        "low_memory",
        "max_length",
        "max_new_tokens",
        "max_time",
        "min_length",
        "min_new_tokens",
        "no_repeat_ngram_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_logits",
        "output_scores",
        "penalty_alpha",
        "prefix",
        "prompt_lookup_num_tokens",
        "remove_invalid_values",
        "renormalize_logits",
        "repetition_penalty",
        "return_dict_in_generate",
        "suppress_tokens",
        "target_lookbehind",
        "task_specific_params",
        "temperature",
        "token_healing",
        "top_k",
        "top_p",
        "typical_p",
        # ids of single tokens: which one ends a text is read with the tokenizer
        "bos_token_id",
        "cls_token_id",
        "decoder_start_token_id",
        "eos_token_id",
        "mask_token_id",
        "pad_token_id",
        "sep_token_id",
        "unk_token_id",
    }
)
"""Keys that do not shape the computation of any family: how to train, how to generate, how the file
came to be.
"""

MARKS = (
    "_attn_implementation*",
    "_experts_implementation*",
    "_flash_attn_2_enabled",
    "transformers.js_config",
    "unsloth_*",
    "use_flash_attn",
    "use_flash_attention",
    "use_flash_attention_2",
)
"""Patterns of keys that other tools leave in any folder: which kernel they computed the same with,
and their own names.
"""

FIXED: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
    "tie_encoder_decoder": (False,),
    # where the weights are not in the usual files, those that would be read are others
    "transformers_weights": (None, "model.safetensors", "model.safetensors.index.json"),
}
"""Keys that every family understands with these values only, unless it says otherwise."""


def is_mark(key: str) -> bool:
    """Whether a key is one that other tools leave in any folder.

    >>> is_mark("_attn_implementation_autoset"), is_mark("attention")
    (True, False)
    """
    return any(fnmatchcase(key, pattern) for pattern in MARKS)


def is_harmless(key: str) -> bool:
    """Whether a key changes the numbers of no family: it is in `IGNORED`, or a mark of another
    tool.
    """
    return key in IGNORED or is_mark(key)


def read_raw(folder: Path, family_of: Callable[[str], Family | None]) -> tuple[Family, Raw]:
    """The family that config.json names, and the file as it is.

    Raises:
        FileError: config.json is missing, no JSON object, or of another family.
    """
    path = folder / "config.json"
    if present(folder, "config.json") is None:
        raise without_config(folder)
    raw = read_json(folder, "config.json")
    name = raw.get("model_type")
    family = family_of(name) if isinstance(name, str) else None
    if family is None:
        raise FileError(f"{path}: model_type {shown(name)} is not supported{_known_types(name)}")
    return family, raw


def read_config(
    folder: Path, family: Family, raw: Raw, *, tensors: int, ignore: Sequence[str] = ()
) -> tuple[Any, tuple[str, ...]]:
    """The config of a family, from a raw config.json; and the keys in it that were passed over.

    Passed over are keys that other tools leave in any folder (`MARKS`), and unknown ones that
    `ignore` names.

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
    passed = [
        key for key in keys if is_mark(key) or (key == "auto_map" and raw.get(key) is not None)
    ]
    try:
        _check_counts(raw, tensors)
        check_dtypes(raw)
        for _ in range(_MOST_IGNORED):
            try:
                return parse(family, raw), tuple(dict.fromkeys(passed))
            except UnknownKey as unknown:
                rest = _without(raw, unknown.path)
                if rest is None or not any(fnmatchcase(unknown.key, p) for p in ignore):
                    raise
                raw = rest
                passed.append(unknown.key)
        raise ArgumentError(
            f"it has more than {_MOST_IGNORED} unknown keys; at most so many are passed over"
        )
    except ArgumentError as e:
        raise FileError(f"{folder / 'config.json'}: {told(e)}") from e


def _without(raw: Raw, path: tuple[str, ...]) -> Raw | None:
    """A config without one key, which may stand in the text_config of a model that also sees
    pictures; None without it.
    """
    inner = raw.get(path[0])
    if len(path) > 1 and isinstance(inner, Mapping):
        rest = _without(inner, path[1:])
        return None if rest is None else {**raw, path[0]: rest}
    if len(path) == 1 and path[0] in raw:
        return {key: value for key, value in raw.items() if key != path[0]}
    if isinstance(text := raw.get("text_config"), Mapping):
        rest = _without(text, path)
        return None if rest is None else {**raw, "text_config": rest}
    return None


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
        FileError: it is missing, lies elsewhere, is larger than a config is, or holds something
            else.
    """
    found: dict[str, Any] = read_json_file(inside(folder, name), limit=LONGEST)
    return found


def parse(family: Family, raw: Raw) -> Any:
    """Check every key: it shapes the model, is known not to, or has a value that is understood.

    Raises:
        ArgumentError: a key is unknown, missing, of the wrong type, or out of range.
    """
    model_type = raw.get("model_type")
    check_code(family, raw)
    known = {f.name: f for f in fields(family.config)}
    found = family.plain(raw)
    fixed = {k: v for k, v in {**FIXED, **family.fixed}.items() if k not in known}
    for key, value in found.items():
        if key in fixed and value not in fixed[key]:
            allowed = " or ".join(repr(v) for v in fixed[key])
            raise ArgumentError(f"{key} is {value!r}; only {allowed} is supported for {model_type}")
        if not (key in known or key in fixed or key in family.ignored or is_harmless(key)):
            raise UnknownKey((key,), f"unknown key {shown(key)}{suggest(key, [*known, *fixed])}")
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

    known = FAMILIES if isinstance(name, str) else ()
    return f"{suggest(name, known, cutoff=0.75, otherwise='.')} Supported: {', '.join(FAMILIES)}"
