"""DeepSeek-V3 and R1: multi-head latent attention, and mixtures of experts with sigmoid scores and
a bias that balances their load.

Source: DeepSeek-AI 2024 (arXiv 2412.19437); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from functools import partial

from regard.configs.deepseek import DeepseekV3Config
from regard.models.assembly import deepseek, llama_like
from regard.models.checkpoint.family import Family
from regard.models.decoder import Decoder

Config = DeepseekV3Config


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    return deepseek.decoder(config, partial(deepseek.sigmoid_router, config))


FAMILY = Family(
    Config,
    build,
    deepseek.NAMES,
    check=lambda config: deepseek.check(config, partial(deepseek.sigmoid_router, config)),
    prefixes=llama_like.PREFIXES,
    head=llama_like.HEAD,
    buffers=deepseek.BUFFERS,
    # rounding this bias would change which experts are selected
    keep_float32=("*.router.correction",),
)
