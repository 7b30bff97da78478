"""The configs of further decoders with RMS norms, grouped queries and rotary positions: Arcee,
ERNIE 4.5, EXAONE 4, GLM-4, Granite, Helium, Seed-OSS and SmolLM3.

Source of the keys: Hugging Face checkpoints. Papers: see the builders in `regard.models.families`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from regard.configs.base import Raw, layer_windows
from regard.configs.llama import GroupedQueryConfig, LlamaConfig
from regard.configs.rope import RopeSettings
from regard.cost.model import DenseSpec, FeedForwardSpec
from regard.errors import ArgumentError
from regard.units import plural


@dataclass(frozen=True)
class GlmConfig(GroupedQueryConfig):
    """The keys of GLM-4-9B, which rotates a part of each head, in pairs of neighbours."""

    head_dim: int = 128
    rms_norm_eps: float = 1.5625e-07
    partial_rotary_factor: float = 0.5
    max_position_embeddings: int = 131072
    attention_bias: bool = True

    model_types: ClassVar[tuple[str, ...]] = ("glm",)

    @property
    def rope(self) -> RopeSettings:
        """The rotary settings: pairs of neighbours in the first part of each head."""
        return super().rope._replace(partial=self.partial_rotary_factor, layout="interleaved")

    @property
    def biases(self) -> tuple[bool, bool]:
        """Whether queries, keys and values have biases; the output map has none."""
        return self.attention_bias, False


@dataclass(frozen=True)
class Glm4Config(GlmConfig):
    """The keys of GLM-4-0414, which also has a norm after each sublayer."""

    model_types: ClassVar[tuple[str, ...]] = ("glm4",)
    norms_per_block: ClassVar[int] = 4


@dataclass(frozen=True)
class GraniteConfig(LlamaConfig):
    """The keys of Granite 3: Llama with a factor on the embedding, the scores, what each sublayer
    adds, and the logits (1 / `logits_scaling`).

    Raises:
        ArgumentError: as in `LlamaConfig`; or logits_scaling is 0.
    """

    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0

    model_types: ClassVar[tuple[str, ...]] = ("granite",)
    ignored: ClassVar[frozenset[str]] = frozenset()
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {"hidden_act": ("silu",)}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.logits_scaling == 0:
            raise ArgumentError("logits_scaling is 0; the logits are divided by it")


@dataclass(frozen=True)
class SmolLM3Config(LlamaConfig):
    """The keys of SmolLM3: Llama without rotary positions in every fourth layer (NoPE).

    Raises:
        ArgumentError: as in `LlamaConfig`; or no_rope_layers has not one number per layer.
    """

    rope_theta: float = 2000000.0
    max_position_embeddings: int = 32768
    tie_word_embeddings: bool = True
    no_rope_layers: tuple[int, ...] | None = None
    no_rope_layer_interval: int = 4
    use_sliding_window: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None

    model_types: ClassVar[tuple[str, ...]] = ("smollm3",)
    ignored: ClassVar[frozenset[str]] = frozenset({"max_window_layers"})
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {"hidden_act": ("silu",)}

    def rotated(self) -> tuple[bool, ...]:
        """Return whether each layer has rotary positions: a 1 in `no_rope_layers`."""
        n, layers = self.no_rope_layer_interval, self.num_hidden_layers
        if self.no_rope_layers is None:
            return tuple((i + 1) % n != 0 for i in range(layers))
        if len(self.no_rope_layers) != layers or not set(self.no_rope_layers) <= {0, 1}:
            raise ArgumentError(
                f"no_rope_layers must have 0 or 1 for each of {plural(layers, 'layer')}; it has "
                f"{plural(len(self.no_rope_layers), 'entry')}"
            )
        return tuple(flag == 1 for flag in self.no_rope_layers)

    def ropes(self) -> tuple[RopeSettings | None, ...]:
        """Return the rotary settings of each layer; None for a layer without positions."""
        return tuple(self.rope if rotates else None for rotates in self.rotated())

    def windows(self) -> tuple[int | None, ...]:
        """Return the windows of `layer_types`; without that key, layers without positions have the
        window if use_sliding_window is true.
        """
        if self.layer_types is None and self.use_sliding_window:
            width = self.sliding_window
            return tuple(None if rotates else width for rotates in self.rotated())
        return layer_windows(
            self.num_hidden_layers,
            sliding_window=self.sliding_window,
            layer_types=self.layer_types,
            use_sliding_window=self.use_sliding_window,
        )


@dataclass(frozen=True)
class HeliumConfig(GroupedQueryConfig):
    """The keys of Helium, which rotates pairs of neighbours."""

    head_dim: int = 128
    rms_norm_eps: float = 1e-8
    rope_theta: float = 100000.0
    max_position_embeddings: int = 4096
    attention_bias: bool = False
    mlp_bias: bool = False

    model_types: ClassVar[tuple[str, ...]] = ("helium",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_attention_heads * self.head_dim != self.hidden_size:
            raise ArgumentError(
                f"num_attention_heads {self.num_attention_heads} times head_dim {self.head_dim} "
                f"must be hidden_size, {self.hidden_size}"
            )

    @property
    def rope(self) -> RopeSettings:
        """The rotary settings: pairs of neighbours."""
        return super().rope._replace(layout="interleaved")

    @property
    def biases(self) -> tuple[bool, bool]:
        """Whether queries, keys and values have biases; the output map has none."""
        return self.attention_bias, False

    def feed_forward(self) -> FeedForwardSpec:
        """Return the sizes of a feed-forward layer."""
        return DenseSpec(self.hidden_size, self.intermediate_size, bias=self.mlp_bias)


@dataclass(frozen=True)
class Ernie45Config(GroupedQueryConfig):
    """The keys of the dense models of ERNIE 4.5, which rotate pairs of neighbours."""

    head_dim: int = 128
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    max_position_embeddings: int = 131072
    tie_word_embeddings: bool = True
    use_bias: bool = False

    model_types: ClassVar[tuple[str, ...]] = ("ernie4_5",)

    @property
    def rope(self) -> RopeSettings:
        """The rotary settings: pairs of neighbours."""
        return super().rope._replace(layout="interleaved")

    @property
    def biases(self) -> tuple[bool, bool]:
        """Whether all maps of the attention have biases."""
        return self.use_bias, self.use_bias

    def feed_forward(self) -> FeedForwardSpec:
        """Return the sizes of a feed-forward layer."""
        return DenseSpec(self.hidden_size, self.intermediate_size, bias=self.use_bias)


@dataclass(frozen=True)
class SeedOssConfig(GroupedQueryConfig):
    """The keys of Seed-OSS, which has separate keys for the biases of its maps."""

    head_dim: int = 128
    max_position_embeddings: int = 524288
    attention_bias: bool = True
    attention_out_bias: bool = False
    mlp_bias: bool = False

    model_types: ClassVar[tuple[str, ...]] = ("seed_oss",)

    @property
    def biases(self) -> tuple[bool, bool]:
        """Whether queries, keys and values have biases, and whether the output map has one."""
        return self.attention_bias, self.attention_out_bias

    def feed_forward(self) -> FeedForwardSpec:
        """Return the sizes of a feed-forward layer."""
        return DenseSpec(self.hidden_size, self.intermediate_size, bias=self.mlp_bias)


@dataclass(frozen=True)
class ArceeConfig(LlamaConfig):
    """The keys of Arcee's AFM, whose feed-forward layers have no gate and a squared ReLU."""

    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 4096

    model_types: ClassVar[tuple[str, ...]] = ("arcee",)
    ignored: ClassVar[frozenset[str]] = frozenset()
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {"hidden_act": ("relu2",)}

    def feed_forward(self) -> FeedForwardSpec:
        """Return the sizes of a feed-forward layer without a gate."""
        return DenseSpec(self.hidden_size, self.intermediate_size, gated=False, bias=self.mlp_bias)


@dataclass(frozen=True)
class Exaone4Config(GroupedQueryConfig):
    """The keys of EXAONE 4: norms after each sublayer and on each head; in models with a window,
    layers without one have no positions.
    """

    rms_norm_eps: float = 1e-5
    sliding_window: int | None = 4096
    sliding_window_pattern: int | str | None = 4
    layer_types: tuple[str, ...] | None = None

    model_types: ClassVar[tuple[str, ...]] = ("exaone4",)

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys as for Llama; a model without a window has no pattern."""
        keys = super().normalize_keys(raw)
        if "sliding_window" in keys and keys["sliding_window"] is None:
            keys["sliding_window_pattern"] = None
        pattern = keys.get("sliding_window_pattern")
        if isinstance(pattern, str):  # "LLLG": three local layers, then a global one
            if not pattern or pattern != "L" * (len(pattern) - 1) + "G":
                raise ArgumentError(
                    f"sliding_window_pattern is {pattern!r}; it must be a number n, or n - 1 "
                    "letters L and a G"
                )
            keys["sliding_window_pattern"] = len(pattern)
        return keys

    def windows(self) -> tuple[int | None, ...]:
        """Return the windows of `layer_types`, or a window in all layers but every n-th one."""
        pattern = self.sliding_window_pattern
        return layer_windows(
            self.num_hidden_layers,
            sliding_window=self.sliding_window,
            layer_types=self.layer_types,
            sliding_window_pattern=pattern
            if self.layer_types is None and isinstance(pattern, int) and pattern > 0
            else None,
        )

    def ropes(self) -> tuple[RopeSettings | None, ...]:
        """Return the rotary settings of each layer; None for a layer without positions."""
        if self.sliding_window is None:
            return super().ropes()
        return tuple(None if window is None else self.rope for window in self.windows())

    @property
    def head_norms(self) -> int:
        """The number of parameters of the norms: query heads share one, and key heads share one."""
        return 2 * self.head_dim
