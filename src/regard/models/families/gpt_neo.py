"""GPT-Neo: scores without a scale, learned positions, and a sliding window in every second layer.

Source: Black et al. 2021, "GPT-Neo: Large Scale Autoregressive Language Modeling with
Mesh-Tensorflow"; key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from torch import nn

from regard import masks
from regard.argument_checks import resolve_head_dim
from regard.configs.gpt_relatives import GPTNeoConfig
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

Config = GPTNeoConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    M = config.hidden_size
    embedding, head = embedding_and_head(config.vocab_size, M, tied=config.tie_word_embeddings)
    embed = InputEmbedding(embedding, LearnedPositions(config.max_position_embeddings, M))
    layers = [_block(config, window) for window in config.windows()]
    return initialize_weights(Decoder(embed, layers, _norm(config), head))


def _norm(config: Config) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)


def _block(config: Config, window: int | None) -> Block:
    M, H = config.hidden_size, config.num_heads
    D = resolve_head_dim(M, H, None)
    mask = masks.Causal() if window is None else masks.Causal() & masks.Window(window)
    attention = Attention(separate_qkv(M, H, H, D), Linear(M, M), mask=mask, scale=1.0)
    feed_forward = FeedForward(M, config.hidden, activation(config.activation_function))
    return Block(attention, feed_forward, PreNorm(_norm(config)), PreNorm(_norm(config)))


STORED_LAYER, MODEL_LAYER = "transformer.h.{}.", "layers.{}."
PARTS = {
    "ln_1": "attention_residual.norm",
    "attn.attention.out_proj": "attention.output",
    "ln_2": "feed_forward_residual.norm",
    "mlp.c_fc": "feed_forward.up",
    "mlp.c_proj": "feed_forward.down",
}
NAMES = {
    "transformer.wte.weight": "embed.embedding.weight",
    "transformer.wpe.weight": "embed.positional.weight",
    **weight_and_bias("transformer.ln_f", "norm"),
    "lm_head.weight": "head.weight",
    **weights_and_biases(PARTS, STORED_LAYER, MODEL_LAYER),
    **{
        f"{STORED_LAYER}attn.attention.{part}_proj.weight": f"{MODEL_LAYER}attention.project.{part}"
        ".linear.weight"
        for part in "qkv"
    },
}
"""Stored name -> parameter name; {} is the layer."""

FAMILY = Family(
    Config,
    build,
    NAMES,
    prefixes=("transformer.",),
    head="lm_head.weight",
    buffers=(r"(transformer\.)?h\.\d+\.attn\.attention\.(bias|masked_bias)",),
)
