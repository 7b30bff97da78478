"""The configs of LFM2: gated short convolutions in most layers, attention in the others."""

from __future__ import annotations

from dataclasses import dataclass, replace

from regard.argument_checks import check_number
from regard.configs.base import FULL, Raw
from regard.configs.rope import RopeSettings
from regard.configs.rotary_decoder import DecoderRecipe, Experts, RotaryDecoderConfig
from regard.cost.delta_rules import short_convolution
from regard.cost.spec import Spec
from regard.errors import ArgumentError
from regard.units import plural

CONV = "conv"
"""The kind of a layer with a gated short convolution."""


@dataclass(frozen=True)
class Lfm2Config(RotaryDecoderConfig):
    """LFM2: layers of gated short convolutions, and some of attention with a norm on each head.
    Source: Liquid AI 2025 (arXiv 2511.23404).
    """

    rope_theta: float = 1000000.0
    max_position_embeddings: int = 128000
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    conv_bias: bool = False
    conv_L_cache: int = 3  # noqa: N815  (the name in the files)
    block_multiple_of: int = 256
    block_ffn_dim_multiplier: float | None = 1.0
    block_auto_adjust_ff_dim: bool = True
    layer_types: tuple[str, ...] | None = None

    model_types = ("lfm2",)
    family_file = "lfm2"
    renamed = {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"}
    recipe = DecoderRecipe(
        eps="norm_eps",
        head_norms="each head",
        width="feed_forward_width",
        stored={
            "self_attn.o_proj": "self_attn.out_proj",
            "q_norm": "q_layernorm",
            "k_norm": "k_layernorm",
            "input_layernorm": "operator_norm",
            "post_attention_layernorm": "ffn_norm",
            "mlp.gate_proj": "feed_forward.w1",
            "mlp.up_proj": "feed_forward.w3",
            "mlp.down_proj": "feed_forward.w2",
            "model.norm": "model.embedding_norm",
        },
    )
    # sizes that follow from others, and initial weights
    ignored = frozenset(
        {"block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale"}
        | {"block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init"}
        | {"full_attn_idxs", "num_heads", "theta"}
    )
    fixed = {"block_use_swiglu": (True,), "use_pos_enc": (True,)}

    def __post_init__(self) -> None:
        super().__post_init__()
        factor = self.block_ffn_dim_multiplier
        check_number("block_ffn_dim_multiplier", factor, 0, float("inf"), "above 0")
        kinds, layers = self.kinds(), self.num_hidden_layers
        if len(kinds) != layers or not set(kinds) <= {CONV, FULL}:
            raise ArgumentError(
                f"layer_types must have {CONV!r} or {FULL!r} for each of {plural(layers, 'layer')}"
            )

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys as for Llama, with `layer_types` for the numbers of layers."""
        keys = super().normalize_keys(raw)
        full, layers = keys.get("full_attn_idxs"), keys.get("num_hidden_layers")
        if keys.get("layer_types") is None and isinstance(full, list) and isinstance(layers, int):
            keys["layer_types"] = [FULL if i in full else CONV for i in range(layers)]
        return keys

    @property
    def feed_forward_width(self) -> int:
        """The width of the feed-forward layers: two thirds, times a factor, rounded up."""
        width, factor = self.intermediate_size, self.block_ffn_dim_multiplier
        if not self.block_auto_adjust_ff_dim:
            return width
        width = int(2 * width / 3)
        if factor is None:
            return width
        return -(-int(factor * width) // self.block_multiple_of) * self.block_multiple_of

    def kinds(self) -> tuple[str, ...]:
        """Return the kind of each layer; without `layer_types` all have attention."""
        return self.layer_types or (FULL,) * self.num_hidden_layers

    def ropes(self) -> tuple[RopeSettings | None, ...]:
        """Return the rotary settings of each layer with attention; None for the others."""
        return tuple(self.rope if kind == FULL else None for kind in self.kinds())

    def mixer(self, layer: int, window: int | None) -> Spec:
        """Return the sizes of the mechanism of a layer."""
        if self.kinds()[layer] == FULL:
            return self.attention(window)
        return short_convolution(self.hidden_size, self.conv_L_cache, bias=self.conv_bias)


@dataclass(frozen=True)
class Lfm2MoeConfig(Lfm2Config):
    """LFM2 with mixtures of experts behind the first layers."""

    num_dense_layers: int = 2
    num_experts: int = 32
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 1792
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    block_auto_adjust_ff_dim: bool = False

    model_types = ("lfm2_moe",)
    recipe = replace(
        Lfm2Config.recipe,
        experts=Experts(
            "num_experts",
            "moe_intermediate_size",
            router="sigmoid",
            normalized="norm_topk_prob",
            eps=1e-6,
            dense="num_dense_layers",
            stored="feed_forward",
            parts=("w1", "w3", "w2"),
        ),
        stored={
            **(Lfm2Config.recipe.stored or {}),
            "gate.e_score_correction_bias": "expert_bias",
        },
    )
    fixed = {**Lfm2Config.fixed, "use_expert_bias": (True,)}
    zero = ("num_dense_layers",)
