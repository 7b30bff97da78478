"""The config of Step-3.5 and of the language model of Step-3.7."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from regard.configs.base import FULL, SLIDING, Raw, check_length, rename_keys
from regard.configs.expert_layers import ExpertLayersConfig
from regard.configs.rope import RopeSettings, shorten
from regard.configs.rotary_decoder import SIGMOID_EXPERTS, SILU, DecoderRecipe, language_model
from regard.cost.softmax import SoftmaxSpec
from regard.cost.spec import HeadShape, ParameterCounts
from regard.errors import ArgumentError

STEP_NAMES = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
    "num_mtp_layers": "num_nextn_predict_layers",
}
"""Other name of a key -> its name in transformers."""
LISTS = ("layer_types", "rope_theta", "partial_rotary_factors")
LIMITS = ("swiglu_limits", "swiglu_limits_shared")
"""Keys with a value for each layer; makers' lists also have the layers that predict more tokens."""
PICTURES = frozenset({"vision_config", "text_config", "image_token_id", "projector_bias"})
SIZES_OF_WINDOWS = {
    "num_attention_groups": "num_key_value_heads",
    "head_dim": "head_dim",
    "true_head_dim": "head_dim",
}
"""Key of `attention_other_setting` -> the key that must have the same value."""


@dataclass(frozen=True)
class StepConfig(ExpertLayersConfig):
    """Step-3.5 and Step-3.7: windows in most layers, which have more query heads and another rotary
    base; a gate for each head; experts of DeepSeek-V3, whose hidden numbers the last layers limit.
    Source: StepFun 2026, "Step 3.5 Flash", and its code in transformers.
    """

    n_routed_experts: int = 288
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 1280
    share_expert_dim: int = 1280
    moe_router_scaling_factor: float = 1.0
    num_sliding_attention_heads: int | None = None
    query_pre_attn_scalar: float | None = None
    swiglu_limits: tuple[float | None, ...] | None = None
    swiglu_limits_shared: tuple[float | None, ...] | None = None
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    rope_parameters: Mapping[str, object] = field(default_factory=dict)
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 128000
    attention_bias: bool = False
    mlp_bias: bool = False

    model_types = ("step3p5", "step3p7")
    family_file = "step"
    dense_layers = 3
    recipe = DecoderRecipe(
        norm="rms 1 + w",
        head_norms="each head",
        score_scale="score_scale",
        experts=replace(
            SIGMOID_EXPERTS,
            count="n_routed_experts",
            normalized=True,
            shared="share_expert_dim",
            shared_count=None,
            dense=None,
            stored="moe",
        ),
        stored={
            "moe.gate.e_score_correction_bias": "moe.router_bias",
            "moe.shared_experts": "share_expert",
        },
    )
    unwritten = frozenset({"rope_scaling", "rope_theta"})
    towers = "vision_model vit_large_projector multi_modal_projector"
    buffers = (r"model\.layers\.(45|46|47)\..*",)  # layers for further tokens
    code = "Step3p"
    ignored = frozenset(
        {"max_seq_len", "moe_every_n_layer", "moe_layer_offset", "mtp_layer_types"}
        | {"mtp_mlp_layer_types", "need_fp32_gate", "num_nextn_predict_layers"}
    )
    fixed = {
        **SILU,
        "att_impl_type": ("GQA",),
        "gating": (True, "per-head"),
        "moe_router_activation": ("sigmoid",),
        "norm_expert_weight": (True,),
        "sink": (False,),
        "use_bidirectional_attention": (False,),
        "use_head_wise_attn_gate": (True,),
        "use_moe": (True,),
        "use_moe_router_bias": (True,),
        "use_qk_norm": (True,),
        "use_rope_layers": ([],),
        "yarn_only_types": ([FULL],),
        "zero_centered": (True,),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in LIMITS:
            listed = getattr(self, name)
            if listed is not None:
                check_length(name, listed, self.num_hidden_layers)

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys of transformers for those of the makers, of the language model alone."""
        if raw.get("model_type") == "step3p7":
            raw = language_model(raw, PICTURES)
        keys: dict[str, Any] = rename_keys(raw, STEP_NAMES)
        n, more = keys.get("num_hidden_layers"), keys.get("num_nextn_predict_layers") or 0
        kinds = keys.get("layer_types")
        if not isinstance(n, int) or not isinstance(more, int):
            return super().normalize_keys(keys)
        if kinds is None:
            kinds = keys["layer_types"] = [FULL] * n
        if not isinstance(kinds, list):
            return super().normalize_keys(keys)
        for name in (*LISTS, *LIMITS, "mlp_layer_types"):
            value = keys.get(name)
            if isinstance(value, list) and len(value) == n + more:
                keys[name] = value[:n]
        listed = keys.pop("moe_layers_enum", None)
        if listed is not None and keys.get("mlp_layer_types") is None:
            numbers = {x.strip() for x in str(listed).strip("[]").split(",")}
            if wrong := sorted(numbers - {str(i) for i in range(n + more)}):
                raise ArgumentError(
                    f"moe_layers_enum has {shorten(wrong[0])}; it must list layers below {n}"
                )
            keys["moe_layer_freq"] = [int(str(i) in numbers) for i in range(n)]
        _normalize_heads(keys)
        if keys.get("rope_parameters") is None:
            keys["rope_parameters"] = _ropes_of_layers(keys, keys["layer_types"])
        for name in ("rope_theta", "partial_rotary_factors", "rope_scaling"):
            keys.pop(name, None)
        parameters = keys.pop("rope_parameters")
        return super().normalize_keys(keys) | {"rope_parameters": parameters}

    @property
    def routed_scaling_factor(self) -> float:
        """The factor on the weights of experts, as a router reads it."""
        return self.moe_router_scaling_factor

    @property
    def score_scale(self) -> float:
        """The factor on scores; None in the config is 1/sqrt(D)."""
        scalar = self.query_pre_attn_scalar
        return float((self.head_dim if scalar is None else scalar) ** -0.5)

    def ropes(self) -> tuple[RopeSettings | None, ...]:
        """Return the rotary settings of each layer; those with a window have others."""
        return self.ropes_by_kind(self.rope_parameters)

    def head_shape(self, window: int | None) -> HeadShape:
        """Return the heads of a layer: with a window, other numbers of query heads."""
        own = None if window is None else self.num_sliding_attention_heads
        H, D = self.num_attention_heads if own is None else own, self.head_dim
        return HeadShape(H, self.num_key_value_heads, D, D)

    def attention(self, window: int | None = None) -> SoftmaxSpec:
        """Return the sizes of attention with a gate for each head."""
        spec = super().attention(window)
        gate = ParameterCounts(self.hidden_size * spec.query_heads)
        return replace(spec, weights=spec.weights + gate)

    def limits(self, layer: int, *, expert: bool = False) -> Mapping[str, Any] | None:
        """Return the limit of a layer's experts, or of its other networks; 0 is none."""
        listed = self.swiglu_limits if expert else self.swiglu_limits_shared
        limit = listed[layer] if listed else None
        return {"limit": limit, "alpha": 1.0, "offset": 0.0, "after": True} if limit else None


def _normalize_heads(keys: dict[str, Any]) -> None:
    """Give the query heads of layers with a window one name, and check what they have in common."""
    own = keys.pop("attention_other_setting", None)
    if isinstance(own, Mapping):
        if keys.get("num_sliding_attention_heads") is None:
            keys["num_sliding_attention_heads"] = own.get("num_attention_heads")
        for theirs, ours in SIZES_OF_WINDOWS.items():
            if own.get(theirs, keys.get(ours)) != keys.get(ours):
                raise ArgumentError(
                    f"attention_other_setting.{theirs} is {own[theirs]}; it must be {ours}, "
                    f"{keys.get(ours)}"
                )
    listed, H = keys.pop("per_layer_config", None), keys.get("num_attention_heads")
    if isinstance(listed, Mapping):
        heads, name = keys.get("num_sliding_attention_heads") or H, "num_attention_heads"
        changed = {i for i, kind in enumerate(keys["layer_types"]) if kind == SLIDING}
        expected = {str(i): {name: heads} for i in changed if heads != H}
        if {f"{i}": x for i, x in listed.items() if x != {name: H}} != expected:
            raise ArgumentError(
                f"per_layer_config is {shorten(listed)}; it must give {name} {heads} to each layer "
                "with a window, and nothing else"
            )


def _ropes_of_layers(keys: Mapping[str, Any], kinds: Any) -> dict[str, object]:
    """Return the rotary settings by kind of layer, from lists with a value for each layer."""
    n = keys["num_hidden_layers"]
    settings: dict[str, object] = {}
    bases, shares = keys.get("rope_theta", 10000.0), keys.get("partial_rotary_factors")
    bases = bases if isinstance(bases, list) else [bases] * n
    shares = shares if isinstance(shares, list) else [1.0 if shares is None else shares] * n
    scaling = keys.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ArgumentError(f"rope_scaling is {shorten(scaling)}; it must be an object")
    for name, values in zip(LISTS, (kinds, bases, shares), strict=True):
        check_length(name, values, n)
    for kind in (FULL, SLIDING):
        own = [x[1:] for x in zip(kinds, bases, shares, strict=True) if x[0] == kind]
        if own != own[:1] * len(own):
            raise ArgumentError(
                f"layers of the kind {kind!r} have the rotary bases and shares {shorten(own)}; "
                "all of one kind must have the same"
            )
        scaled = {"rope_type": "default", **(scaling if kind == FULL else {})}
        for base, share in own[:1]:
            settings[kind] = {**scaled, "rope_theta": base, "partial_rotary_factor": share}
    return settings
