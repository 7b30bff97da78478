"""The configs of models that mix attention with Mamba-2 or Mamba: Bamba, Granite 4.0 H, Falcon-H1,
Nemotron-H and Jamba.

Source of the keys: Hugging Face checkpoints, and transformers' configuration classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from regard.argument_checks import check_groups
from regard.configs.base import FULL, ModelConfig, Raw, check_sizes
from regard.configs.hybrid import LINEAR, HybridConfig, Names, named_kinds
from regard.configs.llama import GroupedQueryConfig, check_experts
from regard.configs.rope import RopeSettings
from regard.configs.state_space import (
    NO_LIMITS,
    STEP_KEYS,
    Mamba2Sizes,
    StepLimits,
    check_width,
    step_limits,
    with_step_limits,
)
from regard.cost.model import DenseSpec, FeedForwardSpec, LayerSpec, ModelSpec, MoESpec
from regard.cost.softmax import SoftmaxSpec
from regard.cost.spec import HeadShape, ParameterCounts, Spec
from regard.cost.state_space import mamba
from regard.errors import ArgumentError
from regard.units import plural


@dataclass(frozen=True)
class Mamba2Keys(GroupedQueryConfig):
    """The keys of the layers of Mamba-2 in Bamba, Granite 4.0 H and Falcon-H1."""

    rms_norm_eps: float = 1e-5
    mamba_n_heads: int = 128
    mamba_d_head: int = field(kw_only=True)
    mamba_n_groups: int = 1
    mamba_d_state: int = 256
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: StepLimits = NO_LIMITS

    ignored: ClassVar[frozenset[str]] = frozenset({"mamba_chunk_size", "num_logits_to_keep"})

    def __post_init__(self) -> None:
        super().__post_init__()
        step_limits(self.time_step_limit)
        self.mixer_sizes().check("mamba_n_heads", "mamba_n_groups")
        self.check_mixer_width()

    def check_mixer_width(self) -> None:
        """Raise unless the heads are together mamba_expand times as wide as the model."""
        names = "mamba_expand, mamba_n_heads and mamba_d_head"
        check_width(self.mamba_expand, self.hidden_size, self.mixer_sizes(), names)

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys as for Llama; a mamba_d_head of "auto" follows from the width."""
        keys = super().normalize_keys(with_step_limits(raw))
        heads = keys.get("mamba_n_heads", cls.mamba_n_heads)
        width = cls.mixer_width(keys)
        if keys.get("mamba_d_head") in (None, "auto"):
            keys.pop("mamba_d_head", None)
            if isinstance(heads, int) and isinstance(width, int) and heads > 0:
                keys["mamba_d_head"] = width // heads
        return keys

    @classmethod
    def mixer_width(cls, keys: Raw) -> object:
        """Return the width of a layer of Mamba-2, from the keys of config.json."""
        expand, dim = keys.get("mamba_expand", cls.mamba_expand), keys.get("hidden_size")
        return expand * dim if isinstance(expand, int) and isinstance(dim, int) else None

    def mixer_sizes(self) -> Mamba2Sizes:
        """Return the sizes of a layer of Mamba-2."""
        return Mamba2Sizes(
            self.hidden_size,
            self.mamba_n_heads,
            self.mamba_d_head,
            self.mamba_n_groups,
            self.mamba_d_state,
            self.mamba_d_conv,
            bias=self.mamba_proj_bias,
            output_bias=self.mamba_proj_bias,
            conv_bias=self.mamba_conv_bias,
        )


@dataclass(frozen=True)
class BambaConfig(Mamba2Keys, HybridConfig):
    """The keys of Bamba: Mamba-2 in most layers, attention in those of `attn_layer_indices`, and a
    dense feed-forward layer in each.

    Raises:
        ArgumentError: as for Llama and for Mamba-2; or an index is not that of a layer.
    """

    attn_layer_indices: tuple[int, ...] | None = None
    partial_rotary_factor: float = 0.5
    max_position_embeddings: int = 262144
    attention_bias: bool = False
    mlp_bias: bool = False

    model_types: ClassVar[tuple[str, ...]] = ("bamba",)
    ignored: ClassVar[frozenset[str]] = Mamba2Keys.ignored | {"z_loss_coefficient"}

    @property
    def biases(self) -> tuple[bool, bool]:
        """Whether queries, keys and values have biases, and whether the output map has one."""
        return self.attention_bias, self.attention_bias

    @property
    def rope(self) -> RopeSettings:
        """The rotary settings: only a part of each head is rotated."""
        return super().rope._replace(partial=self.partial_rotary_factor)

    def kinds(self) -> tuple[str, ...]:
        """Return attention for the layers of `attn_layer_indices`."""
        layers, indices = self.num_hidden_layers, self.attn_layer_indices or ()
        for i in indices:
            if not 0 <= i < layers:
                raise ArgumentError(
                    f"attn_layer_indices has {i}; the {plural(layers, 'layer')} have the indices 0 "
                    f"to {layers - 1}"
                )
        return tuple(FULL if i in indices else LINEAR for i in range(layers))

    def recurrent(self) -> Spec:
        """Return the sizes of a layer of Mamba-2."""
        return self.mixer_sizes().spec()

    def feed_forward(self) -> FeedForwardSpec:
        """Return the sizes of a dense layer."""
        return DenseSpec(self.hidden_size, self.intermediate_size, bias=self.mlp_bias)


@dataclass(frozen=True)
class GraniteHybridConfig(Mamba2Keys, HybridConfig):
    """The keys of Granite 4.0 H: Mamba-2 in most layers, attention in the others, and dense or
    sparse feed-forward layers, with the factors of Granite 3.

    Raises:
        ArgumentError: as for Llama and for Mamba-2; a token uses more experts than there are,
            position_embedding_type is unknown, or logits_scaling is 0.
    """

    rms_norm_eps: float = 1e-6
    shared_intermediate_size: int = 1024
    layer_types: Names = None
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    attention_bias: bool = False
    position_embedding_type: str | None = None
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0

    model_types: ClassVar[tuple[str, ...]] = ("granitemoehybrid",)
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "hidden_act": ("silu",),
        "normalization_function": ("rmsnorm",),
    }
    zero: ClassVar[tuple[str, ...]] = ("num_local_experts", "num_experts_per_tok")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_local_experts:
            check_experts("num_local_experts", self.num_local_experts, self.num_experts_per_tok)
        if self.position_embedding_type not in (None, "nope", "rope"):
            raise ArgumentError(
                f"position_embedding_type is {self.position_embedding_type!r}; it must be 'rope', "
                "'nope' or null"
            )
        if self.logits_scaling == 0:
            raise ArgumentError("logits_scaling is 0; the logits are divided by it")

    @property
    def biases(self) -> tuple[bool, bool]:
        """Whether queries, keys and values have biases, and whether the output map has one."""
        return self.attention_bias, self.attention_bias

    def ropes(self) -> tuple[RopeSettings | None, ...]:
        """Return the rotary settings of each layer; None unless positions are "rope"."""
        rope = self.rope if self.position_embedding_type == "rope" else None
        return (rope,) * self.num_hidden_layers

    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of `layer_types`; without that key all layers are Mamba-2."""
        if self.layer_types is None:
            return (LINEAR,) * self.num_hidden_layers
        return named_kinds(self.layer_types, self.num_hidden_layers)

    def recurrent(self) -> Spec:
        """Return the sizes of a layer of Mamba-2."""
        return self.mixer_sizes().spec()

    def feed_forward(self) -> FeedForwardSpec:
        """Return the sizes of a mixture of experts with a shared one, or of the latter alone."""
        shared = DenseSpec(self.hidden_size, self.shared_intermediate_size)
        if not self.num_local_experts:
            return shared
        expert = DenseSpec(self.hidden_size, self.intermediate_size)
        return MoESpec(expert, self.num_local_experts, self.num_experts_per_tok, shared)


@dataclass(frozen=True)
class FalconH1Config(Mamba2Keys):
    """The keys of Falcon-H1: attention and Mamba-2 beside each other in every layer, with a factor
    on the result of most linear maps.

    Raises:
        ArgumentError: as for Llama and for Mamba-2; or a list of factors has another length.
    """

    max_position_embeddings: int = 8192
    mamba_d_ssm: int | None = 1024
    mamba_norm_before_gate: bool = True
    mamba_rms_norm: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    projectors_bias: bool = False
    embedding_multiplier: float = 1.0
    lm_head_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    key_multiplier: float = 1.0
    ssm_in_multiplier: float = 1.0
    ssm_out_multiplier: float = 1.0
    ssm_multipliers: tuple[float, ...] = (1.0,) * 5
    mlp_multipliers: tuple[float, ...] = (1.0,) * 2

    model_types: ClassVar[tuple[str, ...]] = ("falcon_h1",)
    ignored: ClassVar[frozenset[str]] = Mamba2Keys.ignored | {"mlp_expansion_factor"}
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "hidden_act": ("silu",),
        "attn_layer_indices": (None,),
        "mamba_use_mlp": (True,),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, count in (("ssm_multipliers", 5), ("mlp_multipliers", 2)):
            if len(getattr(self, name)) != count:
                raise ArgumentError(
                    f"{name} has {plural(len(getattr(self, name)), 'number')}; it must have {count}"
                )

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys as for Llama and Mamba-2; a list of factors that is null is all 1."""
        lists = ("ssm_multipliers", "mlp_multipliers")
        return super().normalize_keys(
            {k: v for k, v in raw.items() if k not in lists or v is not None}
        )

    @classmethod
    def mixer_width(cls, keys: Raw) -> object:
        """Return mamba_d_ssm, or the width by mamba_expand if that is null."""
        width = keys.get("mamba_d_ssm", cls.mamba_d_ssm)
        return super().mixer_width(keys) if width is None else width

    def check_mixer_width(self) -> None:
        """Raise unless the heads are together as wide as mamba_d_ssm says."""
        if self.mamba_d_ssm is None:
            super().check_mixer_width()
        elif self.mamba_n_heads * self.mamba_d_head != self.mamba_d_ssm:
            raise ArgumentError(
                f"mamba_d_ssm is {self.mamba_d_ssm}, and {plural(self.mamba_n_heads, 'head')} of "
                f"{self.mamba_d_head} are {self.mamba_n_heads * self.mamba_d_head} channels; they "
                "must be equal"
            )

    def mixer_sizes(self) -> Mamba2Sizes:
        """Return the sizes of the Mamba-2 of a layer."""
        return replace(
            super().mixer_sizes(), output_bias=self.projectors_bias, normed=self.mamba_rms_norm
        )

    @property
    def biases(self) -> tuple[bool, bool]:
        """Whether queries, keys and values have biases, and whether the output map has one."""
        return self.attention_bias, self.attention_bias

    def feed_forward(self) -> FeedForwardSpec:
        """Return the sizes of a feed-forward layer."""
        return DenseSpec(self.hidden_size, self.intermediate_size, bias=self.mlp_bias)

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the decoder, with both mechanisms in every layer."""
        model, state = super().sizes(name), self.mixer_sizes().spec()
        return replace(model, layers=tuple(replace(x, parallel=state) for x in model.layers))


@dataclass(frozen=True)
class PositionlessConfig(ModelConfig, ABC):
    """The keys of decoders with grouped queries and without positions, where state-space layers see
    the order of the tokens.

    Raises:
        ArgumentError: a size is less than 1, or num_key_value_heads does not divide
            num_attention_heads.
    """

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


MAMBA, MLP, MOE = "mamba", "mlp", "moe"
BLOCKS = {"M": MAMBA, "*": FULL, "-": MLP, "E": MOE}
"""Letter of `hybrid_override_pattern` -> the kind of a layer."""
BLOCK_NAMES = {MAMBA: MAMBA, LINEAR: MAMBA, "attention": FULL, FULL: FULL, MLP: MLP, MOE: MOE}
"""Name in `layers_block_type` -> the kind of a layer."""


@dataclass(frozen=True)
class NemotronHConfig(PositionlessConfig):
    """The keys of Nemotron-H: layers of Mamba-2, of attention without positions, and of
    feed-forward networks, dense or with experts, which are listed one by one.

    Raises:
        ArgumentError: as for Llama and for Mamba-2; a kind of layer is unknown, their number is not
            num_hidden_layers, or a token uses more experts than there are.
    """

    layers_block_type: tuple[str, ...] = field(kw_only=True)
    head_dim: int = 128
    layer_norm_epsilon: float = 1e-5
    mamba_num_heads: int = 128
    mamba_head_dim: int = 64
    n_groups: int = 8
    ssm_state_size: int = 128
    conv_kernel: int = 4
    use_bias: bool = False
    use_conv_bias: bool = True
    mlp_bias: bool = False
    time_step_limit: StepLimits = NO_LIMITS
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 7688
    moe_shared_expert_intermediate_size: int = 7688
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0

    model_types: ClassVar[tuple[str, ...]] = ("nemotron_h",)
    code: ClassVar[str | None] = "NemotronH"
    # the released code reads layer_norm_epsilon alone, and widens by the number of heads
    ignored: ClassVar[frozenset[str]] = STEP_KEYS | {
        "chunk_size",
        "expand",
        "head_dim_attention",
        "mamba_ssm_cache_dtype",
        "moe_shared_expert_overlap",
        "mtp_layers_block_type",
        "num_logits_to_keep",
        "rescale_prenorm_residual",
        "rms_norm_eps",
        "use_mamba_kernels",
    }
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "mlp_hidden_act": ("relu2",),
        "mamba_hidden_act": ("silu",),
        "attention_bias": (False,),
        "mamba_proj_bias": (False,),
        "moe_latent_size": (None,),
        "n_shared_experts": (1,),
        "num_nextn_predict_layers": (0,),
        "residual_in_fp32": (False,),
        "sliding_window": (None,),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        step_limits(self.time_step_limit)
        self.mixer_sizes().check("mamba_num_heads", "n_groups")
        if MOE in self.kinds():
            check_experts("n_routed_experts", self.n_routed_experts, self.num_experts_per_tok)

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys with the list of layers, which older files give as one string."""
        pattern = raw.get("hybrid_override_pattern")
        keys = super().normalize_keys(
            {k: v for k, v in with_step_limits(raw).items() if "pattern" not in k}
        )
        if isinstance(pattern, str) and keys.get("layers_block_type") is None:
            unknown = [letter for letter in pattern if letter not in BLOCKS]
            if unknown:
                raise ArgumentError(
                    f"hybrid_override_pattern has {unknown[0]!r}; supported are {', '.join(BLOCKS)}"
                )
            keys["layers_block_type"] = [BLOCKS[letter] for letter in pattern]
        blocks = keys.get("layers_block_type")
        if keys.get("num_hidden_layers") is None and isinstance(blocks, list):
            keys["num_hidden_layers"] = len(blocks)
        return keys

    def kinds(self) -> tuple[str, ...]:
        """Return the kind of each layer: `MAMBA`, `FULL`, `MLP` or `MOE`."""
        names = self.layers_block_type
        if len(names) != self.num_hidden_layers:
            raise ArgumentError(
                f"layers_block_type has {plural(len(names), 'entry')} and num_hidden_layers is "
                f"{self.num_hidden_layers}; give one per layer"
            )
        for i, name in enumerate(names):
            if name not in BLOCK_NAMES:
                raise ArgumentError(
                    f"layers_block_type[{i}] is {name!r}; supported are {', '.join(BLOCK_NAMES)}"
                )
        return tuple(BLOCK_NAMES[name] for name in names)

    def mixer_sizes(self) -> Mamba2Sizes:
        """Return the sizes of a layer of Mamba-2."""
        return Mamba2Sizes(
            self.hidden_size,
            self.mamba_num_heads,
            self.mamba_head_dim,
            self.n_groups,
            self.ssm_state_size,
            self.conv_kernel,
            bias=self.use_bias,
            output_bias=self.use_bias,
            conv_bias=self.use_conv_bias,
        )

    @property
    def attention_head_dim(self) -> int:
        """The head dim D of attention."""
        return self.head_dim

    def layer(self, index: int, kind: str) -> LayerSpec:
        """Return the sizes of a layer of this kind, which has one sublayer."""
        norms = ParameterCounts(norms=self.hidden_size)
        if kind == MAMBA:
            return LayerSpec(self.mixer_sizes().spec(), None, norms)
        if kind == FULL:
            return LayerSpec(self.attention(), None, norms)
        return LayerSpec(None, self.network(kind), norms)

    def network(self, kind: str) -> FeedForwardSpec:
        """Return the sizes of a feed-forward layer of this kind."""
        M, bias = self.hidden_size, self.mlp_bias
        if kind == MLP:
            return DenseSpec(M, self.intermediate_size, gated=False, bias=bias)
        shared = self.moe_shared_expert_intermediate_size
        return MoESpec(
            DenseSpec(M, self.moe_intermediate_size, gated=False),
            self.n_routed_experts,
            self.num_experts_per_tok,
            DenseSpec(M, shared, gated=False, bias=bias),
            self.n_routed_experts,
        )


@dataclass(frozen=True)
class JambaConfig(PositionlessConfig):
    """The keys of Jamba: Mamba in most layers, attention without positions in every
    `attn_layer_period`-th, and a mixture of experts in every `expert_layer_period`-th.

    Raises:
        ArgumentError: a size is out of range, head_dim is not hidden_size / num_attention_heads, or
            a token uses more experts than there are.
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

    model_types: ClassVar[tuple[str, ...]] = ("jamba",)
    ignored: ClassVar[frozenset[str]] = frozenset(
        {"calc_logits_for_entire_prompt", "num_logits_to_keep", "use_associative_scan"}
        | {"use_mamba_kernels", "use_mambapy"}
    )
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "hidden_act": ("silu",),
        "mamba_inner_layernorms": (True,),
        "sliding_window": (None,),
    }
    zero: ClassVar[tuple[str, ...]] = ("attn_layer_offset", "expert_layer_offset")

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
