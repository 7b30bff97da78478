"""BLOOM: a decoder with ALiBi, a norm after the embedding, and one fused matrix in which the rows
of queries, keys and values are grouped by head.

Source: Le Scao et al. 2022 (arXiv 2211.05100); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from torch import nn

from regard import masks
from regard.argument_checks import resolve_head_dim
from regard.biases import ALiBi
from regard.configs.gpt import BloomConfig
from regard.models.assembly.building_blocks import embedding_and_head, initialize_weights
from regard.models.checkpoint.family import Family, weights_and_biases
from regard.models.decoder import Decoder
from regard.nn import Attention, Block, FeedForward, FusedQKV, InputEmbedding, PreNorm
from regard.nn.blocks import NormedResidual
from regard.nn.linear import Linear

Config = BloomConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    embedding, head = embedding_and_head(
        config.vocab_size, config.hidden_size, tied=config.tie_word_embeddings
    )
    embed = InputEmbedding(embedding, norm=_norm(config))
    layers = [_block(config) for _ in range(config.n_layer)]
    return initialize_weights(Decoder(embed, layers, _norm(config), head))


def _norm(config: Config) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)


def _block(config: Config) -> Block:
    M, H = config.hidden_size, config.n_head
    project = FusedQKV(M, H, H, resolve_head_dim(M, H, None), order="heads")
    attention = Attention(project, Linear(M, M), mask=masks.Causal(), bias=ALiBi(H))
    feed_forward = FeedForward(M, 4 * M, nn.GELU("tanh"))
    residual = NormedResidual if config.apply_residual_connection_post_layernorm else PreNorm
    return Block(attention, feed_forward, residual(_norm(config)), residual(_norm(config)))


STORED_LAYER, MODEL_LAYER = "transformer.h.{}.", "layers.{}."
PARTS = {
    "input_layernorm": "attention_residual.norm",
    "self_attention.query_key_value": "attention.project.linear",
    "self_attention.dense": "attention.output",
    "post_attention_layernorm": "feed_forward_residual.norm",
    "mlp.dense_h_to_4h": "feed_forward.up",
    "mlp.dense_4h_to_h": "feed_forward.down",
}
NAMES = {
    "transformer.word_embeddings.weight": "embed.embedding.weight",
    "transformer.word_embeddings_layernorm.weight": "embed.norm.weight",
    "transformer.word_embeddings_layernorm.bias": "embed.norm.bias",
    "transformer.ln_f.weight": "norm.weight",
    "transformer.ln_f.bias": "norm.bias",
    "lm_head.weight": "head.weight",
} | weights_and_biases(PARTS, STORED_LAYER, MODEL_LAYER)
"""Stored name -> parameter name; {} is the layer."""

FAMILY = Family(
    Config,
    build,
    NAMES,
    prefixes=("transformer.",),
    head="lm_head.weight",
)
