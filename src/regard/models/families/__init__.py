"""One file per family, named as `model_type` in its config.json: a config with Hugging Face's keys,
a builder, a name table.

Families never import one another; what they share stands in `models/checkpoint`, `models/assembly`
and `nn`.
"""

from __future__ import annotations

import importlib
from typing import Any, cast

from regard.models.checkpoint.family import Family

FILES = {
    "bert": "bert",
    "bloom": "bloom",
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "gemma3_text": "gemma3_text",
    "gpt2": "gpt2",
    "gpt_neox": "gpt_neox",
    "gpt_oss": "gpt_oss",
    "llama": "llama",
    "mistral": "mistral",
    "mpt": "mpt",
    "olmo2": "olmo2",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "regard": "regard",
    "t5": "t5",
}
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
    return file if file in FILES else next(name for name, where in FILES.items() if where == file)
