"""The configs of models that mix layers with softmax attention and layers with a state of fixed
size: Qwen3-Next, Qwen3.5 and MiniMax-Text-01; those with state-space layers are in
`state_space_hybrids`.

Each class names the kind of every layer, and what a layer of a kind costs. `regard cost` counts
these families; `regard.load` does not load them.

Source of the keys: Hugging Face checkpoints, and transformers' configuration classes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeAlias

from regard.configs.base import FULL, Raw, rename_keys
from regard.configs.llama import GroupedQueryConfig, MixtralConfig, check_experts
from regard.cost.model import DenseSpec, FeedForwardSpec, LayerSpec, ModelSpec, MoESpec
from regard.cost.spec import HeadShape, ParameterCounts, Spec
from regard.cost.state_space import (
    convolved_gated_delta_net,
    lightning_attention,
)
from regard.did_you_mean import suggest
from regard.errors import ArgumentError
from regard.units import plural

LINEAR = "linear_attention"
"""The kind of a layer with a state of fixed size, as transformers names it."""
LAYER_NAMES = {"attention": FULL, "mamba": LINEAR, FULL: FULL, LINEAR: LINEAR}
"""Name of a kind in config.json -> its name here."""
Names: TypeAlias = tuple[str, ...] | None


def named_kinds(names: Sequence[str], layers: int, key: str = "layer_types") -> tuple[str, ...]:
    """Return the kind of each layer from the names in config.json.

    Args:
        names: a name for each layer.
        layers: the number of layers.
        key: the key in config.json, for messages.

    Raises:
        ArgumentError: a name is unknown, or their number is not that of the layers.

    >>> named_kinds(["mamba", "attention"], 2)
    ('linear_attention', 'full_attention')
    """
    if len(names) != layers:
        raise ArgumentError(
            f"{key} has {plural(len(names), 'entry')} and num_hidden_layers is {layers}; give one "
            "per layer"
        )
    for i, name in enumerate(names):
        if name not in LAYER_NAMES:
            raise ArgumentError(
                f"{key}[{i}] is {name!r}; supported are {', '.join(LAYER_NAMES)}"
                f"{suggest(name, LAYER_NAMES, cutoff=0.8)}"
            )
    return tuple(LAYER_NAMES[name] for name in names)


@dataclass(frozen=True)
class HybridConfig(GroupedQueryConfig):
    """A model whose layers are of two kinds, `full_attention` and `linear_attention`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kinds()

    @abstractmethod
    def kinds(self) -> tuple[str, ...]:
        """Return the kind of each layer."""

    @abstractmethod
    def recurrent(self) -> Spec:
        """Return the sizes of the mechanism of a layer with a state of fixed size."""

    def feed_forward_of(self, layer: int) -> FeedForwardSpec:
        """Return the sizes of the feed-forward part of a layer."""
        return self.feed_forward()

    def mixer(self, kind: str) -> Spec:
        """Return the sizes of the mechanism of a layer of this kind."""
        return self.attention(None) if kind == FULL else self.recurrent()

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the decoder, layer by layer."""
        norms = ParameterCounts(norms=self.norms_per_block * self.hidden_size)
        layers = tuple(
            LayerSpec(self.mixer(kind), self.feed_forward_of(i), norms)
            for i, kind in enumerate(self.kinds())
        )
        return replace(super().sizes(name), layers=layers)


@dataclass(frozen=True)
class Qwen3NextConfig(HybridConfig):
    """The keys of Qwen3-Next: three layers of Gated DeltaNet, then one of gated attention."""

    moe_intermediate_size: int = field(kw_only=True)
    shared_expert_intermediate_size: int = field(kw_only=True)
    num_experts: int = field(kw_only=True)
    num_experts_per_tok: int = field(kw_only=True)
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    full_attention_interval: int = 4
    layer_types: Names = None

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_next",)
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([],),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts("num_experts", self.num_experts, self.num_experts_per_tok)

    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of `layer_types`, or attention in every `full_attention_interval`-th
        layer.
        """
        if self.layer_types is not None:
            return named_kinds(self.layer_types, self.num_hidden_layers)
        n = self.full_attention_interval
        return tuple(FULL if (i + 1) % n == 0 else LINEAR for i in range(self.num_hidden_layers))

    def mixer(self, kind: str) -> Spec:
        """Return the sizes of Gated DeltaNet, or of attention with an output gate."""
        if kind == LINEAR:
            return self.recurrent()
        spec = self.attention(None)
        gate = self.hidden_size * self.num_attention_heads * self.head_dim
        return replace(spec, weights=spec.weights + ParameterCounts(gate))

    def recurrent(self) -> Spec:
        """Return the sizes of a layer of Gated DeltaNet."""
        keys = self.linear_num_key_heads
        D, E = self.linear_key_head_dim, self.linear_value_head_dim
        shape = HeadShape(keys, keys, D, E, self.linear_num_value_heads)
        return convolved_gated_delta_net(self.hidden_size, shape, self.linear_conv_kernel_dim)

    @property
    def head_norms(self) -> int:
        """The number of parameters of the norms: query heads share one, and key heads share one."""
        return 2 * self.head_dim

    def feed_forward(self) -> FeedForwardSpec:
        """Return the sizes of a mixture of experts whose shared expert has a gate."""
        M = self.hidden_size
        return MoESpec(
            DenseSpec(M, self.moe_intermediate_size),
            self.num_experts,
            self.num_experts_per_tok,
            DenseSpec(M, self.shared_expert_intermediate_size),
            shared_gate=True,
        )


PICTURES = frozenset(
    {
        "text_config",
        "vision_config",
        "image_token_id",
        "video_token_id",
        "vision_start_token_id",
        "vision_end_token_id",
    }
)
"""Keys of a model that also reads images, which the language model does not have."""


def _language_model(raw: Raw) -> Raw:
    """Return the config of the language model, from that of a model that also reads images."""
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        return raw
    return {key: value for key, value in raw.items() if key not in PICTURES} | dict(text)


@dataclass(frozen=True)
class Qwen35MoeConfig(Qwen3NextConfig):
    """The keys of the language model of Qwen3.5 with experts: the layers of Qwen3-Next.

    The config.json of a model that also reads images has them in `text_config`.
    """

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5_moe_text", "qwen3_5_moe")

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys of the language model, as for Qwen3-Next."""
        return super().normalize_keys(_language_model(raw))


@dataclass(frozen=True)
class Qwen35Config(Qwen35MoeConfig):
    """The keys of the language model of Qwen3.5 with dense feed-forward layers."""

    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5_text", "qwen3_5")
    zero: ClassVar[tuple[str, ...]] = (
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "num_experts",
        "num_experts_per_tok",
    )

    def feed_forward(self) -> FeedForwardSpec:
        """Return the sizes of the dense layer."""
        return DenseSpec(self.hidden_size, self.intermediate_size)


@dataclass(frozen=True)
class MiniMaxConfig(MixtralConfig, HybridConfig):
    """The keys of MiniMax-Text-01: lightning attention in most layers, softmax attention in the
    others, and a mixture of experts in each.
    """

    layer_types: Names = None

    model_types: ClassVar[tuple[str, ...]] = ("minimax",)

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys as for Llama; attn_type_list has a 1 for each layer with softmax."""
        keys = super().normalize_keys(rename_keys(raw, {"attn_type_list": "layer_types"}))
        names = keys.get("layer_types")
        if isinstance(names, list):
            keys["layer_types"] = [
                FULL if name == 1 else LINEAR if name == 0 else name for name in names
            ]
        return keys

    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of `layer_types`; without them every second layer has attention."""
        if self.layer_types is not None:
            return named_kinds(self.layer_types, self.num_hidden_layers)
        return tuple(FULL if i % 2 == 0 else LINEAR for i in range(self.num_hidden_layers))

    def recurrent(self) -> Spec:
        """Return the sizes of a layer of lightning attention."""
        return lightning_attention(self.hidden_size, self.num_attention_heads, self.head_dim)
