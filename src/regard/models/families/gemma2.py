"""Gemma 2: Gemma with soft caps on scores and logits, norms before and after each sublayer, and a
sliding window in layers 0, 2, 4, ...

Source: Gemma Team 2024 (arXiv 2408.00118); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.gemma import Gemma2Config
from regard.models.assembly import building_blocks, gemma, llama_like
from regard.models.decoder import Decoder

Config = Gemma2Config


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    rotary = building_blocks.rotary_module(config.rope)
    mixers = [
        gemma.attention(
            config,
            rotary,
            window,
            scale=config.query_pre_attn_scalar**-0.5,
            softcap=config.attn_logit_softcapping,
        )
        for window in config.windows()
    ]
    layers = [gemma.sandwich(config, mixer) for mixer in mixers]
    return gemma.decoder(config, layers, config.final_logit_softcapping)


FAMILY = llama_like.family(Config, build, gemma.NAMES)
