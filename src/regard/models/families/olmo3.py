"""OLMo 3: OLMo 2 with a sliding window in three of four layers.

Source: Team OLMo 2025 (arXiv 2512.13961); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.llama import Olmo3Config
from regard.models.assembly import llama_like, olmo
from regard.models.decoder import Decoder

Config = Olmo3Config


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    return olmo.output_norm_decoder(config)


FAMILY = llama_like.family(Config, build, olmo.NAMES)
