"""One file per family, named as `model_type` in its config.json: a config with Hugging Face's keys, a builder, a name table.

Families never import one another; what they share stands in `models/checkpoint`, `models/rope`, `models/layer_types` and `nn`.
"""

from __future__ import annotations

import importlib
from typing import Any, cast

from regard.models.checkpoint.family import Family

FILES = {"llama": "llama"}
"""model_type -> the file that describes it."""
FAMILIES = tuple(sorted(FILES))
"""Every supported model_type."""


def family(model_type: str) -> Family | None:
    """The family of a `model_type`, or None.

    >>> family("llama").text
    'decoder'
    """
    if model_type not in FILES:
        return None
    module = importlib.import_module(f"regard.models.families.{FILES[model_type]}")
    return cast("Family", module.FAMILY)


def type_of(config: Any) -> str:
    """The `model_type` of a config."""
    file = type(config).__module__.rpartition(".")[2]
    return next(name for name, where in FILES.items() if where == file)
