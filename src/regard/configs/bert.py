"""`BertConfig`: the keys of a BERT config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from regard.argument_checks import resolve_head_dim
from regard.configs.base import ModelConfig, check_activation, check_sizes
from regard.cost.model import DenseSpec, LayerSpec, ModelSpec
from regard.cost.softmax import SoftmaxSpec
from regard.cost.spec import HeadShape, ParameterCounts


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
