"""The configs of MiniMax-Text-01 and MiniMax-M2."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from regard.configs.base import FULL, Raw, layer_windows, rename_keys
from regard.configs.hybrid import LINEAR, HybridConfig, Names, named_kinds
from regard.configs.mistral import MixtralConfig
from regard.configs.rope import RopeSettings, rotated_share
from regard.configs.rotary_decoder import SILU, DecoderRecipe, Experts, GroupedQueryConfig
from regard.cost.spec import Spec
from regard.cost.state_space import lightning_attention

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
    recipe = replace(MixtralConfig.recipe, partial="partial_rotary_factor")
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
        keys = super().normalize_keys(rename_keys(raw, MAKERS_NAMES))
        keys = rotated_share(keys)
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

    def ropes(self) -> tuple[RopeSettings | None, ...]:
        """Return the rotary settings of each layer with softmax attention; None for the others."""
        return tuple(self.rope if kind == FULL else None for kind in self.kinds())

    def recurrent(self) -> Spec:
        """Return the sizes of a layer of lightning attention."""
        return lightning_attention(self.hidden_size, self.num_attention_heads, self.head_dim)

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
        partial="partial_rotary_factor",
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
