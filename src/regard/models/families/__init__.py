"""The network and the name table of each model family that a `DecoderRecipe` alone does not give,
in the file that its config names (`family_file`); these files never import each other.
"""

from __future__ import annotations

import importlib
from functools import cache

from regard.configs import CONFIGS, config_class
from regard.configs.base import ModelConfig
from regard.configs.rotary_decoder import RotaryDecoderConfig
from regard.did_you_mean import suggest
from regard.errors import ArgumentError
from regard.models.assembly import llama_like
from regard.models.checkpoint.family import Family

FAMILIES = CONFIGS
"""Every `model_type` that can be loaded."""


def family(model_type: str) -> Family:
    """Return the family of a `model_type`."""
    its_family = find_family(model_type)
    if its_family is None:
        raise ArgumentError(
            f"model_type {model_type!r} is not supported"
            f"{suggest(model_type, FAMILIES, otherwise='.')}"
        )
    return its_family


@cache
def find_family(model_type: str) -> Family | None:
    """Return the family of a `model_type`, or None if it is not supported."""
    kind = config_class(model_type)
    if kind is None:
        return None
    name = kind.model_types[0]
    if kind.family_file is not None:
        families: dict[str, Family] = importlib.import_module(
            f"{__name__}.{kind.family_file}"
        ).FAMILIES
        return families[name]
    assert issubclass(kind, RotaryDecoderConfig), f"{kind.__name__} has no recipe"
    return llama_like.family(kind)


def model_type_of(config: ModelConfig) -> str:
    """Return the `model_type` of a config."""
    return config.model_types[0]
