"""The configs of DeepSeek-V2, V3 and V3.2, GLM-5, and Kimi Linear: multi-head latent attention; the
first layers are dense, and the others are mixtures of experts.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from regard.configs.base import FULL, ModelConfig, Raw, check_sizes, rename_keys
from regard.configs.hybrid import LINEAR, check_layer_names, named_kinds
from regard.configs.mistral import PICTURES
from regard.configs.rope import (
    RopeSettings,
    normalize_rope,
    shorten,
    temperature,
    without_own_keys,
)
from regard.configs.rotary_decoder import (
    SILU,
    check_experts,
    dense_layers_first,
    language_model,
)
from regard.cost.delta_rules import kimi_delta
from regard.cost.latent import IndexedLatentSpec, LatentSpec
from regard.cost.model import DenseSpec, FeedForwardSpec, LayerSpec, ModelSpec, MoESpec
from regard.cost.selected import IndexSelection
from regard.cost.spec import HeadShape, ParameterCounts, Spec
from regard.errors import ArgumentError


@dataclass(frozen=True)
class DeepseekConfig(ModelConfig, ABC):
    """The keys that DeepSeek-V2 and DeepSeek-V3 have in common."""

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
    ignored = frozenset({"aux_loss_alpha", "ep_size", "seq_aux"})
    code = "Deepseek"
    layout: ClassVar[Literal["half", "interleaved"]] = "interleaved"
    rope_keys: ClassVar[tuple[str, ...]] = ()
    absent_rope: ClassVar[Mapping[str, object] | None] = None

    def __post_init__(self) -> None:
        check_sizes(self, zero=("first_k_dense_replace",))
        check_own_keys(self)
        if self.rope.is_length_dependent:
            raise ArgumentError(
                f"rope_scaling is {dict(self.rope_scaling or {})}, whose frequencies depend on the "
                "length of the text, but a latent cache stores rotated keys: supported are yarn, "
                "linear and none"
            )
        check_experts("n_routed_experts", self.n_routed_experts, self.num_experts_per_tok)

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys with num_key_value_heads, without head_dim and qk_head_dim."""
        keys = normalize_rope(raw, own=cls.rope_keys, absent=cls.absent_rope)
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
            without_own_keys(self.rope_scaling, self.rope_keys),
            self.max_position_embeddings,
            layout=self.layout,
        )

    family_file = "deepseek"
    router_biases: ClassVar[bool] = False

    def mixer(self, layer: int) -> Spec:
        """Return the sizes of the attention of a layer, which is the same for every layer."""
        return latent_spec(self)

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the decoder."""
        return latent_decoder(self, name)


FIXED = {**SILU, "moe_layer_freq": (1,)}
"""Key -> the only values that both families support."""


@dataclass(frozen=True)
class DeepseekV2Config(DeepseekConfig):
    """The keys of a DeepSeek-V2 config.json that change the network."""

    topk_method: str = "greedy"
    n_group: int | None = None
    topk_group: int | None = None
    routed_scaling_factor: float = 1.0

    model_types = ("deepseek_v2",)
    # the authors' code scales expert weights only where it does not renormalize them, and
    # transformers never renormalizes them
    fixed = FIXED | {
        "mlp_bias": (False,),
        "norm_topk_prob": (False,),
        "scoring_func": ("softmax",),
    }


KIMI_PICTURES = PICTURES | {
    *("ignore_index", "image_token_id", "media_placeholder_token_id", "projection_hidden_size"),
    *("projection_layer_norm_eps", "use_unified_vision_chunk", "video_placeholder"),
    *("video_token_id", "vision_end_token_id", "vision_start_token_id"),
}
"""Keys of Kimi K2.5 beside those of its language model."""


@dataclass(frozen=True)
class DeepseekV3Config(DeepseekConfig):
    """The keys of DeepSeek-V3 and R1, and of the language model of Kimi K2.5, which also sees."""

    n_group: int = 8
    topk_group: int = 4
    routed_scaling_factor: float = 2.5
    norm_topk_prob: bool = True
    rope_interleave: bool = True

    model_types: ClassVar[tuple[str, ...]] = ("deepseek_v3", "kimi_k25")
    # the number of additional layers that predict a second token, which are not loaded
    ignored = DeepseekConfig.ignored | {"num_nextn_predict_layers"}
    fixed = FIXED | {
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    }
    # the correction that balances the load of experts has one number per expert
    router_biases = True

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys of the language model; whether it is tied stands beside it in a file of
        Kimi K2.5, where transformers ties what says nothing.
        """
        if raw.get("model_type") == "kimi_k25":
            tied = raw.get("tie_word_embeddings", True)
            raw = language_model(raw, KIMI_PICTURES) | {"tie_word_embeddings": tied}
            if (kind := raw.get("model_type")) not in ("deepseek_v3", "kimi_k2", "kimi_k25_text"):
                raise ArgumentError(
                    f"text_config.model_type is {shorten(kind)}; of kimi_k25, only the language "
                    "models deepseek_v3 and kimi_k2 are supported"
                )
        return super().normalize_keys(raw)

    @property
    def rope(self) -> RopeSettings:
        """The rotary settings; adjacent dims form a pair, unless rope_interleave is false."""
        return super().rope._replace(layout="interleaved" if self.rope_interleave else "half")


@dataclass(frozen=True)
class Glm4MoeLiteConfig(DeepseekV3Config):
    """The keys of GLM-4.7-Flash, which has the network of DeepSeek-V3."""

    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 202752
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.8

    model_types = ("glm4_moe_lite",)
    fixed = DeepseekV3Config.fixed | {"partial_rotary_factor": (1.0, 1)}

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys as for DeepSeek-V3, with the kinds of layers as first_k_dense_replace."""
        return dense_layers_first(super().normalize_keys(raw), 1)


@dataclass(frozen=True)
class Mistral4Config(DeepseekV3Config):
    """The keys of Mistral Small 4: the network of DeepSeek-V3 with softmax scores of experts, and
    queries with the temperature of Ministral 3.
    """

    max_position_embeddings: int = 1048576
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0

    model_types = ("mistral4",)
    fixed = {**SILU, "moe_layer_freq": (1,)}
    rope_keys = ("llama_4_scaling_beta", "max_position_embeddings", "partial_rotary_factor")
    absent_rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 128.0,
        "original_max_position_embeddings": 8192,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
    router_biases = False

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys as for DeepSeek-V3, of the language model; head_dim is that of a key."""
        if raw.get("model_type") == "mistral3":
            raw = language_model(raw, PICTURES)
        raw = {"first_k_dense_replace": 0, **raw}
        raw["head_dim"] = raw.get("qk_rope_head_dim")
        keys: dict[str, Any] = super().normalize_keys(raw)
        rope, nope = keys.get("qk_rope_head_dim"), keys.get("qk_nope_head_dim")
        if isinstance(rope, int) and isinstance(nope, int):
            share = keys["rope_scaling"].setdefault("partial_rotary_factor", rope / (nope + rope))
            if share * (rope + nope) != rope:
                raise ArgumentError(
                    f"partial_rotary_factor is {share}; it must be qk_rope_head_dim / "
                    f"(qk_nope_head_dim + qk_rope_head_dim) = {rope} / {nope + rope}"
                )
        return keys

    @property
    def temperature(self) -> tuple[float, float] | None:
        """The factor and the length of the temperature; None without that factor."""
        return temperature(self.rope_scaling)


WITH_INDEXER, SHARED = "full", "shared"
"""Entries of `indexer_types`."""
INDEXED = "indexed_attention"
"""The name of DeepSeek sparse attention in `layer_types`."""


@dataclass(frozen=True)
class DeepseekV32Config(DeepseekV3Config):
    """The keys of DeepSeek-V3.2: DeepSeek-V3 with an indexer that selects keys (DSA)."""

    index_topk: int = 2048
    index_head_dim: int = 128
    index_n_heads: int = 64

    model_types = ("deepseek_v32",)
    indexer_layout: ClassVar[Literal["half", "interleaved"]] = "half"
    fixed = {
        **DeepseekV3Config.fixed,
        "mlp_bias": (False,),
        "index_topk_freq": (1,),  # a layer that uses the selection of another has no indexer
        "index_topk_pattern": (None,),
    }

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys as for DeepSeek-V3, with the kinds of layers as first_k_dense_replace."""
        keys = super().normalize_keys(raw)
        mixers = keys.pop("layer_types", None)
        if isinstance(mixers, list) and mixers != [INDEXED] * len(mixers):
            raise ArgumentError(f"layer_types is {shorten(mixers)}; only {INDEXED!r} is supported")
        return dense_layers_first(keys, 3)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.q_lora_rank is None:
            raise ArgumentError(
                "q_lora_rank is null, but the indexer computes its queries from that latent; give "
                "its size"
            )

    def shares_choice(self, layer: int) -> bool:
        """Return whether a layer reads the keys that an earlier one chose."""
        return False

    def mixer(self, layer: int) -> Spec:
        """Return the sizes of latent attention to selected keys."""
        J, d = (0, 0) if self.shares_choice(layer) else (self.index_n_heads, self.index_head_dim)
        selection = IndexSelection(J, d, self.index_topk)
        rank = self.q_lora_rank or 0
        return IndexedLatentSpec.from_latent(latent_spec(self), self.hidden_size, rank, selection)


@dataclass(frozen=True)
class GlmMoeDsaConfig(DeepseekV32Config):
    """The keys of GLM-5: DeepSeek-V3.2 with an indexer that rotates pairs of neighbours; from 5.2
    on, layers that share the choice of an earlier layer have none.
    """

    index_n_heads: int = 32
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 202752
    n_group: int = 1
    topk_group: int = 1
    indexer_types: tuple[str, ...] | None = None

    model_types = ("glm_moe_dsa",)
    indexer_layout = "interleaved"
    fixed = DeepseekV32Config.fixed | {"indexer_rope_interleave": (True,)}

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys as for DeepSeek-V3.2, with `indexer_types` for a pattern of letters, or
        for every n-th layer behind an offset.
        """
        keys: dict[str, Any] = dict(raw)
        every, offset = keys.pop("index_topk_freq", None), keys.pop("index_skip_topk_offset", None)
        pattern, layers = keys.pop("index_topk_pattern", None), keys.get("num_hidden_layers")
        if isinstance(pattern, str):
            pattern = [{"F": WITH_INDEXER, "S": SHARED}.get(letter, letter) for letter in pattern]
        if pattern is None and isinstance(layers, int) and isinstance(every, int) and every > 1:
            first = offset if isinstance(offset, int) else 2
            chosen = (max(i - first + 1, 0) % every == 0 for i in range(layers))
            pattern = [WITH_INDEXER if own else SHARED for own in chosen]
        if keys.get("indexer_types") is None:
            keys["indexer_types"] = pattern
        return super().normalize_keys(keys)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (kinds := self.indexer_types) is not None:
            check_layer_names(
                "indexer_types", kinds, self.num_hidden_layers, (WITH_INDEXER, SHARED)
            )
            if kinds[0] == SHARED:
                raise ArgumentError(
                    f"indexer_types[0] is {SHARED!r}; the first layer must have an indexer"
                )

    def shares_choice(self, layer: int) -> bool:
        """Return whether a layer reads the keys that an earlier one chose."""
        return self.indexer_types is not None and self.indexer_types[layer] == SHARED


KIMI_NAMES = {
    "model_max_length": "max_position_embeddings",
    "num_expert_group": "n_group",
    "num_shared_experts": "n_shared_experts",
    "moe_renormalize": "norm_topk_prob",
    "num_experts_per_token": "num_experts_per_tok",
    "num_local_experts": "num_experts",
}
"""Other name of a key -> its name in transformers: DeepSeek's, but for `num_experts`."""
STATE_SIZES = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""Key of `linear_attn_config` -> its name at the top level of newer files."""


@dataclass(frozen=True)
class KimiLinearConfig(ModelConfig):
    """The keys of Kimi Linear."""

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
    num_experts_per_tok: int
    layer_types: tuple[str, ...]
    q_lora_rank: int | None = None
    n_shared_experts: int = 1
    first_k_dense_replace: int = 1
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.446
    linear_head_dim: int = 128
    linear_num_heads: int = 32
    linear_conv_kernel_dim: int = 4
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 1048576
    attention_bias: bool = False
    tie_word_embeddings: bool = False

    router_biases = True
    model_types = ("kimi_linear",)
    family_file = "deepseek"
    code = "Kimi"
    # no layer has rotary positions; the layers that predict a second token are not loaded
    ignored = frozenset(
        {"num_nextn_predict_layers", "rope_parameters", "rope_scaling", "rope_theta"}
    )
    fixed = {
        **SILU,
        "moe_layer_freq": (1,),
        "moe_router_activation_func": ("sigmoid",),
        "mla_use_nope": (True,),
        "use_grouped_topk": (True,),
    }

    def __post_init__(self) -> None:
        check_sizes(self, zero=("first_k_dense_replace",))
        check_own_keys(self)
        check_experts("num_experts", self.num_experts, self.num_experts_per_tok)
        self.kinds()

    @property
    def n_routed_experts(self) -> int:
        """The number of experts, under the name that DeepSeek has for it."""
        return self.num_experts

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys with one name each and a kind for each layer; the makers number layers
        from 1 in `linear_attn_config`, and transformers writes `layer_types` and `mlp_layer_types`.
        """
        left_out = ("head_dim", "qk_head_dim", "linear_attn_config")
        keys = rename_keys({k: v for k, v in raw.items() if k not in left_out}, KIMI_NAMES)
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
        return dense_layers_first(keys, cls.first_k_dense_replace)

    def kinds(self) -> tuple[str, ...]:
        """Return the kind of each layer."""
        return named_kinds(self.layer_types, self.num_hidden_layers)

    def mixer(self, layer: int) -> Spec:
        """Return the sizes of the mechanism of a layer."""
        if self.kinds()[layer] == LINEAR:
            H, D = self.linear_num_heads, self.linear_head_dim
            shape, kernel = HeadShape(H, H, D, D), self.linear_conv_kernel_dim
            return kimi_delta(self.hidden_size, shape, kernel, mechanism="delta rule")
        return latent_spec(self)

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the decoder."""
        return latent_decoder(self, name)


def _check_listed(linear: object, kinds: list[str]) -> None:
    """Check that `kda_layers`, if given, lists all layers that `full_attn_layers` does not."""
    if isinstance(linear, list):
        for i, kind in enumerate(kinds):
            if (i + 1 in linear) != (kind == LINEAR):
                raise ArgumentError(
                    f"layer {i + 1} of linear_attn_config is in both lists, full_attn_layers and "
                    "kda_layers, or in neither"
                )


LatentConfig: TypeAlias = DeepseekConfig | KimiLinearConfig
"""A config with latent attention, whose first layers are dense and whose others have experts."""


def check_own_keys(config: LatentConfig) -> None:
    """Check that every head has its own keys."""
    if config.num_key_value_heads != config.num_attention_heads:
        raise ArgumentError(
            f"num_key_value_heads is {config.num_key_value_heads}, and num_attention_heads "
            f"{config.num_attention_heads}; in latent attention every head has its own keys: "
            "make them equal"
        )


def latent_spec(config: LatentConfig) -> LatentSpec:
    """Return the sizes of the latent attention of a layer."""
    return LatentSpec.of(
        config.hidden_size,
        config.num_attention_heads,
        config.kv_lora_rank,
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
        config.q_lora_rank,
        bias=config.attention_bias,
    )


def latent_decoder(config: LatentConfig, name: str) -> ModelSpec:
    """Return the sizes of a decoder: the first layers are dense, the others have experts."""
    M, first, width = (
        config.hidden_size,
        config.first_k_dense_replace,
        config.moe_intermediate_size,
    )
    dense: FeedForwardSpec = DenseSpec(M, config.intermediate_size)
    experts: FeedForwardSpec = MoESpec(
        DenseSpec(M, width),
        config.n_routed_experts,
        config.num_experts_per_tok,
        DenseSpec(M, width * config.n_shared_experts),
        config.n_routed_experts if config.router_biases else 0,
    )
    norms = ParameterCounts(norms=2 * M)
    layers = (
        LayerSpec(config.mixer(layer), dense if layer < first else experts, norms)
        for layer in range(config.num_hidden_layers)
    )
    return ModelSpec(
        name,
        config.vocab_size,
        M,
        tuple(layers),
        norms=ParameterCounts(norms=M),
        tied=config.tie_word_embeddings,
    )
