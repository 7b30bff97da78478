"""A decoder and its config, as conversions take and give them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard.models.convert.layer import Errors
from regard.models.decoder import Decoder
from regard.models.families import family, type_of


@dataclass(frozen=True)
class Checkpoint:
    """What a conversion takes, and what it gives.

    Attributes:
        network: the decoder.
        config: the frozen config of its family.
    """

    network: Decoder
    config: Any

    @property
    def model_type(self) -> str:
        """The family."""
        return type_of(self.config)

    def weights(self) -> dict[str, Tensor]:
        """Every parameter by name; a shared one under each of its names."""
        named = self.network.named_parameters(remove_duplicate=False)
        return {name: parameter.detach() for name, parameter in named}


@dataclass(frozen=True)
class Step:
    """What one conversion did.

    Attributes:
        what: in words.
        layers: what it lost in each layer; empty where weights did not change.
        curve: rank -> relative error, the root mean square over layers, where there was a rank to choose.
        notes: what to know about the result.
    """

    what: str
    layers: tuple[Errors, ...] = ()
    curve: Mapping[int, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def rebuilt(config: Any, weights: Mapping[str, Tensor]) -> Checkpoint:
    """The model of a config with these weights: no memory is taken for any other.

    Args:
        config: of a family.
        weights: every parameter of its model by name, each on its own or as another model's: they are not copied.
    """
    found = family(type_of(config))
    assert found is not None
    with torch.device("meta"):
        network = found.build(config)
    before: list[nn.Parameter] = []  # held, so that no id is given twice
    made: dict[int, nn.Parameter] = {}
    lost = set(weights) - {name for name, _ in network.named_parameters(remove_duplicate=False)}
    assert not lost, f"the model has no place for {sorted(lost)[:5]}"
    for prefix, module in network.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            before.append(parameter)
            if id(parameter) not in made:
                value = weights[f"{prefix}.{name}" if prefix else name]
                assert value.shape == parameter.shape, (prefix, name, value.shape, parameter.shape)
                made[id(parameter)] = nn.Parameter(value.contiguous(), requires_grad=False)
            module._parameters[name] = made[id(parameter)]
    return Checkpoint(cast("Decoder", network.eval()), config)
