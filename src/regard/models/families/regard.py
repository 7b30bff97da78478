"""The family "regard": pre-norm blocks of SwiGLU and any causal mechanism in `regard.nn.variants`.
No other library supports this model_type.

    x = E[id] + positions
    x = x + mechanism(norm(x))
    x = x + W_down (silu(W_gate norm(x)) * W_up norm(x))
    logits = W norm(x)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from regard.configs.regard import RegardConfig
from regard.models.assembly.building_blocks import embedding_and_head, initialize_weights
from regard.models.assembly.catalogue_mixer import build_mixer
from regard.models.checkpoint.family import SAME_NAMES, Family
from regard.models.decoder import Decoder
from regard.nn import Block, InputEmbedding, PreNorm, RMSNorm, SinusoidalPositions, SwiGLU
from regard.nn.mixer import Mixer
from regard.positions import LearnedPositions


@dataclass(frozen=True)
class Config(RegardConfig):
    """The config, with a check of the mechanism."""

    def __post_init__(self) -> None:
        super().__post_init__()
        with torch.device("meta"):  # only sizes are checked, and nothing is allocated
            self.mixer(0)

    def mixer(self, layer: int) -> Mixer:
        """Build the attention of a layer, counted from 0."""
        return build_mixer(
            self.attention,
            self.hidden_size,
            self.num_attention_heads,
            self.attention_options,
            layer=layer,
            position=self.position,
            window=self.window,
        )


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    embedding, head = embedding_and_head(
        config.vocab_size, config.hidden_size, tied=config.tie_word_embeddings
    )
    layers = [_block(config, layer) for layer in range(config.num_hidden_layers)]
    decoder = Decoder(_embed(config, embedding), layers, _norm(config), head)
    return initialize_weights(decoder)


def _embed(config: Config, embedding: nn.Embedding) -> InputEmbedding:
    M = config.hidden_size
    if config.position == "learned":
        return InputEmbedding(embedding, LearnedPositions(config.max_position_embeddings, M))
    if config.position == "sinusoidal":
        # the vectors of a tied embedding are small compared with the sinusoids, so they are scaled
        return InputEmbedding(
            embedding, SinusoidalPositions(M), scale=M**0.5 if config.tie_word_embeddings else 1.0
        )
    return InputEmbedding(embedding)


def _norm(config: Config) -> RMSNorm:
    return RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


def _block(config: Config, layer: int) -> Block:
    feed_forward = SwiGLU(config.hidden_size, config.intermediate_size)
    residuals = [PreNorm(_norm(config)) for _ in range(2)]
    return Block(config.mixer(layer), feed_forward, *residuals)


FAMILIES = {
    "regard": Family(
        Config,
        build,
        SAME_NAMES,
        # the stored tensors do not change the config
        complete_config=lambda config, raw, stored: config,
    )
}
