"""Published models by name, as the keys of their config.json: data, read as any other config is."""

from __future__ import annotations

from regard.cost.known import deepseek, gemma, gpt, llama, qwen
from regard.cost.known.entry import Known

KNOWN: dict[str, Known] = gpt.MODELS | llama.MODELS | qwen.MODELS | gemma.MODELS | deepseek.MODELS
"""Name -> config and source."""

__all__ = ["KNOWN", "Known"]
