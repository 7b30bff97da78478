"""Seed-OSS: Llama with biases on queries, keys and values.

Source: ByteDance Seed 2025, "Seed-OSS Open-Source Models"; key names as in Hugging Face
checkpoints.
"""

from __future__ import annotations

from regard.configs.llama_relatives import SeedOssConfig
from regard.models.assembly import llama_like
from regard.models.decoder import Decoder

Config = SeedOssConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    return llama_like.pre_norm_decoder(
        config,
        bias=config.attention_bias,
        output_bias=config.attention_out_bias,
        feed_forward_bias=config.mlp_bias,
    )


FAMILY = llama_like.family(Config, build)
