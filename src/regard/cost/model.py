"""The sizes of a whole model: its layers, embeddings and output head, and its parameters by
part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from regard.cost.feed_forward import FeedForwardSpec
from regard.cost.softmax import CrossSpec
from regard.cost.spec import ParameterCounts, Spec

PART_NAMES = (
    "embedding",
    "positions",
    "attention",
    "feed-forward",
    "experts",
    "shared expert",
    "router",
    "biases",
    "norms",
    "head",
)
"""The rows of a table of parameters, in their order. "biases" are those of all layers, including
attention sinks and gates.
"""

NO_PARAMETERS = ParameterCounts()


@dataclass(frozen=True)
class LayerSpec:
    """The sizes of one block of a model.

    Attributes:
        mixer: its attention, or the mechanism that replaces attention.
        feed_forward: its feed-forward layer; None if it has none.
        norms: the parameters of its norms.
        cross: its cross-attention to another sequence; None if it has none.
    """

    mixer: Spec
    feed_forward: FeedForwardSpec | None = None
    norms: ParameterCounts = NO_PARAMETERS
    cross: CrossSpec | None = None

    @property
    def mixers(self) -> tuple[Spec, ...]:
        """The self-attention, and the cross-attention if there is one."""
        return (self.mixer,) if self.cross is None else (self.mixer, self.cross)


@dataclass(frozen=True)
class PartCount:
    """The parameters of one part of a model, and those of them that are active for one token.

    A token uses one row of an embedding or of a table of positions. A tied output head has no
    parameters of its own, and all parameters of its matrix are active.
    """

    name: str
    parameters: int
    active_parameters: int


@dataclass(frozen=True)
class ModelSpec:
    """The sizes of a decoder, of an encoder, or of both.

    Attributes:
        name: the name of the model.
        vocab, dim: V and M.
        layers: the layers of the decoder; for a model with an encoder only, those of the encoder.
        encoder: the layers of the encoder of an encoder-decoder.
        positions: the number of values in learned tables of positions and segments.
        position_rows: how many rows of those tables one token uses.
        norms: the parameters of the norms outside the layers.
        head: whether there is an output matrix to logits.
        tied: whether that matrix is the embedding.
        pooler: the parameters of a pooler, or of other modules after the last layer.
        decodes: whether the model generates token by token.
        max_context: the largest context, where positions are learned; None if there is no limit.
        dtype: the format that its config.json names, as in `regard.cost.kv_formats.BITS`.
        notes: remarks for the reader of a report.

    >>> from regard.cost import model_of
    >>> gpt2 = model_of("gpt2")
    >>> gpt2.parameters, gpt2.layers[0].mixer.name
    (124439808, 'MHA 12/12 heads of 64')
    """

    name: str
    vocab: int
    dim: int
    layers: tuple[LayerSpec, ...]
    encoder: tuple[LayerSpec, ...] = ()
    positions: int = 0
    position_rows: int = 0
    norms: ParameterCounts = NO_PARAMETERS
    head: bool = True
    tied: bool = False
    pooler: ParameterCounts = NO_PARAMETERS
    decodes: bool = True
    max_context: int | None = None
    dtype: str = "bf16"
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def parts(self) -> tuple[PartCount, ...]:
        """All parameters and active parameters by part; parts that the model does not have are left
        out.
        """
        return self.parts_for(1)

    def parts_for(self, tokens: int) -> tuple[PartCount, ...]:
        """Return parameters by part, where the active ones are those that `tokens` tokens use
        together.

        Several tokens together use more experts than one token does.
        """
        whole, active = self._sums(None), self._sums(tokens)
        head = self.vocab * self.dim if self.head else 0
        own = {"embedding": self.vocab * self.dim, "positions": self.positions}
        own["head"] = 0 if self.tied else head
        used = {
            "embedding": min(tokens, self.vocab) * self.dim,
            "positions": min(tokens * self.position_rows * self.dim, self.positions),
            "head": head,
        }
        return tuple(
            PartCount(name, whole[name] + own.get(name, 0), active[name] + used.get(name, 0))
            for name in PART_NAMES
            if whole[name] + own.get(name, 0) + used.get(name, 0)
        )

    @property
    def parameters(self) -> int:
        """The number of all parameters."""
        return sum(part.parameters for part in self.parts)

    @property
    def active_parameters(self) -> int:
        """The number of active parameters, which are those that one token uses."""
        return sum(part.active_parameters for part in self.parts)

    @property
    def attention_parameters(self) -> int:
        """The number of parameters in the attention matrices of all layers."""
        return self._sums(None)["attention"]

    @property
    def mixers(self) -> Iterator[Spec]:
        """The specs of all attention mechanisms in the layers of the decoder."""
        return (mixer for layer in self.layers for mixer in layer.mixers)

    @property
    def attention_kinds(self) -> dict[str, int]:
        """How many layers have each kind of attention: its name to the number of layers."""
        return dict(Counter(m.name for layer in self._all for m in layer.mixers))

    @property
    def _all(self) -> tuple[LayerSpec, ...]:
        """The layers of the encoder and of the decoder."""
        return (*self.encoder, *self.layers)

    def _sums(self, tokens: int | None) -> Counter[str]:
        """Return parameters by part, without embeddings: those active for `tokens` tokens, or all
        if it is None.
        """
        sums: Counter[str] = Counter()
        for layer, times in Counter(self._all).items():
            own = [("attention", mixer.weights) for mixer in layer.mixers]
            if (feed := layer.feed_forward) is not None:
                own += (feed.weights if tokens is None else feed.active_weights(tokens)).items()
            for name, weights in (*own, ("norms", layer.norms)):
                sums.update(_counts_by_part(name, weights, times))
        for weights in (self.norms, self.pooler):
            sums.update(_counts_by_part("head", weights, 1))
        return sums


def _counts_by_part(name: str, weights: ParameterCounts, times: int) -> dict[str, int]:
    """Return the parameters of `times` equal layers by part: matrices belong to the part `name`,
    biases and norms to the parts "biases" and "norms".
    """
    counts = {"biases": times * weights.biases, "norms": times * weights.norms}
    return {**counts, name: counts.get(name, 0) + times * weights.matrices}
