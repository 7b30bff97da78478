"""Config classes that read config.json, one for each family of models; none imports torch.

`regard.load` and `regard cost` use the same classes. `regard.load` checks every key of config.json
(`reader.parse`); `regard cost` checks only the keys that change sizes (`reader.read_sizes`).
"""

from __future__ import annotations

import importlib

from regard.configs.base import ModelConfig

CONFIG_MODULES = {
    "bert": "bert",
    "bloom": "gpt",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "gemma": "gemma",
    "gemma2": "gemma",
    "gemma3": "gemma",
    "gemma3_text": "gemma",
    "gpt2": "gpt",
    "gpt_neox": "gpt",
    "gpt_oss": "llama",
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "mpt": "gpt",
    "olmo2": "llama",
    "phi3": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "qwen3_moe": "llama",
    "regard": "regard",
    "t5": "t5",
}
"""model_type -> the module of this package with its config class."""
COUNTED_ONLY = frozenset({"mixtral", "qwen3_moe"})
"""Families that `regard cost` counts and `regard.load` cannot load."""
CONFIGS = tuple(sorted(CONFIG_MODULES))
"""Every model_type whose config.json is understood."""
LOADABLE = tuple(name for name in CONFIGS if name not in COUNTED_ONLY)
"""Every model_type that `regard.load` can load."""


def config_class(model_type: str) -> type[ModelConfig] | None:
    """Return the config class of a `model_type`, or None if it is not supported.

    >>> config_class("gemma3").__name__
    'Gemma3Config'
    """
    if model_type not in CONFIG_MODULES:
        return None
    module = importlib.import_module(f"{__name__}.{CONFIG_MODULES[model_type]}")
    return next(
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, ModelConfig)
        and model_type in getattr(value, "model_types", ())
    )
