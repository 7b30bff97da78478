"""The configs of Phi 1 to 4 and Phi-3.5-MoE."""

from __future__ import annotations

from dataclasses import dataclass, field

from regard.argument_checks import check_number
from regard.configs.rope import RopeSettings
from regard.configs.rotary_decoder import (
    SILU,
    DecoderRecipe,
    Experts,
    GroupedQueryConfig,
    RotaryDecoderConfig,
)
from regard.errors import ArgumentError


@dataclass(frozen=True)
class PhiConfig(RotaryDecoderConfig):
    """Phi 1, 1.5 and 2: parallel sublayers that share a LayerNorm, rotary positions on a part of
    each head, and a head with biases. Source: Li et al. 2023 (arXiv 2309.05463).
    """

    layer_norm_eps: float = 1e-5
    partial_rotary_factor: float = 0.5
    hidden_act: str = "gelu_new"

    model_types = ("phi",)
    recipe = DecoderRecipe(
        norm="layer",
        eps="layer_norm_eps",
        parallel=True,
        qkv_bias=True,
        output_bias=True,
        ff_bias=True,
        head_bias=True,
        gated=False,
        stored={
            "self_attn.o_proj": "self_attn.dense",
            "mlp.up_proj": "mlp.fc1",
            "mlp.down_proj": "mlp.fc2",
            "model.norm": "model.final_layernorm",
        },
    )
    fixed = {"qk_layernorm": (False,), "tie_word_embeddings": (False,)}


@dataclass(frozen=True)
class Phi3Config(GroupedQueryConfig):
    """The keys of Phi 3, 3.5 and 4-mini."""

    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 4096
    original_max_position_embeddings: int = 4096
    partial_rotary_factor: float = 1.0
    sliding_window: int | None = None

    model_types = ("phi3",)
    recipe = DecoderRecipe(fused=("qkv_proj", "gate_up_proj"))
    code = "Phi3"
    fixed = {
        **SILU,
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "lm_head_bias": (False,),
        "full_attn_mod": (1,),
        "interpolate_factor": (1,),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = "default" if self.rope_scaling is None else self.rope_scaling.get("rope_type")
        if kind not in ("default", "longrope"):
            raise ArgumentError(
                f"rope_scaling.rope_type is {kind!r}; phi3 supports longrope (formerly su) or no "
                "scaling"
            )

    @property
    def rope(self) -> RopeSettings:
        """The rotary settings: `short_factor` up to the trained length, `long_factor` beyond."""
        return super().rope._replace(original=self.original_max_position_embeddings)


MSCALES = ("short_mscale", "long_mscale")


@dataclass(frozen=True)
class PhimoeConfig(RotaryDecoderConfig):
    """The keys of Phi-3.5-MoE: LayerNorms, and two experts a token, each weighed by a softmax over
    the experts whose scores are within `router_jitter_noise`, in inference, too.
    """

    rms_norm_eps: float = 1e-5  # of LayerNorms, in spite of its name
    rope_theta: float = 1000000.0
    max_position_embeddings: int = 131072
    original_max_position_embeddings: int | None = None
    sliding_window: int | None = None
    num_local_experts: int = field(kw_only=True)
    router_jitter_noise: float = 0.01
    attention_bias: bool = False
    lm_head_bias: bool = False

    model_types = ("phimoe",)
    recipe = DecoderRecipe(
        norm="layer",
        head_bias="lm_head_bias",
        experts=Experts(
            "num_local_experts",
            active=2,
            router="sparse_mixer",
            stored="block_sparse_moe",
            parts=("w1", "w3", "w2"),
        ),
    )
    rope_keys = MSCALES
    code = "PhiMoE"
    ignored = frozenset({"input_jitter_noise"})  # in training only
    fixed = {
        **SILU,
        "num_experts_per_tok": (2,),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        noise = self.router_jitter_noise
        check_number("router_jitter_noise", noise, -1e-300, float("inf"), "at least 0")

    @property
    def rope(self) -> RopeSettings:
        """The rotary settings, in which the two factors of LongRoPE are its `attention_factor`."""
        settings, scaling = super().rope, dict(self.rope_scaling or {})
        if not scaling:
            return settings
        short, long = (scaling.pop(key, None) for key in MSCALES)
        if scaling.get("rope_type") != "longrope" or short is None or short != long:
            raise ArgumentError(
                f"rope_scaling has rope_type {scaling.get('rope_type')!r}, short_mscale {short!r} "
                f"and long_mscale {long!r}; phimoe supports longrope with two equal factors, or no "
                "scaling"
            )
        scaling["attention_factor"] = short
        original = self.original_max_position_embeddings
        return settings._replace(scaling=scaling, original=original)
