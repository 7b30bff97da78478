"""OPT: pre-norm blocks with LayerNorm and ReLU, and learned positions whose table has two unused
rows in front.

Source: Zhang et al. 2022 (arXiv 2205.01068); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from torch import nn

from regard import masks
from regard.argument_checks import resolve_head_dim
from regard.configs.gpt_relatives import OPTConfig
from regard.models.assembly.building_blocks import (
    activation,
    embedding_and_head,
    initialize_weights,
)
from regard.models.checkpoint.family import Family, weight_and_bias, weights_and_biases
from regard.models.decoder import Decoder
from regard.nn import Attention, Block, FeedForward, InputEmbedding, PreNorm
from regard.nn.linear import Linear
from regard.nn.variants.projections import separate_qkv
from regard.positions import LearnedPositions

Config = OPTConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    M = config.hidden_size
    embedding, head = embedding_and_head(config.vocab_size, M, tied=config.tie_word_embeddings)
    positions = LearnedPositions(config.max_position_embeddings, M, offset=2)
    layers = [_block(config) for _ in range(config.num_hidden_layers)]
    embed = InputEmbedding(embedding, positions)
    return initialize_weights(Decoder(embed, layers, nn.LayerNorm(M), head))


def _block(config: Config) -> Block:
    M, H = config.hidden_size, config.num_attention_heads
    D = resolve_head_dim(M, H, None)
    project = separate_qkv(M, H, H, D, bias=True)
    attention = Attention(project, Linear(M, M), mask=masks.Causal())
    feed_forward = FeedForward(M, config.ffn_dim, activation(config.activation_function))
    return Block(attention, feed_forward, PreNorm(nn.LayerNorm(M)), PreNorm(nn.LayerNorm(M)))


PARTS = {
    "self_attn_layer_norm": "attention_residual.norm",
    "self_attn.q_proj": "attention.project.q.linear",
    "self_attn.k_proj": "attention.project.k.linear",
    "self_attn.v_proj": "attention.project.v.linear",
    "self_attn.out_proj": "attention.output",
    "final_layer_norm": "feed_forward_residual.norm",
    "fc1": "feed_forward.up",
    "fc2": "feed_forward.down",
}
NAMES = {
    "model.decoder.embed_tokens.weight": "embed.embedding.weight",
    "model.decoder.embed_positions.weight": "embed.positional.weight",
    **weight_and_bias("model.decoder.final_layer_norm", "norm"),
    "lm_head.weight": "head.weight",
    **weights_and_biases(PARTS, "model.decoder.layers.{}.", "layers.{}."),
}
"""Stored name -> parameter name; {} is the layer."""

FAMILY = Family(Config, build, NAMES, prefixes=("model.",), head="lm_head.weight")
