"""The configs of Gemma, Gemma 2, Gemma 3 and Gemma 3n, of which only `text_config` is used."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from regard.argument_checks import check_number
from regard.configs.base import FULL, SLIDING, Raw, layer_windows
from regard.configs.rope import RopeSettings, check_rope, normalize_rope, ropes_of_both_kinds
from regard.configs.rotary_decoder import DecoderRecipe, GroupedQueryConfig, language_model
from regard.cost.model import DenseSpec, FeedForwardSpec, ModelSpec
from regard.cost.softmax import SharedKeysSpec
from regard.cost.spec import ParameterCounts
from regard.errors import ArgumentError


@dataclass(frozen=True)
class GemmaConfig(GroupedQueryConfig):
    """The keys of Gemma; the configs of later versions derive from it."""

    max_position_embeddings: int = 8192
    attention_bias: bool = False
    tie_word_embeddings: bool = True

    model_types: ClassVar[tuple[str, ...]] = ("gemma",)
    recipe = DecoderRecipe(
        norm="rms 1 + w",
        activation="gelu_pytorch_tanh",
        embedding_scale="embedding_scale",
    )
    # some files name the activation in `hidden_act`, others in `hidden_activation`; "gelu" in
    # `hidden_act` of the first files means the tanh approximation, which the authors' code uses
    fixed = {
        "hidden_act": ("gelu", "gelu_pytorch_tanh"),
        "hidden_activation": (None, "gelu_pytorch_tanh"),
        "use_bidirectional_attention": (None, False),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("rms_norm_eps", self.rms_norm_eps, 0, float("inf"), "above 0")

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys with rotary settings in one form, and head_dim 256 by default."""
        return normalize_rope({"head_dim": 256, **raw})

    @property
    def embedding_scale(self) -> float:
        """The factor on the embedding, sqrt(M)."""
        return float(self.hidden_size**0.5)


@dataclass(frozen=True)
class WindowedGemmaConfig(GemmaConfig):
    """The keys that Gemma 2 introduced: a scale for scores, a soft cap on logits, norms before
    and after each sublayer, and windows in some layers.
    """

    query_pre_attn_scalar: float = 256
    final_logit_softcapping: float | None = None
    sliding_window: int | None = 4096
    layer_types: tuple[str, ...] | None = None

    recipe = replace(
        GemmaConfig.recipe,
        norms="around",
        score_scale="score_scale",
        logit_cap="final_logit_softcapping",
    )
    fixed = {
        "hidden_act": ("gelu_pytorch_tanh",),
        "hidden_activation": ("gelu_pytorch_tanh",),
        "use_bidirectional_attention": (None, False),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("query_pre_attn_scalar", "final_logit_softcapping"):
            check_number(key, getattr(self, key), 0, float("inf"), "above 0")

    @property
    def score_scale(self) -> float:
        """The factor on the scores."""
        return float(self.query_pre_attn_scalar**-0.5)


@dataclass(frozen=True)
class Gemma2Config(WindowedGemmaConfig):
    """The keys of Gemma 2: a soft cap on scores, too, and a window in every second layer."""

    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0

    model_types = ("gemma2",)
    recipe = replace(
        WindowedGemmaConfig.recipe, window_pattern=2, score_cap="attn_logit_softcapping"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        cap = self.attn_logit_softcapping
        check_number("attn_logit_softcapping", cap, 0, float("inf"), "above 0")


SIZES = {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4}
"""Values of keys that the `text_config` of a Gemma 3 may omit."""
PICTURES = {
    "text_config",
    "vision_config",
    "mm_tokens_per_image",
    "boi_token_index",
    "eoi_token_index",
    "image_token_index",
    "boi_token_id",
    "eoi_token_id",
    "image_token_id",
    "audio_config",
    "audio_soft_tokens_per_image",
    "audio_token_id",
    "boa_token_id",
    "eoa_token_id",
    "vision_soft_tokens_per_image",
}
"""Keys of a model that also reads images or sound."""


@dataclass(frozen=True)
class Gemma3Config(WindowedGemmaConfig):
    """The keys of Gemma 3: a norm on each head instead of the soft cap on scores, a window in five
    of six layers, and another rotary base in the layers with a window.
    """

    max_position_embeddings: int = 131072
    rope_theta: float = 1000000.0
    rope_local_base_freq: float = 10000.0

    model_types = ("gemma3_text", "gemma3")
    towers = "vision_tower multi_modal_projector"
    fixed = {
        **WindowedGemmaConfig.fixed,
        "attn_logit_softcapping": (None,),
    }
    ignored = frozenset({"_sliding_window_pattern"})
    recipe = replace(WindowedGemmaConfig.recipe, window_pattern=6, head_norms="each head")

    def __post_init__(self) -> None:
        super().__post_init__()
        base = self.rope_local_base_freq
        check_number("rope_local_base_freq", base, 1, float("inf"), "above 1")
        check_rope(self.local_rope)

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys with both rotary bases, and `layer_types` for sliding_window_pattern."""
        if raw.get("model_type") == "gemma3":
            raw = language_model(raw, PICTURES, **SIZES)
        keys, full, sliding = ropes_of_both_kinds({"head_dim": 256, **raw}, "gemma3_text")
        for key, value in (("rope_theta", full), ("rope_local_base_freq", sliding)):
            if "rope_theta" in value:
                keys[key] = value["rope_theta"]
        keys["rope_scaling"] = full["rope_scaling"]
        pattern, layers = keys.pop("sliding_window_pattern", None), keys.get("num_hidden_layers")
        if pattern is not None and isinstance(layers, int):
            named, width = (
                keys.get("layer_types"),
                keys.get("sliding_window", cls.sliding_window),
            )
            spans = layer_windows(
                layers,
                sliding_window=width,
                layer_types=named,
                sliding_window_pattern=pattern,
            )
            keys["layer_types"] = [FULL if span is None else SLIDING for span in spans]
        return keys

    @property
    def local_rope(self) -> RopeSettings:
        """The rotary settings of layers with a window; those of the other layers are `rope`."""
        return RopeSettings(
            self.head_dim, self.rope_local_base_freq, None, self.max_position_embeddings
        )

    def ropes(self) -> tuple[RopeSettings | None, ...]:
        """Return the rotary settings of each layer; those with a window have another base."""
        return tuple(self.rope if x is None else self.local_rope for x in self.windows())


PER_LAYER_NORMS = 7
"""The number of norms of width M in a layer of Gemma 3n."""


@dataclass(frozen=True)
class Gemma3nConfig(Gemma3Config):
    """The keys of the language model of Gemma 3n: Gemma 3 with embeddings for every layer, several
    streams (AltUp), a low-rank branch (LAuReL), and last layers that use the keys of earlier ones.
    """

    max_position_embeddings: int = 32768
    sliding_window: int | None = 512
    final_logit_softcapping: float | None = 30.0
    vocab_size_per_layer_input: int = 262144
    hidden_size_per_layer_input: int = 256
    altup_num_inputs: int = 4
    num_kv_shared_layers: int = 15
    laurel_rank: int = 64
    altup_correct_scale: bool = True
    activation_sparsity_pattern: tuple[float, ...] | None = None

    model_types = ("gemma3n_text", "gemma3n")
    ignored = frozenset({"altup_coef_clip"})  # acts in training only
    fixed = {
        **WindowedGemmaConfig.fixed,
        "altup_active_idx": (0,),
    }
    family_file = "gemma"
    towers = "vision_tower audio_tower embed_vision embed_audio"
    recipe = replace(
        Gemma3Config.recipe, norm="rms", window_pattern=5, score_scale=1.0, value_norm=True
    )
    zero = ("num_kv_shared_layers",)

    def __post_init__(self) -> None:
        super().__post_init__()
        sparsities = self.sparsities()
        if len(sparsities) != self.num_hidden_layers:
            raise ArgumentError(
                f"activation_sparsity_pattern has length {len(sparsities)}, and num_hidden_layers "
                f"is {self.num_hidden_layers}; give one per layer"
            )
        for sparsity in sparsities:
            check_number(
                "activation_sparsity_pattern", sparsity, -1e-300, 1, "at least 0 and below 1"
            )

    def sparsities(self) -> tuple[float, ...]:
        """Return the share of zeros among the activations of each feed-forward layer; by default
        0.95 in the first ten layers of more than ten.
        """
        if self.activation_sparsity_pattern is not None:
            return self.activation_sparsity_pattern
        sparse = 10 if self.num_hidden_layers > 10 else 0
        return (0.95,) * sparse + (0.0,) * (self.num_hidden_layers - sparse)

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys as for Gemma 3; the width of the feed-forward layers may be a list."""
        if raw.get("model_type") == "gemma3n":
            raw = language_model(raw, PICTURES, **SIZES)
        keys = super().normalize_keys(raw)
        widths = keys.get("intermediate_size")
        if isinstance(widths, list):
            if not widths or any(width != widths[0] for width in widths):
                raise ArgumentError(
                    "intermediate_size differs from layer to layer, which is not supported"
                )
            keys["intermediate_size"] = widths[0]
        return keys

    def feed_forward(self, layer: int) -> FeedForwardSpec:
        """Return the feed-forward sizes with AltUp, LAuReL and the layer's own embeddings."""
        M, n = self.hidden_size, self.altup_num_inputs
        altup = n * n + n**3 + n * M
        # the low-rank branch, and the maps of the layer's embedding: its input, gate and output
        branches = M * (2 * self.laurel_rank + 3 * self.hidden_size_per_layer_input)
        return DenseSpec(M, self.intermediate_size, beside=ParameterCounts(altup + branches))

    def _shared_keys(self, window: int | None) -> SharedKeysSpec:
        """Return the sizes of a layer without key and value matrices of its own."""
        own = self.attention(window)
        keys = own.shape.key_maps(self.hidden_size)
        weights = own.weights + ParameterCounts(-keys, norms=-self.head_dim)
        return SharedKeysSpec(weights, (), own.shape, own.visible)

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the decoder, with its further embeddings and projections."""
        M, L, n = self.hidden_size, self.num_hidden_layers, self.altup_num_inputs
        width = self.hidden_size_per_layer_input
        model, first_shared = super().sizes(name), L - self.num_kv_shared_layers
        scale = M if self.altup_correct_scale else 0
        norms = ParameterCounts(norms=PER_LAYER_NORMS * M, biases=scale)
        layers = tuple(
            replace(
                layer,
                norms=norms,
                mixer=layer.mixer if i < first_shared else self._shared_keys(window),
            )
            for i, (layer, window) in enumerate(zip(model.layers, self.windows(), strict=True))
        )
        # the maps between the streams are before the first layer and after the last one; every
        # token uses them, so that they count with the feed-forward part of the first layer
        feed = layers[0].feed_forward
        assert isinstance(feed, DenseSpec)
        maps = ParameterCounts(2 * (n - 1) * M * M)
        first = replace(feed, beside=feed.beside + maps)
        return replace(
            model,
            layers=(replace(layers[0], feed_forward=first), *layers[1:]),
            norms=model.norms + ParameterCounts(norms=width),
            token_tables=(self.vocab_size_per_layer_input, L * width, 1),
        )
