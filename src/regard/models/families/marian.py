"""Marian, the translation models of OPUS-MT: BART with sinusoidal positions and without norms
behind the embeddings.

Source: Junczys-Dowmunt et al. 2018 (arXiv 1804.00344); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.bart import MarianConfig
from regard.models.assembly import bart_like
from regard.models.checkpoint.family import Family
from regard.models.encoder_decoder import EncoderDecoder
from regard.nn.embedding import SinusoidalPositions

Config = MarianConfig


def build(config: Config) -> EncoderDecoder:
    """Build the encoder-decoder of a config, with initial weights."""
    positions = [SinusoidalPositions(config.d_model, layout="halves") for _ in range(2)]
    return bart_like.encoder_decoder(config, positions, norm=False)


FAMILY = Family(
    Config,
    build,
    bart_like.NAMES,
    complete_config=bart_like.complete_config,
    prefixes=("model.",),
    buffers=(r"(model\.)?(encoder|decoder)\.embed_positions\.weight",),  # sinusoids
    architecture="encoder-decoder",
)
