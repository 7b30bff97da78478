"""Helium: Llama that rotates pairs of neighbours.

Source: Kyutai 2025, "Helium 1"; key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.llama_relatives import HeliumConfig
from regard.models.assembly import llama_like
from regard.models.decoder import Decoder

Config = HeliumConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    return llama_like.pre_norm_decoder(
        config, bias=config.attention_bias, feed_forward_bias=config.mlp_bias
    )


FAMILY = llama_like.family(Config, build)
