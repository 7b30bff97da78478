"""The configs of further decoders with LayerNorms and feed-forward layers without a gate: Falcon,
GPT-BigCode, GPT-J, GPT-Neo and OPT.

Source of the keys: Hugging Face checkpoints. Papers: see the builders in `regard.models.families`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from regard.argument_checks import check_groups, check_number, resolve_head_dim
from regard.configs.base import (
    MAX_LAYERS,
    ModelConfig,
    Raw,
    check_activation,
    check_sizes,
    rename_keys,
)
from regard.configs.gpt import GPT2Config
from regard.configs.rope import RopeSettings, check_rope, normalize_rope
from regard.cost.model import DenseSpec, LayerSpec, ModelSpec
from regard.cost.softmax import SoftmaxSpec
from regard.cost.spec import HeadShape, ParameterCounts
from regard.errors import ArgumentError
from regard.units import plural


def _norms(dim: int, count: int) -> ParameterCounts:
    """Return the parameters of LayerNorms with weights and biases."""
    return ParameterCounts(norms=2 * dim * count)


@dataclass(frozen=True)
class GPTBigCodeConfig(GPT2Config):
    """The keys of GPT-BigCode (SantaCoder, StarCoder): GPT-2 whose heads share a key and a
    value.
    """

    activation_function: str = "gelu_pytorch_tanh"
    multi_query: bool = True

    model_types: ClassVar[tuple[str, ...]] = ("gpt_bigcode",)
    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "attention_softmax_in_fp32",
            "inference_runner",
            "max_batch_size",
            "max_sequence_length",
            "num_key_value_heads",  # transformers writes a number that it does not use
            "pad_key_length",
            "pre_allocate_kv_cache",
            "scale_attention_softmax_in_fp32",
            "validate_runner_input",
        }
    )
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "add_cross_attention": (False,),
        "scale_attn_by_inverse_layer_idx": (False,),
    }

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the decoder, with its table of positions."""
        M, H = self.n_embd, self.n_head
        D, G = resolve_head_dim(M, H, None), 1 if self.multi_query else H
        layer = LayerSpec(
            SoftmaxSpec.of(M, HeadShape(H, G, D, D), bias=True, output_bias=True),
            DenseSpec(M, self.hidden, gated=False, bias=True),
            _norms(M, 2),
        )
        return ModelSpec(
            name,
            self.vocab_size,
            M,
            (layer,) * self.n_layer,
            positions=self.n_positions * M,
            position_rows=1,
            max_context=self.n_positions,
            norms=_norms(M, 1),
            tied=self.tie_word_embeddings,
        )


@dataclass(frozen=True)
class GPTJConfig(ModelConfig):
    """The keys of GPT-J: parallel sublayers that share a norm, rotary pairs of neighbours in a part
    of each head, and a head with biases.

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
    rotary_dim: int = 64
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5

    model_types: ClassVar[tuple[str, ...]] = ("gptj",)
    ignored: ClassVar[frozenset[str]] = frozenset({"rotary", "scale_attn_weights"})
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {"tie_word_embeddings": (False,)}

    def __post_init__(self) -> None:
        check_sizes(self)
        check_number("layer_norm_epsilon", self.layer_norm_epsilon, 0, float("inf"), "above 0")
        check_activation(self.activation_function, "activation_function")
        check_rope(self.rope)

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys under GPT-J's names; the general names of sizes are accepted, too."""
        return GPT2Config.normalize_keys(raw)

    @property
    def hidden(self) -> int:
        """The hidden size of the feed-forward layers: 4 M if n_inner is not given."""
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    @property
    def rope(self) -> RopeSettings:
        """The rotary settings: pairs of neighbours in the first `rotary_dim` numbers of a head."""
        D = resolve_head_dim(self.n_embd, self.n_head, None)
        return RopeSettings(
            D, 10000.0, None, self.n_positions, partial=self.rotary_dim / D, layout="interleaved"
        )

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the decoder; the biases of the head count as biases."""
        M, H = self.n_embd, self.n_head
        D = resolve_head_dim(M, H, None)
        layer = LayerSpec(
            SoftmaxSpec.of(M, HeadShape(H, H, D, D)),
            DenseSpec(M, self.hidden, gated=False, bias=True),
            _norms(M, 1),
        )
        return ModelSpec(
            name,
            self.vocab_size,
            M,
            (layer,) * self.n_layer,
            norms=_norms(M, 1) + ParameterCounts(biases=self.vocab_size),
            tied=False,
        )


def _is_repetition(entry: object) -> bool:
    """Return whether an entry of `attention_types` is [names, number of repetitions]."""
    if not isinstance(entry, list) or len(entry) != 2:
        return False
    kinds, times = entry
    return isinstance(kinds, list) and type(times) is int and len(kinds) * times <= MAX_LAYERS


@dataclass(frozen=True)
class GPTNeoConfig(ModelConfig):
    """The keys of GPT-Neo: scores without a scale, and a window in some layers.

    Raises:
        ArgumentError: a size is less than 1, the norms' eps is not above 0, num_heads does not
            divide hidden_size, the activation is not known, or attention_layers has not "global" or
            "local" for each layer.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    max_position_embeddings: int = 2048
    intermediate_size: int | None = None
    window_size: int = 256
    attention_layers: tuple[str, ...] = ()
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = True

    model_types: ClassVar[tuple[str, ...]] = ("gpt_neo",)
    ignored: ClassVar[frozenset[str]] = frozenset({"embed_dropout", "resid_dropout"})

    def __post_init__(self) -> None:
        check_sizes(self)
        check_number("layer_norm_epsilon", self.layer_norm_epsilon, 0, float("inf"), "above 0")
        check_activation(self.activation_function, "activation_function")
        resolve_head_dim(self.hidden_size, self.num_heads, None)
        self.windows()

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys with `attention_layers`, which follow from `attention_types` if they are
        not given: [[["global", "local"], 12]] repeats the two names 12 times.
        """
        names = {"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"}
        keys = rename_keys(raw, names)
        types = keys.pop("attention_types", None)
        if keys.get("attention_layers") is None and isinstance(types, list):
            if not all(_is_repetition(entry) for entry in types):
                raise ArgumentError(
                    "attention_types must be a list of [names, number of repetitions], with at "
                    f"most {plural(MAX_LAYERS, 'layer')}"
                )
            keys["attention_layers"] = [
                kind for kinds, times in types for _ in range(times) for kind in kinds
            ]
        return keys

    @property
    def hidden(self) -> int:
        """The hidden size of the feed-forward layers: 4 M if intermediate_size is not given."""
        return 4 * self.hidden_size if self.intermediate_size is None else self.intermediate_size

    def windows(self) -> tuple[int | None, ...]:
        """Return the window of each layer; None for a global one."""
        kinds = self.attention_layers
        if len(kinds) != self.num_layers or not set(kinds) <= {"global", "local"}:
            raise ArgumentError(
                "attention_layers must have 'global' or 'local' for each of "
                f"{plural(self.num_layers, 'layer')}; it is {list(kinds)}"
            )
        return tuple(self.window_size if kind == "local" else None for kind in kinds)

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the decoder, with its table of positions."""
        M, H = self.hidden_size, self.num_heads
        D = resolve_head_dim(M, H, None)
        layers = (
            LayerSpec(
                SoftmaxSpec.of(M, HeadShape(H, H, D, D), output_bias=True, window=window),
                DenseSpec(M, self.hidden, gated=False, bias=True),
                _norms(M, 2),
            )
            for window in self.windows()
        )
        return ModelSpec(
            name,
            self.vocab_size,
            M,
            tuple(layers),
            positions=self.max_position_embeddings * M,
            position_rows=1,
            max_context=self.max_position_embeddings,
            norms=_norms(M, 1),
            tied=self.tie_word_embeddings,
        )


@dataclass(frozen=True)
class OPTConfig(ModelConfig):
    """The keys of OPT. Its table of positions has two unused rows in front.

    Raises:
        ArgumentError: a size is less than 1, num_attention_heads does not divide hidden_size, the
            activation is not known, or word_embed_proj_dim is not hidden_size.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    ffn_dim: int
    max_position_embeddings: int = 2048
    activation_function: str = "relu"
    word_embed_proj_dim: int | None = None
    tie_word_embeddings: bool = True

    model_types: ClassVar[tuple[str, ...]] = ("opt",)
    ignored: ClassVar[frozenset[str]] = frozenset({"init_std", "layerdrop"})
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "_remove_final_layer_norm": (False,),
        "do_layer_norm_before": (True,),
        "enable_bias": (True,),
        "layer_norm_elementwise_affine": (True,),
    }

    def __post_init__(self) -> None:
        check_sizes(self)
        check_activation(self.activation_function, "activation_function")
        resolve_head_dim(self.hidden_size, self.num_attention_heads, None)
        if self.word_embed_proj_dim not in (None, self.hidden_size):
            raise ArgumentError(
                f"word_embed_proj_dim is {self.word_embed_proj_dim}; only hidden_size, "
                f"{self.hidden_size}, is supported"
            )

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the decoder, with its table of positions."""
        M, H = self.hidden_size, self.num_attention_heads
        D = resolve_head_dim(M, H, None)
        layer = LayerSpec(
            SoftmaxSpec.of(M, HeadShape(H, H, D, D), bias=True, output_bias=True),
            DenseSpec(M, self.ffn_dim, gated=False, bias=True),
            _norms(M, 2),
        )
        return ModelSpec(
            name,
            self.vocab_size,
            M,
            (layer,) * self.num_hidden_layers,
            positions=(self.max_position_embeddings + 2) * M,
            position_rows=1,
            max_context=self.max_position_embeddings,
            norms=_norms(M, 1),
            tied=self.tie_word_embeddings,
        )


@dataclass(frozen=True)
class FalconConfig(ModelConfig):
    """The keys of Falcon: parallel sublayers, and one key and value for all query heads (7B) or for
    groups of them (40B, 180B, 11B).

    Raises:
        ArgumentError: a size is less than 1, the norms' eps is not above 0, the heads do not fit,
            or the settings of rotary positions are not supported.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_kv_heads: int | None = None
    ffn_hidden_size: int | None = None
    layer_norm_epsilon: float = 1e-5
    activation: str = "gelu"
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, object] | None = None
    max_position_embeddings: int = 2048
    bias: bool = False
    multi_query: bool = True
    new_decoder_architecture: bool = False
    num_ln_in_parallel_attn: int | None = None
    tie_word_embeddings: bool = True

    model_types: ClassVar[tuple[str, ...]] = ("falcon",)
    code: ClassVar[str | None] = "Falcon"
    ignored: ClassVar[frozenset[str]] = frozenset({"ff_factor"})
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "alibi": (False,),
        "apply_residual_connection_post_layernorm": (False,),
        "parallel_attn": (True,),
    }

    def __post_init__(self) -> None:
        check_sizes(self)
        check_number("layer_norm_epsilon", self.layer_norm_epsilon, 0, float("inf"), "above 0")
        check_activation(self.activation, "activation")
        check_groups(self.num_attention_heads, self.groups)
        check_rope(self.rope)
        if self.num_ln_in_parallel_attn not in (None, 1, 2):
            raise ArgumentError(
                f"num_ln_in_parallel_attn is {self.num_ln_in_parallel_attn}; it must be 1 or 2"
            )

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys under Falcon's present names; rotary settings may be nested."""
        names = {"n_head": "num_attention_heads", "n_layer": "num_hidden_layers"}
        keys = rename_keys(raw, names | {"n_head_kv": "num_kv_heads"})
        return normalize_rope(keys)

    @property
    def groups(self) -> int:
        """The key/value heads G: `num_kv_heads` only in the new architecture, else 1 or all."""
        if self.new_decoder_architecture and self.num_kv_heads is not None:
            return self.num_kv_heads
        alone = self.multi_query and not self.new_decoder_architecture
        return 1 if alone else self.num_attention_heads

    @property
    def hidden(self) -> int:
        """The hidden size of the feed-forward layers: 4 M if ffn_hidden_size is not given."""
        return 4 * self.hidden_size if self.ffn_hidden_size is None else self.ffn_hidden_size

    @property
    def shares_norm(self) -> bool:
        """Whether both sublayers of a block read the result of one norm."""
        default = 2 if self.new_decoder_architecture else 1
        count = self.num_ln_in_parallel_attn or default
        return not (self.new_decoder_architecture and count == 2)

    @property
    def rope(self) -> RopeSettings:
        """The settings of the rotary positions of every layer."""
        D = resolve_head_dim(self.hidden_size, self.num_attention_heads, None)
        return RopeSettings(D, self.rope_theta, self.rope_scaling, self.max_position_embeddings)

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the decoder."""
        M, H = self.hidden_size, self.num_attention_heads
        D = resolve_head_dim(M, H, None)
        layer = LayerSpec(
            SoftmaxSpec.of(
                M, HeadShape(H, self.groups, D, D), bias=self.bias, output_bias=self.bias
            ),
            DenseSpec(M, self.hidden, gated=False, bias=self.bias),
            _norms(M, 1 if self.shares_norm else 2),
        )
        return ModelSpec(
            name,
            self.vocab_size,
            M,
            (layer,) * self.num_hidden_layers,
            norms=_norms(M, 1),
            tied=self.tie_word_embeddings,
        )
