"""The configs of MiniMax-Text-01, of MiniMax-M2, and of the language model of MiniMax-M3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from regard.configs.base import FULL, Raw, layer_windows, rename_keys
from regard.configs.expert_layers import ExpertLayersConfig
from regard.configs.hybrid import LINEAR, HybridConfig, Names, check_layer_names
from regard.configs.mistral import MixtralConfig
from regard.configs.rope import rotated_share
from regard.configs.rotary_decoder import (
    SIGMOID_EXPERTS,
    SILU,
    DecoderRecipe,
    Experts,
    GroupedQueryConfig,
    language_model,
)
from regard.cost.decayed_state import lightning
from regard.cost.selected import BlockMaximumSelection, SelectedSpec
from regard.cost.spec import HeadShape, ParameterCounts, Spec
from regard.errors import ArgumentError

MAKERS_NAMES = {"attn_type_list": "layer_types"} | {
    f"layernorm_{theirs}_{factor}": f"{ours}_{factor}_factor"
    for theirs, ours in (
        ("full_attention", "full_attn"),
        ("linear_attention", "linear_attn"),
        ("mlp", "mlp"),
    )
    for factor in ("alpha", "beta")
}
"""Key in the makers' files -> its name in transformers."""


@dataclass(frozen=True)
class MiniMaxConfig(MixtralConfig, HybridConfig):
    """The keys of MiniMax-Text-01: lightning attention in most layers, softmax attention in the
    others, and a mixture of experts in each.
    """

    layer_types: Names = None
    partial_rotary_factor: float = 1.0
    full_attn_alpha_factor: float = 1.0
    full_attn_beta_factor: float = 1.0
    linear_attn_alpha_factor: float = 1.0
    linear_attn_beta_factor: float = 1.0
    mlp_alpha_factor: float = 1.0
    mlp_beta_factor: float = 1.0

    model_types = ("minimax",)
    family_file = "minimax"
    renamed = MAKERS_NAMES
    ignored = frozenset({"block_size"})  # of other code's loops
    fixed = {
        **SILU,
        "postnorm": (True,),
        "shared_intermediate_size": (0,),
    }

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys as for Llama, also with the makers' names: attn_type_list has a 1 for
        each layer with softmax attention, and rotary_dim counts the rotated dims of a head.
        """
        keys = rotated_share(super().normalize_keys(raw))
        names = keys.get("layer_types")
        if isinstance(names, list):
            keys["layer_types"] = [
                FULL if name == 1 else LINEAR if name == 0 else name for name in names
            ]
        return keys

    def usual_kinds(self) -> tuple[str, ...]:
        """Return attention in every second layer."""
        return tuple(FULL if i % 2 == 0 else LINEAR for i in range(self.num_hidden_layers))

    def recurrent(self) -> Spec:
        """Return the sizes of a layer of lightning attention."""
        H, D = self.num_attention_heads, self.head_dim
        shape = HeadShape(H, H, D, D)
        return lightning(self.hidden_size, shape, mechanism="lightning attention")

    def windows(self) -> tuple[int | None, ...]:
        """Return the same window for all layers, or None for all."""
        return layer_windows(self.num_hidden_layers, sliding_window=self.sliding_window)


@dataclass(frozen=True)
class MiniMaxM2Config(GroupedQueryConfig):
    """The keys of MiniMax-M2, whose norms are over all query heads and over all key heads."""

    num_local_experts: int = field(kw_only=True)
    num_experts_per_tok: int = field(kw_only=True)
    partial_rotary_factor: float = 1.0
    rope_theta: float = 5000000.0

    model_types = ("minimax_m2",)
    recipe = DecoderRecipe(
        head_norms="all heads",
        experts=Experts(
            "num_local_experts",
            router="sigmoid",
            stored="block_sparse_moe",
            parts=("w1", "w3", "w2"),
        ),
        stored={"gate.e_score_correction_bias": "e_score_correction_bias"},
    )
    code = "MiniMaxM2"
    ignored = frozenset({"attn_type_list", "mtp_transformer_layers", "num_mtp_modules", "use_mtp"})
    fixed = {
        **SILU,
        "qk_norm_type": ("per_layer",),
        "scoring_func": ("sigmoid",),
        "shared_intermediate_size": (0,),
        "use_qk_norm": (True,),
        "use_routing_bias": (True,),
    }

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys with `partial_rotary_factor` in place of `rotary_dim`."""
        return rotated_share(super().normalize_keys(raw))


SPARSE = "minimax_m3_sparse"
"""The name in `layer_types` of attention to the blocks that index heads choose."""
INDEX_NAMES = {
    "sparse_num_index_heads": "index_n_heads",
    "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
}
"""Key of the makers' `sparse_attention_config` -> its name in transformers."""
SPARSE_FIXED = {"sparse_init_block": 0, "sparse_score_type": "max", "use_sparse_attention": True}
PICTURES = frozenset(
    {
        "image_grid_pinpoints",
        "image_seq_length",
        "image_token_compression_config",
        "image_token_index",
        "img_token_compression_config",
        "merged_hidden_size",
        "process_image_mode",
        "projector_hidden_act",
        "projector_hidden_size",
        "text_config",
        "video_token_index",
        "vision_config",
        "vision_feature_layer",
        "vision_feature_select_strategy",
    }
)
"""Keys of the model that also reads images, which the language model does not have."""


@dataclass(frozen=True)
class MiniMaxM3Config(ExpertLayersConfig):
    """MiniMax-M3: after dense first layers, attention to the blocks of keys that index heads choose
    (MSA), and experts of DeepSeek-V3 with the limits of gpt-oss. Source: MiniMax 2026
    (MiniMax-M3), and its code in transformers.
    """

    num_local_experts: int = field(kw_only=True)
    num_experts_per_tok: int = field(kw_only=True)
    dense_intermediate_size: int = 12288
    shared_intermediate_size: int = 3072
    routed_scaling_factor: float = 2.0
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    layer_types: Names = None
    index_n_heads: int = 4
    index_head_dim: int = 128
    index_block_size: int = 128
    index_topk_blocks: int = 16
    index_local_blocks: int = 1
    partial_rotary_factor: float = 1.0
    rope_theta: float = 5000000.0
    max_position_embeddings: int = 524288

    model_types = ("minimax_m3_vl_text", "minimax_m3_vl")
    family_file = "minimax"
    dense_layers = 0
    recipe = DecoderRecipe(
        norm="rms 1 + w",
        head_norms="each head",
        width="dense_intermediate_size",
        experts=replace(
            SIGMOID_EXPERTS,
            count="num_local_experts",
            width="intermediate_size",
            normalized=True,
            shared="shared_intermediate_size",
            shared_count=None,
            dense=None,
        ),
    )
    towers = "vision_tower multi_modal_projector patch_merge_mlp"
    buffers = (r"(model\.)?mtp\..*",)  # layers for further tokens
    code = "MiniMaxM3"
    # the makers give the rotated share of a head, too, and transformers reads it alone
    ignored = frozenset({"num_mtp_modules", "num_nextn_predict_layers", "rotary_dim"})
    fixed = {
        "attention_output_gate": (False,),
        "hidden_act": ("silu", "swigluoai"),
        "n_shared_experts": (1,),
        "qk_norm_type": ("per_head",),
        "scoring_func": ("sigmoid",),
        "swiglu_beta": (1.0,),
        "use_gemma_norm": (True,),
        "use_qk_norm": (True,),
        "use_routing_bias": (True,),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_names("layer_types", self.kinds(), self.num_hidden_layers, (SPARSE, FULL))
        if self.index_local_blocks > self.index_topk_blocks:
            raise ArgumentError(
                f"index_local_blocks is {self.index_local_blocks}; it must be at most "
                f"index_topk_blocks, {self.index_topk_blocks}, in which the local ones count"
            )

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys of the language model; the makers have those of the index heads in
        `sparse_attention_config`.
        """
        if raw.get("model_type") == "minimax_m3_vl":
            raw = language_model(raw, PICTURES)
        keys: dict[str, Any] = dict(raw)
        sparse = keys.pop("sparse_attention_config", None)
        if isinstance(sparse, Mapping):
            flags = sparse.get("sparse_attention_freq")
            expected = SPARSE_FIXED | {"sparse_disable_index_value": flags}
            for key, value in expected.items():
                if sparse.get(key, value) != value:
                    raise ArgumentError(
                        f"sparse_attention_config.{key} is {sparse[key]}; only {value} is supported"
                    )
            keys = rename_keys(
                keys | {k: v for k, v in sparse.items() if k in INDEX_NAMES}, INDEX_NAMES
            )
            if isinstance(flags, list) and keys.get("layer_types") is None:
                keys["layer_types"] = [SPARSE if flag else FULL for flag in flags]
        return super().normalize_keys(keys)

    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of `layer_types`; without them all layers see all keys."""
        names = self.layer_types
        return (FULL,) * self.num_hidden_layers if names is None else names

    def limits(self, layer: int, *, expert: bool = False) -> Mapping[str, Any]:
        """Return the limit of all networks, and the factor inside their activation."""
        return {"limit": self.swiglu_limit, "alpha": self.swiglu_alpha}

    def mixer(self, layer: int, window: int | None) -> Spec:
        """Return the sizes of attention, to chosen blocks where the layer has index heads."""
        full, M, J, d = self.attention(), self.hidden_size, self.index_n_heads, self.index_head_dim
        if self.kinds()[layer] == FULL:
            return full
        return SelectedSpec(
            full.weights + ParameterCounts(M * d * (J + 1), norms=2 * d),
            (*full.parts, (1, d)),
            full.shape,
            BlockMaximumSelection(J, d, self.index_block_size, self.index_topk_blocks),
        )
