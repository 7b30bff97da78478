"""The config of Gemma 4, of which only the language model is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from regard.argument_checks import check_groups, check_number
from regard.configs.base import FULL, SLIDING, Raw
from regard.configs.gemma import PICTURES
from regard.configs.rope import RopeSettings
from regard.configs.rotary_decoder import (
    DecoderRecipe,
    GroupedQueryConfig,
    check_experts,
    language_model,
)
from regard.cost.model import DenseSpec, FeedForwardSpec, ModelSpec, MoESpec
from regard.cost.softmax import SharedKeysSpec, SoftmaxSpec
from regard.cost.spec import HeadShape, ParameterCounts, Spec
from regard.errors import ArgumentError

ROPES: Mapping[str, object] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
"""The rotary settings of a config.json that has none."""


@dataclass(frozen=True)
class Gemma4Config(GroupedQueryConfig):
    """The keys of Gemma 4: windows in most layers; other heads in the layers without one, whose
    values may be their keys; embeddings for every layer, and last layers that use earlier keys; or
    experts beside every dense network. Source: Gemma Team 2026, "Gemma 4" and its code.
    """

    head_dim: int = 256
    global_head_dim: int = 512
    num_global_key_value_heads: int | None = None
    max_position_embeddings: int = 131072
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    attention_k_eq_v: bool = False
    sliding_window: int | None = 512
    layer_types: tuple[str, ...] | None = None
    rope_parameters: Mapping[str, object] | None = None
    final_logit_softcapping: float | None = None
    vocab_size_per_layer_input: int = 262144
    hidden_size_per_layer_input: int = 256
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False
    enable_moe_block: bool = False
    num_experts: int | None = None
    top_k_experts: int | None = None
    moe_intermediate_size: int | None = None

    model_types = ("gemma4_text", "gemma4")
    family_file = "gemma4"
    towers = "vision_tower audio_tower embed_vision embed_audio"
    recipe = DecoderRecipe(
        norms="around",
        head_norms="each head",
        activation="gelu_pytorch_tanh",
        logit_cap="final_logit_softcapping",
        window_pattern=6,
        score_scale=1.0,
        value_norm=True,
    )
    unwritten = frozenset({"rope_scaling", "rope_theta"})
    fixed = {
        "hidden_activation": ("gelu_pytorch_tanh",),
        "use_bidirectional_attention": (None, "vision"),  # of images alone
    }
    zero = ("hidden_size_per_layer_input", "num_kv_shared_layers")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_groups(self.num_attention_heads, self.global_groups)
        cap = self.final_logit_softcapping
        check_number("final_logit_softcapping", cap, 0, float("inf"), "above 0")
        if self.enable_moe_block:
            check_experts("num_experts", *self.experts[:2])
        if self.windows()[-1] is not None:
            raise ArgumentError(
                f"layer_types ends with {SLIDING!r}; the last layer of a Gemma 4 has {FULL!r}"
            )

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys of the language model; `per_layer_config` has the heads of layers without
        a window in the files of transformers.
        """
        if raw.get("model_type") == "gemma4":
            raw = language_model(raw, PICTURES | {"eoa_token_index", "video_token_id"})
        keys: dict[str, Any] = {k: v for k, v in raw.items() if k not in cls.unwritten}
        keys["rope_parameters"] = keys.get("rope_parameters") or ROPES
        if keys.get("hidden_size_per_layer_input", 0) is None:
            keys["hidden_size_per_layer_input"] = 0
        layers, kinds = keys.get("num_hidden_layers"), keys.get("layer_types")
        if isinstance(layers, int) and kinds is None:
            kinds = [
                FULL if (i + 1) % 6 == 0 or i + 1 == layers else SLIDING for i in range(layers)
            ]
            keys["layer_types"] = kinds
        own = keys.pop("per_layer_config", None)
        if isinstance(own, Mapping) and isinstance(kinds, list):
            full = [str(i) for i, kind in enumerate(kinds) if kind == FULL]
            names = {"head_dim": "global_head_dim"} | {
                "num_key_value_heads": "num_global_key_value_heads"
            }
            own = {str(i).lstrip("0") or "0": x for i, x in own.items()}
            first = own.get(full[0]) if full else {}
            if sorted(own) != sorted(full) or any(x != first for x in own.values()):
                raise ArgumentError(
                    "per_layer_config must have the same keys for each layer without a window, and "
                    "no other layer"
                )
            if not isinstance(first, Mapping) or set(first) - set(names):
                raise ArgumentError(
                    f"per_layer_config has {first}; its keys are {', '.join(names)}"
                )
            keys |= {names[key]: value for key, value in first.items()}
        return keys

    @property
    def embedding_scale(self) -> float:
        """The factor on the embedding, sqrt(M)."""
        return float(self.hidden_size**0.5)

    @property
    def experts(self) -> tuple[int, int, int]:
        """The number of experts, how many of them a token uses, and the width of each."""
        count, active, width = self.num_experts, self.top_k_experts, self.moe_intermediate_size
        if count is None or active is None or width is None:
            raise ArgumentError(
                f"enable_moe_block is true, with num_experts {count}, top_k_experts {active} and "
                f"moe_intermediate_size {width}; a Gemma 4 with experts has all three"
            )
        return count, active, width

    @property
    def global_groups(self) -> int:
        """The number of key heads in layers without a window."""
        own = self.num_global_key_value_heads if self.attention_k_eq_v else None
        return self.num_key_value_heads if own is None else own

    def kinds(self) -> tuple[str, ...]:
        """Return the kind of each layer."""
        return tuple(FULL if window is None else SLIDING for window in self.windows())

    def head_shape(self, window: int | None) -> HeadShape:
        """Return the heads of a layer with a window, or without one."""
        is_full = window is None
        G = self.global_groups if is_full else self.num_key_value_heads
        D = self.global_head_dim if is_full else self.head_dim
        return HeadShape(self.num_attention_heads, G, D, D)

    def shares_keys(self, layer: int) -> bool:
        """Return whether a layer reads the keys and values of an earlier one."""
        return layer >= self.num_hidden_layers - self.num_kv_shared_layers

    def width(self, layer: int) -> int:
        """Return the width of a feed-forward layer."""
        wide = self.use_double_wide_mlp and self.shares_keys(layer)
        return self.intermediate_size * (2 if wide else 1)

    def ropes(self) -> tuple[RopeSettings | None, ...]:
        """Return the rotary settings of each layer, by its kind."""
        return self.ropes_by_kind(self.rope_parameters or ROPES)

    def mixer(self, layer: int, window: int | None) -> Spec:
        """Return the sizes of attention: its heads, and whose keys and values it reads."""
        kind, M = self.kinds()[layer], self.hidden_size
        shape = self.head_shape(window)
        bias = self.attention_bias
        own = SoftmaxSpec.of(
            M, shape, bias=bias, output_bias=bias, norms=2 * shape.head_dim, window=window
        )
        key_maps = shape.groups * shape.head_dim * M
        key_bias = shape.groups * shape.head_dim if bias else 0
        if self.shares_keys(layer):
            less = ParameterCounts(-2 * key_maps, -2 * key_bias, norms=-shape.head_dim)
            return SharedKeysSpec(own.weights + less, (), own.shape, own.visible)
        if kind == FULL and self.attention_k_eq_v:
            return replace(own, weights=own.weights + ParameterCounts(-key_maps, -key_bias))
        return own

    def feed_forward(self, layer: int) -> FeedForwardSpec:
        """Return the feed-forward sizes, with the maps of the layer's own embedding."""
        M, P = self.hidden_size, self.hidden_size_per_layer_input
        dense = DenseSpec(M, self.width(layer), beside=ParameterCounts(2 * M * P))
        if not self.enable_moe_block:
            return dense
        count, active, width = self.experts
        # the router has a factor for each of its inputs and of its experts
        return MoESpec(DenseSpec(M, width), count, active, dense, router_bias=M + count)

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the decoder, with its further embeddings and scalars."""
        M, L, P = self.hidden_size, self.num_hidden_layers, self.hidden_size_per_layer_input
        model = super().sizes(name)
        more = ParameterCounts(
            0, 1, norms=(M if P else 0) + (3 * M if self.enable_moe_block else 0)
        )
        layers = [replace(layer, norms=layer.norms + more) for layer in model.layers]
        if not P:
            return replace(model, layers=tuple(layers))
        # every token uses the map to the layers' embeddings, which counts with the first layer
        feed = layers[0].feed_forward
        dense = feed.shared if isinstance(feed, MoESpec) else feed
        assert isinstance(dense, DenseSpec)
        dense = replace(dense, beside=dense.beside + ParameterCounts(M * L * P))
        feed = replace(feed, shared=dense) if isinstance(feed, MoESpec) else dense
        layers[0] = replace(layers[0], feed_forward=feed)
        return replace(
            model,
            layers=tuple(layers),
            norms=model.norms + ParameterCounts(norms=P),
            token_tables=(self.vocab_size_per_layer_input, L * P, 1),
        )
