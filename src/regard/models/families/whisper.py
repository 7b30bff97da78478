"""Whisper: an encoder of log-mel features and a decoder of pre-norm blocks, whose maps to keys have
no bias.

Source: Radford et al. 2022 (arXiv 2212.04356); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from torch import nn

from regard.configs.whisper import WhisperConfig
from regard.models.assembly import bart_like
from regard.models.checkpoint.family import Family, NameTable, weights_and_biases
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.speech_to_text import SpeechEncoder
from regard.nn import InputEmbedding, PreNorm
from regard.nn.embedding import LogMelEmbedding
from regard.nn.linear import Linear
from regard.positions import LearnedPositions, sinusoidal

Config = WhisperConfig


def build(config: Config) -> EncoderDecoder:
    """Build the encoder-decoder of a config, with initial weights: normal (standard deviation
    0.02), biases 0, norms 1, and sinusoids as positions of the encoder.
    """
    M, V, S = config.d_model, config.vocab_size, config.max_source_positions
    embedding, head = nn.Embedding(V, M), Linear(M, V, bias=False)
    head.weight = embedding.weight
    table = LearnedPositions(S, M)
    encoder = SpeechEncoder(
        LogMelEmbedding(config.num_mel_bins, M, table),
        bart_like.encoder_blocks(bart_like.encoder_sizes(config, PreNorm), config.encoder_layers),
        nn.LayerNorm(M),
    )
    blocks = bart_like.decoder_blocks(
        bart_like.decoder_sizes(config, PreNorm), config.decoder_layers
    )
    embed = InputEmbedding(embedding, LearnedPositions(config.max_target_positions, M))
    model = EncoderDecoder(encoder, embed, blocks, nn.LayerNorm(M), head)
    bart_like.initialize(model)
    table.weight.data.copy_(sinusoidal(S, M, layout="tensor2tensor"))
    return model


NAMES: NameTable = {
    **weights_and_biases(
        {
            "encoder.conv1": "encoder.embed.conv1",
            "encoder.conv2": "encoder.embed.conv2",
            "encoder.layer_norm": "encoder.norm",
            "decoder.layer_norm": "norm",
        },
        "model.",
        "",
    ),
    "model.encoder.embed_positions.weight": "encoder.embed.positional.weight",
    "model.decoder.embed_positions.weight": "embed.positional.weight",
    "model.decoder.embed_tokens.weight": "embed.embedding.weight",
    **bart_like.LAYERS,
    "proj_out.weight": "head.weight",
}
"""Stored name -> parameter name; {} is the layer."""

FAMILY = Family(
    Config,
    build,
    NAMES,
    complete_config=lambda config, _raw, _stored: config,
    prefixes=("model.",),
    architecture="speech-to-text",
)
