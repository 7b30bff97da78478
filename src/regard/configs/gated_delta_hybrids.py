"""The configs of models that mix layers of Gated DeltaNet and layers of softmax attention:
Qwen3-Next and Qwen3.5, dense and with experts.

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
"""Key -> the only values that the families of this file support."""


@dataclass(frozen=True)
class GatedDeltaConfig(HybridConfig):
    """The keys of layers of Gated DeltaNet with a layer of gated attention after every few."""

    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    partial_rotary_factor: float = 0.25
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    full_attention_interval: int = 4
    layer_types: Names = None

    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = FIXED

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys as for Llama; head_dim is 256 if it is not given, for every
        hidden_size.
        """
        return super().normalize_keys({"head_dim": 256, **raw})

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

    def ropes(self) -> tuple[RopeSettings | None, ...]:
        """Return the rotary settings of each layer with attention; None for the others."""
        return tuple(self.rope if kind == FULL else None for kind in self.kinds())

    def mixer(self, kind: str) -> Spec:
        """Return the sizes of Gated DeltaNet, or of attention with an output gate."""
        if kind == LINEAR:
            return self.recurrent()
        spec = self.attention(None)
        gate = self.hidden_size * self.num_attention_heads * self.head_dim
        return replace(spec, weights=spec.weights + ParameterCounts(gate))

    def recurrent(self) -> Spec:
        """Return the sizes of a layer of Gated DeltaNet."""
        keys = self.linear_num_key_heads
        D, E = self.linear_key_head_dim, self.linear_value_head_dim
        shape = HeadShape(keys, keys, D, E, self.linear_num_value_heads)
        return convolved_gated_delta_net(self.hidden_size, shape, self.linear_conv_kernel_dim)

    @property
    def head_norms(self) -> int:
        """The number of parameters of the norms: query heads share one, and key heads share one."""
        return 2 * self.head_dim


@dataclass(frozen=True)
class GatedDeltaMoeConfig(GatedDeltaConfig):
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
class Qwen3NextConfig(GatedDeltaMoeConfig):
    """The keys of Qwen3-Next."""

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
class Qwen35Config(GatedDeltaConfig):
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
class Qwen35MoeConfig(GatedDeltaMoeConfig):
    """The keys of the language model of Qwen3.5 with experts."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5_moe_text", "qwen3_5_moe")
    ignored: ClassVar[frozenset[str]] = _IGNORED
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = FIXED | {"norm_topk_prob": (True,)}

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys of the language model, as for Qwen3-Next."""
        return super().normalize_keys(_language_model(raw))
