"""The configs of Llama 1 to 3 and Llama 4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from regard.argument_checks import check_number
from regard.configs.base import FULL, Raw
from regard.configs.rope import RopeSettings
from regard.configs.rotary_decoder import (
    SILU,
    DecoderRecipe,
    Experts,
    GroupedQueryConfig,
    language_model,
    rotated_by_flag,
)
from regard.cost.model import DenseSpec, FeedForwardSpec
from regard.cost.softmax import CausalKeys
from regard.cost.spec import Spec
from regard.errors import ArgumentError
from regard.units import plural


@dataclass(frozen=True)
class LlamaConfig(GroupedQueryConfig):
    """Llama 1 to 3: RMS norm, rotary positions with the layout "half", grouped queries, SwiGLU.
    Source: Touvron et al. 2023 (arXiv 2307.09288).
    """

    attention_bias: bool = False
    mlp_bias: bool = False

    model_types = ("llama",)
    ignored = frozenset({"is_llama_config", "max_sequence_length"})
    fixed = {**SILU, "rope_interleaved": (False,)}


CHUNKED = "chunked_attention"


IMAGES = frozenset(
    {
        "text_config",
        "vision_config",
        "boi_token_index",
        "eoi_token_index",
        "image_token_index",
    }
)
"""Keys of a Llama 4 that also reads images."""


SIZES: Mapping[str, object] = {
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 16,
}
"""Sizes that the text_config of a model with image input leaves out where they are the default."""


@dataclass(frozen=True)
class Llama4Config(GroupedQueryConfig):
    """The keys of Llama 4: attention inside chunks in three of four layers, no positions in the
    others, and a mixture of experts in every `interleave_moe_layer_step`-th layer.
    """

    intermediate_size_mlp: int = field(kw_only=True)
    num_local_experts: int = field(kw_only=True)
    rope_theta: float = 500000.0
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    num_experts_per_tok: int = 1
    interleave_moe_layer_step: int = 1
    moe_layers: tuple[int, ...] | None = None
    attention_chunk_size: int = 8192
    no_rope_layers: tuple[int, ...] | None = None
    no_rope_layer_interval: int = 4
    layer_types: tuple[str, ...] | None = None
    use_qk_norm: bool = True
    attn_temperature_tuning: bool = True
    floor_scale: int = 8192
    attn_scale: float = 0.1
    attention_bias: bool = False

    model_types = ("llama4_text", "llama4")
    family_file = "llama"
    towers = "vision_model multi_modal_projector"
    recipe = DecoderRecipe(
        layout="interleaved",
        experts=Experts("num_local_experts", shared="intermediate_size"),
    )
    fixed = {
        **SILU,
        "for_llm_compressor": (False,),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("attn_scale", self.attn_scale, -float("inf"), float("inf"), "finite")
        self.chunked()
        self.with_experts()
        if self.use_qk_norm and self.rope.is_length_dependent:
            raise ArgumentError(
                "rope_scaling has frequencies that depend on the length, and use_qk_norm is true; "
                "a norm behind such a rotation is not supported: use another rope_type"
            )

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys of the language model; the first files have numbers for truth in
        attn_temperature_tuning, and an empty list for no list in no_rope_layers.
        """
        if raw.get("model_type") == "llama4":
            raw = language_model(raw, IMAGES, **SIZES)
        keys = super().normalize_keys(raw)
        if type(tuning := keys.get("attn_temperature_tuning")) is int:
            keys["attn_temperature_tuning"] = tuning != 0
        if keys.get("no_rope_layers") == []:
            keys["no_rope_layers"] = None
        return keys

    def rotated(self) -> tuple[bool, ...]:
        """Return whether each layer has rotary positions: a 1 in `no_rope_layers`."""
        return rotated_by_flag(
            self.no_rope_layers, self.num_hidden_layers, self.no_rope_layer_interval
        )

    def chunked(self) -> tuple[bool, ...]:
        """Return which layers attend inside chunks: by default those with rotary positions."""
        layers, rotated = self.num_hidden_layers, self.rotated()
        if self.layer_types is None:
            return rotated
        if len(self.layer_types) != layers or not set(self.layer_types) <= {CHUNKED, FULL}:
            raise ArgumentError(
                f"layer_types must have {CHUNKED!r} or {FULL!r} for each of "
                f"{plural(layers, 'layer')}"
            )
        return tuple(kind == CHUNKED for kind in self.layer_types)

    def with_experts(self) -> tuple[bool, ...]:
        """Return whether each layer has a mixture of experts, not a dense network."""
        layers, step = range(self.num_hidden_layers), self.interleave_moe_layer_step
        if self.moe_layers is None:
            return tuple((i + 1) % step == 0 for i in layers)
        if wrong := [i for i in self.moe_layers if i not in layers]:
            raise ArgumentError(
                f"moe_layers has {wrong[0]}; the model has "
                f"{plural(self.num_hidden_layers, 'layer')}, counted from 0"
            )
        return tuple(i in self.moe_layers for i in layers)

    def ropes(self) -> tuple[RopeSettings | None, ...]:
        """Return the rotary settings of each layer; None for a layer without positions."""
        return tuple(self.rope if rotates else None for rotates in self.rotated())

    def mixer(self, layer: int, window: int | None) -> Spec:
        """Return the sizes of attention, inside chunks where the layer has them."""
        full = self.attention()
        if not self.chunked()[layer]:
            return full
        return replace(full, visible=CausalKeys(self.attention_chunk_size, chunked=True))

    def feed_forward(self, layer: int) -> FeedForwardSpec:
        """Return the sizes of a dense layer, or of a mixture of experts with a shared one."""
        if self.with_experts()[layer]:
            return super().feed_forward(layer)
        return DenseSpec(self.hidden_size, self.intermediate_size_mlp)
