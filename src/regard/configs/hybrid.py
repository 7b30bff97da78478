"""The base class of the configs of models that mix layers with softmax attention and layers with a
state of fixed size.

Each class names the kind of every layer, and what a layer of a kind costs.

Source of the keys: Hugging Face checkpoints, and transformers' configuration classes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from regard.configs.base import FULL
from regard.configs.llama import GroupedQueryConfig
from regard.cost.model import FeedForwardSpec, LayerSpec, ModelSpec
from regard.cost.spec import ParameterCounts, Spec
from regard.did_you_mean import suggest
from regard.errors import ArgumentError
from regard.units import plural

LINEAR = "linear_attention"
"""The kind of a layer with a state of fixed size, as transformers names it."""
LAYER_NAMES = {"attention": FULL, "mamba": LINEAR, FULL: FULL, LINEAR: LINEAR}
"""Name of a kind in config.json -> its name here."""
Names: TypeAlias = tuple[str, ...] | None


def named_kinds(names: Sequence[str], layers: int, key: str = "layer_types") -> tuple[str, ...]:
    """Return the kind of each layer from the names in config.json.

    >>> named_kinds(["mamba", "attention"], 2)
    ('linear_attention', 'full_attention')
    """
    if len(names) != layers:
        raise ArgumentError(
            f"{key} has {plural(len(names), 'entry')} and num_hidden_layers is {layers}; give one "
            "per layer"
        )
    for i, name in enumerate(names):
        if name not in LAYER_NAMES:
            raise ArgumentError(
                f"{key}[{i}] is {name!r}; supported are {', '.join(LAYER_NAMES)}"
                f"{suggest(name, LAYER_NAMES, cutoff=0.8)}"
            )
    return tuple(LAYER_NAMES[name] for name in names)


@dataclass(frozen=True)
class HybridConfig(GroupedQueryConfig):
    """A model whose layers are of two kinds, `full_attention` and `linear_attention`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kinds()

    @abstractmethod
    def kinds(self) -> tuple[str, ...]:
        """Return the kind of each layer."""

    @abstractmethod
    def recurrent(self) -> Spec:
        """Return the sizes of the mechanism of a layer with a state of fixed size."""

    def feed_forward_of(self, layer: int) -> FeedForwardSpec:
        """Return the sizes of the feed-forward part of a layer."""
        return self.feed_forward()

    def mixer(self, kind: str) -> Spec:
        """Return the sizes of the mechanism of a layer of this kind."""
        return self.attention(None) if kind == FULL else self.recurrent()

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the decoder, layer by layer."""
        norms = ParameterCounts(norms=self.norms_per_block * self.hidden_size)
        layers = tuple(
            LayerSpec(self.mixer(kind), self.feed_forward_of(i), norms)
            for i, kind in enumerate(self.kinds())
        )
        return replace(super().sizes(name), layers=layers)
