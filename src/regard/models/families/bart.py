"""BART: an encoder-decoder of post-norm blocks with learned positions, and a norm behind each
embedding.

Source: Lewis et al. 2019 (arXiv 1910.13461); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.bart import BartConfig
from regard.models.assembly import bart_like
from regard.models.checkpoint.family import Family, NameTable, weight_and_bias
from regard.models.encoder_decoder import EncoderDecoder
from regard.positions import LearnedPositions

Config = BartConfig


def build(config: Config) -> EncoderDecoder:
    """Build the encoder-decoder of a config, with initial weights."""
    tables = [
        LearnedPositions(config.max_position_embeddings, config.d_model, offset=config.offset)
        for _ in range(2)
    ]
    return bart_like.encoder_decoder(config, tables, norm=True)


NAMES: NameTable = {
    **bart_like.NAMES,
    "model.encoder.embed_positions.weight": "encoder.embed.positional.weight",
    "model.decoder.embed_positions.weight": "embed.positional.weight",
    **weight_and_bias("model.encoder.layernorm_embedding", "encoder.embed.norm"),
    **weight_and_bias("model.decoder.layernorm_embedding", "embed.norm"),
}
"""Stored name -> parameter name; {} is the layer."""

FAMILY = Family(
    Config,
    build,
    NAMES,
    complete_config=bart_like.complete_config,
    prefixes=("model.",),
    architecture="encoder-decoder",
)
