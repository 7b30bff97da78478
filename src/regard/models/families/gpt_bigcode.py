"""GPT-BigCode (SantaCoder, StarCoder): GPT-2 whose query heads share one key and one value.

Source: Ben Allal et al. 2023 (arXiv 2301.03988); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from torch import nn

from regard import masks
from regard.argument_checks import resolve_head_dim
from regard.configs.gpt_relatives import GPTBigCodeConfig
from regard.models.assembly.building_blocks import (
    activation,
    embedding_and_head,
    initialize_weights,
)
from regard.models.checkpoint.family import Family, weight_and_bias, weights_and_biases
from regard.models.decoder import Decoder
from regard.nn import Attention, Block, FeedForward, FusedQKV, InputEmbedding, PreNorm
from regard.nn.linear import Linear
from regard.positions import LearnedPositions

Config = GPTBigCodeConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    M = config.n_embd
    embedding, head = embedding_and_head(config.vocab_size, M, tied=config.tie_word_embeddings)
    embed = InputEmbedding(embedding, LearnedPositions(config.n_positions, M))
    layers = [_block(config) for _ in range(config.n_layer)]
    return initialize_weights(Decoder(embed, layers, _norm(config), head))


def _norm(config: Config) -> nn.LayerNorm:
    return nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)


def _block(config: Config) -> Block:
    M, H = config.n_embd, config.n_head
    D = resolve_head_dim(M, H, None)
    project = (
        FusedQKV(M, H, 1, D, order="parts")
        if config.multi_query
        else FusedQKV(M, H, H, D, order="heads")
    )
    scale = D**-0.5 if config.scale_attn_weights else 1.0
    attention = Attention(project, Linear(M, M), mask=masks.Causal(), scale=scale)
    feed_forward = FeedForward(M, config.hidden, activation(config.activation_function))
    return Block(attention, feed_forward, PreNorm(_norm(config)), PreNorm(_norm(config)))


PARTS = {
    "ln_1": "attention_residual.norm",
    "attn.c_attn": "attention.project.linear",
    "attn.c_proj": "attention.output",
    "ln_2": "feed_forward_residual.norm",
    "mlp.c_fc": "feed_forward.up",
    "mlp.c_proj": "feed_forward.down",
}
NAMES = {
    "transformer.wte.weight": "embed.embedding.weight",
    "transformer.wpe.weight": "embed.positional.weight",
    **weight_and_bias("transformer.ln_f", "norm"),
    "lm_head.weight": "head.weight",
    **weights_and_biases(PARTS, "transformer.h.{}.", "layers.{}."),
}
"""Stored name -> parameter name; {} is the layer."""

FAMILY = Family(
    Config,
    build,
    NAMES,
    prefixes=("transformer.",),
    head="lm_head.weight",
    buffers=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),
)
