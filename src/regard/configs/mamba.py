"""The configs of Mamba, Mamba-2 and Jamba, and the keys of decoders without positions."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from regard.argument_checks import check_groups, check_number
from regard.configs.base import FULL, ModelConfig, Raw, check_sizes
from regard.configs.hybrid import (
    LINEAR,
    NO_LIMITS,
    STEP_KEYS,
    Mamba2Sizes,
    StepLimits,
    check_width,
    step_limits,
    with_step_limits,
)
from regard.configs.rotary_decoder import SILU, check_experts
from regard.cost.decayed_state import mamba
from regard.cost.model import DenseSpec, LayerSpec, ModelSpec, MoESpec
from regard.cost.softmax import SoftmaxSpec
from regard.cost.spec import HeadShape, ParameterCounts, Spec
from regard.errors import ArgumentError


@dataclass(frozen=True)
class StateSpaceConfig(ModelConfig, ABC):
    """The keys of decoders of one mechanism, without attention and without feed-forward layers."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int

    family_file = "mamba"

    def __post_init__(self) -> None:
        check_sizes(self)
        eps = self.value("layer_norm_epsilon")
        check_number("layer_norm_epsilon", eps, -1e-300, math.inf, "at least 0")

    @abstractmethod
    def recurrent(self) -> Spec:
        """Return the sizes of the mechanism of a layer."""

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the decoder."""
        norm, tied = ParameterCounts(norms=self.hidden_size), self.value("tie_word_embeddings")
        layers = (LayerSpec(self.recurrent(), None, norm),) * self.num_hidden_layers
        return ModelSpec(name, self.vocab_size, self.hidden_size, layers, norms=norm, tied=tied)


@dataclass(frozen=True)
class MambaConfig(StateSpaceConfig):
    """The keys of Mamba, which has no attention and no feed-forward layers."""

    time_step_rank: int
    expand: int = 2
    state_size: int = 16
    conv_kernel: int = 4
    use_bias: bool = False
    use_conv_bias: bool = True
    layer_norm_epsilon: float = 1e-5
    residual_in_fp32: bool = True
    tie_word_embeddings: bool = True

    model_types = ("mamba",)
    renamed = {
        "d_model": "hidden_size",
        "n_layer": "num_hidden_layers",
        "d_inner": "intermediate_size",
    }
    ignored = (
        STEP_KEYS - {"time_step_rank"}
        | {"fused_add_norm", "pad_vocab_size_multiple", "rescale_prenorm_residual"}
        | {"use_associative_scan", "use_falcon_mambapy", "use_mambapy"}
    )
    fixed = {**SILU, "rms_norm": (True,), "ssm_cfg": ({},)}

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys; a rank that is "auto" is a sixteenth of hidden_size."""
        keys = super().normalize_keys(raw)
        size, expand = keys.get("hidden_size"), keys.get("expand", cls.expand)
        inner = keys.pop("intermediate_size", None)
        if isinstance(size, int) and isinstance(expand, int):
            if keys.get("time_step_rank") in (None, "auto"):
                keys["time_step_rank"] = -(-size // 16)
            if inner not in (None, expand * size):
                raise ArgumentError(
                    f"intermediate_size is {inner}; it must be expand x hidden_size = {expand} x "
                    f"{size}"
                )
        return keys

    def recurrent(self) -> Spec:
        """Return the sizes of a layer."""
        return mamba(
            self.hidden_size,
            self.expand * self.hidden_size,
            self.state_size,
            self.conv_kernel,
            self.time_step_rank,
            bias=self.use_bias,
            conv_bias=self.use_conv_bias,
        )


@dataclass(frozen=True)
class FalconMambaConfig(MambaConfig):
    """The keys of Falcon Mamba: Mamba with norms without weights on queries, keys and step sizes.
    Source: Zuo et al. 2024 (arXiv 2410.05355).
    """

    mixer_rms_eps: float = 1e-6

    model_types = ("falcon_mamba",)


@dataclass(frozen=True)
class Mamba2Config(StateSpaceConfig):
    """The keys of Mamba-2, which has no attention and no feed-forward layers."""

    num_heads: int
    head_dim: int = 64
    expand: int = 2
    state_size: int = 128
    n_groups: int = 8
    conv_kernel: int = 4
    use_bias: bool = False
    use_conv_bias: bool = True
    layer_norm_epsilon: float = 1e-5
    residual_in_fp32: bool = True
    time_step_limit: StepLimits = NO_LIMITS
    tie_word_embeddings: bool = False

    model_types = ("mamba2",)
    # the released code applies the gate before the norm whatever norm_before_gate says
    ignored = STEP_KEYS | {
        "chunk_size",
        "norm_before_gate",
        "rescale_prenorm_residual",
    }
    fixed = {
        **SILU,
        "rms_norm": (True,),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        step_limits(self.time_step_limit)
        sizes = self.mixer_sizes()
        sizes.check("num_heads", "n_groups")
        check_width(self.expand, self.hidden_size, sizes, "expand, num_heads and head_dim")

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys; without time_step_limit there is none."""
        return with_step_limits(raw)

    def mixer_sizes(self) -> Mamba2Sizes:
        """Return the sizes of a layer."""
        return Mamba2Sizes(
            self.hidden_size,
            self.num_heads,
            self.head_dim,
            self.n_groups,
            self.state_size,
            self.conv_kernel,
            bias=self.use_bias,
            output_bias=self.use_bias,
            conv_bias=self.use_conv_bias,
        )

    def recurrent(self) -> Spec:
        """Return the sizes of a layer."""
        return self.mixer_sizes().spec()


@dataclass(frozen=True)
class PositionlessConfig(ModelConfig, ABC):
    """The keys of decoders without positions, where state-space layers see the order of tokens."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int = 262144
    tie_word_embeddings: bool = False

    zero: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_sizes(self, zero=self.zero)
        check_groups(self.num_attention_heads, self.num_key_value_heads)
        self.kinds()

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys; without num_key_value_heads there are as many as query heads."""
        keys = dict(raw)
        if keys.get("num_key_value_heads") is None and "num_attention_heads" in keys:
            keys["num_key_value_heads"] = keys["num_attention_heads"]
        return keys

    @abstractmethod
    def kinds(self) -> tuple[str, ...]:
        """Return the kind of each layer."""

    @abstractmethod
    def layer(self, index: int, kind: str) -> LayerSpec:
        """Return the sizes of a layer of this kind."""

    @property
    @abstractmethod
    def attention_head_dim(self) -> int:
        """The head dim D of attention."""

    def attention(self) -> SoftmaxSpec:
        """Return the sizes of the attention of a layer."""
        D = self.attention_head_dim
        shape = HeadShape(self.num_attention_heads, self.num_key_value_heads, D, D)
        return SoftmaxSpec.of(self.hidden_size, shape)

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the decoder, layer by layer."""
        return ModelSpec(
            name,
            self.vocab_size,
            self.hidden_size,
            tuple(self.layer(i, kind) for i, kind in enumerate(self.kinds())),
            norms=ParameterCounts(norms=self.hidden_size),
            tied=self.tie_word_embeddings,
        )


@dataclass(frozen=True)
class JambaConfig(PositionlessConfig):
    """The keys of Jamba: Mamba in most layers, attention without positions in every
    `attn_layer_period`-th, and a mixture of experts in every `expert_layer_period`-th.
    """

    rms_norm_eps: float = 1e-6
    num_experts: int = 16
    num_experts_per_tok: int = 2
    attn_layer_period: int = 8
    attn_layer_offset: int = 4
    expert_layer_period: int = 2
    expert_layer_offset: int = 1
    mamba_d_state: int = 16
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_dt_rank: int = field(kw_only=True)
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False

    model_types = ("jamba",)
    family_file = "mamba"
    ignored = frozenset(
        {"calc_logits_for_entire_prompt", "num_logits_to_keep", "use_associative_scan"}
        | {"use_mamba_kernels", "use_mambapy"}
    )
    fixed = {
        **SILU,
        "mamba_inner_layernorms": (True,),
        "sliding_window": (None,),
    }
    zero = ("attn_layer_offset", "expert_layer_offset")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_size % self.num_attention_heads:
            raise ArgumentError(
                f"hidden_size {self.hidden_size} is not divisible by num_attention_heads "
                f"{self.num_attention_heads}"
            )
        check_experts("num_experts", self.num_experts, min(self.num_experts_per_tok, 1))
        if self.num_experts > 1:
            check_experts("num_experts", self.num_experts, self.num_experts_per_tok)

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys; a missing mamba_dt_rank is a sixteenth of hidden_size."""
        keys = super().normalize_keys(raw)
        size, heads = keys.get("hidden_size"), keys.get("num_attention_heads")
        if keys.get("mamba_dt_rank") in (None, "auto") and isinstance(size, int):
            keys["mamba_dt_rank"] = -(-size // 16)
        head_dim = keys.pop("head_dim", None)
        if not isinstance(size, int) or not isinstance(heads, int):
            return keys
        if isinstance(head_dim, int) and head_dim * heads != size:
            raise ArgumentError(
                f"head_dim is {head_dim}; it must be hidden_size / num_attention_heads = {size} / "
                f"{heads} for jamba"
            )
        return keys

    @property
    def attention_head_dim(self) -> int:
        """The head dim D of attention."""
        return self.hidden_size // self.num_attention_heads

    @property
    def inner_size(self) -> int:
        """The number of channels of a layer of Mamba."""
        return self.mamba_expand * self.hidden_size

    def kinds(self) -> tuple[str, ...]:
        """Return attention for the layers with the remainder `attn_layer_offset`."""
        period, offset = self.attn_layer_period, self.attn_layer_offset
        return tuple(
            FULL if i % period == offset else LINEAR for i in range(self.num_hidden_layers)
        )

    def is_sparse(self, layer: int) -> bool:
        """Return whether a layer has a mixture of experts."""
        chosen = layer % self.expert_layer_period == self.expert_layer_offset
        return chosen and self.num_experts > 1

    def layer(self, index: int, kind: str) -> LayerSpec:
        """Return the sizes of a layer."""
        norms = ParameterCounts(norms=2 * self.hidden_size)
        mixer: Spec = self.attention() if kind == FULL else self.recurrent()
        dense = DenseSpec(self.hidden_size, self.intermediate_size)
        if not self.is_sparse(index):
            return LayerSpec(mixer, dense, norms)
        return LayerSpec(mixer, MoESpec(dense, self.num_experts, self.num_experts_per_tok), norms)

    def recurrent(self) -> Spec:
        """Return the sizes of a layer of Mamba."""
        return mamba(
            self.hidden_size,
            self.inner_size,
            self.mamba_d_state,
            self.mamba_d_conv,
            self.mamba_dt_rank,
            bias=self.mamba_proj_bias,
            conv_bias=self.mamba_conv_bias,
            norms=True,
        )
