"""The configs of decoders like Llama whose makers have one family here: Arcee, ERNIE 4.5, EXAONE 4,
Helium, Seed-OSS, SmolLM3, StableLM and StarCoder2.
"""

from __future__ import annotations

from dataclasses import dataclass

from regard.configs.base import Raw, layer_windows
from regard.configs.llama import LlamaConfig
from regard.configs.rope import RopeSettings
from regard.configs.rotary_decoder import (
    SILU,
    DecoderRecipe,
    GroupedQueryConfig,
    RotaryDecoderConfig,
    rotated_by_flag,
)
from regard.errors import ArgumentError


@dataclass(frozen=True)
class ArceeConfig(LlamaConfig):
    """Arcee's AFM: Llama with a squared ReLU in place of the gated feed-forward layer. Source:
    Arcee AI 2025, "Announcing Arcee Foundation Models".
    """

    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 4096

    model_types = ("arcee",)
    recipe = DecoderRecipe(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        ff_bias="mlp_bias",
        gated=False,
        activation="relu2",
    )
    ignored = frozenset[str]()
    fixed = {"hidden_act": ("relu2",)}


@dataclass(frozen=True)
class Ernie45Config(GroupedQueryConfig):
    """ERNIE 4.5, the dense models: Llama that rotates pairs of neighbours. Source: Baidu 2025,
    "ERNIE 4.5 Technical Report".
    """

    head_dim: int = 128
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    max_position_embeddings: int = 131072
    tie_word_embeddings: bool = True
    use_bias: bool = False

    model_types = ("ernie4_5",)
    recipe = DecoderRecipe(
        layout="interleaved", qkv_bias="use_bias", output_bias="use_bias", ff_bias="use_bias"
    )


@dataclass(frozen=True)
class Exaone4Config(GroupedQueryConfig):
    """EXAONE 4: norms after each sublayer and on each head of queries and keys; in models with a
    window, layers without one have no positions. Source: LG AI Research 2025 (arXiv 2507.11407).
    """

    rms_norm_eps: float = 1e-5
    sliding_window: int | None = 4096
    sliding_window_pattern: int | str | None = 4
    layer_types: tuple[str, ...] | None = None

    model_types = ("exaone4",)
    recipe = DecoderRecipe(norms="after", head_norms="each head")

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys as for Llama; a model without a window has no pattern."""
        keys = super().normalize_keys(raw)
        if "sliding_window" in keys and keys["sliding_window"] is None:
            keys["sliding_window_pattern"] = None
        pattern = keys.get("sliding_window_pattern")
        if isinstance(pattern, str):  # "LLLG": three local layers, then a global one
            if not pattern or pattern != "L" * (len(pattern) - 1) + "G":
                raise ArgumentError(
                    f"sliding_window_pattern is {pattern!r}; it must be a number n, or n - 1 "
                    "letters L and a G"
                )
            keys["sliding_window_pattern"] = len(pattern)
        return keys

    def windows(self) -> tuple[int | None, ...]:
        """Return the windows of `layer_types`, or a window in all layers but every n-th one."""
        pattern = self.sliding_window_pattern
        return layer_windows(
            self.num_hidden_layers,
            sliding_window=self.sliding_window,
            layer_types=self.layer_types,
            sliding_window_pattern=pattern
            if self.layer_types is None and isinstance(pattern, int) and pattern > 0
            else None,
        )

    def ropes(self) -> tuple[RopeSettings | None, ...]:
        """Return the rotary settings of each layer; None for a layer without positions."""
        if self.sliding_window is None:
            return super().ropes()
        return tuple(None if window is None else self.rope for window in self.windows())


@dataclass(frozen=True)
class HeliumConfig(GroupedQueryConfig):
    """Helium: Llama that rotates pairs of neighbours. Source: Kyutai 2025, "Helium 1"."""

    head_dim: int = 128
    rms_norm_eps: float = 1e-8
    rope_theta: float = 100000.0
    max_position_embeddings: int = 4096
    attention_bias: bool = False
    mlp_bias: bool = False

    model_types = ("helium",)
    recipe = DecoderRecipe(layout="interleaved", qkv_bias="attention_bias", ff_bias="mlp_bias")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_attention_heads * self.head_dim != self.hidden_size:
            raise ArgumentError(
                f"num_attention_heads {self.num_attention_heads} times head_dim {self.head_dim} "
                f"must be hidden_size, {self.hidden_size}"
            )


@dataclass(frozen=True)
class SeedOssConfig(GroupedQueryConfig):
    """Seed-OSS: Llama with separate keys for the biases of its maps. Source: ByteDance Seed 2025,
    "Seed-OSS Open-Source Models".
    """

    head_dim: int = 128
    max_position_embeddings: int = 524288
    attention_bias: bool = True
    attention_out_bias: bool = False
    mlp_bias: bool = False

    model_types = ("seed_oss",)
    recipe = DecoderRecipe(
        qkv_bias="attention_bias", output_bias="attention_out_bias", ff_bias="mlp_bias"
    )


@dataclass(frozen=True)
class SmolLM3Config(LlamaConfig):
    """SmolLM3: Llama without positions in every fourth layer (NoPE). Source: Hugging Face 2025,
    "SmolLM3"; NoPE: Yang et al. 2025 (arXiv 2501.18795).
    """

    rope_theta: float = 2000000.0
    max_position_embeddings: int = 32768
    tie_word_embeddings: bool = True
    no_rope_layers: tuple[int, ...] | None = None
    no_rope_layer_interval: int = 4
    use_sliding_window: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None

    model_types = ("smollm3",)
    ignored = frozenset({"max_window_layers"})
    fixed = SILU

    def rotated(self) -> tuple[bool, ...]:
        """Return whether each layer has rotary positions: a 1 in `no_rope_layers`."""
        return rotated_by_flag(
            self.no_rope_layers, self.num_hidden_layers, self.no_rope_layer_interval
        )

    def ropes(self) -> tuple[RopeSettings | None, ...]:
        """Return the rotary settings of each layer; None for a layer without positions."""
        return tuple(self.rope if rotates else None for rotates in self.rotated())

    def windows(self) -> tuple[int | None, ...]:
        """Return the windows of `layer_types`; without that key, layers without positions have the
        window if use_sliding_window is true.
        """
        if self.layer_types is None and self.use_sliding_window:
            width = self.sliding_window
            return tuple(None if rotates else width for rotates in self.rotated())
        return super().windows()


@dataclass(frozen=True)
class StableLmConfig(RotaryDecoderConfig):
    """StableLM: LayerNorms and rotary positions on a part of each head; in some models, parallel
    sublayers that share a norm. Source: Bellagente et al. 2024 (arXiv 2402.17834).
    """

    layer_norm_eps: float = 1e-5
    max_position_embeddings: int = 4096
    partial_rotary_factor: float = 0.25
    use_qkv_bias: bool = False
    use_parallel_residual: bool = False

    model_types = ("stablelm",)
    recipe = DecoderRecipe(
        norm="layer",
        eps="layer_norm_eps",
        partial="partial_rotary_factor",
        qkv_bias="use_qkv_bias",
        parallel="use_parallel_residual",
    )
    fixed = {**SILU, "qk_layernorm": (False,)}


@dataclass(frozen=True)
class Starcoder2Config(RotaryDecoderConfig):
    """StarCoder2: LayerNorms, biases everywhere, and a feed-forward layer without a gate. Source:
    Lozhkov et al. 2024 (arXiv 2402.19173).
    """

    norm_epsilon: float = 1e-5
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = True
    hidden_act: str = "gelu_pytorch_tanh"
    use_bias: bool = True
    sliding_window: int | None = None

    model_types = ("starcoder2",)
    recipe = DecoderRecipe(
        norm="layer",
        eps="norm_epsilon",
        qkv_bias="use_bias",
        output_bias="use_bias",
        ff_bias="use_bias",
        gated=False,
        stored={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"},
    )
    ignored = frozenset({"mlp_type", "norm_type"})
