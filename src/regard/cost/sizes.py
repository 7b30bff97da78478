"""The sizes of a model that a user gives by hand, as the flags of `regard cost` do.

The model is a decoder with RMS norms, any mechanism in `MECHANISMS`, and feed-forward layers or
experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from regard.cost.feed_forward import DenseSpec, FeedForwardSpec, MoESpec
from regard.cost.mechanisms import MECHANISMS, mechanism_spec
from regard.cost.model import LayerSpec, ModelSpec
from regard.cost.spec import ParameterCounts, Spec
from regard.errors import ArgumentError

MECHANISMS_WITH_WINDOW = tuple(
    name for name, builder in MECHANISMS.items() if "window" in builder.optional and name != "nsa"
)
"""Mechanisms whose layers may alternate between a window and full attention."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a decoder, given one by one.

    Attributes:
        layers: the number of layers.
        dim: M, the width of the model.
        heads: H, the number of query heads.
        attention: a name in `MECHANISMS`; None is MHA, GQA or MQA, according to the number of
            key/value heads.
        options: options of the mechanism: groups, head_dim, window, kv_rank and so on.
        global_every: with a window, every n-th layer has full attention.
        ff: F, the hidden width of the feed-forward layers; None is 4 M.
        gated: whether the feed-forward layers have a gate (SwiGLU).
        vocab: V, the number of tokens in the vocabulary.
        tied: whether the output head is the embedding.
        experts: the number of experts; None is a dense model.
        active: how many experts a token uses.
        expert_ff: the hidden width of an expert; None is `ff`.
        shared: the number of experts that all tokens use.
        dense_layers: the number of first layers without experts.

    Raises:
        ArgumentError: a size is less than 1, or two sizes contradict each other; the message names
            the flags.

    >>> llama = Sizes(32, 4096, 32, options={"groups": 8}, ff=14336, vocab=128256)  # Llama-3-8B
    >>> llama.model().parameters
    8030261248
    """

    layers: int
    dim: int
    heads: int
    attention: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    global_every: int | None = None
    ff: int | None = None
    gated: bool = True
    vocab: int = 32000
    tied: bool = False
    experts: int | None = None
    active: int | None = None
    expert_ff: int | None = None
    shared: int | None = None
    dense_layers: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "layers",
            "dim",
            "heads",
            "vocab",
            "ff",
            "experts",
            "active",
            "expert_ff",
            "shared",
            "global_every",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ArgumentError(f"{name} is {value}; it must be at least 1")
        if self.dense_layers is not None and self.dense_layers < 0:
            raise ArgumentError(f"dense_layers is {self.dense_layers}; it must be at least 0")
        if self.global_every is not None and self.options.get("window") is None:
            raise ArgumentError("--global-every needs a window: give --window too")
        if (self.experts is None) != (self.active is None):
            raise ArgumentError("--experts and --active belong together: give both, or neither")
        if self.experts is None and any((self.expert_ff, self.shared, self.dense_layers)):
            raise ArgumentError(
                "--expert-ff, --shared and --dense-layers need experts: give --experts and "
                "--active too"
            )
        if self.experts is not None and self.active is not None and self.active > self.experts:
            raise ArgumentError(
                f"--active is {self.active}, but --experts is {self.experts}; a token cannot use "
                "more experts than there are; give a smaller --active"
            )

    def model(self, name: str = "flags") -> ModelSpec:
        """Return the model of these sizes."""
        windowed_spec = self._spec(self.options)
        full_spec = windowed_spec
        if self.global_every is not None:
            full_spec = self._spec({**self.options, "window": None})
        norms, layers = ParameterCounts(norms=2 * self.dim), []
        for i in range(self.layers):
            is_global = self.global_every is not None and (i + 1) % self.global_every == 0
            layers.append(
                LayerSpec(full_spec if is_global else windowed_spec, self._feed_forward(i), norms)
            )
        return ModelSpec(
            name,
            self.vocab,
            self.dim,
            tuple(layers),
            norms=ParameterCounts(norms=self.dim),
            tied=self.tied,
        )

    def _spec(self, options: dict[str, Any]) -> Spec:
        mechanism = self.attention
        if mechanism is None:
            groups = options.get("groups")
            mechanism = "mha" if groups in (None, self.heads) else "gqa"
            options = {k: v for k, v in options.items() if k != "groups" or mechanism == "gqa"}
        if self.global_every is not None and mechanism not in MECHANISMS_WITH_WINDOW:
            raise ArgumentError(
                f"--global-every needs one of {', '.join(MECHANISMS_WITH_WINDOW)}; --attention is "
                f"{mechanism!r}: choose one of these, or leave --global-every out"
            )
        return mechanism_spec(mechanism, self.dim, self.heads, options)

    def _feed_forward(self, layer: int) -> FeedForwardSpec:
        ff = 4 * self.dim if self.ff is None else self.ff
        if self.experts is None or self.active is None or layer < (self.dense_layers or 0):
            return DenseSpec(self.dim, ff, self.gated)
        width = self.expert_ff or ff
        shared = (
            None if self.shared is None else DenseSpec(self.dim, width * self.shared, self.gated)
        )
        return MoESpec(DenseSpec(self.dim, width, self.gated), self.experts, self.active, shared)
