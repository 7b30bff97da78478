"""Llama 1 to 3: RMS norm, rotary positions with the layout "half", grouped queries, SwiGLU.

Source: Touvron et al. 2023 (arXiv 2307.09288); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.llama import LlamaConfig
from regard.models.assembly import llama_like
from regard.models.decoder import Decoder

Config = LlamaConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    bias = config.attention_bias
    return llama_like.pre_norm_decoder(
        config, bias=bias, output_bias=bias, feed_forward_bias=config.mlp_bias
    )


FAMILY = llama_like.family(Config, build)
