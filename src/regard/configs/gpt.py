"""The configs of GPT-2, GPT-NeoX, BLOOM and MPT: multi-head attention, LayerNorms, and feed-forward
layers without a gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from regard.argument_checks import check_number, resolve_head_dim
from regard.configs.base import (
    ModelConfig,
    Raw,
    UnknownKey,
    check_activation,
    check_sizes,
    rename_keys,
)
from regard.configs.reader import is_harmless
from regard.configs.rope import RopeSettings, check_rope, normalize_rope
from regard.cost.model import DenseSpec, LayerSpec, ModelSpec
from regard.cost.softmax import SoftmaxSpec
from regard.cost.spec import HeadShape, ParameterCounts
from regard.errors import ArgumentError
from regard.untrusted_text import short_repr


def _check_eps(key: str, value: float) -> None:
    check_number(key, value, 0, float("inf"), "above 0")


def _layer(
    dim: int, heads: int, hidden: int, *, bias: bool = True, attention_bias: bool = True
) -> LayerSpec:
    """Return the sizes of a block: multi-head attention, a feed-forward layer and two LayerNorms.

    Without `bias`, neither the feed-forward layer nor the norms have biases.
    """
    D, norm = resolve_head_dim(dim, heads, None), _norm(dim, bias=bias)
    shape = HeadShape(heads, heads, D, D)
    mixer = SoftmaxSpec.of(dim, shape, bias=attention_bias, output_bias=attention_bias)
    return LayerSpec(mixer, DenseSpec(dim, hidden, gated=False, bias=bias), norm + norm)


def _norm(dim: int, *, bias: bool = True) -> ParameterCounts:
    return ParameterCounts(norms=2 * dim if bias else dim)


@dataclass(frozen=True)
class GPT2Config(ModelConfig):
    """The keys of GPT-2.

    Raises:
        ArgumentError: a size is less than 1, the norms' eps is not above 0, n_head does not divide
            n_embd, or the activation is not known.
    """

    vocab_size: int
    n_positions: int
    n_embd: int
    n_layer: int
    n_head: int
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    tie_word_embeddings: bool = True

    model_types: ClassVar[tuple[str, ...]] = ("gpt2",)
    ignored: ClassVar[frozenset[str]] = frozenset(
        {"n_ctx", "n_special", "predict_special_tokens", "reorder_and_upcast_attn"}
    )

    def __post_init__(self) -> None:
        check_sizes(self)
        _check_eps("layer_norm_epsilon", self.layer_norm_epsilon)
        resolve_head_dim(self.n_embd, self.n_head, None)
        check_activation(self.activation_function, "activation_function")

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys under GPT-2's names; the general names of sizes are accepted, too."""
        names = {
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        }
        return rename_keys(raw, names)

    @property
    def hidden(self) -> int:
        """The hidden size of the feed-forward layers: 4 M if n_inner is not given."""
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the decoder, with its table of positions."""
        M = self.n_embd
        return ModelSpec(
            name,
            self.vocab_size,
            M,
            (_layer(M, self.n_head, self.hidden),) * self.n_layer,
            positions=self.n_positions * M,
            position_rows=1,
            max_context=self.n_positions,
            norms=_norm(M),
            tied=self.tie_word_embeddings,
        )


NEOX_NAMES = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
"""GPT-NeoX's name of a key -> the general name."""


@dataclass(frozen=True)
class GPTNeoXConfig(ModelConfig):
    """The keys of GPT-NeoX and Pythia.

    Raises:
        ArgumentError: a size is less than 1, the norms' eps is not above 0, num_attention_heads
            does not divide hidden_size, the activation is not known, or the settings of rotary
            positions are not supported.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-5
    max_position_embeddings: int = 2048
    rotary_emb_base: float = 10000.0
    rotary_pct: float = 0.25
    rope_scaling: Mapping[str, object] | None = None
    use_parallel_residual: bool = True
    attention_bias: bool = True
    tie_word_embeddings: bool = False

    model_types: ClassVar[tuple[str, ...]] = ("gpt_neox",)

    def __post_init__(self) -> None:
        check_sizes(self)
        _check_eps("layer_norm_eps", self.layer_norm_eps)
        check_activation(self.hidden_act)
        check_rope(self.rope)

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys under GPT-NeoX's names; rotary settings may be in rope_parameters."""
        keys = normalize_rope(rename_keys(raw, NEOX_NAMES))
        return rename_keys(keys, {general: own for own, general in NEOX_NAMES.items()})

    @property
    def rope(self) -> RopeSettings:
        """The settings of the rotary positions of every layer."""
        return RopeSettings(
            resolve_head_dim(self.hidden_size, self.num_attention_heads, None),
            self.rotary_emb_base,
            self.rope_scaling,
            self.max_position_embeddings,
            partial=self.rotary_pct,
        )

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the decoder."""
        M = self.hidden_size
        layer = _layer(
            M,
            self.num_attention_heads,
            self.intermediate_size,
            attention_bias=self.attention_bias,
        )
        return ModelSpec(
            name,
            self.vocab_size,
            M,
            (layer,) * self.num_hidden_layers,
            norms=_norm(M),
            tied=self.tie_word_embeddings,
        )


@dataclass(frozen=True)
class BloomConfig(ModelConfig):
    """The keys of BLOOM.

    Raises:
        ArgumentError: a size is less than 1, the norms' eps is not above 0, or n_head does not
            divide hidden_size.
    """

    vocab_size: int
    hidden_size: int
    n_layer: int
    n_head: int
    layer_norm_epsilon: float = 1e-5
    apply_residual_connection_post_layernorm: bool = False
    tie_word_embeddings: bool = True

    model_types: ClassVar[tuple[str, ...]] = ("bloom",)
    ignored: ClassVar[frozenset[str]] = frozenset(
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
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {"n_inner": (None,)}

    def __post_init__(self) -> None:
        check_sizes(self)
        _check_eps("layer_norm_epsilon", self.layer_norm_epsilon)
        resolve_head_dim(self.hidden_size, self.n_head, None)

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys with BLOOM's spelling; n_embed and the general names are accepted,
        too.
        """
        names = {
            "n_embed": "hidden_size",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        }
        return rename_keys(raw, names)

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the decoder, with the norm after its embedding."""
        M = self.hidden_size
        return ModelSpec(
            name,
            self.vocab_size,
            M,
            (_layer(M, self.n_head, 4 * M),) * self.n_layer,
            norms=_norm(M) + _norm(M),
            tied=self.tie_word_embeddings,
        )


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
class MptConfig(ModelConfig):
    """The keys of MPT.

    Raises:
        ArgumentError: a size is less than 1, the norms' eps is not above 0, n_heads does not divide
            d_model, or attn_config asks for something unsupported.
    """

    vocab_size: int
    d_model: int
    n_heads: int
    n_layers: int
    max_seq_len: int = 2048
    layer_norm_epsilon: float = 1e-5
    attn_config: Mapping[str, Any] = field(default_factory=dict)
    tie_word_embeddings: bool = True

    model_types: ClassVar[tuple[str, ...]] = ("mpt",)
    code: ClassVar[str | None] = "MPT"
    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "embedding_fraction",
            "init_config",
            "init_device",
            "learned_pos_emb",
            "tokenizer_name",
            "verbose",
        }
    )
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "expansion_ratio": (4,),
        "logit_scale": (None,),
        "no_bias": (True,),
        "norm_type": ("low_precision_layernorm", "layernorm"),
    }

    def __post_init__(self) -> None:
        check_sizes(self)
        _check_eps("layer_norm_epsilon", self.layer_norm_epsilon)
        resolve_head_dim(self.d_model, self.n_heads, None)
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
        names = {
            "hidden_size": "d_model",
            "num_attention_heads": "n_heads",
            "num_hidden_layers": "n_layers",
        }
        keys = rename_keys(raw, names)
        attention = keys["attn_config"] = {} if (own := keys.get("attn_config")) is None else own
        if isinstance(attention, Mapping):
            without = {"attn_impl", "is_encoder_decoder"}
            keys["attn_config"] = {
                k: v for k, v in attention.items() if not (k in without or is_harmless(k))
            }
        return keys

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the decoder, which has no biases at all."""
        M = self.d_model
        layer = _layer(M, self.n_heads, 4 * M, bias=False, attention_bias=False)
        return ModelSpec(
            name,
            self.vocab_size,
            M,
            (layer,) * self.n_layers,
            norms=_norm(M, bias=False),
            tied=self.tie_word_embeddings,
        )
