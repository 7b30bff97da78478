"""Command R: parallel sublayers that share a LayerNorm without biases, rotary pairs of neighbours,
and a factor on the logits.

Source: Cohere 2024, "Command R"; key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.layer_norm_decoders import CohereConfig
from regard.models.assembly import cohere, llama_like
from regard.models.decoder import Decoder

Config = CohereConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    return cohere.decoder(config)


FAMILY = llama_like.family(Config, build, cohere.NAMES)
