"""The configs of decoders like Llama whose makers have few families: Apertus, Arcee, ERNIE 4.5,
EXAONE, Helium, HunYuan, nanochat, Seed-OSS, SmolLM3, StableLM and StarCoder2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from regard.configs.base import Raw, layer_windows
from regard.configs.llama import LlamaConfig
from regard.configs.rope import RopeSettings, check_finite, shorten
from regard.configs.rotary_decoder import (
    SIGMOID_EXPERTS,
    SILU,
    DecoderRecipe,
    Experts,
    GroupedQueryConfig,
    RotaryDecoderConfig,
    dense_layers_first,
    rotated_by_flag,
)
from regard.errors import ArgumentError


@dataclass(frozen=True)
class ApertusConfig(GroupedQueryConfig):
    """Apertus: Llama with a norm on each head, and an activation with learned curvatures in place
    of the gated feed-forward layer. Source: Swiss AI Initiative 2025 (arXiv 2509.14233).
    """

    rms_norm_eps: float = 1e-5
    rope_theta: float = 12000000.0
    max_position_embeddings: int = 65536
    attention_bias: bool = False

    model_types = ("apertus",)
    recipe = DecoderRecipe(
        head_norms="each head",
        gated=False,
        activation="xielu",
        stored={
            "input_layernorm": "attention_layernorm",
            "post_attention_layernorm": "feedforward_layernorm",
        },
    )
    absent_rope = {
        "rope_type": "llama3",
        "rope_theta": 12000000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    fixed = {
        "hidden_act": ("xielu",),
        "mlp_bias": (False,),
        "post_norm": (False,),
        "qk_norm": (True,),
    }


@dataclass(frozen=True)
class ArceeConfig(LlamaConfig):
    """Arcee's AFM: Llama with a squared ReLU in place of the gated feed-forward layer. Source:
    Arcee AI 2025, "Announcing Arcee Foundation Models".
    """

    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 4096

    model_types = ("arcee",)
    recipe = DecoderRecipe(gated=False, activation="relu2")
    ignored = frozenset[str]()
    fixed = {"hidden_act": ("relu2",)}


@dataclass(frozen=True)
class Ernie45Config(GroupedQueryConfig):
    """ERNIE 4.5, the dense models: Llama that rotates pairs of neighbours. Source: Baidu 2025,
    "ERNIE 4.5 Technical Report".
    """

    head_dim: int = 128
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    max_position_embeddings: int = 131072
    tie_word_embeddings: bool = True
    use_bias: bool = False

    model_types = ("ernie4_5",)
    recipe = DecoderRecipe(
        layout="interleaved", qkv_bias="use_bias", output_bias="use_bias", ff_bias="use_bias"
    )


@dataclass(frozen=True)
class Ernie45MoeConfig(Ernie45Config):
    """ERNIE 4.5 with mixtures of experts, chosen by their softmax plus a correction, and an expert
    for all tokens. The experts have no biases, where all other maps have them.
    """

    moe_num_experts: int = 64
    moe_k: int = 6
    moe_intermediate_size: int = 1536
    moe_num_shared_experts: int = 2
    moe_layer_start_index: int = 1
    moe_layer_end_index: int = -1
    moe_layer_interval: int = 1

    model_types = ("ernie4_5_moe",)
    recipe = replace(
        Ernie45Config.recipe,
        head_bias="use_bias",
        experts=Experts(
            "moe_num_experts",
            "moe_intermediate_size",
            "moe_k",
            router="corrected softmax",
            shared="moe_intermediate_size",
            shared_count="moe_num_shared_experts",
        ),
    )
    buffers = (r"(model\.)?mtp.*",)  # the layer for a second token
    ignored = frozenset({"moe_capacity", "num_nextn_predict_layers"})
    fixed = {
        **SILU,
        "moe_gate": ("topk",),
        "moe_norm_min": (1e-12,),
        "moe_use_aux_free": (True,),
    }
    zero = ("moe_layer_start_index", "moe_layer_end_index", "moe_num_shared_experts")

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys as for Llama; -1 as the last layer with experts is the last one."""
        keys = super().normalize_keys(raw)
        layers = keys.get("num_hidden_layers")
        if keys.get("moe_layer_end_index", -1) == -1 and isinstance(layers, int):
            keys["moe_layer_end_index"] = layers - 1
        return keys

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer is every n-th one, between the first and the last with experts."""
        inside = self.moe_layer_start_index <= layer <= self.moe_layer_end_index
        return inside and (layer + 1) % self.moe_layer_interval == 0


@dataclass(frozen=True)
class Exaone4Config(GroupedQueryConfig):
    """EXAONE 4: norms after each sublayer and on each head of queries and keys; in models with a
    window, layers without one have no positions. Source: LG AI Research 2025 (arXiv 2507.11407).
    """

    rms_norm_eps: float = 1e-5
    sliding_window: int | None = 4096
    sliding_window_pattern: int | str | None = 4
    layer_types: tuple[str, ...] | None = None

    model_types = ("exaone4",)
    recipe = DecoderRecipe(norms="after", head_norms="each head")

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys as for Llama; a model without a window has no pattern."""
        keys = super().normalize_keys(raw)
        if "sliding_window" in keys and keys["sliding_window"] is None:
            keys["sliding_window_pattern"] = None
        pattern = keys.get("sliding_window_pattern")
        if isinstance(pattern, str):  # "LLLG": three local layers, then a global one
            if not pattern or pattern != "L" * (len(pattern) - 1) + "G":
                raise ArgumentError(
                    f"sliding_window_pattern is {pattern!r}; it must be a number n, or n - 1 "
                    "letters L and a G"
                )
            keys["sliding_window_pattern"] = len(pattern)
        return keys

    def windows(self) -> tuple[int | None, ...]:
        """Return the windows of `layer_types`, or a window in all layers but every n-th one."""
        pattern = self.sliding_window_pattern
        return layer_windows(
            self.num_hidden_layers,
            sliding_window=self.sliding_window,
            layer_types=self.layer_types,
            sliding_window_pattern=pattern
            if self.layer_types is None and isinstance(pattern, int) and pattern > 0
            else None,
        )

    def ropes(self) -> tuple[RopeSettings | None, ...]:
        """Return the rotary settings of each layer; None for a layer without positions."""
        if self.sliding_window is None:
            return super().ropes()
        return tuple(None if window is None else self.rope for window in self.windows())


@dataclass(frozen=True)
class ExaoneMoeConfig(Exaone4Config):
    """K-EXAONE: the attention of EXAONE 4 behind norms, and the experts of DeepSeek-V3. Source: LG
    AI Research 2026, "K-EXAONE Technical Report".
    """

    rms_norm_eps: float = 1e-5
    num_experts: int = 64
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 1024
    num_shared_experts: int = 1
    first_k_dense_replace: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    n_group: int = 1
    topk_group: int = 1

    model_types = ("exaone_moe",)
    recipe = DecoderRecipe(
        head_norms="each head",
        experts=SIGMOID_EXPERTS,
        stored={"gate.e_score_correction_bias": "e_score_correction_bias"},
    )
    buffers = (r"mtp\..*",)
    ignored = frozenset({"num_nextn_predict_layers"})
    fixed = {**SILU, "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
    zero = ("first_k_dense_replace",)

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys as for EXAONE 4, with the kinds of layers as first_k_dense_replace."""
        keys: dict[str, Any] = dense_layers_first(super().normalize_keys(raw), 1)
        listed, first = keys.pop("is_moe_layer", None), keys["first_k_dense_replace"]
        # the makers' other spelling of the same
        known = isinstance(listed, list) and isinstance(first, int)
        if known and [bool(x) for x in listed] != [i >= first for i in range(len(listed))]:
            raise ArgumentError(
                f"is_moe_layer is {shorten(listed)}, and first_k_dense_replace is {first}; they "
                "must agree"
            )
        return keys


@dataclass(frozen=True)
class HeliumConfig(GroupedQueryConfig):
    """Helium: Llama that rotates pairs of neighbours. Source: Kyutai 2025, "Helium 1"."""

    head_dim: int = 128
    rms_norm_eps: float = 1e-8
    rope_theta: float = 100000.0
    max_position_embeddings: int = 4096
    attention_bias: bool = False
    mlp_bias: bool = False

    model_types = ("helium",)
    recipe = DecoderRecipe(layout="interleaved", output_bias=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_attention_heads * self.head_dim != self.hidden_size:
            raise ArgumentError(
                f"num_attention_heads {self.num_attention_heads} times head_dim {self.head_dim} "
                f"must be hidden_size, {self.hidden_size}"
            )


@dataclass(frozen=True)
class HunYuanConfig(GroupedQueryConfig):
    """HunYuan's dense models: Llama with a norm on each head behind the rotation, whose base a
    fixed `alpha` stretches. Source: Tencent 2025, "Hunyuan-7B" and its code.
    """

    rms_norm_eps: float = 1e-5
    attention_bias: bool = False

    model_types = ("hunyuan_v1_dense",)
    recipe = DecoderRecipe(
        head_norms="each head",
        norm_rotated=True,
        stored={"q_norm": "query_layernorm", "k_norm": "key_layernorm"},
    )
    renamed = {"attention_head_dim": "head_dim"}
    rope_keys = ("alpha",)
    code = "HunYuan"
    ignored = frozenset(
        {"cla_share_factor", "class_num", "dense_list", "eod_token_id", "im_end_id"}
        | {"im_newline_id", "im_start_id", "mask_init_id", "org_vocab_size", "pad_id"}
        | {"pool_type", "text_end_id", "text_start_id"}
    )
    fixed = {
        **SILU,
        "add_classification_head": (False,),
        "mlp_bias": (False,),
        "norm_type": ("rms", "hf_rms"),
        "num_experts": (1,),
        "use_cla": (False,),
        "use_qk_norm": (True,),
        "use_rotary_pos_emb": (True,),
    }

    @property
    def rope(self) -> RopeSettings:
        """The rotary settings; with alpha, a "dynamic" scaling is NTK with that factor."""
        settings, D = super().rope, self.head_dim
        alpha = (self.rope_scaling or {}).get("alpha")
        if alpha is None or (settings.scaling or {}).get("rope_type") != "dynamic":
            return settings
        if check_finite("rope_scaling.alpha", alpha) <= 0 or D < 3:
            raise ArgumentError(
                f"rope_scaling.alpha is {alpha} for heads of {D}; it must be above 0, for 3 or more"
            )
        stretch = check_finite("rope_scaling.alpha", alpha) ** (D / (D - 2))
        return settings._replace(theta=self.rope_theta * stretch, scaling=None)

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys as for Llama; with alpha, the other numbers of a scaling say nothing."""
        keys = dict(raw)
        for name in ("rope_scaling", "rope_parameters"):
            if isinstance(scaling := keys.get(name), Mapping) and scaling.get("alpha"):
                keys[name] = {k: x for k, x in scaling.items() if k not in UNUSED_BY_NTK}
        return super().normalize_keys(keys)


UNUSED_BY_NTK = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""Keys of other scalings in the files of HunYuan."""


@dataclass(frozen=True)
class NanoChatConfig(GroupedQueryConfig):
    """nanochat: norms without weights, also on the embedding and on each head behind a rotation in
    the other direction, a squared ReLU, and capped logits. Source: Karpathy 2025, "nanochat".
    """

    attention_bias: bool = False
    final_logit_softcapping: float | None = 15.0

    model_types = ("nanochat",)
    recipe = DecoderRecipe(
        norm="rms, bare",
        embedding_norm=True,
        head_norms="each head",
        norm_rotated=True,
        gated=False,
        activation="relu2",
        logit_cap="final_logit_softcapping",
        stored={"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"},
    )
    fixed = {"hidden_act": ("relu2",)}

    @property
    def rope(self) -> RopeSettings:
        """The rotary settings, whose pairs turn in the other direction."""
        if self.rope_scaling is not None:
            raise ArgumentError(
                f"rope_scaling is {dict(self.rope_scaling)}; nanochat supports no scaling"
            )
        return super().rope._replace(backwards=True)


@dataclass(frozen=True)
class SeedOssConfig(GroupedQueryConfig):
    """Seed-OSS: Llama with separate keys for the biases of its maps. Source: ByteDance Seed 2025,
    "Seed-OSS Open-Source Models".
    """

    head_dim: int = 128
    max_position_embeddings: int = 524288
    attention_bias: bool = True
    attention_out_bias: bool = False
    mlp_bias: bool = False

    model_types = ("seed_oss",)
    recipe = DecoderRecipe(output_bias="attention_out_bias")


@dataclass(frozen=True)
class SmolLM3Config(LlamaConfig):
    """SmolLM3: Llama without positions in every fourth layer (NoPE). Source: Hugging Face 2025,
    "SmolLM3"; NoPE: Yang et al. 2025 (arXiv 2501.18795).
    """

    rope_theta: float = 2000000.0
    max_position_embeddings: int = 32768
    tie_word_embeddings: bool = True
    no_rope_layers: tuple[int, ...] | None = None
    no_rope_layer_interval: int = 4
    use_sliding_window: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None

    model_types = ("smollm3",)
    ignored = frozenset({"max_window_layers"})
    fixed = SILU

    def rotated(self) -> tuple[bool, ...]:
        """Return whether each layer has rotary positions: a 1 in `no_rope_layers`."""
        return rotated_by_flag(
            self.no_rope_layers, self.num_hidden_layers, self.no_rope_layer_interval
        )

    def ropes(self) -> tuple[RopeSettings | None, ...]:
        """Return the rotary settings of each layer; None for a layer without positions."""
        return tuple(self.rope if rotates else None for rotates in self.rotated())

    def windows(self) -> tuple[int | None, ...]:
        """Return the windows of `layer_types`; without that key, layers without positions have the
        window if use_sliding_window is true.
        """
        if self.layer_types is None and self.use_sliding_window:
            width = self.sliding_window
            return tuple(None if rotates else width for rotates in self.rotated())
        return super().windows()


@dataclass(frozen=True)
class StableLmConfig(RotaryDecoderConfig):
    """StableLM: LayerNorms and rotary positions on a part of each head; in some models, parallel
    sublayers that share a norm. Source: Bellagente et al. 2024 (arXiv 2402.17834).
    """

    layer_norm_eps: float = 1e-5
    max_position_embeddings: int = 4096
    partial_rotary_factor: float = 0.25
    use_qkv_bias: bool = False
    use_parallel_residual: bool = False

    model_types = ("stablelm",)
    recipe = DecoderRecipe(
        norm="layer",
        eps="layer_norm_eps",
        qkv_bias="use_qkv_bias",
        parallel="use_parallel_residual",
    )
    fixed = {**SILU, "qk_layernorm": (False,)}


@dataclass(frozen=True)
class Starcoder2Config(RotaryDecoderConfig):
    """StarCoder2: LayerNorms, biases everywhere, and a feed-forward layer without a gate. Source:
    Lozhkov et al. 2024 (arXiv 2402.19173).
    """

    norm_epsilon: float = 1e-5
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = True
    hidden_act: str = "gelu_pytorch_tanh"
    use_bias: bool = True
    sliding_window: int | None = None

    model_types = ("starcoder2",)
    recipe = DecoderRecipe(
        norm="layer",
        eps="norm_epsilon",
        qkv_bias="use_bias",
        output_bias="use_bias",
        ff_bias="use_bias",
        gated=False,
        stored={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"},
    )
    ignored = frozenset({"mlp_type", "norm_type"})
