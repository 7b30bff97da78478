"""The configs of BERT, RoBERTa and DistilBERT."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from regard.argument_checks import resolve_head_dim
from regard.configs.base import ModelConfig, Raw, check_activation, check_sizes, rename_keys
from regard.cost.model import DenseSpec, LayerSpec, ModelSpec
from regard.cost.softmax import SoftmaxSpec
from regard.cost.spec import HeadShape, ParameterCounts
from regard.errors import ArgumentError
from regard.units import plural


@dataclass(frozen=True)
class BertConfig(ModelConfig):
    """The keys of a BERT config.json that change the network, and two flags that only the stored
    tensors determine: `pooler` and `masked_words`.

    Attributes:
        pooler: whether there is a pooler.
        masked_words: whether there is a head for masked language modelling; its matrix is the
            embedding.

    Raises:
        ArgumentError: a size is less than 1, num_attention_heads does not divide hidden_size, or
            hidden_act is unknown.
    """

    vocab_size: int
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
    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "pooler_fc_size",
            "pooler_num_attention_heads",
            "pooler_num_fc_layers",
            "pooler_size_per_head",
        }
    )
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "directionality": ("bidi",),
        "pooler_type": ("first_token_transform",),
        "position_embedding_type": ("absolute",),
        "tie_word_embeddings": (True,),
    }

    def __post_init__(self) -> None:
        check_sizes(self)
        resolve_head_dim(self.hidden_size, self.num_attention_heads, None)
        check_activation(self.hidden_act)

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the encoder with its tables of positions and segments, and its
        pooler.

        A head for masked language modelling is not counted.
        """
        M, H = self.hidden_size, self.num_attention_heads
        D, norm = resolve_head_dim(M, H, None), ParameterCounts(norms=2 * M)
        layer = LayerSpec(
            SoftmaxSpec.of(M, HeadShape(H, H, D, D), bias=True, output_bias=True, causal=False),
            DenseSpec(M, self.intermediate_size, gated=False, bias=True),
            norm + norm,
        )
        return ModelSpec(
            name,
            self.vocab_size,
            M,
            (layer,) * self.num_hidden_layers,
            positions=(self.max_position_embeddings + self.type_vocab_size) * M,
            position_rows=2,
            norms=norm,
            head=False,
            pooler=ParameterCounts(M * M, M) if self.pooler else ParameterCounts(),
            decodes=False,
            max_context=self.max_position_embeddings,
        )


@dataclass(frozen=True)
class RobertaConfig(BertConfig):
    """The keys of RoBERTa and its relatives. Positions begin behind the row of the padding token,
    so that `max_position_embeddings` counts `pad_token_id` + 1 unused rows.

    Raises:
        ArgumentError: as in `BertConfig`; or no row is left for positions.
    """

    layer_norm_eps: float = 1e-5
    pad_token_id: int = 1

    model_types: ClassVar[tuple[str, ...]] = ("roberta", "xlm-roberta", "camembert")
    ignored: ClassVar[frozenset[str]] = BertConfig.ignored
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "add_cross_attention": (False,),
        "is_decoder": (False,),
        "position_embedding_type": ("absolute",),
        "tie_word_embeddings": (True,),
    }

    def __post_init__(self) -> None:
        check_sizes(self, zero=("pad_token_id",))
        resolve_head_dim(self.hidden_size, self.num_attention_heads, None)
        check_activation(self.hidden_act)
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

    @property
    def positions(self) -> int:
        """The number of positions with a vector."""
        return self.max_position_embeddings - self.offset

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the encoder, as for BERT; the unused rows count as parameters."""
        return replace(super().sizes(name), max_context=self.positions)


@dataclass(frozen=True)
class DistilBertConfig(ModelConfig):
    """The keys of DistilBERT, and a flag that only the stored tensors determine: `masked_words`.

    Attributes:
        masked_words: whether there is a head for masked language modelling; its matrix is the
            embedding.

    Raises:
        ArgumentError: a size is less than 1, n_heads does not divide dim, or the activation is
            unknown.
    """

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    hidden_dim: int
    max_position_embeddings: int
    activation: str = "gelu"
    masked_words: bool = False

    model_types: ClassVar[tuple[str, ...]] = ("distilbert",)
    ignored: ClassVar[frozenset[str]] = frozenset(
        {"qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds", "tie_weights_"}
    )
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {"tie_word_embeddings": (True,)}
    eps: ClassVar[float] = 1e-12

    def __post_init__(self) -> None:
        check_sizes(self)
        resolve_head_dim(self.dim, self.n_heads, None)
        check_activation(self.activation, "activation")

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys under DistilBERT's names; the general names are accepted, too."""
        names = {
            "hidden_size": "dim",
            "num_attention_heads": "n_heads",
            "num_hidden_layers": "n_layers",
        }
        return rename_keys(raw, names)

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the encoder with its table of positions.

        A head for masked language modelling is not counted.
        """
        M, H = self.dim, self.n_heads
        D, norm = resolve_head_dim(M, H, None), ParameterCounts(norms=2 * M)
        layer = LayerSpec(
            SoftmaxSpec.of(M, HeadShape(H, H, D, D), bias=True, output_bias=True, causal=False),
            DenseSpec(M, self.hidden_dim, gated=False, bias=True),
            norm + norm,
        )
        return ModelSpec(
            name,
            self.vocab_size,
            M,
            (layer,) * self.n_layers,
            positions=self.max_position_embeddings * M,
            position_rows=1,
            norms=norm,
            head=False,
            decodes=False,
            max_context=self.max_position_embeddings,
        )
