"""The configs of DeepSeek-V2, V3 and V3.2, and of Kimi Linear: multi-head latent attention; the
first layers are dense, and the others are mixtures of experts.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from regard.configs.base import ModelConfig, Raw, check_sizes
from regard.configs.llama import check_experts
from regard.configs.rope import RopeSettings, normalize_rope, shorten
from regard.cost.latent import IndexedLatentSpec, LatentSpec
from regard.cost.model import DenseSpec, FeedForwardSpec, LayerSpec, ModelSpec, MoESpec
from regard.cost.selected import IndexSelection
from regard.cost.spec import ParameterCounts, Spec
from regard.errors import ArgumentError
from regard.units import plural


@dataclass(frozen=True)
class DeepseekConfig(ModelConfig, ABC):
    """The keys that DeepSeek-V2 and DeepSeek-V3 have in common.

    Raises:
        ArgumentError: a size is out of range, rope_scaling is not supported or depends on the
            length of the text, num_key_value_heads differs from num_attention_heads, or a token
            uses more experts than there are.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    kv_lora_rank: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    first_k_dense_replace: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, object] | None = None
    max_position_embeddings: int = 2048
    attention_bias: bool = False
    tie_word_embeddings: bool = False

    # keys of training and of other code
    ignored: ClassVar[frozenset[str]] = frozenset({"aux_loss_alpha", "ep_size", "seq_aux"})
    code: ClassVar[str | None] = "Deepseek"
    layout: ClassVar[Literal["half", "interleaved"]] = "interleaved"

    def __post_init__(self) -> None:
        check_sizes(self, zero=("first_k_dense_replace",))
        if self.num_key_value_heads != self.num_attention_heads:
            raise ArgumentError(
                f"num_key_value_heads is {self.num_key_value_heads}, and num_attention_heads "
                f"{self.num_attention_heads}; in latent attention every head has its own keys: "
                "make them equal"
            )
        if self.rope.is_length_dependent:
            raise ArgumentError(
                f"rope_scaling is {dict(self.rope_scaling or {})}, whose frequencies depend on the "
                "length of the text, but a latent cache stores rotated keys: supported are yarn, "
                "linear and none"
            )
        check_experts("n_routed_experts", self.n_routed_experts, self.num_experts_per_tok)

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys with num_key_value_heads, and without head_dim and qk_head_dim.

        Newer files contain these two, which follow from the dims of the two parts of a head.
        """
        keys = normalize_rope(raw)
        if keys.get("num_key_value_heads") is None:
            keys["num_key_value_heads"] = keys.get("num_attention_heads")
        nope_dim, rope_dim = keys.get("qk_nope_head_dim"), keys.get("qk_rope_head_dim")
        if isinstance(nope_dim, int) and isinstance(rope_dim, int):
            for key, allowed in (("head_dim", rope_dim), ("qk_head_dim", nope_dim + rope_dim)):
                value = keys.pop(key, None)
                if value not in (None, allowed):
                    raise ArgumentError(
                        f"{key} is {value}, but qk_nope_head_dim is {nope_dim} and "
                        f"qk_rope_head_dim is {rope_dim}: it must be {allowed}"
                    )
        return keys

    @property
    def rope(self) -> RopeSettings:
        """The settings of the rotary positions of every layer."""
        return RopeSettings(
            self.qk_rope_head_dim,
            self.rope_theta,
            self.rope_scaling,
            self.max_position_embeddings,
            layout=self.layout,
        )

    router_biases: ClassVar[bool] = False

    def mixer(self, layer: int) -> Spec:
        """Return the sizes of the attention of a layer, which is the same for every layer."""
        return self.latent()

    def latent(self) -> LatentSpec:
        """Return the sizes of latent attention."""
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
            self.n_routed_experts,
            self.num_experts_per_tok,
            DenseSpec(M, width * self.n_shared_experts),
            self.n_routed_experts if self.router_biases else 0,
        )
        first, norms = self.first_k_dense_replace, ParameterCounts(norms=2 * M)
        layers = (
            LayerSpec(self.mixer(layer), dense if layer < first else experts, norms)
            for layer in range(self.num_hidden_layers)
        )
        return ModelSpec(
            name,
            self.vocab_size,
            M,
            tuple(layers),
            norms=ParameterCounts(norms=M),
            tied=self.tie_word_embeddings,
        )


FIXED = {"hidden_act": ("silu",), "moe_layer_freq": (1,)}
"""Key -> the only values that both families support."""


@dataclass(frozen=True)
class DeepseekV2Config(DeepseekConfig):
    """The keys of a DeepSeek-V2 config.json that change the network."""

    topk_method: str = "greedy"
    n_group: int | None = None
    topk_group: int | None = None
    routed_scaling_factor: float = 1.0

    model_types: ClassVar[tuple[str, ...]] = ("deepseek_v2",)
    # the authors' code scales expert weights only where it does not renormalise them, and
    # transformers never renormalises them
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = FIXED | {
        "mlp_bias": (False,),
        "norm_topk_prob": (False,),
        "scoring_func": ("softmax",),
    }


@dataclass(frozen=True)
class DeepseekV3Config(DeepseekConfig):
    """The keys of a DeepSeek-V3 config.json, also for R1, that change the network."""

    n_group: int = 8
    topk_group: int = 4
    routed_scaling_factor: float = 2.5
    norm_topk_prob: bool = True
    rope_interleave: bool = True

    model_types: ClassVar[tuple[str, ...]] = ("deepseek_v3",)
    # the number of additional layers that predict a second token, which are not loaded
    ignored: ClassVar[frozenset[str]] = DeepseekConfig.ignored | {"num_nextn_predict_layers"}
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = FIXED | {
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    }
    # the correction that balances the load of experts has one number per expert
    router_biases: ClassVar[bool] = True

    @property
    def rope(self) -> RopeSettings:
        """The settings of the rotary positions; adjacent dims form a pair, unless rope_interleave
        is false.
        """
        return super().rope._replace(layout="interleaved" if self.rope_interleave else "half")


INDEXED = "indexed_attention"
"""The name of DeepSeek sparse attention in `layer_types`."""


@dataclass(frozen=True)
class DeepseekV32Config(DeepseekV3Config):
    """The keys of DeepSeek-V3.2 and GLM-5: DeepSeek-V3 with an indexer that selects keys (DSA).

    Raises:
        ArgumentError: as in `DeepseekConfig`; or q_lora_rank is null, from which the indexer
            computes its queries.
    """

    index_topk: int = 2048
    index_head_dim: int = 128
    index_n_heads: int = 64

    model_types: ClassVar[tuple[str, ...]] = ("deepseek_v32", "glm_moe_dsa")
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **DeepseekV3Config.fixed,
        "mlp_bias": (False,),
        "index_topk_freq": (1,),  # a layer that uses the selection of another has no indexer
        "index_topk_pattern": (None,),
    }

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys as for DeepSeek-V3, with the kinds of layers as first_k_dense_replace."""
        keys = super().normalize_keys(raw)
        layers, mixers = keys.get("num_hidden_layers"), keys.pop("layer_types", None)
        kinds, first = keys.pop("mlp_layer_types", None), keys.get("first_k_dense_replace")
        if isinstance(mixers, list) and mixers != [INDEXED] * len(mixers):
            raise ArgumentError(f"layer_types is {shorten(mixers)}; only {INDEXED!r} is supported")
        if not isinstance(kinds, list) or not isinstance(layers, int):
            return {"first_k_dense_replace": 3, **keys}
        dense = kinds.count("dense")
        if kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
            raise ArgumentError(
                f"mlp_layer_types is {shorten(kinds)}; it must be one name for each of "
                f"{plural(layers, 'layer')}: 'dense' for the first ones, then 'sparse'"
            )
        if isinstance(first, int) and min(first, layers) != dense:
            raise ArgumentError(
                f"mlp_layer_types begins with {dense} dense, and first_k_dense_replace is {first}; "
                "remove the wrong one"
            )
        return {**keys, "first_k_dense_replace": dense}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.q_lora_rank is None:
            raise ArgumentError(
                "q_lora_rank is null, but the indexer computes its queries from that latent; give "
                "its size"
            )

    def mixer(self, layer: int) -> Spec:
        """Return the sizes of latent attention to selected keys."""
        selection = IndexSelection(self.index_n_heads, self.index_head_dim, self.index_topk)
        rank = self.q_lora_rank or 0
        return IndexedLatentSpec.from_latent(self.latent(), self.hidden_size, rank, selection)
