"""The configs of GLM-4 to GLM-4.7; GLM-5 is in `deepseek`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from regard.configs.rotary_decoder import SIGMOID_EXPERTS, DecoderRecipe, GroupedQueryConfig


@dataclass(frozen=True)
class GlmConfig(GroupedQueryConfig):
    """The keys of GLM-4-9B, which rotates a part of each head, in pairs of neighbours."""

    head_dim: int = 128
    rms_norm_eps: float = 1.5625e-07
    partial_rotary_factor: float = 0.5
    max_position_embeddings: int = 131072
    attention_bias: bool = True

    model_types = ("glm",)
    recipe = DecoderRecipe(
        layout="interleaved",
        output_bias=False,
        fused=("gate_up_proj",),
    )


@dataclass(frozen=True)
class Glm4Config(GlmConfig):
    """The keys of GLM-4-0414, which also has a norm after each sublayer."""

    model_types = ("glm4",)
    recipe = replace(
        GlmConfig.recipe,
        norms="around",
        stored={
            "post_attention_layernorm": "post_self_attn_layernorm",
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "post_feedforward_layernorm": "post_mlp_layernorm",
        },
    )


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

    model_types = ("glm4_moe",)
    recipe = DecoderRecipe(
        head_norms=("each head", "use_qk_norm"),
        output_bias=False,
        experts=replace(SIGMOID_EXPERTS, count="n_routed_experts", shared_count="n_shared_experts"),
    )
    ignored = frozenset({"num_nextn_predict_layers"})
    zero = ("first_k_dense_replace",)
