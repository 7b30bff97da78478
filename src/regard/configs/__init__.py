"""Config classes that read config.json, one for each family of models; none imports torch.

`regard.load` and `regard cost` use the same classes. `regard.load` checks every key of config.json
(`reader.parse`); `regard cost` checks only the keys that change sizes (`reader.read_sizes`).
"""

from __future__ import annotations

import importlib

from regard.configs.base import ModelConfig

CONFIG_MODULES = {
    "arcee": "llama_relatives",
    "bamba": "state_space_hybrids",
    "bart": "bart",
    "bert": "bert",
    "bloom": "gpt",
    "camembert": "bert",
    "cohere": "layer_norm_decoders",
    "cohere2": "layer_norm_decoders",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "deepseek_v32": "deepseek",
    "distilbert": "bert",
    "ernie4_5": "llama_relatives",
    "exaone4": "llama_relatives",
    "falcon": "gpt_relatives",
    "falcon_h1": "state_space_hybrids",
    "gemma": "gemma",
    "gemma2": "gemma",
    "gemma3": "gemma",
    "gemma3_text": "gemma",
    "gemma3n": "gemma",
    "gemma3n_text": "gemma",
    "glm": "llama_relatives",
    "glm4": "llama_relatives",
    "glm4_moe": "mixtures",
    "glm_moe_dsa": "deepseek",
    "gpt2": "gpt",
    "gpt_bigcode": "gpt_relatives",
    "gpt_neo": "gpt_relatives",
    "gpt_neox": "gpt",
    "gpt_oss": "llama",
    "gptj": "gpt_relatives",
    "granite": "llama_relatives",
    "granitemoe": "mixtures",
    "granitemoehybrid": "state_space_hybrids",
    "helium": "llama_relatives",
    "jamba": "state_space_hybrids",
    "kimi_linear": "kimi_linear",
    "llama": "llama",
    "llama4": "llama4",
    "llama4_text": "llama4",
    "mamba2": "state_space",
    "marian": "bart",
    "minimax": "lightning_hybrids",
    "minimax_m2": "mixtures",
    "ministral3": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "modernbert": "modernbert",
    "mpt": "gpt",
    "nemotron": "layer_norm_decoders",
    "nemotron_h": "state_space_hybrids",
    "olmo": "layer_norm_decoders",
    "olmo2": "llama",
    "olmo3": "llama",
    "olmo_hybrid": "gated_delta_hybrids",
    "olmoe": "mixtures",
    "opt": "gpt_relatives",
    "phi": "layer_norm_decoders",
    "phi3": "llama",
    "phimoe": "phimoe",
    "qwen2": "llama",
    "qwen2_moe": "mixtures",
    "qwen3": "llama",
    "qwen3_5": "gated_delta_hybrids",
    "qwen3_5_moe": "gated_delta_hybrids",
    "qwen3_5_moe_text": "gated_delta_hybrids",
    "qwen3_5_text": "gated_delta_hybrids",
    "qwen3_moe": "llama",
    "qwen3_next": "gated_delta_hybrids",
    "regard": "regard",
    "roberta": "bert",
    "rwkv": "rwkv",
    "seed_oss": "llama_relatives",
    "smollm3": "llama_relatives",
    "stablelm": "layer_norm_decoders",
    "starcoder2": "layer_norm_decoders",
    "t5": "t5",
    "whisper": "whisper",
    "xlm-roberta": "bert",
}
"""model_type -> the module of this package with its config class."""
COUNTED_ONLY = frozenset(
    {
        "glm_moe_dsa",
        "ministral3",
    }
)
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
