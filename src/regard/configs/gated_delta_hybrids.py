"""The configs of models that mix layers of Gated DeltaNet and layers of softmax attention:
Qwen3-Next, Qwen3.5, dense and with experts, and OLMo Hybrid.

Source of the keys: Hugging Face checkpoints, and transformers' configuration classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from regard.configs.base import FULL, Raw
from regard.configs.hybrid import LINEAR, HybridConfig, Names, named_kinds
from regard.configs.llama import check_experts
from regard.configs.rope import RopeSettings
from regard.cost.model import DenseSpec, FeedForwardSpec, MoESpec
from regard.cost.spec import HeadShape, ParameterCounts, Spec
from regard.cost.state_space import convolved_gated_delta_net

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
class GatedDeltaConfig(HybridConfig):
    """The keys of layers of Gated DeltaNet between layers of attention."""

    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    layer_types: Names = None

    def ropes(self) -> tuple[RopeSettings | None, ...]:
        """Return the rotary settings of each layer with attention; None for the others."""
        return tuple(self.rope if kind == FULL else None for kind in self.kinds())

    def recurrent(self) -> Spec:
        """Return the sizes of a layer of Gated DeltaNet."""
        keys = self.linear_num_key_heads
        D, E = self.linear_key_head_dim, self.linear_value_head_dim
        shape = HeadShape(keys, keys, D, E, self.linear_num_value_heads)
        return convolved_gated_delta_net(self.hidden_size, shape, self.linear_conv_kernel_dim)


@dataclass(frozen=True)
class QwenHybridConfig(GatedDeltaConfig):
    """The keys of Qwen3-Next and Qwen3.5: a layer of gated attention after every few of Gated
    DeltaNet.
    """

    max_position_embeddings: int = 32768
    partial_rotary_factor: float = 0.25
    full_attention_interval: int = 4

    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = FIXED

    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of `layer_types`, or attention in every `full_attention_interval`-th
        layer.
        """
        if self.layer_types is not None:
            return named_kinds(self.layer_types, self.num_hidden_layers)
        n = self.full_attention_interval
        return tuple(FULL if (i + 1) % n == 0 else LINEAR for i in range(self.num_hidden_layers))

    @property
    def rope(self) -> RopeSettings:
        """The rotary settings: only the first part of each head is rotated."""
        return super().rope._replace(partial=self.partial_rotary_factor)

    def mixer(self, kind: str) -> Spec:
        """Return the sizes of Gated DeltaNet, or of attention with an output gate."""
        if kind == LINEAR:
            return self.recurrent()
        spec = self.attention(None)
        gate = self.hidden_size * self.num_attention_heads * self.head_dim
        return replace(spec, weights=spec.weights + ParameterCounts(gate))

    @property
    def head_norms(self) -> int:
        """The number of parameters of the norms: query heads share one, and key heads share one."""
        return 2 * self.head_dim


@dataclass(frozen=True)
class QwenHybridMoeConfig(QwenHybridConfig):
    """The keys of Qwen3-Next and of Qwen3.5 with experts: a mixture of experts in every layer, with
    an expert for all tokens behind a gate.
    """

    moe_intermediate_size: int = field(kw_only=True)
    shared_expert_intermediate_size: int = field(kw_only=True)
    num_experts: int = field(kw_only=True)
    num_experts_per_tok: int = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts("num_experts", self.num_experts, self.num_experts_per_tok)

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys as for the dense model; no layer uses intermediate_size, which may be
        missing.
        """
        width = raw.get("moe_intermediate_size")
        return super().normalize_keys({"intermediate_size": width, **raw})

    def feed_forward(self) -> FeedForwardSpec:
        """Return the sizes of a mixture of experts whose shared expert has a gate."""
        M = self.hidden_size
        return MoESpec(
            DenseSpec(M, self.moe_intermediate_size),
            self.num_experts,
            self.num_experts_per_tok,
            DenseSpec(M, self.shared_expert_intermediate_size),
            shared_gate=True,
        )


@dataclass(frozen=True)
class Qwen3NextConfig(QwenHybridMoeConfig):
    """The keys of Qwen3-Next, whose expert weights of a token sum to 1 unless a key says
    otherwise.
    """

    norm_topk_prob: bool = True

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_next",)


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
"""The dtype of the state in other code, and the layer that predicts a second token, which is not
loaded.
"""


@dataclass(frozen=True)
class Qwen35Config(QwenHybridConfig):
    """The keys of the language model of Qwen3.5 with dense feed-forward layers.

    The config.json of a model that also reads images has them in `text_config`.
    """

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5_text", "qwen3_5")
    ignored: ClassVar[frozenset[str]] = _IGNORED

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys of the language model, as for Qwen3-Next."""
        return super().normalize_keys(_language_model(raw))


@dataclass(frozen=True)
class Qwen35MoeConfig(QwenHybridMoeConfig):
    """The keys of the language model of Qwen3.5 with experts."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5_moe_text", "qwen3_5_moe")
    ignored: ClassVar[frozenset[str]] = _IGNORED
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = FIXED | {"norm_topk_prob": (True,)}

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys of the language model, as for Qwen3-Next."""
        return super().normalize_keys(_language_model(raw))


@dataclass(frozen=True)
class OlmoHybridConfig(GatedDeltaConfig):
    """The keys of OLMo Hybrid: layers of Gated DeltaNet, and the attention of OLMo 3, with rotary
    positions or without.
    """

    max_position_embeddings: int = 65536
    attention_bias: bool = False
    linear_allow_neg_eigval: bool = True
    rope_parameters: Mapping[str, object] | None = None

    model_types: ClassVar[tuple[str, ...]] = ("olmo_hybrid",)
    # initial values
    ignored: ClassVar[frozenset[str]] = frozenset(
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
        """Return the keys with all sizes, and with rope_parameters for a model without positions
        only.

        A rope_theta of null, inside of rope_parameters or instead of them, means no positions.
        """
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

    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of `layer_types`; without them every fourth layer has attention, or the
        last one if there are fewer.
        """
        if self.layer_types is not None:
            return named_kinds(self.layer_types, self.num_hidden_layers)
        n = min(4, self.num_hidden_layers)
        return tuple(FULL if i % 4 == n - 1 else LINEAR for i in range(self.num_hidden_layers))

    def ropes(self) -> tuple[RopeSettings | None, ...]:
        """Return the rotary settings of each layer with attention; None for the others, and for all
        layers of a model without positions.
        """
        if self.rope_parameters is not None:
            return (None,) * self.num_hidden_layers
        return super().ropes()

    @property
    def biases(self) -> tuple[bool, bool]:
        """Whether all maps of the attention have biases."""
        return self.attention_bias, self.attention_bias

    @property
    def head_norms(self) -> int:
        """The number of parameters of the norms: one over all query heads, one over all key
        heads.
        """
        return (self.num_attention_heads + self.num_key_value_heads) * self.head_dim


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
