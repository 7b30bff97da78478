"""The configs of Llama and its relatives: grouped queries, rotary positions, gated feed-forward
layers or experts, and RMS norms.

Source of the keys: Hugging Face checkpoints. Papers: see the builders in `regard.models.families`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from regard.argument_checks import check_groups, check_number
from regard.configs.base import (
    FULL,
    SLIDING,
    ModelConfig,
    Raw,
    check_sizes,
    layer_windows,
    rename_keys,
)
from regard.configs.rope import RopeSettings, check_rope, normalize_rope
from regard.cost.model import DenseSpec, FeedForwardSpec, LayerSpec, ModelSpec, MoESpec
from regard.cost.softmax import SoftmaxSpec
from regard.cost.spec import HeadShape, ParameterCounts
from regard.errors import ArgumentError


@dataclass(frozen=True)
class RotaryDecoderConfig(ModelConfig):
    """The keys that decoders with grouped queries and rotary positions share, whatever their norms
    and feed-forward layers.

    Raises:
        ArgumentError: a size is less than 1, num_key_value_heads does not divide
            num_attention_heads, or the keys of rotary positions or windows are not supported.
    """

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

    norms_per_block: ClassVar[int] = 2
    zero: ClassVar[tuple[str, ...]] = ("max_window_layers",)

    def __post_init__(self) -> None:
        check_sizes(self, zero=self.zero)
        check_groups(self.num_attention_heads, self.num_key_value_heads)
        for settings in self.ropes():
            if settings is not None:
                check_rope(settings)
        self.windows()

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys with head_dim and num_key_value_heads, and rotary settings in one form.

        >>> sizes = {"num_attention_heads": 4, "hidden_size": 32}
        >>> keys = LlamaConfig.normalize_keys({**sizes, "rope_parameters": {"rope_theta": 1e6}})
        >>> keys["num_key_value_heads"], keys["head_dim"], keys["rope_theta"]
        (4, 8, 1000000.0)
        """
        keys = normalize_rope(raw)
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
            self.head_dim, self.rope_theta, self.rope_scaling, self.max_position_embeddings
        )

    def ropes(self) -> tuple[RopeSettings | None, ...]:
        """Return the rotary settings of each layer; None for a layer without rotary positions."""
        return (self.rope,) * self.num_hidden_layers

    def windows(self) -> tuple[int | None, ...]:
        """Return, for each layer, how many keys a query attends to; None means no limit."""
        return (None,) * self.num_hidden_layers

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the decoder."""
        M, feed_forward = self.hidden_size, self.feed_forward()
        norms = ParameterCounts(norms=self.norms_per_block * self.norm_size)
        layers = (
            LayerSpec(self.attention(window), feed_forward, norms) for window in self.windows()
        )
        return ModelSpec(
            name,
            self.vocab_size,
            M,
            tuple(layers),
            norms=ParameterCounts(norms=self.norm_size),
            tied=self.tie_word_embeddings,
        )

    @property
    def norm_size(self) -> int:
        """The number of parameters of a norm of the model dim."""
        return self.hidden_size

    def attention(self, window: int | None) -> SoftmaxSpec:
        """Return the sizes of the attention of a layer with this window."""
        H, G, D = self.num_attention_heads, self.num_key_value_heads, self.head_dim
        bias, output_bias = self.biases
        return SoftmaxSpec.of(
            self.hidden_size,
            HeadShape(H, G, D, D),
            bias=bias,
            output_bias=output_bias,
            norms=self.head_norms,
            window=window,
        )

    def feed_forward(self) -> FeedForwardSpec:
        """Return the sizes of a feed-forward layer."""
        return DenseSpec(self.hidden_size, self.intermediate_size)

    @property
    def biases(self) -> tuple[bool, bool]:
        """Whether queries, keys and values have biases, and whether the output map has one."""
        return False, False

    @property
    def head_norms(self) -> int:
        """The number of parameters of the norms on queries and keys."""
        return 0


@dataclass(frozen=True)
class GroupedQueryConfig(RotaryDecoderConfig):
    """The keys that Llama, its relatives and the Gemmas share: those of `RotaryDecoderConfig`, with
    RMS norms.
    """

    rms_norm_eps: float = 1e-6

    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {"hidden_act": ("silu",)}


@dataclass(frozen=True)
class LlamaConfig(GroupedQueryConfig):
    """The keys of Llama 1 to 3."""

    attention_bias: bool = False
    mlp_bias: bool = False

    model_types: ClassVar[tuple[str, ...]] = ("llama",)
    ignored: ClassVar[frozenset[str]] = frozenset({"is_llama_config", "max_sequence_length"})
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "hidden_act": ("silu",),
        "rope_interleaved": (False,),
    }

    def feed_forward(self) -> FeedForwardSpec:
        """Return the sizes of a feed-forward layer."""
        return DenseSpec(self.hidden_size, self.intermediate_size, bias=self.mlp_bias)

    @property
    def biases(self) -> tuple[bool, bool]:
        """Whether queries, keys and values have biases, and whether the output map has one."""
        return self.attention_bias, self.attention_bias


@dataclass(frozen=True)
class MistralConfig(GroupedQueryConfig):
    """The keys of Mistral, which has one window for all layers or none."""

    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096

    model_types: ClassVar[tuple[str, ...]] = ("mistral",)

    def windows(self) -> tuple[int | None, ...]:
        """Return the same window for all layers, or None for all."""
        return layer_windows(self.num_hidden_layers, sliding_window=self.sliding_window)


@dataclass(frozen=True)
class Ministral3Config(MistralConfig):
    """The keys of Ministral 3, which has no window unless one is given."""

    sliding_window: int | None = None

    model_types: ClassVar[tuple[str, ...]] = ("ministral3",)


@dataclass(frozen=True)
class MixtralConfig(MistralConfig):
    """The keys of Mixtral: Mistral whose feed-forward layers are mixtures of experts."""

    rms_norm_eps: float = 1e-5
    rope_theta: float = 1000000.0
    sliding_window: int | None = None
    num_local_experts: int = field(kw_only=True)
    num_experts_per_tok: int = field(kw_only=True)

    model_types: ClassVar[tuple[str, ...]] = ("mixtral",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts("num_local_experts", self.num_local_experts, self.num_experts_per_tok)

    def feed_forward(self) -> FeedForwardSpec:
        """Return the sizes of a mixture of experts."""
        expert = DenseSpec(self.hidden_size, self.intermediate_size)
        return MoESpec(expert, self.num_local_experts, self.num_experts_per_tok)


@dataclass(frozen=True)
class Qwen2Config(GroupedQueryConfig):
    """The keys of Qwen 2 and 2.5. The biases are not among them: queries, keys and values always
    have one.
    """

    max_position_embeddings: int = 32768
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: tuple[str, ...] | None = None

    model_types: ClassVar[tuple[str, ...]] = ("qwen2",)
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "hidden_act": ("silu",),
        "use_mrope": (False,),
    }

    def windows(self) -> tuple[int | None, ...]:
        """Return the windows of `layer_types`, or a window from layer `max_window_layers` on; None
        for all layers if use_sliding_window is false.
        """
        return layer_windows(
            self.num_hidden_layers,
            sliding_window=self.sliding_window,
            layer_types=self.layer_types,
            max_window_layers=self.max_window_layers,
            use_sliding_window=self.use_sliding_window,
        )

    @property
    def biases(self) -> tuple[bool, bool]:
        """Always (True, False): queries, keys and values have biases, and the output has none."""
        return True, False


@dataclass(frozen=True)
class Qwen3Config(Qwen2Config):
    """The keys of Qwen 3: the windows of Qwen 2, and a norm on each head of queries and keys in
    place of the biases.
    """

    attention_bias: bool = False

    model_types: ClassVar[tuple[str, ...]] = ("qwen3",)
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {"hidden_act": ("silu",)}

    @property
    def biases(self) -> tuple[bool, bool]:
        """Whether queries, keys and values have biases, and whether the output map has one."""
        return self.attention_bias, self.attention_bias

    @property
    def head_norms(self) -> int:
        """The number of parameters of the norms: query heads share one, and key heads share one."""
        return 2 * self.head_dim


@dataclass(frozen=True)
class Qwen3MoeConfig(Qwen3Config):
    """The keys of Qwen 3 with a mixture of experts in every layer."""

    moe_intermediate_size: int = field(kw_only=True)
    num_experts: int = field(kw_only=True)
    num_experts_per_tok: int = field(kw_only=True)
    norm_topk_prob: bool = field(kw_only=True, default=False)

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_moe",)
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "hidden_act": ("silu",),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([],),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts("num_experts", self.num_experts, self.num_experts_per_tok)

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys as for Qwen 3; num_local_experts is another name of num_experts."""
        return super().normalize_keys(rename_keys(raw, {"num_local_experts": "num_experts"}))

    def feed_forward(self) -> FeedForwardSpec:
        """Return the sizes of a mixture of experts."""
        expert = DenseSpec(self.hidden_size, self.moe_intermediate_size)
        return MoESpec(expert, self.num_experts, self.num_experts_per_tok)


@dataclass(frozen=True)
class Olmo2Config(GroupedQueryConfig):
    """The keys of OLMo 2."""

    rms_norm_eps: float = 1e-5
    attention_bias: bool = False

    model_types: ClassVar[tuple[str, ...]] = ("olmo2",)

    @property
    def biases(self) -> tuple[bool, bool]:
        """Whether queries, keys and values have biases, and whether the output map has one."""
        return self.attention_bias, self.attention_bias

    @property
    def head_norms(self) -> int:
        """The number of parameters of the norms: one over all query heads, one over all key
        heads.
        """
        return (self.num_attention_heads + self.num_key_value_heads) * self.head_dim


@dataclass(frozen=True)
class Olmo3Config(Olmo2Config):
    """The keys of OLMo 3: OLMo 2 with a window in three of four layers; a scaling of the rotary
    positions concerns only the layers without a window.
    """

    rope_theta: float = 500000.0
    sliding_window: int | None = 4096
    layer_types: tuple[str, ...] | None = None

    model_types: ClassVar[tuple[str, ...]] = ("olmo3",)

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys with one rotary base, and the scaling of the layers without a window."""
        nested = raw.get("rope_parameters")
        if isinstance(nested, Mapping) and any(isinstance(x, Mapping) for x in nested.values()):
            both = normalize_rope(raw, layered=True)["rope_parameters"]
            full, sliding = both[FULL], both[SLIDING]
            if sliding["rope_scaling"] is not None:
                raise ArgumentError(
                    f"rope_parameters.{SLIDING} has the scaling {sliding['rope_scaling']}; olmo3 "
                    f"supports one only for {FULL}"
                )
            bases = {x["rope_theta"] for x in (full, sliding) if "rope_theta" in x}
            if len(bases) > 1:
                raise ArgumentError(
                    f"rope_parameters has the bases {sorted(bases)}; olmo3 supports one for all "
                    "layers"
                )
            rest = {k: v for k, v in raw.items() if k != "rope_parameters"}
            base = {"rope_theta": bases.pop()} if bases else {}
            raw = rest | {"rope_scaling": full["rope_scaling"]} | base
        return super().normalize_keys(raw)

    def ropes(self) -> tuple[RopeSettings | None, ...]:
        """Return the rotary settings of each layer; layers with a window have no scaling."""
        local = self.rope._replace(scaling=None)
        return tuple(self.rope if window is None else local for window in self.windows())

    def windows(self) -> tuple[int | None, ...]:
        """Return the windows of `layer_types`; without that key, every fourth layer has full
        attention and the others have the window.
        """
        return layer_windows(
            self.num_hidden_layers,
            sliding_window=self.sliding_window,
            layer_types=self.layer_types,
            sliding_window_pattern=4 if self.layer_types is None else None,
        )


@dataclass(frozen=True)
class Phi3Config(GroupedQueryConfig):
    """The keys of Phi 3, 3.5 and 4-mini.

    Raises:
        ArgumentError: as in `GroupedQueryConfig`; or the type of rope_scaling is not one that Phi 3
            uses.
    """

    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 4096
    original_max_position_embeddings: int = 4096
    partial_rotary_factor: float = 1.0
    sliding_window: int | None = None

    model_types: ClassVar[tuple[str, ...]] = ("phi3",)
    code: ClassVar[str | None] = "Phi3"
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "lm_head_bias": (False,),
        "full_attn_mod": (1,),
        "interpolate_factor": (1,),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = "default" if self.rope_scaling is None else self.rope_scaling.get("rope_type")
        if kind not in ("default", "longrope"):
            raise ArgumentError(
                f"rope_scaling.rope_type is {kind!r}; phi3 supports longrope (formerly su) or no "
                "scaling"
            )

    @property
    def rope(self) -> RopeSettings:
        """The rotary settings: only a part of each head may be rotated, and LongRoPE uses
        `short_factor` up to the trained length and `long_factor` beyond it.
        """
        return super().rope._replace(
            partial=self.partial_rotary_factor, original=self.original_max_position_embeddings
        )

    def windows(self) -> tuple[int | None, ...]:
        """Return the same window for all layers, or None for all."""
        return layer_windows(self.num_hidden_layers, sliding_window=self.sliding_window)


YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
"""The rotary scaling of gpt-oss if config.json has none."""


@dataclass(frozen=True)
class GptOssConfig(GroupedQueryConfig):
    """The keys of gpt-oss.

    Raises:
        ArgumentError: as in `GroupedQueryConfig`; a token uses more experts than there are; or
            swiglu_limit or swiglu_alpha is not above 0.
    """

    head_dim: int = 64
    num_local_experts: int = 128
    num_experts_per_tok: int = 4
    sliding_window: int | None = 128
    layer_types: tuple[str, ...] | None = None
    rms_norm_eps: float = 1e-5
    rope_theta: float = 150000.0
    rope_scaling: Mapping[str, object] | None = field(default_factory=lambda: dict(YARN))
    max_position_embeddings: int = 131072
    attention_bias: bool = True
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702

    model_types: ClassVar[tuple[str, ...]] = ("gpt_oss",)
    ignored: ClassVar[frozenset[str]] = frozenset({"initial_context_length"})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("swiglu_limit", "swiglu_alpha"):
            check_number(name, getattr(self, name), 0, float("inf"), "a finite number above 0")
        check_experts("num_local_experts", self.num_local_experts, self.num_experts_per_tok)

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys with the default rotary scaling if the file has none, as in transformers.

        experts_per_token is an older spelling of num_experts_per_tok.
        """
        keys = normalize_rope(raw)
        if keys["rope_scaling"] is None:
            scaling = raw.get("rope_scaling") or raw.get("rope_parameters")
            keys["rope_scaling"] = {"rope_type": "default"} if scaling else dict(YARN)
        old_value, new_value = keys.pop("experts_per_token", None), keys.get("num_experts_per_tok")
        if old_value is not None and new_value not in (None, old_value):
            raise ArgumentError(
                f"experts_per_token is {old_value} and num_experts_per_tok is {new_value}; they "
                "mean the same: keep one"
            )
        return keys if old_value is None else keys | {"num_experts_per_tok": old_value}

    def windows(self) -> tuple[int | None, ...]:
        """Return the windows of `layer_types`; without that key, layers 0, 2, 4, ... have a
        window.
        """
        pattern = None if self.layer_types is not None or self.sliding_window is None else 2
        return layer_windows(
            self.num_hidden_layers,
            sliding_window=self.sliding_window,
            layer_types=self.layer_types,
            sliding_window_pattern=pattern,
        )

    def attention(self, window: int | None) -> SoftmaxSpec:
        """Return the sizes of the attention, with one sink per head."""
        H, G, D = self.num_attention_heads, self.num_key_value_heads, self.head_dim
        return SoftmaxSpec.of(
            self.hidden_size,
            HeadShape(H, G, D, D),
            bias=self.attention_bias,
            output_bias=self.attention_bias,
            extra=H,
            window=window,
        )

    def feed_forward(self) -> FeedForwardSpec:
        """Return the sizes of a mixture of experts whose router has biases."""
        expert = DenseSpec(self.hidden_size, self.intermediate_size, bias=True)
        count = self.num_local_experts
        return MoESpec(expert, count, self.num_experts_per_tok, router_bias=count)


def check_experts(key: str, experts: int, per_token: int) -> None:
    """Check that a token uses no more experts than there are.

    >>> check_experts("num_experts", 8, 2)
    """
    if per_token > experts:
        raise ArgumentError(
            f"num_experts_per_tok is {per_token}, and {key} is {experts}; it must be at most that"
        )
