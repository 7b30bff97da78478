"""The configs of BLOOM, MPT and OPT."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from regard.argument_checks import check_number
from regard.configs.base import Raw, UnknownKey
from regard.configs.layer_norm import LayerNormConfig, LayerNormRecipe
from regard.configs.reader import is_harmless
from regard.errors import ArgumentError
from regard.untrusted_text import short_repr


@dataclass(frozen=True)
class BloomConfig(LayerNormConfig):
    """The keys of BLOOM, which has ALiBi and a norm behind the embedding."""

    hidden_size: int
    n_layer: int
    n_head: int
    layer_norm_epsilon: float = 1e-5
    apply_residual_connection_post_layernorm: bool = False
    tie_word_embeddings: bool = True

    model_types = ("bloom",)
    family_file = "gpt_like"
    renamed = {
        "n_embed": "hidden_size",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }
    recipe = LayerNormRecipe(
        rows="heads",
        embedding_norm=True,
        normed_residual="apply_residual_connection_post_layernorm",
    )
    activation_function = "gelu_new"
    ignored = frozenset(
        {
            "attention_softmax_in_fp32",
            "bias_dropout_fusion",
            "masked_softmax_fusion",
            "offset_alibi",
            "seq_length",
            "skip_bias_add",
            "skip_bias_add_qkv",
            "slow_but_exact",
        }
    )
    fixed = {"n_inner": (None,)}


MPT_ATTENTION = {"alibi_bias_max": 8, "clip_qkv": None, "softmax_scale": None}
"""Keys of attn_config that change the network -> their defaults."""
MPT_FIXED: dict[str, tuple[object, ...]] = {
    "alibi": (True,),
    "attn_type": ("multihead_attention",),
    "attn_uses_sequence_id": (False,),
    "prefix_lm": (False,),
    "qk_ln": (False,),
}
"""Key of attn_config -> the only values that are supported."""


@dataclass(frozen=True)
class MptConfig(LayerNormConfig):
    """The keys of MPT, which has ALiBi and no biases."""

    d_model: int
    n_heads: int
    n_layers: int
    max_seq_len: int = 2048
    layer_norm_epsilon: float = 1e-5
    attn_config: Mapping[str, Any] = field(default_factory=dict)
    tie_word_embeddings: bool = True

    model_types = ("mpt",)
    family_file = "gpt_like"
    renamed = {
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    }
    recipe = LayerNormRecipe(qkv_bias=False, output_bias=False, ff_bias=False, norm_bias=False)
    activation_function = "gelu"
    code = "MPT"
    ignored = frozenset(
        {
            "embedding_fraction",
            "init_config",
            "init_device",
            "learned_pos_emb",
            "tokenizer_name",
            "verbose",
        }
    )
    fixed = {
        "expansion_ratio": (4,),
        "logit_scale": (None,),
        "no_bias": (True,),
        "norm_type": ("low_precision_layernorm", "layernorm"),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, value in self.attn_config.items():
            name, allowed = f"attn_config.{key}", MPT_FIXED.get(key)
            if allowed is not None and value not in allowed:
                raise ArgumentError(f"{name} is {value!r}; only {allowed[0]!r} is supported")
            if allowed is None and key not in MPT_ATTENTION:
                raise UnknownKey(
                    ("attn_config", key), f"attn_config has the unknown key {short_repr(key)}"
                )
            if key == "alibi_bias_max" and value is None:
                raise ArgumentError(f"{name} is null; it must be above 0")
            if key in MPT_ATTENTION:
                check_number(name, value, 0, float("inf"), "above 0")

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys with MPT's spelling of sizes, and the keys of attn_config that matter."""
        keys = super().normalize_keys(raw)
        attention = keys["attn_config"] = {} if (own := keys.get("attn_config")) is None else own
        if isinstance(attention, Mapping):
            without = {"attn_impl", "is_encoder_decoder"}
            keys["attn_config"] = {
                k: v for k, v in attention.items() if not (k in without or is_harmless(k))
            }
        return keys


@dataclass(frozen=True)
class OPTConfig(LayerNormConfig):
    """The keys of OPT. Its table of positions has two unused rows in front."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    ffn_dim: int
    max_position_embeddings: int = 2048
    activation_function: str = "relu"
    word_embed_proj_dim: int | None = None
    tie_word_embeddings: bool = True

    model_types = ("opt",)
    family_file = "gpt_like"
    recipe = LayerNormRecipe(
        eps=1e-5, width="ffn_dim", rows=None, positions="max_position_embeddings", unused=2
    )
    ignored = frozenset({"init_std", "layerdrop"})
    fixed = {
        "_remove_final_layer_norm": (False,),
        "do_layer_norm_before": (True,),
        "enable_bias": (True,),
        "layer_norm_elementwise_affine": (True,),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.word_embed_proj_dim not in (None, self.hidden_size):
            raise ArgumentError(
                f"word_embed_proj_dim is {self.word_embed_proj_dim}; only hidden_size, "
                f"{self.hidden_size}, is supported"
            )
