"""The config of Kimi Linear: Kimi Delta Attention in three of four layers, latent attention without
positions in the fourth, and mixtures of experts.

Source of the keys: Hugging Face checkpoints, and transformers' configuration class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from regard.configs.base import FULL, ModelConfig, Raw, check_sizes, rename_keys
from regard.configs.hybrid import LINEAR, named_kinds
from regard.configs.llama import check_experts
from regard.cost.latent import LatentSpec
from regard.cost.model import DenseSpec, FeedForwardSpec, LayerSpec, ModelSpec, MoESpec
from regard.cost.spec import ParameterCounts, Spec
from regard.cost.state_space import kimi_delta_attention
from regard.errors import ArgumentError

NAMES = {
    "max_position_embeddings": "model_max_length",
    "n_group": "num_expert_group",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token",
    "num_local_experts": "num_experts",
}
"""Name of an attribute in transformers -> its name in the files."""
STATE_SIZES = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""Key of `linear_attn_config` -> its name at the top level of newer files."""


@dataclass(frozen=True)
class KimiLinearConfig(ModelConfig):
    """The keys of Kimi Linear.

    Raises:
        ArgumentError: a size is out of range, num_key_value_heads differs from num_attention_heads,
            the kinds of layers are not one per layer, or a token uses more experts than there are.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    num_experts: int
    num_experts_per_token: int
    layer_types: tuple[str, ...]
    q_lora_rank: int | None = None
    num_shared_experts: int = 1
    first_k_dense_replace: int = 1
    num_expert_group: int = 1
    topk_group: int = 1
    moe_renormalize: bool = True
    routed_scaling_factor: float = 2.446
    linear_head_dim: int = 128
    linear_num_heads: int = 32
    linear_conv_kernel_dim: int = 4
    rms_norm_eps: float = 1e-5
    model_max_length: int = 1048576
    attention_bias: bool = False
    tie_word_embeddings: bool = False

    model_types: ClassVar[tuple[str, ...]] = ("kimi_linear",)
    code: ClassVar[str | None] = "Kimi"
    # no layer has rotary positions; the layers that predict a second token are not loaded
    ignored: ClassVar[frozenset[str]] = frozenset(
        {"num_nextn_predict_layers", "rope_parameters", "rope_scaling", "rope_theta"}
    )
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "hidden_act": ("silu",),
        "moe_layer_freq": (1,),
        "moe_router_activation_func": ("sigmoid",),
        "mla_use_nope": (True,),
        "use_grouped_topk": (True,),
    }

    def __post_init__(self) -> None:
        check_sizes(self, zero=("first_k_dense_replace",))
        if self.num_key_value_heads != self.num_attention_heads:
            raise ArgumentError(
                f"num_key_value_heads is {self.num_key_value_heads}, and num_attention_heads "
                f"{self.num_attention_heads}; in latent attention every head has its own keys: "
                "make them equal"
            )
        check_experts("num_experts", self.num_experts, self.num_experts_per_token)
        self.kinds()

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys with one name each, and with a kind for each layer.

        The makers' files have `linear_attn_config`, in which layers are numbered from 1, and
        `first_k_dense_replace`; transformers writes `layer_types` and `mlp_layer_types`. The sizes
        of a head that follow from other keys are left out.
        """
        left_out = ("head_dim", "qk_head_dim", "linear_attn_config", "mlp_layer_types")
        keys = rename_keys({k: v for k, v in raw.items() if k not in left_out}, NAMES)
        if keys.get("num_key_value_heads") is None:
            keys["num_key_value_heads"] = keys.get("num_attention_heads")
        linear, n = raw.get("linear_attn_config"), keys.get("num_hidden_layers")
        if isinstance(linear, Mapping):
            sizes = {k: v for k, v in linear.items() if k in STATE_SIZES}
            keys = rename_keys(keys | sizes, STATE_SIZES)
            full = linear.get("full_attn_layers")
            if isinstance(full, list) and isinstance(n, int) and keys.get("layer_types") is None:
                kinds = [FULL if layer + 1 in full else LINEAR for layer in range(n)]
                _check_listed(linear.get("kda_layers"), kinds)
                keys["layer_types"] = kinds
        networks = raw.get("mlp_layer_types")
        if isinstance(networks, list):
            first = networks.count("dense")
            if networks != ["dense"] * first + ["sparse"] * (len(networks) - first):
                raise ArgumentError(
                    f"mlp_layer_types is {networks}; supported are 'dense' for the first layers, "
                    "then 'sparse'"
                )
            keys["first_k_dense_replace"] = first
        return keys

    def kinds(self) -> tuple[str, ...]:
        """Return the kind of each layer."""
        return named_kinds(self.layer_types, self.num_hidden_layers)

    def mixer(self, kind: str) -> Spec:
        """Return the sizes of the mechanism of a layer of this kind."""
        if kind == LINEAR:
            return kimi_delta_attention(
                self.hidden_size,
                self.linear_num_heads,
                self.linear_head_dim,
                self.linear_conv_kernel_dim,
            )
        return LatentSpec.of(
            self.hidden_size,
            self.num_attention_heads,
            self.kv_lora_rank,
            self.qk_nope_head_dim,
            self.qk_rope_head_dim,
            self.v_head_dim,
            self.q_lora_rank,
            bias=self.attention_bias,
        )

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the decoder: the first layers are dense, the others have experts."""
        M, width = self.hidden_size, self.moe_intermediate_size
        dense: FeedForwardSpec = DenseSpec(M, self.intermediate_size)
        experts: FeedForwardSpec = MoESpec(
            DenseSpec(M, width),
            self.num_experts,
            self.num_experts_per_token,
            DenseSpec(M, width * self.num_shared_experts),
            self.num_experts,
        )
        first, norms = self.first_k_dense_replace, ParameterCounts(norms=2 * M)
        layers = (
            LayerSpec(self.mixer(kind), dense if i < first else experts, norms)
            for i, kind in enumerate(self.kinds())
        )
        return ModelSpec(
            name,
            self.vocab_size,
            M,
            tuple(layers),
            norms=ParameterCounts(norms=M),
            tied=self.tie_word_embeddings,
        )


def _check_listed(linear: object, kinds: list[str]) -> None:
    """Check that `kda_layers`, if given, lists all layers that `full_attn_layers` does not."""
    if isinstance(linear, list):
        for i, kind in enumerate(kinds):
            if (i + 1 in linear) != (kind == LINEAR):
                raise ArgumentError(
                    f"layer {i + 1} of linear_attn_config is in both lists, full_attn_layers and "
                    "kda_layers, or in neither"
                )
