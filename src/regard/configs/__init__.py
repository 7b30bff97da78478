"""Config classes that read config.json without torch; `regard.load` checks every key
(`reader.parse`), `regard cost` those that change sizes (`reader.read_sizes`).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from regard.configs.base import ModelConfig, Raw

MODEL_TYPES = {
    "bart": "bart marian whisper",
    "bert": "bert camembert distilbert modernbert roberta xlm-roberta",
    "cohere": "cohere cohere2",
    "deepseek": (
        "deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa kimi_k25 kimi_linear "
        "mistral4"
    ),
    "deepseek_v4": "deepseek_v4",
    "expert_layers": "hy_v3 mimo_v2_flash",
    "falcon": "falcon falcon_h1",
    "gemma": "gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text",
    "gemma4": "gemma4 gemma4_text",
    "glm": "glm glm4 glm4_moe",
    "gpt": "gpt2 gpt_bigcode gpt_neo gpt_neox gptj",
    "gpt_like": "bloom mpt opt",
    "gpt_oss": "gpt_oss",
    "granite": "bamba granite granite_swa granitemoe granitemoehybrid",
    "llama": "llama llama4 llama4_text",
    "llama_like": (
        "apertus arcee ernie4_5 ernie4_5_moe exaone4 exaone_moe helium hunyuan_v1_dense nanochat "
        "seed_oss smollm3 stablelm starcoder2"
    ),
    "lfm2": "lfm2 lfm2_moe",
    "mamba": "falcon_mamba jamba mamba mamba2",
    "minimax": "minimax minimax_m2 minimax_m3_vl minimax_m3_vl_text",
    "mistral": "ministral3 mistral mistral3 mixtral",
    "nemotron": "nemotron nemotron_h",
    "olmo": "olmo olmo2 olmo3 olmo_hybrid olmoe",
    "phi": "phi phi3 phimoe",
    "qwen": (
        "qwen2 qwen2_moe qwen3 qwen3_5 qwen3_5_moe "
        "qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen4_exp qwen4_exp_text"
    ),
    "regard": "regard",
    "rwkv": "rwkv",
    "step": "step3p5 step3p7",
    "t5": "t5",
}
"""Module of this package -> the model_types whose config classes it has."""
CONFIG_MODULES = {name: module for module, names in MODEL_TYPES.items() for name in names.split()}
"""model_type -> the module of this package with its config class."""
CONFIGS = tuple(sorted(CONFIG_MODULES))
"""Every model_type whose config.json is understood, and whose folders `regard.load` can load."""


def read_as(raw: Raw) -> object:
    """Return the `model_type` that reads a config.json: its own, or that of its language model
    where models that also read images have languages of several families.
    """
    name, text = raw.get("model_type"), raw.get("text_config")
    inner = text.get("model_type") if isinstance(text, Mapping) else None
    return inner if (name, inner) == ("mistral3", "mistral4") else name


def quantization_settings(raw: Raw) -> object:
    """Return the quantization_config of a config.json, or that of its language model."""
    text = raw.get("text_config")
    own = raw.get("quantization_config")
    return text.get("quantization_config") if own is None and isinstance(text, Mapping) else own


def config_class(model_type: str) -> type[ModelConfig] | None:
    """Return the config class of a `model_type`, or None if it is not supported."""
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
