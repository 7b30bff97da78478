"""The configs of decoders with LayerNorms, grouped queries and rotary positions: Command R,
Nemotron, OLMo, Phi, StableLM and StarCoder2.

Source of the keys: Hugging Face checkpoints. Papers: see the builders in `regard.models.families`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from regard.argument_checks import check_number
from regard.configs.base import check_activation, layer_windows
from regard.configs.llama import RotaryDecoderConfig
from regard.configs.rope import RopeSettings
from regard.cost.model import DenseSpec, FeedForwardSpec, ModelSpec
from regard.cost.spec import ParameterCounts


@dataclass(frozen=True)
class LayerNormDecoderConfig(RotaryDecoderConfig, ABC):
    """The keys that decoders with LayerNorms and rotary positions share.

    Raises:
        ArgumentError: as in `RotaryDecoderConfig`; or the norms' eps is not above 0.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("the eps of the norms", self.eps, 0, float("inf"), "above 0")

    @property
    @abstractmethod
    def eps(self) -> float:
        """The eps of the norms."""

    @property
    def norm_size(self) -> int:
        """The number of parameters of a LayerNorm: weights and biases."""
        return 2 * self.hidden_size


@dataclass(frozen=True)
class OlmoConfig(LayerNormDecoderConfig):
    """The keys of OLMo 1, whose norms have no parameters."""

    clip_qkv: float | None = None
    attention_bias: bool = False

    model_types: ClassVar[tuple[str, ...]] = ("olmo",)
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {"hidden_act": ("silu",)}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip_qkv is not None:
            check_number("clip_qkv", self.clip_qkv, 0, float("inf"), "above 0")

    @property
    def eps(self) -> float:
        """The eps of the norms, which is the same in all models."""
        return 1e-5

    @property
    def norm_size(self) -> int:
        """Always 0: the norms have no parameters."""
        return 0

    @property
    def biases(self) -> tuple[bool, bool]:
        """Whether all maps of the attention have biases."""
        return self.attention_bias, self.attention_bias


@dataclass(frozen=True)
class Starcoder2Config(LayerNormDecoderConfig):
    """The keys of StarCoder2, whose maps all have biases unless `use_bias` is false."""

    norm_epsilon: float = 1e-5
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = True
    hidden_act: str = "gelu_pytorch_tanh"
    use_bias: bool = True
    sliding_window: int | None = None

    model_types: ClassVar[tuple[str, ...]] = ("starcoder2",)
    ignored: ClassVar[frozenset[str]] = frozenset({"mlp_type", "norm_type"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_activation(self.hidden_act)

    @property
    def eps(self) -> float:
        """The eps of the norms."""
        return self.norm_epsilon

    def windows(self) -> tuple[int | None, ...]:
        """Return the same window for all layers, or None for all."""
        return layer_windows(self.num_hidden_layers, sliding_window=self.sliding_window)

    @property
    def biases(self) -> tuple[bool, bool]:
        """Whether all maps of the attention have biases."""
        return self.use_bias, self.use_bias

    def feed_forward(self) -> FeedForwardSpec:
        """Return the sizes of a feed-forward layer without a gate."""
        return DenseSpec(self.hidden_size, self.intermediate_size, gated=False, bias=self.use_bias)


@dataclass(frozen=True)
class StableLmConfig(LayerNormDecoderConfig):
    """The keys of StableLM 2 and 3B, which rotate a part of each head."""

    layer_norm_eps: float = 1e-5
    max_position_embeddings: int = 4096
    partial_rotary_factor: float = 0.25
    use_qkv_bias: bool = False
    use_parallel_residual: bool = False

    model_types: ClassVar[tuple[str, ...]] = ("stablelm",)
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "hidden_act": ("silu",),
        "qk_layernorm": (False,),
    }

    @property
    def eps(self) -> float:
        """The eps of the norms."""
        return self.layer_norm_eps

    @property
    def rope(self) -> RopeSettings:
        """The rotary settings: only the first part of each head is rotated."""
        return super().rope._replace(partial=self.partial_rotary_factor)

    @property
    def biases(self) -> tuple[bool, bool]:
        """Whether queries, keys and values have biases; the output map has none."""
        return self.use_qkv_bias, False

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the decoder; parallel sublayers share one norm."""
        return _with_norms(self, super().sizes(name), 1 if self.use_parallel_residual else 2)


@dataclass(frozen=True)
class PhiConfig(LayerNormDecoderConfig):
    """The keys of Phi 1, 1.5 and 2: parallel sublayers that share a norm, and a head with
    biases.
    """

    layer_norm_eps: float = 1e-5
    partial_rotary_factor: float = 0.5
    hidden_act: str = "gelu_new"

    model_types: ClassVar[tuple[str, ...]] = ("phi",)
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "qk_layernorm": (False,),
        "tie_word_embeddings": (False,),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_activation(self.hidden_act)

    @property
    def eps(self) -> float:
        """The eps of the norms."""
        return self.layer_norm_eps

    @property
    def rope(self) -> RopeSettings:
        """The rotary settings: only the first part of each head is rotated."""
        return super().rope._replace(partial=self.partial_rotary_factor)

    @property
    def biases(self) -> tuple[bool, bool]:
        """Always (True, True): all maps of the attention have biases."""
        return True, True

    def feed_forward(self) -> FeedForwardSpec:
        """Return the sizes of a feed-forward layer without a gate."""
        return DenseSpec(self.hidden_size, self.intermediate_size, gated=False, bias=True)

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the decoder; the biases of the head count as biases."""
        model = _with_norms(self, super().sizes(name), 1)
        return replace(model, norms=model.norms + ParameterCounts(biases=self.vocab_size))


@dataclass(frozen=True)
class NemotronConfig(LayerNormDecoderConfig):
    """The keys of Nemotron 3 and 4 and Minitron: norms with weight 1 + w, a squared ReLU, and a
    part of each head that is rotated.
    """

    norm_eps: float = 1e-5
    max_position_embeddings: int = 4096
    partial_rotary_factor: float = 0.5
    attention_bias: bool = False
    mlp_bias: bool = False

    model_types: ClassVar[tuple[str, ...]] = ("nemotron",)
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {"hidden_act": ("relu2",)}

    @property
    def eps(self) -> float:
        """The eps of the norms."""
        return self.norm_eps

    @property
    def rope(self) -> RopeSettings:
        """The rotary settings: only the first part of each head is rotated."""
        return super().rope._replace(partial=self.partial_rotary_factor)

    @property
    def biases(self) -> tuple[bool, bool]:
        """Whether all maps of the attention have biases."""
        return self.attention_bias, self.attention_bias

    def feed_forward(self) -> FeedForwardSpec:
        """Return the sizes of a feed-forward layer without a gate."""
        return DenseSpec(self.hidden_size, self.intermediate_size, gated=False, bias=self.mlp_bias)


@dataclass(frozen=True)
class CohereConfig(LayerNormDecoderConfig):
    """The keys of Command R: parallel sublayers that share a norm without biases, rotary pairs of
    neighbours, and a factor on the logits.
    """

    layer_norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    logit_scale: float = 0.0625
    attention_bias: bool = False

    model_types: ClassVar[tuple[str, ...]] = ("cohere",)
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "hidden_act": ("silu",),
        "use_qk_norm": (False,),
    }
    norms_per_block: ClassVar[int] = 1

    @property
    def eps(self) -> float:
        """The eps of the norms."""
        return self.layer_norm_eps

    @property
    def norm_size(self) -> int:
        """The number of parameters of a norm, which has no biases."""
        return self.hidden_size

    @property
    def rope(self) -> RopeSettings:
        """The rotary settings: pairs of neighbours."""
        return super().rope._replace(layout="interleaved")

    @property
    def biases(self) -> tuple[bool, bool]:
        """Whether all maps of the attention have biases."""
        return self.attention_bias, self.attention_bias


@dataclass(frozen=True)
class Cohere2Config(CohereConfig):
    """The keys of Command R7B and A: a window in three of four layers; the others have no
    positions (NoPE).
    """

    rope_theta: float = 10000.0
    sliding_window: int | None = 4096
    layer_types: tuple[str, ...] | None = None
    sliding_window_pattern: int | None = None

    model_types: ClassVar[tuple[str, ...]] = ("cohere2",)
    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "order_of_interleaved_layers",
            "position_embedding_type",
            "rotary_pct",
        }
    )
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "hidden_act": ("silu",),
        "use_embedding_sharing": (True,),
        "use_gated_activation": (True,),
        "use_parallel_block": (True,),
        "use_parallel_embedding": (False,),
        "use_qk_norm": (False,),
        "layer_switch": (4,),
    }

    def windows(self) -> tuple[int | None, ...]:
        """Return the windows of `layer_types`; without that key, every n-th layer has full
        attention, n = sliding_window_pattern or 4.
        """
        pattern = self.sliding_window_pattern
        if self.layer_types is None and pattern is None:
            pattern = 4
        return layer_windows(
            self.num_hidden_layers,
            sliding_window=self.sliding_window,
            layer_types=self.layer_types,
            sliding_window_pattern=pattern,
        )

    def ropes(self) -> tuple[RopeSettings | None, ...]:
        """Return the rotary settings of each layer; None for a layer without a window."""
        return tuple(None if window is None else self.rope for window in self.windows())


def _with_norms(config: LayerNormDecoderConfig, model: ModelSpec, count: int) -> ModelSpec:
    """Return a model whose blocks have this number of norms."""
    norms = ParameterCounts(norms=count * config.norm_size)
    return replace(model, layers=tuple(replace(layer, norms=norms) for layer in model.layers))
