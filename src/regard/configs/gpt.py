"""The configs of GPT-2, GPT-BigCode, GPT-J, GPT-Neo and GPT-NeoX, and the sizes of decoders with
LayerNorms and feed-forward layers without a gate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from regard.argument_checks import check_number, resolve_head_dim
from regard.configs.base import (
    MAX_LAYERS,
    ModelConfig,
    Raw,
    check_activation,
    check_sizes,
    rename_keys,
)
from regard.configs.rope import RopeSettings, check_rope, normalize_rope
from regard.cost.model import DenseSpec, LayerSpec, ModelSpec
from regard.cost.softmax import SoftmaxSpec
from regard.cost.spec import HeadShape, ParameterCounts
from regard.errors import ArgumentError
from regard.units import plural


def check_eps(key: str, value: float) -> None:
    """Check the eps of norms."""
    check_number(key, value, 0, float("inf"), "above 0")


def layer_norm_block(
    dim: int,
    heads: int,
    hidden: int,
    *,
    groups: int | None = None,
    window: int | None = None,
    norms: int = 2,
    bias: bool = True,
    qkv_bias: bool = True,
    output_bias: bool = True,
) -> LayerSpec:
    """Return the sizes of a block of attention, a feed-forward layer without a gate, and
    LayerNorms; `bias` is that of the latter two.
    """
    D = resolve_head_dim(dim, heads, None)
    shape = HeadShape(heads, heads if groups is None else groups, D, D)
    return LayerSpec(
        SoftmaxSpec.of(dim, shape, bias=qkv_bias, output_bias=output_bias, window=window),
        DenseSpec(dim, hidden, gated=False, bias=bias),
        layer_norms(dim, norms, bias=bias),
    )


def layer_norms(dim: int, count: int, *, bias: bool = True) -> ParameterCounts:
    """Return the parameters of LayerNorms."""
    return ParameterCounts(norms=count * (2 if bias else 1) * dim)


def layer_norm_decoder(
    name: str,
    vocab: int,
    layers: Sequence[LayerSpec],
    *,
    tied: bool,
    norms: int = 1,
    bias: bool = True,
) -> ModelSpec:
    """Return the sizes of a decoder with LayerNorms outside of its layers."""
    feed_forward = layers[0].feed_forward
    assert isinstance(feed_forward, DenseSpec)
    dim = feed_forward.dim
    outside = layer_norms(dim, norms, bias=bias)
    return ModelSpec(name, vocab, dim, tuple(layers), norms=outside, tied=tied)


def with_learned_positions(model: ModelSpec, rows: int, unused: int = 0) -> ModelSpec:
    """Return a model with a table of positions."""
    table = (rows + unused) * model.dim
    return replace(model, positions=table, position_rows=1, max_context=rows)


@dataclass(frozen=True)
class GPT2Config(ModelConfig):
    """The keys of GPT-2, whose heads have keys and values of their own."""

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

    model_types = ("gpt2",)
    family_file = "gpt"
    ignored = frozenset({"n_ctx", "n_special", "predict_special_tokens", "reorder_and_upcast_attn"})

    def __post_init__(self) -> None:
        check_sizes(self)
        check_eps("layer_norm_epsilon", self.layer_norm_epsilon)
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
        layers = (self.block(),) * self.n_layer
        model = layer_norm_decoder(name, self.vocab_size, layers, tied=self.tie_word_embeddings)
        return with_learned_positions(model, self.n_positions)

    def block(self) -> LayerSpec:
        """Return the sizes of a layer."""
        return layer_norm_block(self.n_embd, self.n_head, self.hidden)


@dataclass(frozen=True)
class GPTBigCodeConfig(GPT2Config):
    """The keys of GPT-BigCode (SantaCoder, StarCoder): GPT-2 with one key/value head."""

    activation_function: str = "gelu_pytorch_tanh"
    multi_query: bool = True

    model_types = ("gpt_bigcode",)
    ignored = frozenset(
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
    fixed = {
        "add_cross_attention": (False,),
        "scale_attn_by_inverse_layer_idx": (False,),
    }

    def block(self) -> LayerSpec:
        """Return the sizes of a layer, with one key and value for all heads."""
        groups = 1 if self.multi_query else self.n_head
        return layer_norm_block(self.n_embd, self.n_head, self.hidden, groups=groups)


@dataclass(frozen=True)
class GPTJConfig(ModelConfig):
    """The keys of GPT-J: parallel sublayers that share a norm, rotary pairs of neighbours in a part
    of each head, and a head with biases.
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

    model_types = ("gptj",)
    family_file = "gpt"
    ignored = frozenset({"rotary", "scale_attn_weights"})
    fixed = {"tie_word_embeddings": (False,)}

    def __post_init__(self) -> None:
        check_sizes(self)
        check_eps("layer_norm_epsilon", self.layer_norm_epsilon)
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
        layer = layer_norm_block(
            self.n_embd, self.n_head, self.hidden, norms=1, qkv_bias=False, output_bias=False
        )
        layers = (layer,) * self.n_layer
        model = layer_norm_decoder(name, self.vocab_size, layers, tied=False)
        return replace(model, norms=model.norms + ParameterCounts(biases=self.vocab_size))


def _is_repetition(entry: object) -> bool:
    """Return whether an entry of `attention_types` is [names, number of repetitions]."""
    if not isinstance(entry, list) or len(entry) != 2:
        return False
    kinds, times = entry
    return isinstance(kinds, list) and type(times) is int and len(kinds) * times <= MAX_LAYERS


@dataclass(frozen=True)
class GPTNeoConfig(ModelConfig):
    """The keys of GPT-Neo: scores without a scale, and a window in some layers."""

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

    model_types = ("gpt_neo",)
    family_file = "gpt"
    ignored = frozenset({"embed_dropout", "resid_dropout"})

    def __post_init__(self) -> None:
        check_sizes(self)
        check_eps("layer_norm_epsilon", self.layer_norm_epsilon)
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
        layers = tuple(
            layer_norm_block(
                self.hidden_size, self.num_heads, self.hidden, window=window, qkv_bias=False
            )
            for window in self.windows()
        )
        model = layer_norm_decoder(name, self.vocab_size, layers, tied=self.tie_word_embeddings)
        return with_learned_positions(model, self.max_position_embeddings)


NEOX_NAMES = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
"""GPT-NeoX's name of a key -> the general name."""


@dataclass(frozen=True)
class GPTNeoXConfig(ModelConfig):
    """The keys of GPT-NeoX and Pythia."""

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

    model_types = ("gpt_neox",)
    family_file = "gpt"

    def __post_init__(self) -> None:
        check_sizes(self)
        check_eps("layer_norm_eps", self.layer_norm_eps)
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
        bias = self.attention_bias
        layer = layer_norm_block(
            self.hidden_size,
            self.num_attention_heads,
            self.intermediate_size,
            qkv_bias=bias,
            output_bias=bias,
        )
        layers = (layer,) * self.num_hidden_layers
        return layer_norm_decoder(name, self.vocab_size, layers, tied=self.tie_word_embeddings)
