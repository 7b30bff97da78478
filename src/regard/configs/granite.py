"""The configs of Granite 3 and 4.0 H, and of Bamba, on which IBM worked, too."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from regard.configs.base import FULL, SLIDING, Raw
from regard.configs.hybrid import LINEAR, HybridConfig, Mamba2Keys, Names
from regard.configs.llama import LlamaConfig
from regard.configs.rope import RopeSettings
from regard.configs.rotary_decoder import SILU, Experts, check_experts
from regard.cost.model import DenseSpec, FeedForwardSpec, MoESpec
from regard.errors import ArgumentError
from regard.units import plural


@dataclass(frozen=True)
class GraniteConfig(LlamaConfig):
    """The keys of Granite 3: Llama with a factor on the embedding, the scores, what each sublayer
    adds, and the logits (1 / `logits_scaling`).
    """

    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0

    model_types = ("granite",)
    recipe = replace(
        LlamaConfig.recipe,
        embedding_scale="embedding_multiplier",
        score_scale="attention_multiplier",
        residual_scale="residual_multiplier",
        logit_scale="logit_scale",
    )
    ignored = frozenset[str]()
    fixed = SILU

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.logits_scaling == 0:
            raise ArgumentError("logits_scaling is 0; the logits are divided by it")

    @property
    def logit_scale(self) -> float:
        """The factor on the logits."""
        return 1 / self.logits_scaling


@dataclass(frozen=True)
class GraniteSwaConfig(GraniteConfig):
    """The keys of Granite Swash: Granite with learned sinks, a window in three of four layers, and
    a rotary base of each layer, 0 for none.
    """

    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    sliding_window: int | None = 128
    layer_types: tuple[str, ...] | None = None
    layer_rope_theta: tuple[float, ...] | None = None

    model_types = ("granite_swa",)
    recipe = replace(GraniteConfig.recipe, sinks=True)

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys as for Granite; by default the first of four layers has no window."""
        keys = super().normalize_keys(raw)
        if keys.get("layer_types") is None and isinstance(n := keys.get("num_hidden_layers"), int):
            keys["layer_types"] = [SLIDING if i % 4 else FULL for i in range(n)]
        return keys

    def ropes(self) -> tuple[RopeSettings | None, ...]:
        """Return the rotary settings of each layer, with the base that it has."""
        if self.layer_rope_theta is None:
            return super().ropes()
        if len(self.layer_rope_theta) != self.num_hidden_layers:
            raise ArgumentError(
                f"layer_rope_theta has {plural(len(self.layer_rope_theta), 'number')}; give one "
                f"for each of {plural(self.num_hidden_layers, 'layer')}, 0 for no positions"
            )
        return tuple(
            self.rope._replace(theta=theta) if theta else None for theta in self.layer_rope_theta
        )


@dataclass(frozen=True)
class GraniteMoeConfig(GraniteConfig):
    """The keys of Granite 3 MoE: Granite with a mixture of experts in every layer."""

    num_local_experts: int = field(kw_only=True)
    num_experts_per_tok: int = field(kw_only=True)

    model_types = ("granitemoe",)
    family_file = "granite"
    recipe = replace(GraniteConfig.recipe, experts=Experts("num_local_experts"), ff_bias=False)
    fixed = {
        **SILU,
        "mlp_bias": (False,),
    }


@dataclass(frozen=True)
class GraniteHybridConfig(Mamba2Keys, HybridConfig):
    """The keys of Granite 4.0 H: Mamba-2 in most layers, attention in the others, and dense or
    sparse feed-forward layers, with the factors of Granite 3.
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

    model_types = ("granitemoehybrid",)
    family_file = "granite"
    recipe = replace(GraniteConfig.recipe, ff_bias=False)
    fixed = {
        **SILU,
        "normalization_function": ("rmsnorm",),
    }
    zero = ("num_local_experts", "num_experts_per_tok")

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

    def ropes(self) -> tuple[RopeSettings | None, ...]:
        """Return the rotary settings of each layer; None unless positions are "rope"."""
        rope = self.rope if self.position_embedding_type == "rope" else None
        return (rope,) * self.num_hidden_layers

    def usual_kinds(self) -> tuple[str, ...]:
        """Return Mamba-2 in all layers."""
        return (LINEAR,) * self.num_hidden_layers

    def feed_forward(self, layer: int) -> FeedForwardSpec:
        """Return the sizes of a mixture of experts with a shared one, or of the latter alone."""
        shared = DenseSpec(self.hidden_size, self.shared_intermediate_size)
        if not self.num_local_experts:
            return shared
        expert = DenseSpec(self.hidden_size, self.intermediate_size)
        return MoESpec(expert, self.num_local_experts, self.num_experts_per_tok, shared)

    @property
    def logit_scale(self) -> float:
        """The factor on the logits."""
        return 1 / self.logits_scaling


@dataclass(frozen=True)
class BambaConfig(Mamba2Keys, HybridConfig):
    """The keys of Bamba: Mamba-2 in most layers, attention in those of `attn_layer_indices`, and a
    dense feed-forward layer in each.
    """

    attn_layer_indices: tuple[int, ...] | None = None
    partial_rotary_factor: float = 0.5
    max_position_embeddings: int = 262144
    attention_bias: bool = False
    mlp_bias: bool = False

    model_types = ("bamba",)
    family_file = "granite"
    ignored = Mamba2Keys.ignored | {"z_loss_coefficient"}

    def usual_kinds(self) -> tuple[str, ...]:
        """Return attention for the layers of `attn_layer_indices`."""
        layers, indices = self.num_hidden_layers, self.attn_layer_indices or ()
        for i in indices:
            if not 0 <= i < layers:
                raise ArgumentError(
                    f"attn_layer_indices has {i}; the {plural(layers, 'layer')} have the indices 0 "
                    f"to {layers - 1}"
                )
        return tuple(FULL if i in indices else LINEAR for i in range(layers))
