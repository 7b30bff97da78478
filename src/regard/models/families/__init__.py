"""One file per model family, named like `model_type` in config.json: a builder and a name table.

The config of a family, which needs no torch, is in `regard.configs`. Families never import each
other; shared parts are in `models/checkpoint`, `models/assembly` and `nn`.
"""

from __future__ import annotations

import importlib

from regard.configs import LOADABLE, config_class
from regard.configs.base import ModelConfig
from regard.models.checkpoint.family import Family

FAMILIES = LOADABLE
"""Every `model_type` that can be loaded."""


def family(model_type: str) -> Family | None:
    """Return the family of a `model_type`, or None if it is not supported.

    >>> family("llama").architecture
    'decoder'
    """
    kind = config_class(model_type)
    if kind is None or model_type not in FAMILIES:
        return None
    module = importlib.import_module(f"{__name__}.{kind.model_types[0]}")
    its_family: Family = module.FAMILY
    return its_family


def model_type_of(config: ModelConfig) -> str:
    """Return the `model_type` of a config."""
    return config.model_types[0]
