"""The configs of Qwen 2 to 3.5, with and without experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from regard.configs.base import FULL, Raw, rename_keys
from regard.configs.hybrid import LINEAR, GatedDeltaConfig, named_kinds
from regard.configs.rotary_decoder import SILU, DecoderRecipe, Experts, GroupedQueryConfig
from regard.cost.softmax import SoftmaxSpec
from regard.cost.spec import ParameterCounts


@dataclass(frozen=True)
class Qwen2Config(GroupedQueryConfig):
    """Qwen 2 and 2.5: Llama with a bias on queries, keys and values; the upper layers may have a
    sliding window. Source: Yang et al. 2024 (arXiv 2407.10671).
    """

    max_position_embeddings: int = 32768
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: tuple[str, ...] | None = None

    model_types = ("qwen2",)
    recipe = DecoderRecipe(qkv_bias=True)
    fixed = {**SILU, "use_mrope": (False,)}


DENSE = {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)}
"""The only values of keys that would leave out the experts of some layers."""


SHARING_EXPERTS = Experts(
    "num_experts",
    "moe_intermediate_size",
    normalized="norm_topk_prob",
    shared="shared_expert_intermediate_size",
    shared_gate=True,
)
"""A mixture of experts with an expert for all tokens behind a gate."""


@dataclass(frozen=True)
class Qwen2MoeConfig(Qwen2Config):
    """Qwen1.5-MoE and Qwen2-57B: Qwen 2 with a mixture of experts in every layer, and an expert for
    all tokens behind a gate. Source: Yang et al. 2024 (arXiv 2407.10671), section 2.2.2.
    """

    moe_intermediate_size: int = field(kw_only=True)
    shared_expert_intermediate_size: int = field(kw_only=True)
    num_experts: int = field(kw_only=True)
    num_experts_per_tok: int = field(kw_only=True)
    norm_topk_prob: bool = field(kw_only=True, default=False)

    model_types = ("qwen2_moe",)
    recipe = DecoderRecipe(
        qkv_bias=True,
        experts=SHARING_EXPERTS,
    )
    fixed = {**SILU, **DENSE, "qkv_bias": (True,)}

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys as for Qwen 2; a window of 0 is none."""
        keys = super().normalize_keys(raw)
        if keys.get("sliding_window") == 0 and not keys.get("use_sliding_window"):
            keys["sliding_window"] = None
        return keys


@dataclass(frozen=True)
class Qwen3Config(Qwen2Config):
    """Qwen 3: Qwen 2 with a norm on each head of queries and keys, before they are rotated, in
    place of the bias. Source: Yang et al. 2025 (arXiv 2505.09388).
    """

    attention_bias: bool = False

    model_types = ("qwen3",)
    recipe = DecoderRecipe(
        head_norms="each head", qkv_bias="attention_bias", output_bias="attention_bias"
    )
    fixed = SILU


@dataclass(frozen=True)
class Qwen3MoeConfig(Qwen3Config):
    """Qwen 3 with a mixture of experts in every layer. Source: Yang et al. 2025 (arXiv 2505.09388),
    section 2.
    """

    moe_intermediate_size: int = field(kw_only=True)
    num_experts: int = field(kw_only=True)
    num_experts_per_tok: int = field(kw_only=True)
    norm_topk_prob: bool = field(kw_only=True, default=False)

    model_types = ("qwen3_moe",)
    recipe = replace(
        Qwen3Config.recipe,
        experts=Experts("num_experts", "moe_intermediate_size", normalized="norm_topk_prob"),
    )
    fixed = {**SILU, **DENSE}

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys as for Qwen 3; num_local_experts is another name of num_experts."""
        return super().normalize_keys(rename_keys(raw, {"num_local_experts": "num_experts"}))


FIXED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attn_output_gate": (True,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "use_sliding_window": (False,),
}
"""Key -> the only values that Qwen3-Next and Qwen3.5 support."""


@dataclass(frozen=True)
class QwenHybridConfig(GatedDeltaConfig):
    """The keys of Qwen3-Next and Qwen3.5: a layer of gated attention after some of Gated
    DeltaNet.
    """

    max_position_embeddings: int = 32768
    partial_rotary_factor: float = 0.25
    full_attention_interval: int = 4

    family_file = "qwen"
    towers = "visual"
    buffers = (r"mtp\..*",)  # the layer for a second token
    fixed = FIXED
    recipe = DecoderRecipe(
        norm="rms 1 + w", head_norms="each head", partial="partial_rotary_factor"
    )

    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of `layer_types`, or of `full_attention_interval`."""
        if self.layer_types is not None:
            return named_kinds(self.layer_types, self.num_hidden_layers)
        n = self.full_attention_interval
        return tuple(FULL if (i + 1) % n == 0 else LINEAR for i in range(self.num_hidden_layers))

    def attention(self, window: int | None = None) -> SoftmaxSpec:
        """Return the sizes of attention with an output gate."""
        spec = super().attention(window)
        gate = self.hidden_size * self.num_attention_heads * self.head_dim
        return replace(spec, weights=spec.weights + ParameterCounts(gate))


@dataclass(frozen=True)
class QwenHybridMoeConfig(QwenHybridConfig):
    """The keys of Qwen3-Next and of Qwen3.5 with experts: a mixture of experts in every layer, with
    an expert for all tokens behind a gate.
    """

    moe_intermediate_size: int = field(kw_only=True)
    shared_expert_intermediate_size: int = field(kw_only=True)
    num_experts: int = field(kw_only=True)
    num_experts_per_tok: int = field(kw_only=True)

    recipe = replace(
        QwenHybridConfig.recipe,
        experts=replace(SHARING_EXPERTS, normalized=True),
    )

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys as for the dense model; intermediate_size may be missing."""
        width = raw.get("moe_intermediate_size")
        return super().normalize_keys({"intermediate_size": width, **raw})


@dataclass(frozen=True)
class Qwen3NextConfig(QwenHybridMoeConfig):
    """The keys of Qwen3-Next; by default the expert weights of a token sum to 1."""

    norm_topk_prob: bool = True

    model_types = ("qwen3_next",)
    recipe = replace(QwenHybridConfig.recipe, experts=SHARING_EXPERTS)


PICTURES = frozenset(
    {
        "text_config",
        "vision_config",
        "image_token_id",
        "video_token_id",
        "vision_start_token_id",
        "vision_end_token_id",
    }
)
"""Keys of a model that also reads images, which the language model does not have."""


AXES = ("mrope_section", "mrope_interleaved")
"""Keys that say which rotary pairs follow which axis of an image; all axes of a text are equal."""


def _language_model(raw: Raw) -> dict[str, object]:
    """Return the config of the language model, from that of a model that also reads images."""
    text = raw.get("text_config")
    keys = dict(raw)
    if isinstance(text, Mapping):
        keys = {key: value for key, value in raw.items() if key not in PICTURES} | dict(text)
    for name in ("rope_parameters", "rope_scaling"):
        settings = keys.get(name)
        if isinstance(settings, Mapping):
            keys[name] = {key: value for key, value in settings.items() if key not in AXES}
    return keys


_IGNORED = frozenset({"mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"})
"""Another code's dtype of the state, and the layer that predicts a second token: not loaded."""


@dataclass(frozen=True)
class Qwen35Config(QwenHybridConfig):
    """The keys of Qwen3.5 with dense layers, in `text_config` if the model reads images."""

    model_types = ("qwen3_5_text", "qwen3_5")
    ignored = _IGNORED

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys of the language model, as for Qwen3-Next."""
        return super().normalize_keys(_language_model(raw))


@dataclass(frozen=True)
class Qwen35MoeConfig(QwenHybridMoeConfig):
    """The keys of the language model of Qwen3.5 with experts."""

    model_types = ("qwen3_5_moe_text", "qwen3_5_moe")
    ignored = _IGNORED
    fixed = FIXED | {"norm_topk_prob": (True,)}

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys of the language model, as for Qwen3-Next."""
        return super().normalize_keys(_language_model(raw))
