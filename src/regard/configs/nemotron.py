"""The configs of Nemotron 3 and 4, and of Nemotron-H."""

from __future__ import annotations

from dataclasses import dataclass, field

from regard.configs.base import FULL, Raw, check_length
from regard.configs.hybrid import (
    LINEAR,
    NO_LIMITS,
    STEP_KEYS,
    Mamba2Sizes,
    StepLimits,
    step_limits,
    with_step_limits,
)
from regard.configs.mamba import PositionlessConfig
from regard.configs.rotary_decoder import DecoderRecipe, RotaryDecoderConfig, check_experts
from regard.cost.model import DenseSpec, FeedForwardSpec, LayerSpec, MoESpec
from regard.cost.spec import ParameterCounts
from regard.errors import ArgumentError


@dataclass(frozen=True)
class NemotronConfig(RotaryDecoderConfig):
    """Nemotron 3, 4 and Minitron: LayerNorms with weight 1 + w, a squared ReLU, and rotary
    positions on a part of each head. Source: Parmar et al. 2024 (arXiv 2402.16819).
    """

    norm_eps: float = 1e-5
    max_position_embeddings: int = 4096
    partial_rotary_factor: float = 0.5
    attention_bias: bool = False
    mlp_bias: bool = False

    model_types = ("nemotron",)
    recipe = DecoderRecipe(
        norm="layer 1 + w",
        eps="norm_eps",
        gated=False,
        activation="relu2",
    )
    fixed = {"hidden_act": ("relu2",)}


MAMBA, MLP, MOE = "mamba", "mlp", "moe"
BLOCKS = {"M": MAMBA, "*": FULL, "-": MLP, "E": MOE}
"""Letter of `hybrid_override_pattern` -> the kind of a layer."""
BLOCK_NAMES = {MAMBA: MAMBA, LINEAR: MAMBA, "attention": FULL, FULL: FULL, MLP: MLP, MOE: MOE}
"""Name in `layers_block_type` -> the kind of a layer."""


@dataclass(frozen=True)
class NemotronHConfig(PositionlessConfig):
    """The keys of Nemotron-H: layers of Mamba-2, of attention without positions, and of
    feed-forward networks, dense or with experts, which are listed one by one.
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

    model_types = ("nemotron_h",)
    family_file = "mamba"
    code = "NemotronH"
    # the released code reads layer_norm_epsilon alone, and widens by the number of heads
    ignored = STEP_KEYS | {
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
    fixed = {
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
        check_length("layers_block_type", names, self.num_hidden_layers)
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
