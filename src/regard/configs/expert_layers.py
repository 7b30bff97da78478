"""The configs of decoders that list which layers have experts: Hy3 and MiMo-V2-Flash."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from regard.configs.base import FULL, SLIDING, Raw, layer_windows
from regard.configs.rope import RopeSettings, shorten
from regard.configs.rotary_decoder import (
    SIGMOID_EXPERTS,
    SILU,
    DecoderRecipe,
    GroupedQueryConfig,
)
from regard.cost.spec import HeadShape
from regard.errors import ArgumentError
from regard.units import plural

DENSE, SPARSE = "dense", "sparse"


@dataclass(frozen=True)
class ExpertLayersConfig(GroupedQueryConfig):
    """The keys of a decoder whose `mlp_layer_types` names the layers with a mixture of experts;
    without that key, the first `dense_layers` have none.
    """

    mlp_layer_types: tuple[str, ...] | None = None

    dense_layers: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds, n = self.mlp_layer_types, self.num_hidden_layers
        if kinds is not None and (len(kinds) != n or not {*kinds} <= {DENSE, SPARSE}):
            raise ArgumentError(
                f"mlp_layer_types is {shorten(kinds)}; it must be {DENSE!r} or {SPARSE!r} for each "
                f"of {plural(n, 'layer')}"
            )

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys as for Llama; `moe_layer_freq`, a 1 for each layer with experts, and
        `first_k_dense_replace` are other spellings of `mlp_layer_types`.
        """
        keys = super().normalize_keys(raw)
        flags, first = keys.pop("moe_layer_freq", None), keys.pop("first_k_dense_replace", None)
        n = keys.get("num_hidden_layers")
        if isinstance(first, int) and isinstance(n, int):
            flags = [int(layer >= first) for layer in range(n)] if flags is None else flags
        if isinstance(flags, list):
            kinds = [SPARSE if flag else DENSE for flag in flags]
            if keys.setdefault("mlp_layer_types", kinds) != kinds:
                raise ArgumentError(
                    f"mlp_layer_types is {shorten(keys['mlp_layer_types'])}, and another key means "
                    f"{shorten(kinds)}; keep one"
                )
        return keys

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has a mixture of experts, not a dense network."""
        kinds = self.mlp_layer_types
        return layer >= self.dense_layers if kinds is None else kinds[layer] == SPARSE


@dataclass(frozen=True)
class HYV3Config(ExpertLayersConfig):
    """Hy3: Llama with a norm on each head, and the experts of DeepSeek-V3 without groups. Source:
    Tencent 2026, "Hy3-preview".
    """

    num_experts: int = field(kw_only=True)
    num_experts_per_tok: int = field(kw_only=True)
    moe_intermediate_size: int = field(kw_only=True)
    num_shared_experts: int = 1
    router_scaling_factor: float = 2.826
    rms_norm_eps: float = 1e-5
    rope_theta: float = 11158840.0
    max_position_embeddings: int = 131072
    attention_bias: bool = False
    mlp_bias: bool = False

    model_types = ("hy_v3",)
    renamed = {"expert_hidden_dim": "moe_intermediate_size"}
    recipe = DecoderRecipe(
        head_norms="each head",
        experts=replace(SIGMOID_EXPERTS, normalized=True, dense=None),
        stored={
            "mlp.gate.weight": "mlp.router.gate.weight",
            "gate.e_score_correction_bias": "expert_bias",
            "shared_experts": "shared_mlp",
        },
    )
    buffers = (r"model\.layers\.(48|80)\..*",)  # the layer for a second token
    code = "HYV3"
    # `enable_...` say where another library rounds to fewer bits
    ignored = frozenset(
        {"enable_attention_fp32_softmax", "enable_lm_head_fp32", "enable_moe_fp32_combine"}
        | {"eod_token_id", "num_nextn_predict_layers", "use_grouped_mm"}
    )
    fixed = {
        **SILU,
        "moe_router_enable_expert_bias": (True,),
        "moe_router_use_sigmoid": (True,),
        "qk_norm": (True,),
        "route_norm": (True,),
    }

    @property
    def routed_scaling_factor(self) -> float:
        """The factor on the weights of experts, as a router reads it."""
        return self.router_scaling_factor


SWA_SIZES = ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")
"""Keys of sizes that the makers of MiMo give for layers with a window, too, behind `swa_`."""
MIMO_ROPE = {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.334}
MIMO_ROPES: Mapping[str, Mapping[str, object]] = {
    FULL: MIMO_ROPE,
    SLIDING: MIMO_ROPE | {"rope_theta": 10000.0},
}
"""The rotary settings of a MiMo-V2-Flash whose config.json has none."""


@dataclass(frozen=True)
class MiMoV2FlashConfig(ExpertLayersConfig):
    """MiMo-V2-Flash: windows in most layers, which have sinks, twice as many key heads and another
    rotary base; short values with a factor; the experts of DeepSeek-V3. Source: Xiaomi 2025,
    "MiMo-V2-Flash Technical Report".
    """

    n_routed_experts: int = field(kw_only=True)
    num_experts_per_tok: int = field(kw_only=True)
    moe_intermediate_size: int = field(kw_only=True)
    v_head_dim: int = 128
    attention_value_scale: float | None = 0.707
    sliding_window: int | None = 129
    layer_types: tuple[str, ...] | None = None
    rope_parameters: Mapping[str, object] = field(default_factory=lambda: dict(MIMO_ROPES))
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 131072
    attention_bias: bool = False

    model_types = ("mimo_v2_flash",)
    renamed = {"layernorm_epsilon": "rms_norm_eps"}
    recipe = DecoderRecipe(
        output_bias=False,
        sinks="with a window",
        value_scale="attention_value_scale",
        experts=replace(SIGMOID_EXPERTS, count="n_routed_experts", shared=None, dense=None),
        stored={"self_attn.sinks": "self_attn.attention_sink_bias"},
    )
    unwritten = frozenset({"rope_scaling", "rope_theta"})
    buffers = (r"model\.mtp\..*",)  # layers for further tokens
    code = "MiMoV2"
    ignored = frozenset({"attention_chunk_size", "hybrid_block_size"})
    fixed = {
        **SILU,
        "add_full_attention_sink_bias": (False,),
        "add_swa_attention_sink_bias": (True,),
        "n_shared_experts": (None, 0),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    }

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys of transformers for those of the makers: `hybrid_layer_pattern` has a 1
        for each layer with a window, and `sliding_window_size` counts the keys before the query.
        """
        keys: dict[str, Any] = dict(raw)
        pattern = keys.pop("hybrid_layer_pattern", None)
        size = keys.pop("sliding_window_size", None)
        if isinstance(pattern, list) and keys.get("layer_types") is None:
            keys["layer_types"] = [SLIDING if flag else FULL for flag in pattern]
        if isinstance(size, int):
            keys["sliding_window"] = size + 1
        for name in SWA_SIZES:
            own, of_full = keys.pop(f"swa_{name}", None), keys.get(name)
            if name == "num_key_value_heads" and isinstance(of_full, int):
                of_full *= 2
            if own not in (None, of_full):
                raise ArgumentError(
                    f"swa_{name} is {own}; with {name} {keys.get(name)} it must be {of_full}"
                )
        bases = {FULL: keys.pop("rope_theta", None), SLIDING: keys.pop("swa_rope_theta", None)}
        share = keys.pop("partial_rotary_factor", None)
        if keys.get("rope_parameters") is None:
            keys["rope_parameters"] = {
                kind: {
                    **settings,
                    **({} if share is None else {"partial_rotary_factor": share}),
                    **({} if bases[kind] is None else {"rope_theta": bases[kind]}),
                }
                for kind, settings in MIMO_ROPES.items()
            }
        parameters = keys.pop("rope_parameters")
        if keys.get("routed_scaling_factor", 0) is None:
            del keys["routed_scaling_factor"]
        return super().normalize_keys(keys) | {"rope_parameters": parameters}

    def windows(self) -> tuple[int | None, ...]:
        """Return the windows of `layer_types`, or else one in all layers but 0, 5, 11, 17, ..."""
        n = self.num_hidden_layers
        kinds = [FULL if i == 0 or (i + 1) % 6 == 0 else SLIDING for i in range(n)]
        listed = self.layer_types or kinds
        return layer_windows(n, sliding_window=self.sliding_window, layer_types=listed)

    def ropes(self) -> tuple[RopeSettings | None, ...]:
        """Return the rotary settings of each layer; those with a window have another base."""
        return self.ropes_by_kind(self.rope_parameters)

    def head_shape(self, window: int | None) -> HeadShape:
        """Return the heads of a layer: with a window, twice as many for keys."""
        G = self.num_key_value_heads * (1 if window is None else 2)
        return HeadShape(self.num_attention_heads, G, self.head_dim, self.v_head_dim)
