"""Functions that read a config.json: `parse` checks every key, and `read_sizes` counts models that
`regard.load` does not support, too, as it ignores what changes no size.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from regard.configs import CONFIGS, config_class, quantization_settings, read_as
from regard.configs.base import MAX_LAYERS, ModelConfig, Raw, UnknownKey, with_absent_sizes
from regard.cost.model import ModelSpec, StoredSize
from regard.did_you_mean import suggest
from regard.errors import ArgumentError, FileError
from regard.files.reading import read_json
from regard.untrusted_text import error_text, escape_controls, short_repr

MAX_UNKNOWN_KEYS = 64
"""The largest number of unknown keys that are ignored; each needs another pass over the config."""
_LARGEST_VALUES = (
    # the first entry whose text occurs in the name of the key applies; "" occurs in every name
    *((word, 1 << 31) for word in ("window", "chunk", "position", "length", "seq", "ctx")),
    *((word, 1 << 31) for word in ("distance", "context", "token_id")),
    *((word, 1 << 53) for word in ("theta", "base")),
    ("vocab", 1 << 24),
    ("size", 1 << 20),
    ("layer", MAX_LAYERS),
    ("expert", 1 << 14),
    ("dim", 1 << 20),
    ("head", 1 << 16),
    ("", 1 << 20),
)
"""Part of a key's name -> the largest whole number, ten times that of any published model."""


def largest_value(name: str) -> int:
    """Return the largest whole number that a key may have."""
    last = name.rpartition(".")[2].lower()
    return next(limit for word, limit in _LARGEST_VALUES if word in last)


def counts_layers_or_experts(name: str) -> bool:
    """Return whether a whole number of this key can be a number of layers or of experts."""
    return largest_value(name) in (MAX_LAYERS, 1 << 14)


IGNORED_KEYS = frozenset(
    {
        # names and origin of the file and the model, and their classes in other libraries
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
        # which code another library uses, in which precision, and what it returns
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
        # training: dropout, losses and initial weights
        "activation_dropout",
        "attention_dropout",
        "attention_probs_dropout_prob",
        "attn_pdrop",
        "classifier_dropout",
        "dropout",
        "embedding_dropout",
        "residual_dropout",
        "router_jitter_noise",
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
        # a classification head; its weights, if there are any, are refused by their names
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
        # generation in transformers; here the arguments of `generate` replace them
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
        # ids of single tokens; the one that ends a text is read with the tokenizer
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
"""Keys that change the computation of no family, except those that a family has as a field:
training, generation, and origin of the file.
"""

TOOL_KEYS = (
    "_attn_implementation*",
    "_experts_implementation*",
    "_flash_attn_2_enabled",
    "transformers.js_config",
    "unsloth_*",
    "use_flash_attn",
    "use_flash_attention",
    "use_flash_attention_2",
)
"""Patterns of keys that other tools add to a config.json: their kernels and their names."""

FIXED_VALUES: dict[str, tuple[object, ...]] = {
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
    "tie_encoder_decoder": (False,),
    # other values mean that the weights are in other files than those that are read
    "transformers_weights": (None, "model.safetensors", "model.safetensors.index.json"),
}
"""Key -> the only values that are supported, unless a family defines others."""


SIZE_KEYS = frozenset(
    {
        "add_cross_attention",
        "attention_bias",
        "decoder_sparse_step",
        "expansion_ratio",
        "index_topk_freq",
        "index_topk_pattern",
        "lm_head_bias",
        "mlp_bias",
        "mamba_proj_bias",
        "mlp_only_layers",
        "moe_latent_size",
        "moe_layer_freq",
        "n_inner",
        "no_bias",
        "position_embedding_type",
        "pruned_heads",
    }
)
"""Keys that change sizes: unsupported values also raise when a model is counted."""
ROPE_KEYS = frozenset(
    {
        "partial_rotary_factor",
        "rope_local_base_freq",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "rotary_emb_base",
        "rotary_pct",
    }
)
"""The keys of rotary positions, which change no size."""
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""A dtype of config.json -> its name in `regard.cost.report.BITS`."""


UNCOUNTED_KEYS = (
    "vision_config",
    "audio_config",
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
)
"""Keys of parts that are not counted, such as encoders of images and sound."""
NOT_COUNTED = "not counted: {parts}"
QUANTIZED_NOTE = (
    "config.json has a quantization_config: the weights in the files are smaller than what is "
    "counted here, which is one dtype for all weights"
)


def is_tool_key(key: str) -> bool:
    """Return whether other tools write this key into any folder."""
    return any(fnmatchcase(key, pattern) for pattern in TOOL_KEYS)


def is_harmless(key: str) -> bool:
    """Return whether a key changes the computation of no family."""
    return key in IGNORED_KEYS or is_tool_key(key)


Config = TypeVar("Config", bound=ModelConfig)


def parse(kind: type[Config], raw: Raw) -> Config:
    """Return the config of a family; a key that is not known to change nothing raises."""
    check_code(kind, raw)
    return _parse(kind, raw, sizes_only=False)


def _parse(kind: type[Config], raw: Raw, *, sizes_only: bool) -> Config:
    """Return the config; `sizes_only` checks only the keys that change sizes."""
    known = {f.name: f for f in fields(kind)}
    _check_layer_counts(raw)
    keys = kind.normalize_keys(with_absent_sizes(raw))
    fixed = {k: v for k, v in {**FIXED_VALUES, **kind.fixed}.items() if k not in known}
    for key, value in keys.items():
        if sizes_only and key not in known and (value is None or key not in SIZE_KEYS):
            continue
        if key in fixed and value not in fixed[key]:
            allowed = " or ".join(repr(v) for v in fixed[key])
            raise ArgumentError(
                f"{key} is {value!r}; only {allowed} is supported for {raw.get('model_type')}"
            )
        if sizes_only or key in known or key in fixed or key in kind.ignored or is_harmless(key):
            continue
        raise UnknownKey((key,), f"unknown key {short_repr(key)}{suggest(key, [*known, *fixed])}")
    hints = typing.get_type_hints(kind)
    if sizes_only:  # a null counts as absent, unless it has a meaning for this key
        keys = {
            k: v
            for k, v in keys.items()
            if v is not None or type(None) in _union_members(hints.get(k))
        }
    required = [
        n for n, f in known.items() if f.default is MISSING and f.default_factory is MISSING
    ]
    if missing := [name for name in required if name not in keys]:
        raise ArgumentError(f"it lacks {', '.join(missing)}")
    for name in known.keys() & keys.keys():
        _check_sizes(name, keys[name])
    return kind(**{n: _typed(n, keys[n], hints[n]) for n in known if n in keys})


def parse_ignoring(
    kind: type[Config],
    raw: Raw,
    ignores: Callable[[str], bool],
    parse_config: Callable[[type[Config], Raw], Config] = parse,
) -> tuple[Config, tuple[str, ...]]:
    """Return the config of a family, and the unknown keys that were ignored."""
    ignored_keys: list[str] = []
    for _ in range(MAX_UNKNOWN_KEYS):
        try:
            return parse_config(kind, raw), tuple(ignored_keys)
        except UnknownKey as unknown:
            rest = _without(raw, unknown.path)
            if rest is None or not ignores(unknown.key):
                raise
            raw = rest
            ignored_keys.append(unknown.key)
    raise ArgumentError(
        f"it has more than {MAX_UNKNOWN_KEYS} unknown keys, the largest number that can be ignored"
    )


def read_sizes(raw: Raw, name: str, where: str = "config.json") -> ModelSpec:
    """Return the sizes of the model of a parsed config.json."""
    model_type = raw.get("model_type")
    try:
        config = sizes_config(raw)
        model = config.sizes(name)
    except ArgumentError as error:
        raise ArgumentError(
            f"{where}: {error_text(error)}; or give the sizes as flags: --layers --dim --heads ..."
        ) from error
    text = raw.get("text_config")
    has_more = isinstance(text, Mapping) and config.model_types[0] != model_type
    keys = text if isinstance(text, Mapping) and has_more else raw
    parts = ", ".join(key for key in UNCOUNTED_KEYS if raw.get(key) or keys.get(key))
    if parts or has_more:
        note = NOT_COUNTED.format(parts=parts or "what config.json has besides text_config")
        model = replace(model, notes=(*model.notes, note))
    stated = keys.get("max_position_embeddings", keys.get("model_max_length"))
    if model.max_context is None and isinstance(stated, int):
        model = replace(model, stated_context=stated)
    dtype = str(keys.get("dtype") or keys.get("torch_dtype")).removeprefix("torch.")
    return replace(model, dtype=DTYPES[dtype]) if dtype in DTYPES else model


def sizes_config(raw: Raw) -> ModelConfig:
    """Return the config of a parsed config.json, checked where keys change sizes."""
    model_type = read_as(raw)
    kind = config_class(model_type) if isinstance(model_type, str) else None
    if kind is None:
        raise ArgumentError(
            f"model_type {short_repr(model_type)} is not "
            f"known{suggest(model_type, CONFIGS, otherwise='.')} Known are {', '.join(CONFIGS)}"
        )
    config, _ = parse_ignoring(kind, _without_rope(raw), lambda _: True, _parse_sizes)
    return config


def _parse_sizes(kind: type[Config], raw: Raw) -> Config:
    return _parse(kind, raw, sizes_only=True)


def _without_rope(raw: Raw) -> dict[str, object]:
    """Return a config.json without rotary settings, also in its text_config."""
    keys = {key: value for key, value in raw.items() if key not in ROPE_KEYS}
    text = keys.get("text_config")
    return keys | {"text_config": _without_rope(text)} if isinstance(text, Mapping) else keys


SizeCount: TypeAlias = Callable[[Raw, str], StoredSize | None]
"""(keys of a config.json, its name for messages) -> size of stored weights; None: plain ones."""


def read_sizes_file(path: Path, count_stored: SizeCount | None = None) -> ModelSpec:
    """Return the sizes of the model of a config.json, or of the folder that contains it."""
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise FileError(
            f"{path} does not exist; give a config.json, or the folder that contains it"
        )
    raw = read_json(path, infinity=True)
    try:
        model = read_sizes(raw, escape_controls(path.parent.name) or str(path), str(path))
        if quantization_settings(raw) is None:
            return model
        if count_stored is None:
            return replace(model, notes=(*model.notes, QUANTIZED_NOTE))
        return replace(model, stored=count_stored(raw, str(path)))
    except ArgumentError as error:
        raise ArgumentError(error_text(error, 2000)) from error


def _without(raw: Raw, path: tuple[str, ...]) -> Raw | None:
    """Return a config without one key, which may be in its text_config; None if it is not there."""
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


def _check_sizes(name: str, value: object) -> None:
    """Check that whole numbers of a key, of a list or of an object are not implausibly large."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_sizes(f"{name}.{key}", inner)
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            _check_sizes(f"{name}[{i}]", inner)
    elif type(value) is int and abs(value) > largest_value(name):
        raise ArgumentError(
            f"{name} is {short_repr(value)}; the largest accepted value is {largest_value(name)}"
        )


def _check_layer_counts(raw: Raw) -> None:
    """Check the numbers of layers, from which `normalize_keys` may make lists."""
    for name, value in raw.items():
        if isinstance(value, Mapping):
            _check_layer_counts(value)
        elif largest_value(name) == MAX_LAYERS:
            _check_sizes(name, value)


def check_dtypes(raw: Raw) -> None:
    """Check that `dtype` and its older name `torch_dtype` do not contradict each other."""
    new, old = raw.get("dtype"), raw.get("torch_dtype")
    if new is not None and old is not None and new != old:
        raise ArgumentError(
            f"dtype is {new!r} and torch_dtype is {old!r}; they mean the same: keep one"
        )


def _typed(name: str, value: object, wanted: object) -> object:
    """Return a JSON value as the type of its field; lists become tuples."""
    for kind in _union_members(wanted):
        origin = typing.get_origin(kind) or kind
        if origin is tuple and isinstance(value, list):
            inner = typing.get_args(kind)[0]
            return tuple(_typed(f"{name}[{i}]", x, inner) for i, x in enumerate(value))
        if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, dict):
            return value
        if type(value) is origin or (origin is float and type(value) is int):
            return value
    allowed = " or ".join(_type_name(kind) for kind in _union_members(wanted))
    raise ArgumentError(f"{name} is {short_repr(value)}; it must be {allowed}")


def _union_members(wanted: object) -> tuple[object, ...]:
    union = typing.get_origin(wanted) in (typing.Union, types.UnionType)
    return typing.get_args(wanted) if union else (wanted,)


def _type_name(kind: Any) -> str:
    if kind is type(None):
        return "null"
    if typing.get_origin(kind) is tuple:
        inner = _union_members(typing.get_args(kind)[0])
        return f"a list of {' or '.join(map(_type_name, inner))}"
    return "an object" if typing.get_origin(kind) else str(kind.__name__)


INPUT_CLASS_KEYS = frozenset(
    {
        "AutoFeatureExtractor",
        "AutoImageProcessor",
        "AutoProcessor",
        "AutoTokenizer",
        "AutoVideoProcessor",
    }
)
"""Entries of an `auto_map` that are not networks: they prepare ids or pixels."""


def check_code(kind: type[ModelConfig], raw: Raw) -> None:
    """Check an `auto_map`, which may name only tokenizers and the family's code; none is run."""
    auto_map = raw.get("auto_map")
    if auto_map is None:
        return
    named = auto_map if isinstance(auto_map, Mapping) else {"": auto_map}
    for role, name in named.items():
        if role in INPUT_CLASS_KEYS:
            continue
        if kind.code is None:
            raise UnknownKey(
                ("auto_map",),
                "auto_map names code in the checkpoint, which is never run and may compute "
                "something else; use a checkpoint of the family's own code",
            )
        if not str(name).rpartition(".")[2].startswith(kind.code):
            raise UnknownKey(
                ("auto_map",),
                f"auto_map names {short_repr(str(name))}, which is not the published code of "
                f"{raw.get('model_type')} and is never run; use a checkpoint of the family's own "
                "code",
            )
