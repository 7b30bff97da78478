"""The configs of BERT, RoBERTa, DistilBERT and ModernBERT."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import ClassVar

from regard.argument_checks import check_number, resolve_head_dim
from regard.configs.base import (
    FULL,
    SLIDING,
    ModelConfig,
    Raw,
    check_activation,
    check_sizes,
    layer_windows,
    rename_keys,
)
from regard.configs.layer_norm import LayerNormConfig, LayerNormRecipe
from regard.configs.rope import RopeSettings, normalize_rope
from regard.cost.model import DenseSpec, LayerSpec, ModelSpec
from regard.cost.softmax import NearbyKeys, SoftmaxSpec
from regard.cost.spec import HeadShape, ParameterCounts
from regard.errors import ArgumentError
from regard.units import plural


@dataclass(frozen=True)
class PostNormConfig(LayerNormConfig, ABC):
    """An encoder with norms behind its sublayers, and biases everywhere."""

    family_file = "bert"
    zero: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_sizes(self, zero=self.zero)
        resolve_head_dim(self.model_dim, self.heads, None)
        check_activation(self.value(self.recipe.activation), self.recipe.activation)

    @property
    def offset(self) -> int:
        """The number of unused rows in front of the table of positions."""
        return 0

    @property
    def positions(self) -> int:
        """The number of positions with a vector."""
        return int(self.value("max_position_embeddings")) - self.offset

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the encoder with its pooler, without a head for masked words; unused
        rows of the table of positions count as parameters.
        """
        M, H, segments = self.model_dim, self.heads, self.value("type_vocab_size")
        D, norm = resolve_head_dim(M, H, None), ParameterCounts(norms=2 * M)
        layer = LayerSpec(
            SoftmaxSpec.of(M, HeadShape(H, H, D, D), bias=True, output_bias=True, causal=False),
            DenseSpec(M, self.hidden, gated=False, bias=True),
            norm + norm,
        )
        return ModelSpec(
            name,
            self.vocab_size,
            M,
            (layer,) * self.layers,
            positions=(self.positions + self.offset + segments) * M,
            position_rows=2 if segments else 1,
            norms=norm,
            head=False,
            pooler=ParameterCounts(M * M, M) if self.value("pooler") else ParameterCounts(),
            decodes=False,
            max_context=self.positions,
        )


@dataclass(frozen=True)
class BertConfig(PostNormConfig):
    """The keys of a BERT config.json that change the network, and two flags that only the stored
    tensors determine: `pooler` and `masked_words`.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    hidden_act: str = "gelu"
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    pooler: bool = True
    masked_words: bool = False

    model_types: ClassVar[tuple[str, ...]] = ("bert",)
    recipe = LayerNormRecipe(
        eps="layer_norm_eps", activation="hidden_act", width="intermediate_size"
    )
    ignored = frozenset(
        {
            "pooler_fc_size",
            "pooler_num_attention_heads",
            "pooler_num_fc_layers",
            "pooler_size_per_head",
        }
    )
    fixed = {
        "directionality": ("bidi",),
        "pooler_type": ("first_token_transform",),
        "position_embedding_type": ("absolute",),
        "tie_word_embeddings": (True,),
    }


@dataclass(frozen=True)
class RobertaConfig(BertConfig):
    """The keys of RoBERTa and its relatives. Positions begin behind the row of the padding token,
    so that `max_position_embeddings` counts `pad_token_id` + 1 unused rows.
    """

    pad_token_id: int = 1

    model_types = ("roberta", "xlm-roberta", "camembert")
    ignored = BertConfig.ignored
    zero = ("pad_token_id",)
    fixed = {
        "add_cross_attention": (False,),
        "is_decoder": (False,),
        "position_embedding_type": ("absolute",),
        "tie_word_embeddings": (True,),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions < 1:
            raise ArgumentError(
                f"max_position_embeddings is {self.max_position_embeddings}, of which "
                f"{plural(self.offset, 'row')} in front are unused (pad_token_id + 1); none is "
                "left for positions"
            )

    @property
    def offset(self) -> int:
        """The number of unused rows in front of the table of positions."""
        return self.pad_token_id + 1


@dataclass(frozen=True)
class DistilBertConfig(PostNormConfig):
    """The keys of DistilBERT, and a flag that only the stored tensors determine: `masked_words`."""

    dim: int
    n_layers: int
    n_heads: int
    hidden_dim: int
    max_position_embeddings: int
    activation: str = "gelu"
    masked_words: bool = False

    model_types = ("distilbert",)
    ignored = frozenset(
        {"qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds", "tie_weights_"}
    )
    fixed = {"tie_word_embeddings": (True,)}
    renamed = {
        "hidden_size": "dim",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    }
    recipe = LayerNormRecipe(eps=1e-12, activation="activation", width="hidden_dim")
    type_vocab_size = 0
    pooler = False


BASES = {"global_rope_theta": "rope_theta", "local_rope_theta": "rope_local_base_freq"}
"""ModernBERT's names of the two rotary bases -> those of Gemma 3, which `normalize_rope` reads."""
PERIOD = "global_attn_every_n_layers"


@dataclass(frozen=True)
class ModernBertConfig(ModelConfig):
    """The keys of ModernBERT, where a local layer sees local_attention // 2 keys on each side and
    the query's own; nothing depends on `pad_token_id`, which transformers wants in a saved folder.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int = 8192
    hidden_activation: str = "gelu"
    classifier_activation: str = "gelu"
    norm_eps: float = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    classifier_bias: bool = False
    decoder_bias: bool = True
    tie_word_embeddings: bool = True
    local_attention: int = 128
    layer_types: tuple[str, ...] | None = None
    global_rope_theta: float = 160000.0
    local_rope_theta: float = 10000.0
    pad_token_id: int | None = 50283
    masked_words: bool = False

    model_types = ("modernbert",)
    family_file = "bert"
    ignored = frozenset(
        {
            "classifier_pooling",  # of a classifier, which is refused by the names of its weights
            "deterministic_flash_attn",
            "initializer_cutoff_factor",
            "layer_norm_eps",  # of the released files; their code reads norm_eps
            "mlp_dropout",
            "reference_compile",
            "repad_logits_with_grad",
            "sparse_pred_ignore_index",
            "sparse_prediction",  # which logits a loss in training needs
        }
    )
    fixed = {
        # the released files say absolute, and their code has rotary positions only
        "position_embedding_type": ("absolute",),
    }

    def __post_init__(self) -> None:
        check_sizes(self, zero=("pad_token_id",))
        resolve_head_dim(self.hidden_size, self.num_attention_heads, None)
        check_activation(self.hidden_activation, "hidden_activation")
        check_activation(self.classifier_activation, "classifier_activation")
        for key in ("global_rope_theta", "local_rope_theta"):
            check_number(key, getattr(self, key), 1, float("inf"), "above 1")
        self.distances()

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys with both rotary bases under ModernBERT's names, and with `layer_types`
        in place of global_attn_every_n_layers.
        """
        keys = normalize_rope(rename_keys(raw, BASES), layered=True)
        both = keys.pop("rope_parameters")
        for own, kind in zip(BASES, (FULL, SLIDING), strict=True):
            settings = both[kind]
            if settings["rope_scaling"] is not None or "partial_rotary_factor" in settings:
                raise ArgumentError(
                    f"rope_parameters.{kind} is {settings}; modernbert supports only rope_theta"
                )
            if "rope_theta" in settings:
                keys[own] = settings["rope_theta"]
        period, layers = keys.pop(PERIOD, None), keys.get("num_hidden_layers")
        if period is None or not isinstance(layers, int):
            return keys
        if not isinstance(period, int) or period < 1:
            raise ArgumentError(f"{PERIOD} is {period!r}; it must be an integer of at least 1")
        by_period = [SLIDING if i % period else FULL for i in range(layers)]
        if keys.get("layer_types") not in (None, by_period):
            raise ArgumentError(
                f"layer_types is not what {PERIOD} {period} means; remove one of the two keys"
            )
        keys["layer_types"] = by_period
        return keys

    def distances(self) -> tuple[int | None, ...]:
        """Return the largest distance of a visible key in each layer, or None for a global one, as
        layers 0, 3, 6, ... are without `layer_types`.
        """
        kinds = self.layer_types or tuple(
            SLIDING if i % 3 else FULL for i in range(self.num_hidden_layers)
        )
        windows = layer_windows(
            self.num_hidden_layers, sliding_window=self.local_attention, layer_types=kinds
        )
        return tuple(None if window is None else window // 2 for window in windows)

    def rope(self, distance: int | None) -> RopeSettings:
        """Return the rotary settings of a layer with this entry in `distances`."""
        theta = self.global_rope_theta if distance is None else self.local_rope_theta
        D = self.hidden_size // self.num_attention_heads
        return RopeSettings(D, theta, None, self.max_position_embeddings)

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the encoder; a head for masked language modelling is not counted."""
        M, H = self.hidden_size, self.num_attention_heads
        D = resolve_head_dim(M, H, None)
        one = ParameterCounts(norms=(1 + self.norm_bias) * M)
        feed = DenseSpec(M, self.intermediate_size, bias=self.mlp_bias)
        shape, biases = HeadShape(H, H, D, D), (4 * M if self.attention_bias else 0)
        weights = shape.maps(M) + ParameterCounts(biases=biases)
        layers = tuple(
            LayerSpec(
                SoftmaxSpec(weights, (), shape, NearbyKeys(distance)),
                feed,
                one if i == 0 else one + one,
            )
            for i, distance in enumerate(self.distances())
        )
        return ModelSpec(
            name,
            self.vocab_size,
            M,
            layers,
            norms=one + one,
            head=False,
            decodes=False,
            max_context=self.max_position_embeddings,
        )
