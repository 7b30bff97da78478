"""One file per family, named as `model_type` in its config.json: a builder and a name table.

The family's config, which needs no torch, stands in `regard.configs`. Families never import one
another; what they share stands in `models/checkpoint`, `models/assembly` and `nn`.
"""

from __future__ import annotations

import importlib
from typing import cast

from regard.configs import LOADABLE, config_class
from regard.configs.base import ModelConfig
from regard.models.checkpoint.family import Family

FAMILIES = LOADABLE
"""Every supported model_type."""


def family(model_type: str) -> Family | None:
    """The family of a `model_type`, or None.

    >>> family("llama").text
    'decoder'
    """
    kind = config_class(model_type)
    if kind is None or model_type not in FAMILIES:
        return None
    module = importlib.import_module(f"{__name__}.{kind.model_types[0]}")
    return cast("Family", module.FAMILY)


def model_type_of(config: ModelConfig) -> str:
    """The `model_type` of a config."""
    return config.model_types[0]
