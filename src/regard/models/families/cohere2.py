"""Command R7B and Command A: Command R with a sliding window in three of four layers; the others
have no positions (NoPE).

Source: Cohere Team 2025 (arXiv 2504.00698); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.layer_norm_decoders import Cohere2Config
from regard.models.assembly import cohere, llama_like
from regard.models.decoder import Decoder

Config = Cohere2Config


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    return cohere.decoder(config)


FAMILY = llama_like.family(Config, build, cohere.NAMES)
