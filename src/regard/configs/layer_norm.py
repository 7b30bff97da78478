"""Decoders with LayerNorms and feed-forward layers without a gate, whose makers give the same sizes
different names: what they share, and `LayerNormRecipe`, from which the network is built and `sizes`
counts.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from regard.argument_checks import check_number, resolve_head_dim
from regard.configs.base import Flag, ModelConfig, Number, check_activation, check_sizes
from regard.configs.rope import RopeSettings, check_rope
from regard.cost.model import DenseSpec, LayerSpec, ModelSpec
from regard.cost.softmax import SoftmaxSpec
from regard.cost.spec import HeadShape, ParameterCounts

RowOrder: TypeAlias = Literal["parts", "heads", "groups"]


@dataclass(frozen=True)
class LayerNormRecipe:
    """In which parts a family of decoders with LayerNorms differs from GPT-2.

    Attributes:
        eps: the eps of the norms.
        activation, width: the attributes with the nonlinearity and the width of the feed-forward
            layers; without a width it is 4 M.
        rows: the order of the rows in the matrix of queries, keys and values; None if each of them
            has its own.
        qkv_bias, output_bias, ff_bias, norm_bias, head_bias: which maps and norms have biases.
        positions, unused: the attribute with the rows of a learned table of positions, and the rows
            in front of them that no position uses.
        embedding_norm: whether the embedding has a norm, too.
        normed_residual: whether the residual connections begin behind the norms.
    """

    eps: Number = "layer_norm_epsilon"
    activation: str = "activation_function"
    width: str | None = None
    rows: RowOrder | None = "parts"
    qkv_bias: Flag = True
    output_bias: Flag = True
    ff_bias: Flag = True
    norm_bias: bool = True
    head_bias: bool = False
    positions: str | None = None
    unused: int = 0
    embedding_norm: bool = False
    normed_residual: Flag = False


@dataclass(frozen=True)
class LayerNormConfig(ModelConfig, ABC):
    """The keys of a model with LayerNorms, whose `renamed` has its own names of the usual sizes."""

    vocab_size: int

    recipe: ClassVar[LayerNormRecipe]

    def __post_init__(self) -> None:
        check_sizes(self)
        if isinstance(self.recipe.eps, str):
            check_number(self.recipe.eps, self.value(self.recipe.eps), 0, float("inf"), "above 0")
        check_activation(self.value(self.recipe.activation), self.recipe.activation)
        resolve_head_dim(self.model_dim, self.heads, None)
        if self.rope is not None:
            check_rope(self.rope)

    def _size(self, name: str) -> int:
        """Return the value of a key by its general name."""
        return int(self.value(self.renamed.get(name, name)))

    @property
    def model_dim(self) -> int:
        """The width M of hidden states."""
        return self._size("hidden_size")

    @property
    def heads(self) -> int:
        """The number of query heads H."""
        return self._size("num_attention_heads")

    @property
    def layers(self) -> int:
        """The number of decoder layers."""
        return self._size("num_hidden_layers")

    @property
    def hidden(self) -> int:
        """The hidden size of the feed-forward layers: 4 M if the file does not give it."""
        width = self.value(self.recipe.width)
        return 4 * self.model_dim if width is None else int(width)

    @property
    def groups(self) -> int:
        """The number of key/value heads G."""
        return self.heads

    @property
    def rows(self) -> RowOrder | None:
        """The order of the rows in the matrix of queries, keys and values."""
        return self.recipe.rows

    @property
    def rope(self) -> RopeSettings | None:
        """The rotary settings of every layer; None without rotary positions."""
        return None

    @property
    def parallel_norms(self) -> int:
        """The norms in front of parallel sublayers; 0 if the sublayers follow one another."""
        return 0

    def windows(self) -> tuple[int | None, ...]:
        """Return the window of each layer; None for a global one."""
        return (None,) * self.layers

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the decoder; the biases of a head count as biases."""
        M, recipe, value = self.model_dim, self.recipe, self.value
        D = resolve_head_dim(M, self.heads, None)
        shape = HeadShape(self.heads, self.groups, D, D)
        biases = {"bias": value(recipe.qkv_bias), "output_bias": value(recipe.output_bias)}
        feed = DenseSpec(M, self.hidden, gated=False, bias=value(recipe.ff_bias))
        norm = ParameterCounts(norms=(2 if recipe.norm_bias else 1) * M)
        norms = norm if self.parallel_norms == 1 else norm + norm
        layers = tuple(
            LayerSpec(SoftmaxSpec.of(M, shape, window=window, **biases), feed, norms)
            for window in self.windows()
        )
        rows = value(recipe.positions) or 0
        head = ParameterCounts(biases=self.vocab_size if recipe.head_bias else 0)
        return ModelSpec(
            name,
            self.vocab_size,
            M,
            layers,
            positions=(rows + recipe.unused) * M,
            position_rows=int(rows > 0),
            max_context=rows or None,
            norms=(norm + norm if recipe.embedding_norm else norm) + head,
            tied=value("tie_word_embeddings"),
        )
