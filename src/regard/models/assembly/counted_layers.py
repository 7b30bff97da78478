"""What a layer costs in `regard cost --mechanisms` if its mechanism is not counted without torch:
it is built without memory for its weights.
"""

from __future__ import annotations

import inspect

import torch

from regard.configs.suggested_sizes import (
    BaseModel,
    CountedLayer,
    MechanismChoice,
)
from regard.cost.mechanisms import OPTIONS_WITHOUT_COST
from regard.did_you_mean import suggest
from regard.errors import ArgumentError
from regard.models.assembly.catalogue_mixer import build_mixer, find_decoder_variant
from regard.nn.variants.registry import find_variant, option_names, suggested_options

WITHOUT_SIZE = OPTIONS_WITHOUT_COST | {"depth"}
"""Options whose value is no size of the layer."""


def count_layer(choice: MechanismChoice, base: BaseModel) -> CountedLayer:
    """Return the cost of a layer of any mechanism that can be the layer of a decoder."""
    entry = find_decoder_variant(find_variant(choice.name).name)
    for name, value in entry.published_options.items():
        if not isinstance(value, int):
            raise ArgumentError(
                f"the cost of {entry.name} depends on {name}, which every text has of its own; "
                "compare the mechanism that it uses within a text, such as gqa"
            )
    known = option_names(entry)
    for name in choice.sizes:
        if name not in known:
            hint = suggest(name, known, otherwise=".")
            raise ArgumentError(
                f"{entry.name} has no option {name}{hint} Its options are {', '.join(known)}"
            )
    defaults = {
        name: (parameter.default, f"regard describe {entry.name}")
        for name, parameter in inspect.signature(entry.build).parameters.items()
        if type(parameter.default) is int and name in known and name not in WITHOUT_SIZE
    }
    suggested = {**defaults, **suggested_options(entry, base.sizes)}
    missing = {name: pair for name, pair in suggested.items() if name not in choice.sizes}
    options = {**{name: value for name, (value, _) in missing.items()}, **choice.sizes}
    with torch.device("meta"):
        mixer = build_mixer(entry.name, base.model.dim, base.heads, options)
    sizes = {name: value for name, value in options.items() if isinstance(value, int)}
    sources = {name: source for name, (_, source) in missing.items() if name in sizes}
    return CountedLayer(entry.name, mixer.spec, sizes, sources)
