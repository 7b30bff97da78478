"""`ModelConfig`, the base class of all configs, and what their classes share without torch: checks,
and the sliding window of each layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from regard.cost.model import ModelSpec
from regard.did_you_mean import suggest
from regard.errors import ArgumentError
from regard.units import plural
from regard.untrusted_text import short_repr

Raw: TypeAlias = Mapping[str, object]
"""The parsed content of a config.json."""
Flag: TypeAlias = bool | str
"""A truth value of a recipe, or the name of the config's attribute that says it."""
Number: TypeAlias = float | str
"""A number of a recipe, or the name of the config's attribute that has it."""
_KV_HEADS: dict[object, int] = {
    **dict.fromkeys(("ernie4_5", "glm", "glm4", "qwen3_next", "starcoder2"), 2),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "qwen4_exp_text"), 2),
    **dict.fromkeys(("gemma2", "qwen3_5", "qwen3_5_text", "qwen3_moe", "smollm3"), 4),
    **dict.fromkeys(("ernie4_5_moe", "granite_swa", "mimo_v2_flash", "minimax_m3_vl_text"), 4),
    **dict.fromkeys(("lfm2", "lfm2_moe"), 8),
    **dict.fromkeys(("bamba", "falcon_h1", "glm4_moe", "jamba", "llama4_text", "minimax"), 8),
    **dict.fromkeys(("minimax_m2", "ministral3", "mistral", "mixtral", "nemotron_h"), 8),
    **dict.fromkeys(("hy_v3", "phimoe", "seed_oss"), 8),
    **dict.fromkeys(("gemma", "qwen2_moe"), 16),
    "helium": 20,
    **dict.fromkeys(("exaone4", "exaone_moe", "qwen2", "qwen3", "stablelm"), 32),
}
_HEAD_DIMS: dict[object, int] = {
    **dict.fromkeys(("ernie4_5", "glm", "glm4", "helium", "llama4_text", "minimax_m2"), 128),
    **dict.fromkeys(("hy_v3", "minimax_m3_vl_text", "ministral3", "qwen3", "seed_oss"), 128),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe"), 256),
    "mimo_v2_flash": 192,
    **dict.fromkeys(("qwen3_5_moe_text", "qwen4_exp", "qwen4_exp_text"), 256),
}
ABSENT_SIZES: Mapping[str, Mapping[object, int]] = {
    "num_key_value_heads": _KV_HEADS,
    "head_dim": _HEAD_DIMS,
    "intermediate_size": {"qwen3_next": 5632},
}
"""Key -> model_type -> the value that transformers takes where a config.json lacks the key, for the
families in which it does not follow from other sizes.
"""


def with_absent_sizes(raw: Raw) -> dict[str, object]:
    """Return the keys of a config.json and its text_config, completed from `ABSENT_SIZES`."""
    kind, text = str(raw.get("model_type")), raw.get("text_config")
    keys = {key: values[kind] for key, values in ABSENT_SIZES.items() if kind in values} | dict(raw)
    if isinstance(text, Mapping):
        keys["text_config"] = with_absent_sizes({"model_type": f"{kind}_text", **text})
    return keys


MAX_LAYERS = 1 << 9
"""The largest number of layers that is accepted, about four times that of any published model."""


class UnknownKey(ArgumentError):
    """A key of config.json that its family does not know; a caller may choose to ignore it."""

    def __init__(self, path: tuple[str, ...], reason: str) -> None:
        self.path = path
        name = short_repr(self.key)
        super().__init__(
            f"{reason}{'' if reason.endswith('?') else '.'} If it does not change the computation, "
            f"ignore it: regard.load(folder, ignore=({name},)), or --ignore {name}"
        )

    @property
    def key(self) -> str:
        """The path with dots, as `ignore` spells it."""
        return ".".join(self.path)


@dataclass(frozen=True)
class ModelConfig(ABC):
    """The config of one family: its fields are the keys of config.json that change the network.

    Names are those of Hugging Face; a field without a default is required. What only parts of the
    network can check, such as rotary scalings, is checked when it is built or a folder is read.

    Attributes:
        model_types: the values of `model_type` that this class reads. The first one is written.
        renamed: other name of a key -> its name in this class.
        ignored: further keys that do not change the computation, besides those for every family.
        fixed: key -> the only values that are supported.
        unwritten: fields that say nothing in this family, and that a saved config.json lacks.
        family_file: the file of `regard.models.families` with the network; None builds it from the
            recipe alone.
        code: the beginning of the class names in the family's published code: an `auto_map` that
            names only such classes is accepted, because it is the same computation. No code is run.
    """

    model_types: ClassVar[tuple[str, ...]]
    renamed: ClassVar[Mapping[str, str]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    unwritten: ClassVar[frozenset[str]] = frozenset()
    family_file: ClassVar[str | None] = None
    code: ClassVar[str | None] = None

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys in this class's spelling, with defaults that depend on other keys."""
        return rename_keys(raw, cls.renamed)

    def value(self, value: Any) -> Any:
        """Return a value of a recipe, which may be the name of an attribute."""
        return getattr(self, value) if isinstance(value, str) else value

    @abstractmethod
    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the model, from which parameters, cache and FLOPs are counted."""


def check_sizes(config: ModelConfig, *, zero: Collection[str] = ()) -> None:
    """Check that every whole number of a config is at least 1, or 0 where it may be."""
    for name, value in vars(config).items():
        least = 0 if name in zero else 1
        if isinstance(value, int) and not isinstance(value, bool) and value < least:
            raise ArgumentError(f"{name} is {value}; it must be at least {least}")


def check_length(key: str, values: Sequence[object], layers: int) -> None:
    """Check that a key has a value for each layer."""
    if len(values) != layers:
        raise ArgumentError(
            f"{key} has {plural(len(values), 'entry')} and num_hidden_layers is {layers}; give one "
            "per layer"
        )


def rename_keys(raw: Raw, names: Mapping[str, str]) -> dict[str, object]:
    """Rename keys to the family's own spelling; a null counts as absent."""
    renamed = dict(raw)
    for other, own in names.items():
        value = renamed.pop(other, None)
        if value is None:
            continue
        if renamed.get(own) not in (None, value):
            raise ArgumentError(
                f"{other} is {value!r} and {own} is {renamed[own]!r}; they mean the same: keep one"
            )
        renamed[own] = value
    return renamed


ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "linear": "linear",
    "relu": "relu",
    "relu2": "relu_squared",
    "sigmoid": "sigmoid",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
    "xielu": "xielu",
}
"""Name in config.json -> nonlinearity. "gelu" is x Phi(x) with the error function; five names mean
its approximation with tanh.
"""


def check_activation(name: str, key: str = "hidden_act") -> None:
    """Check that a name in config.json is that of a nonlinearity."""
    if name not in ACTIVATIONS:
        raise ArgumentError(
            f"{key} is {name!r}; supported are {', '.join(sorted(ACTIVATIONS))}"
            f"{suggest(name, ACTIVATIONS)}"
        )


FULL, SLIDING = "full_attention", "sliding_attention"


def layer_windows(
    num_hidden_layers: int,
    *,
    sliding_window: int | None = None,
    layer_types: Sequence[str] | None = None,
    sliding_window_pattern: int | None = None,
    max_window_layers: int | None = None,
    use_sliding_window: bool | None = None,
) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, or None for full attention.

    A window counts the query's own position. The first of these keys that is given decides whether
    layer i has a window: `layer_types` (layer_types[i] == "sliding_attention"),
    `sliding_window_pattern` ((i + 1) % sliding_window_pattern != 0), `max_window_layers` (i >=
    max_window_layers). Without them every layer has the window.
    """
    _at_least("num_hidden_layers", num_hidden_layers, 1)
    _at_least("sliding_window", sliding_window, 1)
    _at_least("sliding_window_pattern", sliding_window_pattern, 1)
    _at_least("max_window_layers", max_window_layers, 0)
    if use_sliding_window and sliding_window is None:
        raise ArgumentError(
            "use_sliding_window is true and sliding_window is null; give the width of the window, "
            "or set it to false"
        )
    width = sliding_window if use_sliding_window is not False else None
    source, slides = "", [i >= (max_window_layers or 0) for i in range(num_hidden_layers)]
    if sliding_window_pattern is not None:
        source = f"sliding_window_pattern {sliding_window_pattern}"
        patterned = [(i + 1) % sliding_window_pattern != 0 for i in range(num_hidden_layers)]
        slides = patterned
    if layer_types is not None:
        source, slides = "layer_types", _slides_of_names(layer_types, num_hidden_layers)
        if sliding_window_pattern is not None:
            _check_agreement(slides, patterned, sliding_window_pattern)
    if source and any(slides) and width is None:
        why = "sliding_window is null" if sliding_window is None else "use_sliding_window is false"
        raise ArgumentError(
            f"{source} makes layer {slides.index(True)} {SLIDING!r}, and {why}; a layer that "
            "slides needs a window"
        )
    return tuple(width if slide else None for slide in slides)


def _slides_of_names(layer_types: Sequence[str], layers: int) -> list[bool]:
    """Return for each layer whether its type is "sliding_attention"."""
    if isinstance(layer_types, str) or not isinstance(layer_types, Sequence):
        raise ArgumentError(f"layer_types is {layer_types!r}; it must be a list of names")
    check_length("layer_types", layer_types, layers)
    for i, name in enumerate(layer_types):
        if name not in (FULL, SLIDING):
            hint = suggest(name, (FULL, SLIDING), cutoff=0.8)
            raise ArgumentError(
                f"layer_types[{i}] is {name!r}; supported are {FULL!r} and {SLIDING!r}{hint}"
            )
    return [name == SLIDING for name in layer_types]


def _check_agreement(named: list[bool], patterned: list[bool], pattern: int) -> None:
    for i, (name, by_pattern) in enumerate(zip(named, patterned, strict=True)):
        if name != by_pattern:
            kinds = [SLIDING if slides else FULL for slides in (name, by_pattern)]
            raise ArgumentError(
                f"layer_types[{i}] is {kinds[0]!r}, and sliding_window_pattern {pattern} makes it "
                f"{kinds[1]!r}; remove one of the two keys"
            )


def _at_least(name: str, value: int | None, least: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(f"{name} is {value!r}; it must be an integer of at least {least}")
