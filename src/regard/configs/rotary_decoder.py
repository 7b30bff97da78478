"""Decoders with grouped queries and rotary positions: the keys that they share, and
`DecoderRecipe`, from which the network is built and `sizes` counts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from regard.argument_checks import check_groups, check_number
from regard.configs.base import (
    FULL,
    SLIDING,
    Flag,
    ModelConfig,
    Number,
    Raw,
    check_activation,
    check_sizes,
    layer_windows,
    rename_keys,
)
from regard.configs.rope import (
    RopeSettings,
    check_rope,
    normalize_rope,
    shorten,
    without_own_keys,
)
from regard.cost.model import DenseSpec, FeedForwardSpec, LayerSpec, ModelSpec, MoESpec
from regard.cost.softmax import SoftmaxSpec
from regard.cost.spec import HeadShape, ParameterCounts, Spec
from regard.errors import ArgumentError
from regard.units import plural

SILU: dict[str, tuple[object, ...]] = {"hidden_act": ("silu",)}
"""The activation that most families have, and that no key changes."""
NormKind: TypeAlias = Literal[
    "rms", "rms 1 + w", "rms, bare", "layer", "layer 1 + w", "layer, no bias", "layer, bare"
]


@dataclass(frozen=True)
class Experts:
    """Mixtures of experts in place of the feed-forward layers.

    Attributes:
        count, width: the attributes with the number of experts and the width of each.
        active: how many experts a token uses, or the attribute with that number.
        router: how experts are scored; "sigmoid" and "corrected softmax" have a correction for each
            expert.
        normalized: whether the weights of the chosen experts are divided by their sum, to which a
            sigmoid router adds `eps`.
        shared, shared_count: the attributes with the width of an expert for all tokens, and with a
            factor on that width; None if there is none.
        dense: the attribute with the number of first layers that have no experts; None if all have.
    """

    count: str
    width: str = "intermediate_size"
    active: int | str = "num_experts_per_tok"
    router: Literal["softmax", "corrected softmax", "sigmoid", "sparse_mixer"] = "softmax"
    normalized: Flag = True
    eps: float = 1e-20
    shared: str | None = None
    shared_count: str | None = None
    shared_gate: bool = False
    dense: str | None = None
    stored: str = "mlp"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


SIGMOID_EXPERTS = Experts(
    "num_experts",
    "moe_intermediate_size",
    router="sigmoid",
    normalized="norm_topk_prob",
    shared="moe_intermediate_size",
    shared_count="num_shared_experts",
    dense="first_k_dense_replace",
)
"""The experts of DeepSeek-V3, which other makers have, too."""


@dataclass(frozen=True)
class DecoderRecipe:
    """In which parts a family of decoders differs from Llama.

    Attributes:
        norm: the kind of all norms: RMS norms, or LayerNorms with weight and bias, without bias, or
            without any parameter ("bare"); "1 + w" is the weight itself plus 1.
        norms: whether a sublayer has a norm before it, after it, or both.
        head_norms: whether queries and keys have a norm on each head, or one over all heads.
        norm_rotated: whether the norm on each head stands behind the rotation.
        temperature: the attribute with the factor and the length of Ministral's queries, or None.
        embedding_norm: whether the embedding has a norm, too.
        qkv_bias, output_bias, ff_bias, head_bias: which maps have biases; None is what a config's
            own `attention_bias` or `mlp_bias` says, and none without that key.
        width, gated, activation: the feed-forward layer; a config's own `hidden_act` comes first.
        layout: the pairs of the rotary positions; a config's own `partial_rotary_factor` is the
            rotated share of a head.
        window_pattern: without the keys that name the layers with a window, every n-th layer has
            full attention.
        sinks: whether each head has a learned sink, in all layers or in those with a window.
        value_scale: the attribute with a factor on values; None is 1.
        value_norm: whether each head of values has a norm without weights.
        clip: the largest absolute value of queries, keys and values.
        stored: Llama's name of a part in checkpoints -> this family's, where they differ.
        fused: the maps whose rows are stored in one tensor: "qkv_proj", "gate_up_proj".
    """

    norm: NormKind = "rms"
    norms: Literal["before", "after", "around"] = "before"
    parallel: Flag = False
    eps: Number = "rms_norm_eps"
    head_norms: Literal["each head", "all heads", "none"] | tuple[str, str] = "none"
    norm_rotated: bool = False
    temperature: str | None = None
    embedding_norm: bool = False
    qkv_bias: Flag | None = None
    output_bias: Flag | None = None
    ff_bias: Flag | None = None
    head_bias: Flag = False
    width: str = "intermediate_size"
    gated: bool = True
    activation: str = "silu"
    layout: Literal["half", "interleaved"] = "half"
    window_pattern: int | None = None
    sinks: bool | Literal["with a window"] = False
    value_scale: str | None = None
    value_norm: bool = False
    clip: str | None = None
    embedding_scale: Number = 1.0
    score_scale: Number | None = None
    residual_scale: str | None = None
    logit_scale: Number = 1.0
    score_cap: str | None = None
    logit_cap: str | None = None
    experts: Experts | None = None
    stored: Mapping[str, str] | None = None
    fused: tuple[str, ...] = ()


@dataclass(frozen=True)
class RotaryDecoderConfig(ModelConfig):
    """The keys that decoders with grouped queries and rotary positions share."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, object] | None = None
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False

    recipe: ClassVar[DecoderRecipe] = DecoderRecipe()
    zero: ClassVar[tuple[str, ...]] = ("max_window_layers",)
    rope_keys: ClassVar[tuple[str, ...]] = ()
    """Keys that only this family has in rope_scaling, where they stay."""
    absent_rope: ClassVar[Mapping[str, object] | None] = None
    """The rope_parameters of a config.json that has none, if they are not the usual ones."""
    buffers: ClassVar[tuple[str, ...]] = ()
    """Patterns of stored tensors that are not weights."""
    towers: ClassVar[str] = ""
    """The networks for images and sound in files of such models, whose tensors are not read."""

    def __post_init__(self) -> None:
        check_sizes(self, zero=self.zero)
        check_groups(self.num_attention_heads, self.num_key_value_heads)
        if hasattr(self, "hidden_act"):
            check_activation(self.hidden_act)
        if self.recipe.norm.startswith("layer"):
            eps = self.value(self.recipe.eps)
            check_number("the eps of the norms", eps, 0, float("inf"), "above 0")
        for settings in self.ropes():
            if settings is not None:
                check_rope(settings)
                if self.recipe.norm_rotated and settings.is_length_dependent:
                    raise ArgumentError(
                        "rope_scaling has frequencies that depend on the length, and a norm stands "
                        "behind the rotation, which is not supported: use another rope_type"
                    )
        self.windows()
        self.value(self.recipe.temperature)
        if (experts := self.recipe.experts) is not None:
            check_experts(experts.count, self.value(experts.count), self.value(experts.active))

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys with all sizes of heads, and rotary settings in one form."""
        keys = normalize_rope(
            rename_keys(raw, cls.renamed), own=cls.rope_keys, absent=cls.absent_rope
        )
        heads, size = keys.get("num_attention_heads"), keys.get("hidden_size")
        if isinstance(heads, int) and isinstance(size, int) and heads > 0:
            if keys.get("num_key_value_heads") is None:
                keys["num_key_value_heads"] = heads
            if keys.get("head_dim") is None:
                if size % heads:
                    raise ArgumentError(
                        f"hidden_size {size} is not divisible by num_attention_heads {heads}, and "
                        "head_dim is not given"
                    )
                keys["head_dim"] = size // heads
        return keys

    @property
    def rope(self) -> RopeSettings:
        """The settings of the rotary positions of every layer."""
        return RopeSettings(
            self.head_dim,
            self.rope_theta,
            without_own_keys(self.rope_scaling, self.rope_keys),
            self.max_position_embeddings,
            getattr(self, "partial_rotary_factor", 1.0),
            self.recipe.layout,
        )

    def ropes(self) -> tuple[RopeSettings | None, ...]:
        """Return the rotary settings of each layer; None for a layer without rotary positions."""
        return (self.rope,) * self.num_hidden_layers

    def ropes_by_kind(self, parameters: Mapping[str, Any]) -> tuple[RopeSettings, ...]:
        """Return the rotary settings of each layer, from `rope_parameters` of both kinds."""
        both = normalize_rope({"rope_parameters": parameters}, layered=True)["rope_parameters"]
        keys_of = ((both[FULL if x is None else SLIDING], x) for x in self.windows())
        return tuple(
            RopeSettings(
                self.head_shape(window).head_dim,
                keys.get("rope_theta", 10000.0),
                keys["rope_scaling"],
                self.max_position_embeddings,
                keys.get("partial_rotary_factor", 1.0),
                self.recipe.layout,
            )
            for keys, window in keys_of
        )

    def windows(self) -> tuple[int | None, ...]:
        """Return, for each layer, how many keys a query attends to; None means no limit."""
        if not hasattr(self, "sliding_window"):
            return (None,) * self.num_hidden_layers
        keys = {key: getattr(self, key) for key in WINDOW_KEYS if hasattr(self, key)}
        if keys.get("layer_types") is None and keys.get("sliding_window_pattern") is None:
            keys["sliding_window_pattern"] = self.recipe.window_pattern
        return layer_windows(self.num_hidden_layers, **keys)

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the decoder, layer by layer."""
        norm = ParameterCounts(norms=self.norm_size)
        count = 4 if self.recipe.norms == "around" else 2
        count = 1 if self.value(self.recipe.parallel) else count
        norms = ParameterCounts(norms=count * self.norm_size)
        layers = tuple(
            LayerSpec(self.mixer(layer, window), self.feed_forward(layer), norms)
            for layer, window in enumerate(self.windows())
        )
        head = self.vocab_size if self.value(self.recipe.head_bias) else 0
        return ModelSpec(
            name,
            self.vocab_size,
            self.hidden_size,
            layers,
            norms=norm + ParameterCounts(biases=head),
            tied=self.tie_word_embeddings,
        )

    @property
    def norm_size(self) -> int:
        """The number of parameters of a norm of the model dim."""
        values = {"layer": 2, "layer 1 + w": 2, "layer, bare": 0, "rms, bare": 0}
        return values.get(self.recipe.norm, 1) * self.hidden_size

    @property
    def head_norms(self) -> str:
        """Which norms queries and keys have; a recipe with a pair also names the key for them."""
        kind = self.recipe.head_norms
        if isinstance(kind, str):
            return kind
        return kind[0] if getattr(self, kind[1]) else "none"

    def mixer(self, layer: int, window: int | None) -> Spec:
        """Return the sizes of the mechanism of a layer."""
        return self.attention(window)

    def attention(self, window: int | None = None) -> SoftmaxSpec:
        """Return the sizes of attention with a window."""
        shape = self.head_shape(window)
        H, G, D = shape.heads, shape.groups, shape.head_dim
        # query heads share the weights of a norm on each head, and so do key heads
        norms = {"each head": 2 * D, "all heads": (H + G) * D}
        return SoftmaxSpec.of(
            self.hidden_size,
            shape,
            bias=self.has_bias("qkv_bias"),
            output_bias=self.has_bias("output_bias"),
            norms=norms.get(self.head_norms, 0) if self.norm_size else 0,
            extra=H if self.has_sinks(window) else 0,
            window=window,
        )

    def head_shape(self, window: int | None) -> HeadShape:
        """Return the heads of a layer with a window, or without one."""
        D = self.head_dim
        return HeadShape(self.num_attention_heads, self.num_key_value_heads, D, D)

    def has_bias(self, name: Literal["qkv_bias", "output_bias", "ff_bias"]) -> bool:
        """Return whether maps have biases, as the recipe or a key says."""
        by_recipe = getattr(self.recipe, name)
        key = "mlp_bias" if name == "ff_bias" else "attention_bias"
        return bool(getattr(self, key, False) if by_recipe is None else self.value(by_recipe))

    def has_sinks(self, window: int | None) -> bool:
        """Return whether the heads of a layer with a window, or without one, have sinks."""
        return self.recipe.sinks is True or (bool(self.recipe.sinks) and window is not None)

    @property
    def shared_width(self) -> int | None:
        """The width of the expert for all tokens; None if there is none."""
        experts = self.recipe.experts
        if experts is None or experts.shared is None:
            return None
        count = 1 if experts.shared_count is None else self.value(experts.shared_count)
        return int(self.value(experts.shared) * count) or None

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has a mixture of experts, not a dense network."""
        experts = self.recipe.experts
        return experts is not None and layer >= (self.value(experts.dense) or 0)

    def limits(self, layer: int, *, expert: bool = False) -> Mapping[str, Any] | None:
        """Return the options of `ClippedSwiGLU` in a layer's experts, or in its other networks;
        None if their hidden numbers have no limit.
        """
        return None

    def feed_forward(self, layer: int) -> FeedForwardSpec:
        """Return the sizes of the feed-forward part of a layer."""
        M, recipe, experts = self.hidden_size, self.recipe, self.recipe.experts
        bias = self.has_bias("ff_bias")
        if experts is None or not self.has_experts(layer):
            learned = getattr(self, "hidden_act", recipe.activation) == "xielu"
            own = ParameterCounts(0, 4 if learned else 0)
            width = self.value(recipe.width)
            return DenseSpec(M, width, gated=recipe.gated, bias=bias, beside=own)
        count, shared = self.value(experts.count), self.shared_width
        return MoESpec(
            DenseSpec(M, self.value(experts.width)),
            count,
            self.value(experts.active),
            None if shared is None else DenseSpec(M, shared, bias=bias),
            count if experts.router in ("sigmoid", "corrected softmax") else 0,
            experts.shared_gate,
        )


WINDOW_KEYS = (
    "sliding_window",
    "layer_types",
    "sliding_window_pattern",
    "max_window_layers",
    "use_sliding_window",
)
"""The keys of `layer_windows`."""


@dataclass(frozen=True)
class GroupedQueryConfig(RotaryDecoderConfig):
    """The keys that Llama, its relatives and the Gemmas share, with RMS norms."""

    rms_norm_eps: float = 1e-6

    fixed = SILU


def check_experts(key: str, experts: int, per_token: int) -> None:
    """Check that a token uses no more experts than there are."""
    if per_token > experts:
        raise ArgumentError(
            f"num_experts_per_tok is {per_token}, and {key} is {experts}; it must be at most that"
        )


def rotated_by_flag(flags: tuple[int, ...] | None, layers: int, interval: int) -> tuple[bool, ...]:
    """Return which layers have rotary positions: by `no_rope_layers`, or all but every n-th."""
    if flags is None:
        return tuple((i + 1) % interval != 0 for i in range(layers))
    if len(flags) != layers or not set(flags) <= {0, 1}:
        raise ArgumentError(
            f"no_rope_layers must have 0 or 1 for each of {plural(layers, 'layer')}; it has "
            f"{plural(len(flags), 'entry')}"
        )
    return tuple(flag == 1 for flag in flags)


def dense_layers_first(keys: Mapping[str, object], default: int) -> dict[str, object]:
    """Return the keys with `first_k_dense_replace` in place of `mlp_layer_types`."""
    rest = dict(keys)
    kinds, first = rest.pop("mlp_layer_types", None), rest.get("first_k_dense_replace")
    layers = rest.get("num_hidden_layers")
    if not isinstance(kinds, list) or not isinstance(layers, int):
        return {"first_k_dense_replace": default, **rest}
    dense = kinds.count("dense")
    if kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise ArgumentError(
            f"mlp_layer_types is {shorten(kinds)}; it must be one name for each of "
            f"{plural(layers, 'layer')}: 'dense' for the first ones, then 'sparse'"
        )
    if isinstance(first, int) and min(first, layers) != dense:
        raise ArgumentError(
            f"mlp_layer_types begins with {dense} dense, and first_k_dense_replace is {first}; "
            "remove the wrong one"
        )
    return {**rest, "first_k_dense_replace": dense}


def language_model(raw: Raw, beside: Collection[str], **absent: object) -> dict[str, object]:
    """Return the config of the language model, from that of a model that also reads images, without
    the keys `beside` it; `absent` are values that it may leave out.
    """
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise ArgumentError(
            f"text_config is {text!r}; it must be an object with the language model's keys"
        )
    return absent | {k: v for k, v in raw.items() if k not in beside} | dict(text)
