"""The configs of further models with grouped queries and mixtures of experts: GLM-4.5, MiniMax-M2,
OLMoE, Qwen1.5-MoE and Granite 3 MoE.

Source of the keys: Hugging Face checkpoints, and transformers' configuration classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from regard.configs.base import Raw
from regard.configs.llama import GroupedQueryConfig, Qwen2Config, check_experts
from regard.configs.llama_relatives import GraniteConfig
from regard.configs.rope import RopeSettings, rotated_share
from regard.cost.model import DenseSpec, FeedForwardSpec, ModelSpec, MoESpec


@dataclass(frozen=True)
class Glm4MoeConfig(GroupedQueryConfig):
    """The keys of GLM-4.5 to 4.7: the first layers are dense, the others mixtures of experts."""

    moe_intermediate_size: int = field(kw_only=True)
    n_routed_experts: int = field(kw_only=True)
    num_experts_per_tok: int = field(kw_only=True)
    n_shared_experts: int = 1
    first_k_dense_replace: int = 1
    use_qk_norm: bool = False
    attention_bias: bool = False
    partial_rotary_factor: float = 0.5
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    rms_norm_eps: float = 1e-5

    model_types: ClassVar[tuple[str, ...]] = ("glm4_moe",)
    ignored: ClassVar[frozenset[str]] = frozenset({"num_nextn_predict_layers"})
    zero: ClassVar[tuple[str, ...]] = ("first_k_dense_replace",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts("n_routed_experts", self.n_routed_experts, self.num_experts_per_tok)

    @property
    def rope(self) -> RopeSettings:
        """The rotary settings: only the first part of each head is rotated."""
        return super().rope._replace(partial=self.partial_rotary_factor)

    @property
    def biases(self) -> tuple[bool, bool]:
        """Whether queries, keys and values have biases; the output map has none."""
        return self.attention_bias, False

    @property
    def head_norms(self) -> int:
        """The number of parameters of the norms: query heads share one, and key heads share one."""
        return 2 * self.head_dim if self.use_qk_norm else 0

    def feed_forward(self) -> FeedForwardSpec:
        """Return the sizes of a mixture of experts, whose router has one number per expert."""
        M, width = self.hidden_size, self.moe_intermediate_size
        return MoESpec(
            DenseSpec(M, width),
            self.n_routed_experts,
            self.num_experts_per_tok,
            DenseSpec(M, width * self.n_shared_experts),
            self.n_routed_experts,
        )

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the decoder, with its first layers dense."""
        model, dense = super().sizes(name), DenseSpec(self.hidden_size, self.intermediate_size)
        first = self.first_k_dense_replace
        heads = tuple(replace(layer, feed_forward=dense) for layer in model.layers[:first])
        return replace(model, layers=(*heads, *model.layers[first:]))


@dataclass(frozen=True)
class MiniMaxM2Config(GroupedQueryConfig):
    """The keys of MiniMax-M2, whose norms are over all query heads and over all key heads."""

    num_local_experts: int = field(kw_only=True)
    num_experts_per_tok: int = field(kw_only=True)
    partial_rotary_factor: float = 1.0

    model_types: ClassVar[tuple[str, ...]] = ("minimax_m2",)
    code: ClassVar[str | None] = "MiniMaxM2"
    ignored: ClassVar[frozenset[str]] = frozenset(
        {"attn_type_list", "mtp_transformer_layers", "num_mtp_modules", "use_mtp"}
    )
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "hidden_act": ("silu",),
        "qk_norm_type": ("per_layer",),
        "scoring_func": ("sigmoid",),
        "shared_intermediate_size": (0,),
        "use_qk_norm": (True,),
        "use_routing_bias": (True,),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts("num_local_experts", self.num_local_experts, self.num_experts_per_tok)

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys with `partial_rotary_factor` in place of `rotary_dim`."""
        return rotated_share(super().normalize_keys(raw))

    @property
    def rope(self) -> RopeSettings:
        """The rotary settings: only the first part of each head is rotated."""
        return super().rope._replace(partial=self.partial_rotary_factor)

    @property
    def head_norms(self) -> int:
        """The number of parameters of the norms: one over all query heads, one over all key
        heads.
        """
        return (self.num_attention_heads + self.num_key_value_heads) * self.head_dim

    def feed_forward(self) -> FeedForwardSpec:
        """Return the sizes of a mixture of experts, whose router has one number per expert."""
        expert = DenseSpec(self.hidden_size, self.intermediate_size)
        count = self.num_local_experts
        return MoESpec(expert, count, self.num_experts_per_tok, router_bias=count)


@dataclass(frozen=True)
class OlmoeConfig(GroupedQueryConfig):
    """The keys of OLMoE: a mixture of experts in every layer, and norms over all query heads and
    over all key heads.
    """

    num_experts: int = field(kw_only=True)
    rms_norm_eps: float = 1e-5
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    attention_bias: bool = False

    model_types: ClassVar[tuple[str, ...]] = ("olmoe",)
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "hidden_act": ("silu",),
        "clip_qkv": (None,),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts("num_experts", self.num_experts, self.num_experts_per_tok)

    @property
    def biases(self) -> tuple[bool, bool]:
        """Whether all maps of the attention have biases."""
        return self.attention_bias, self.attention_bias

    @property
    def head_norms(self) -> int:
        """The number of parameters of the norms: one over all query heads, one over all key
        heads.
        """
        return (self.num_attention_heads + self.num_key_value_heads) * self.head_dim

    def feed_forward(self) -> FeedForwardSpec:
        """Return the sizes of a mixture of experts."""
        expert = DenseSpec(self.hidden_size, self.intermediate_size)
        return MoESpec(expert, self.num_experts, self.num_experts_per_tok)


@dataclass(frozen=True)
class Qwen2MoeConfig(Qwen2Config):
    """The keys of Qwen1.5-MoE and Qwen2-57B: a mixture of experts in every layer, with an expert
    for all tokens behind a gate.
    """

    moe_intermediate_size: int = field(kw_only=True)
    shared_expert_intermediate_size: int = field(kw_only=True)
    num_experts: int = field(kw_only=True)
    num_experts_per_tok: int = field(kw_only=True)
    norm_topk_prob: bool = field(kw_only=True, default=False)

    model_types: ClassVar[tuple[str, ...]] = ("qwen2_moe",)
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "hidden_act": ("silu",),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([],),
        "qkv_bias": (True,),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts("num_experts", self.num_experts, self.num_experts_per_tok)

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys as for Qwen 2; a window of 0 is none."""
        keys = super().normalize_keys(raw)
        if keys.get("sliding_window") == 0 and not keys.get("use_sliding_window"):
            keys["sliding_window"] = None
        return keys

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


@dataclass(frozen=True)
class GraniteMoeConfig(GraniteConfig):
    """The keys of Granite 3 MoE: Granite with a mixture of experts in every layer."""

    num_local_experts: int = field(kw_only=True)
    num_experts_per_tok: int = field(kw_only=True)

    model_types: ClassVar[tuple[str, ...]] = ("granitemoe",)
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "hidden_act": ("silu",),
        "mlp_bias": (False,),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts("num_local_experts", self.num_local_experts, self.num_experts_per_tok)

    def feed_forward(self) -> FeedForwardSpec:
        """Return the sizes of a mixture of experts."""
        expert = DenseSpec(self.hidden_size, self.intermediate_size)
        return MoESpec(expert, self.num_local_experts, self.num_experts_per_tok)
