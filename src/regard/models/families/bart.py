"""BART, Marian and Whisper: encoder-decoders of blocks with LayerNorms and biases, and a head that
is the embedding's matrix. Source: Lewis et al. 2019 (arXiv 1910.13461); Junczys-Dowmunt et al. 2018
(arXiv 1804.00344); Radford et al. 2022 (arXiv 2212.04356).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from regard.configs.bart import BartConfig, MarianConfig, StackedConfig, WhisperConfig
from regard.models.assembly.building_blocks import flags_of_stored
from regard.models.assembly.stacks import (
    LayerSizes,
    decoder_blocks,
    encoder_blocks,
    initialize_normal,
)
from regard.models.checkpoint.family import (
    Family,
    NameTable,
    TensorRule,
    weight_and_bias,
    weights_and_biases,
)
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.speech_to_text import SpeechEncoder
from regard.nn import InputEmbedding, PostNorm, PreNorm
from regard.nn.blocks.blocks import Residual
from regard.nn.blocks.embedding import LogMelEmbedding, SinusoidalPositions
from regard.nn.weights import Linear
from regard.positions import LearnedPositions, sinusoidal


def encoder_sizes(config: StackedConfig, residual: type[Residual] = PostNorm) -> LayerSizes:
    """Return the sizes of the encoder's layers."""
    return LayerSizes(
        config.d_model,
        config.encoder_attention_heads,
        config.encoder_ffn_dim,
        config.activation_function,
        key_bias=config.key_bias,
        residual=residual,
    )


def decoder_sizes(config: StackedConfig, residual: type[Residual] = PostNorm) -> LayerSizes:
    """Return the sizes of the decoder's layers."""
    return replace(
        encoder_sizes(config, residual),
        heads=config.decoder_attention_heads,
        hidden=config.decoder_ffn_dim,
    )


def _encoder_decoder(
    config: BartConfig | MarianConfig, positions: Sequence[nn.Module], *, norm: bool
) -> EncoderDecoder:
    """Build an encoder-decoder with initial weights: normal (std 0.02), biases 0, norms 1."""
    M, V = config.d_model, config.vocab_size
    embedding, head = nn.Embedding(V, M), Linear(M, V, bias=config.logits_bias)
    head.weight = embedding.weight
    scale = M**0.5 if config.scale_embedding else 1.0
    embeds = [
        InputEmbedding(embedding, part, scale=scale, norm=nn.LayerNorm(M) if norm else None)
        for part in positions
    ]
    encoder = Encoder(
        embeds[0], encoder_blocks(encoder_sizes(config), config.encoder_layers), nn.Identity()
    )
    blocks = decoder_blocks(decoder_sizes(config), config.decoder_layers)
    model = EncoderDecoder(encoder, embeds[1], blocks, nn.Identity(), head)
    initialize_normal(model)
    return model


LOGITS_BIAS = "final_logits_bias"


def _first_row(stored: Tensor, _: object) -> tuple[Tensor]:
    return (stored[0],)


def _as_row(parts: Sequence[Tensor]) -> Tensor:
    return parts[0][None]


_SELF = {f"self_attn.{x}_proj": f"attention.project.{x}.linear" for x in "qkv"}
_CROSS = {f"encoder_attn.{x}_proj": f"cross.project.{x}.linear" for x in "qkv"}
ENCODER_LAYER = {
    **_SELF,
    "self_attn.out_proj": "attention.output",
    "self_attn_layer_norm": "attention_residual.norm",
    "fc1": "feed_forward.up",
    "fc2": "feed_forward.down",
    "final_layer_norm": "feed_forward_residual.norm",
}
"""Name of a part of an encoder's layer -> its name in the network."""
DECODER_LAYER = {
    **ENCODER_LAYER,
    **_CROSS,
    "encoder_attn.out_proj": "cross.output",
    "encoder_attn_layer_norm": "cross_residual.norm",
}
"""Name of a part of a decoder's layer -> its name in the network."""
LAYERS = {
    **weights_and_biases(ENCODER_LAYER, "model.encoder.layers.{}.", "encoder.layers.{}."),
    **weights_and_biases(DECODER_LAYER, "model.decoder.layers.{}.", "layers.{}."),
}
"""Stored name -> parameter name; {} is the layer."""
SHARED_NAMES: NameTable = {
    "model.shared.weight": "encoder.embed.embedding.weight",
    "model.encoder.embed_tokens.weight": "encoder.embed.embedding.weight",
    "model.decoder.embed_tokens.weight": "embed.embedding.weight",
    **LAYERS,
    "lm_head.weight": "head.weight",
    LOGITS_BIAS: TensorRule(("head.bias",), _first_row, _as_row),
}
"""Stored name -> parameter name, of what BART and Marian share."""


def _build_bart(config: BartConfig) -> EncoderDecoder:
    """Build the encoder-decoder of a config, with initial weights."""
    tables = [
        LearnedPositions(config.max_position_embeddings, config.d_model, offset=config.offset)
        for _ in range(2)
    ]
    return _encoder_decoder(config, tables, norm=True)


BART_NAMES: NameTable = {
    **SHARED_NAMES,
    "model.encoder.embed_positions.weight": "encoder.embed.positional.weight",
    "model.decoder.embed_positions.weight": "embed.positional.weight",
    **weight_and_bias("model.encoder.layernorm_embedding", "encoder.embed.norm"),
    **weight_and_bias("model.decoder.layernorm_embedding", "embed.norm"),
}


def _build_marian(config: MarianConfig) -> EncoderDecoder:
    """Build the encoder-decoder of a config, with initial weights."""
    positions = [SinusoidalPositions(config.d_model, layout="halves") for _ in range(2)]
    return _encoder_decoder(config, positions, norm=False)


def _build_whisper(config: WhisperConfig) -> EncoderDecoder:
    """Build the encoder-decoder of a config, with initial weights: normal (standard deviation
    0.02), biases 0, norms 1, and sinusoids as positions of the encoder.
    """
    M, V, S = config.d_model, config.vocab_size, config.max_source_positions
    embedding, head = nn.Embedding(V, M), Linear(M, V, bias=False)
    head.weight = embedding.weight
    table = LearnedPositions(S, M)
    encoder = SpeechEncoder(
        LogMelEmbedding(config.num_mel_bins, M, table),
        encoder_blocks(encoder_sizes(config, PreNorm), config.encoder_layers),
        nn.LayerNorm(M),
    )
    blocks = decoder_blocks(decoder_sizes(config, PreNorm), config.decoder_layers)
    embed = InputEmbedding(embedding, LearnedPositions(config.max_target_positions, M))
    model = EncoderDecoder(encoder, embed, blocks, nn.LayerNorm(M), head)
    initialize_normal(model)
    table.weight.data.copy_(sinusoidal(S, M, layout="tensor2tensor"))
    return model


WHISPER_NAMES: NameTable = {
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
    **LAYERS,
    "proj_out.weight": "head.weight",
}
FAMILIES = {
    "bart": Family(
        BartConfig,
        _build_bart,
        BART_NAMES,
        complete_config=flags_of_stored(logits_bias=LOGITS_BIAS),
        prefixes=("model.",),
        architecture="encoder-decoder",
    ),
    "marian": Family(
        MarianConfig,
        _build_marian,
        SHARED_NAMES,
        complete_config=flags_of_stored(logits_bias=LOGITS_BIAS),
        prefixes=("model.",),
        buffers=(r"(model\.)?(encoder|decoder)\.embed_positions\.weight",),  # sinusoids
        architecture="encoder-decoder",
    ),
    "whisper": Family(
        WhisperConfig,
        _build_whisper,
        WHISPER_NAMES,
        complete_config=flags_of_stored(),
        prefixes=("model.",),
        architecture="speech-to-text",
    ),
}
