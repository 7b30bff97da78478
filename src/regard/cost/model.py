"""The sizes of a whole model: its layers, with dense feed-forward layers or mixtures of experts,
embeddings and output head, and its parameters by part.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol

from regard.cost.softmax import CrossSpec
from regard.cost.spec import ParameterCounts, Spec


class FeedForwardSpec(Protocol):
    """The protocol of a feed-forward layer: its parameters, and how many are active."""

    @property
    def weights(self) -> dict[str, ParameterCounts]:
        """All parameters of the layer, by part."""
        ...

    def active_weights(self, tokens: int) -> dict[str, ParameterCounts]:
        """Return the parameters that `tokens` use, by part; the expected number for experts."""
        ...


_NOTHING = ParameterCounts()


@dataclass(frozen=True)
class DenseSpec:
    """A dense layer: an up projection (M F), a down projection (F M), and if gated a gate
    projection (M F), each with or without a bias, and `beside` of smaller parts.
    """

    dim: int
    hidden: int
    gated: bool = True
    bias: bool = False
    beside: ParameterCounts = _NOTHING

    @property
    def total(self) -> ParameterCounts:
        """All parameters of the layer as one record."""
        up_projections = 2 if self.gated else 1
        biases = up_projections * self.hidden + self.dim if self.bias else 0
        matrices = (up_projections + 1) * self.dim * self.hidden
        return ParameterCounts(matrices, biases) + self.beside

    @property
    def weights(self) -> dict[str, ParameterCounts]:
        """All parameters, under the one part "feed-forward"."""
        return {"feed-forward": self.total}

    def active_weights(self, tokens: int) -> dict[str, ParameterCounts]:
        """Return all parameters, because a dense layer uses them for every token."""
        return self.weights


@dataclass(frozen=True)
class MoESpec:
    """A mixture of experts (MoE): a router chooses `active` of the experts for each token.

    Attributes:
        shared: an expert that all tokens use; None if there is none.
        router_bias: how many parameters the router has besides its matrix.
        shared_gate: whether each token weighs the shared expert by a gate, a linear map to one
            number.

    Source: Shazeer et al. 2017 (arXiv 1701.06538), equation 1.
    """

    expert: DenseSpec
    count: int
    active: int
    shared: DenseSpec | None = None
    router_bias: int = 0
    shared_gate: bool = False

    @property
    def weights(self) -> dict[str, ParameterCounts]:
        """The parameters of the experts, the router, and the shared expert."""
        return self._parts(self.count)

    def active_weights(self, tokens: int) -> dict[str, ParameterCounts]:
        """Return the parameters that n tokens use: those of E (1 - (1 - k / E)^n) experts."""
        unused_by_one = 1 - Fraction(self.active, self.count)
        if tokens <= 64:  # the exact power has few digits
            unused_by_all = unused_by_one**tokens
        else:
            unused_by_all = Fraction(float(unused_by_one) ** tokens)
        return self._parts(self.count * (1 - unused_by_all))

    def _parts(self, experts: Fraction | int) -> dict[str, ParameterCounts]:
        """Return the parameters by part if `experts` of the experts are counted."""
        one = self.expert.total
        used = ParameterCounts(math.ceil(experts * one.matrices), math.ceil(experts * one.biases))
        parts = {
            "experts": used,
            "router": ParameterCounts(self.expert.dim * self.count, self.router_bias),
        }
        if self.shared is None:
            return parts
        gate = ParameterCounts(self.expert.dim if self.shared_gate else 0)
        return {**parts, "shared expert": self.shared.total + gate}


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
"""The rows of a table of parameters in order; "biases" include attention sinks and gates."""

NO_PARAMETERS = ParameterCounts()


@dataclass(frozen=True)
class LayerSpec:
    """The sizes of one block; None is a missing part, and `parallel` reads the input of `mixer`."""

    mixer: Spec | None
    feed_forward: FeedForwardSpec | None = None
    norms: ParameterCounts = NO_PARAMETERS
    cross: CrossSpec | None = None
    parallel: Spec | None = None

    @property
    def mixers(self) -> tuple[Spec, ...]:
        """The self-attention, the parallel mechanism and the cross-attention, if present."""
        return tuple(x for x in (self.mixer, self.parallel, self.cross) if x is not None)


@dataclass(frozen=True)
class PartCount:
    """The parameters of one part, and those active for one token: one row of an embedding; or all
    of a tied one, in the head, which has no parameters of its own.
    """

    name: str
    parameters: int
    active_parameters: int


@dataclass(frozen=True)
class StoredSize:
    """The bytes of a model's weights as its files hold them, and the bits per number of
    "embedding", "experts" (of which a token reads a part) and "", the rest.
    """

    form: str
    bytes: int
    bits: tuple[tuple[str, Fraction], ...]

    def bits_of(self, part: str) -> Fraction:
        """Return the bits per number of a part of the model."""
        bits = dict(self.bits)
        return bits.get(part, bits.get("", Fraction(0)))


@dataclass(frozen=True)
class ModelSpec:
    """The sizes of a decoder, of an encoder, or of both.

    Attributes:
        layers: the layers of the decoder; for a model with an encoder only, those of the encoder.
        positions: the number of values in learned tables of positions and segments.
        position_rows: how many rows of those tables one token uses.
        token_tables: rows and width of further tables of embeddings, and how many rows one token
            uses; zeros if there are none.
        pooler: the parameters of a pooler, or of other modules before the first layer or after the
            last one.
        decodes: whether the model generates token by token.
        max_context: the largest context, where positions are learned; None if there is no limit.
        stated_context: the longest context that the maker gives; a longer one only has a note.
        dtype: the format that its config.json names, as in `regard.cost.report.BITS`.
        stored: the size of the weights as files hold them; None if they are plain numbers.
        notes: remarks for the reader of a report.
    """

    name: str
    vocab: int
    dim: int
    layers: tuple[LayerSpec, ...]
    encoder: tuple[LayerSpec, ...] = ()
    positions: int = 0
    position_rows: int = 0
    token_tables: tuple[int, int, int] = (0, 0, 0)
    norms: ParameterCounts = NO_PARAMETERS
    head: bool = True
    tied: bool = False
    pooler: ParameterCounts = NO_PARAMETERS
    decodes: bool = True
    max_context: int | None = None
    stated_context: int | None = None
    dtype: str = "bf16"
    stored: StoredSize | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def parts(self) -> tuple[PartCount, ...]:
        """All parameters and active parameters by part, without parts that are missing."""
        return self.parts_for(1)

    def parts_for(self, tokens: int) -> tuple[PartCount, ...]:
        """Return parameters by part, those that `tokens` use together being active."""
        whole, active = self._sums(None), self._sums(tokens)
        head = self.vocab * self.dim if self.head else 0
        rows, width, used_rows = self.token_tables
        own = {"embedding": self.vocab * self.dim + rows * width, "positions": self.positions}
        own["head"] = 0 if self.tied else head
        used = {
            # the rows of a table that is the head, too, are counted there
            "embedding": (0 if self.tied and self.head else min(tokens, self.vocab) * self.dim)
            + min(tokens * used_rows, rows) * width,
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
        """Return parameters by part without embeddings, active for `tokens`, or all if None."""
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
