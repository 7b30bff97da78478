"""The configs of OLMo 1 to 3, OLMoE and OLMo Hybrid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from regard.argument_checks import check_number
from regard.configs.base import FULL, Raw
from regard.configs.hybrid import LINEAR, GatedDeltaConfig
from regard.configs.rope import RopeSettings, ropes_of_both_kinds
from regard.configs.rotary_decoder import (
    SILU,
    DecoderRecipe,
    Experts,
    GroupedQueryConfig,
    RotaryDecoderConfig,
)
from regard.errors import ArgumentError


@dataclass(frozen=True)
class OlmoConfig(RotaryDecoderConfig):
    """OLMo 1: Llama with LayerNorms that have no parameters, and in some models clipped queries,
    keys and values. Source: Groeneveld et al. 2024 (arXiv 2402.00838).
    """

    clip_qkv: float | None = None
    attention_bias: bool = False

    model_types = ("olmo",)
    recipe = DecoderRecipe(norm="layer, bare", eps=1e-5, clip="clip_qkv")
    fixed = SILU

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip_qkv is not None:
            check_number("clip_qkv", self.clip_qkv, 0, float("inf"), "above 0")


@dataclass(frozen=True)
class Olmo2Config(GroupedQueryConfig):
    """The keys of OLMo 2."""

    rms_norm_eps: float = 1e-5
    attention_bias: bool = False

    model_types = ("olmo2",)
    recipe = DecoderRecipe(norms="after", head_norms="all heads")


@dataclass(frozen=True)
class Olmo3Config(Olmo2Config):
    """The keys of OLMo 3: OLMo 2 with a window in three of four layers; a scaling of the rotary
    positions concerns only the layers without a window.
    """

    rope_theta: float = 500000.0
    sliding_window: int | None = 4096
    layer_types: tuple[str, ...] | None = None

    model_types = ("olmo3",)
    recipe = replace(Olmo2Config.recipe, window_pattern=4)

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys with one rotary base, and the scaling of the layers without a window."""
        nested = raw.get("rope_parameters")
        if isinstance(nested, Mapping) and any(isinstance(x, Mapping) for x in nested.values()):
            _, full, sliding = ropes_of_both_kinds(raw, "olmo3")
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


@dataclass(frozen=True)
class OlmoeConfig(GroupedQueryConfig):
    """The keys of OLMoE: experts in every layer, and norms over all query and all key heads."""

    num_experts: int = field(kw_only=True)
    rms_norm_eps: float = 1e-5
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    attention_bias: bool = False

    model_types = ("olmoe",)
    recipe = replace(
        Olmo2Config.recipe,
        norms="before",
        experts=Experts("num_experts", normalized="norm_topk_prob"),
    )
    fixed = {
        **SILU,
        "clip_qkv": (None,),
    }


@dataclass(frozen=True)
class OlmoHybridConfig(GatedDeltaConfig):
    """The keys of OLMo Hybrid: layers of Gated DeltaNet, and the attention of OLMo 3."""

    max_position_embeddings: int = 65536
    attention_bias: bool = False
    linear_allow_neg_eigval: bool = True
    rope_parameters: Mapping[str, object] | None = None

    model_types = ("olmo_hybrid",)
    family_file = "olmo"
    recipe = Olmo2Config.recipe
    # initial values
    ignored = frozenset(
        {
            "linear_a_log_max",
            "linear_a_log_min",
            "linear_dt_init_floor",
            "linear_dt_max",
            "linear_dt_min",
        }
    )

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys with all sizes; a rope_theta of null means no positions."""
        places = (raw.get("rope_parameters"), raw)
        place = next(x for x in places if isinstance(x, Mapping))
        has_none = "rope_theta" in place and place["rope_theta"] is None
        keys = super().normalize_keys(
            {k: v for k, v in raw.items() if not (has_none and k.startswith("rope_"))}
        )
        if has_none:
            keys["rope_parameters"] = dict(NO_POSITIONS)
        heads, M = keys.get("num_attention_heads"), keys.get("hidden_size")
        keys = {k: v for k, v in keys.items() if v is not None or k not in SIZES_OF_STATES}
        keys.setdefault("linear_num_key_heads", heads)
        keys.setdefault("linear_num_value_heads", heads)
        groups = keys["linear_num_key_heads"]
        if isinstance(M, int) and isinstance(groups, int) and groups > 0:
            keys.setdefault("linear_key_head_dim", 3 * M // (4 * groups))
        D = keys.get("linear_key_head_dim")
        if isinstance(D, int):
            keys.setdefault("linear_value_head_dim", 2 * D)
        return keys

    def usual_kinds(self) -> tuple[str, ...]:
        """Return attention in every fourth layer, or in the last of fewer."""
        n = min(4, self.num_hidden_layers)
        return tuple(FULL if i % 4 == n - 1 else LINEAR for i in range(self.num_hidden_layers))

    def ropes(self) -> tuple[RopeSettings | None, ...]:
        """Return the rotary settings of each layer with attention; None for the others, and for all
        layers of a model without positions.
        """
        if self.rope_parameters is not None:
            return (None,) * self.num_hidden_layers
        return super().ropes()


NO_POSITIONS = {"rope_type": "default", "rope_theta": None}
"""How transformers writes the rotary settings of a model without positions."""
SIZES_OF_STATES = frozenset(
    {
        "linear_key_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_value_head_dim",
    }
)
"""Keys that follow from others where a file has null."""
