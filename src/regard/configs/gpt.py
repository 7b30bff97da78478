"""The configs of GPT-2, GPT-BigCode, GPT-J, GPT-Neo and GPT-NeoX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from regard.argument_checks import resolve_head_dim
from regard.configs.base import MAX_LAYERS, Raw, rename_keys
from regard.configs.layer_norm import LayerNormConfig, LayerNormRecipe, RowOrder
from regard.configs.rope import RopeSettings, normalize_rope
from regard.errors import ArgumentError
from regard.units import plural


@dataclass(frozen=True)
class GPT2Config(LayerNormConfig):
    """The keys of GPT-2, whose heads have keys and values of their own."""

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
    renamed = {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }
    recipe = LayerNormRecipe(width="n_inner", positions="n_positions")
    ignored = frozenset({"n_ctx", "n_special", "predict_special_tokens", "reorder_and_upcast_attn"})


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

    @property
    def groups(self) -> int:
        """The key/value heads G: one for all query heads, or one for each."""
        return 1 if self.multi_query else self.n_head

    @property
    def rows(self) -> RowOrder:
        """The order of the rows in the matrix of queries, keys and values."""
        return "parts" if self.multi_query else "heads"


@dataclass(frozen=True)
class GPTJConfig(LayerNormConfig):
    """The keys of GPT-J: parallel sublayers that share a norm, rotary pairs of neighbours in a part
    of each head, and a head with biases.
    """

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
    renamed = GPT2Config.renamed
    recipe = LayerNormRecipe(
        width="n_inner", rows=None, qkv_bias=False, output_bias=False, head_bias=True
    )
    ignored = frozenset({"rotary", "scale_attn_weights"})
    fixed = {"tie_word_embeddings": (False,)}
    tie_word_embeddings = False
    parallel_norms = 1

    @property
    def rope(self) -> RopeSettings:
        """The rotary settings: pairs of neighbours in the first `rotary_dim` numbers of a head."""
        D = resolve_head_dim(self.n_embd, self.n_head, None)
        return RopeSettings(
            D, 10000.0, None, self.n_positions, partial=self.rotary_dim / D, layout="interleaved"
        )


def _is_repetition(entry: object) -> bool:
    """Return whether an entry of `attention_types` is [names, number of repetitions]."""
    if not isinstance(entry, list) or len(entry) != 2:
        return False
    kinds, times = entry
    return isinstance(kinds, list) and type(times) is int and len(kinds) * times <= MAX_LAYERS


@dataclass(frozen=True)
class GPTNeoConfig(LayerNormConfig):
    """The keys of GPT-Neo: scores without a scale, and a window in some layers."""

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
    renamed = {"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"}
    recipe = LayerNormRecipe(
        width="intermediate_size", rows=None, qkv_bias=False, positions="max_position_embeddings"
    )
    ignored = frozenset({"embed_dropout", "resid_dropout"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.windows()

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys with `attention_layers`, which follow from `attention_types` if they are
        not given: [[["global", "local"], 12]] repeats the two names 12 times.
        """
        keys = super().normalize_keys(raw)
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

    def windows(self) -> tuple[int | None, ...]:
        """Return the window of each layer; None for a global one."""
        kinds = self.attention_layers
        if len(kinds) != self.num_layers or not set(kinds) <= {"global", "local"}:
            raise ArgumentError(
                "attention_layers must have 'global' or 'local' for each of "
                f"{plural(self.num_layers, 'layer')}; it is {list(kinds)}"
            )
        return tuple(self.window_size if kind == "local" else None for kind in kinds)


NEOX_NAMES = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
"""GPT-NeoX's name of a key -> the general name."""


@dataclass(frozen=True)
class GPTNeoXConfig(LayerNormConfig):
    """The keys of GPT-NeoX and Pythia."""

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
    recipe = LayerNormRecipe(
        eps="layer_norm_eps",
        activation="hidden_act",
        width="intermediate_size",
        rows="heads",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
    )

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

    @property
    def parallel_norms(self) -> int:
        """The norms in front of parallel sublayers; 0 if the sublayers follow one another."""
        return 2 if self.use_parallel_residual else 0
