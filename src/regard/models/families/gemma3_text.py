"""The language model of Gemma 3: a norm on each head instead of a soft cap on scores, sliding
windows in five of six layers, and two rotary bases.

From a folder with image input (`model_type` "gemma3"), only `text_config` and the tensors of the
language model are read.

Source: Gemma Team 2025 (arXiv 2503.19786); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.gemma import Gemma3Config
from regard.models.assembly import building_blocks, gemma, llama_like
from regard.models.checkpoint.family import Family
from regard.models.decoder import Decoder

Config = Gemma3Config


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    full, local = (
        building_blocks.rotary_module(config.rope),
        building_blocks.rotary_module(config.local_rope),
    )
    mixers = [
        gemma.attention(
            config,
            full if window is None else local,
            window,
            scale=config.query_pre_attn_scalar**-0.5,
            head_norms=True,
        )
        for window in config.windows()
    ]
    layers = [gemma.sandwich(config, mixer) for mixer in mixers]
    return gemma.decoder(config, layers, config.final_logit_softcapping)


def check(config: Config) -> None:
    """Check the numbers of both rotary settings."""
    for settings in (config.rope, config.local_rope):
        building_blocks.rotary_module(settings)


FAMILY = Family(
    Config,
    build,
    gemma.NAMES,
    check=check,
    prefixes=llama_like.PREFIXES,
    head=llama_like.HEAD,
    buffers=(*llama_like.BUFFERS, r"(model\.)?(vision_tower|multi_modal_projector)\..*"),
    rename_stored=llama_like.rename_language_model,
)
