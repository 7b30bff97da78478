"""GPT-NeoX and Pythia: rotary positions on a part of each head, attention and feed-forward in
parallel, and an untied head.

Source: Black et al. 2022 (arXiv 2204.06745); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from torch import nn

from regard import masks
from regard.configs.gpt import GPTNeoXConfig
from regard.models.assembly import building_blocks
from regard.models.assembly.building_blocks import (
    activation,
    embedding_and_head,
    initialize_weights,
)
from regard.models.checkpoint.family import Family, weights_and_biases
from regard.models.decoder import Decoder
from regard.nn import (
    Attention,
    Block,
    FeedForward,
    FusedQKV,
    InputEmbedding,
    ParallelBlock,
    PreNorm,
)
from regard.nn.linear import Linear
from regard.positions import Rotary

Config = GPTNeoXConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    embedding, head = embedding_and_head(
        config.vocab_size, config.hidden_size, tied=config.tie_word_embeddings
    )
    rotary = building_blocks.rotary_module(config.rope)
    layers = [_block(config, rotary) for _ in range(config.num_hidden_layers)]
    return initialize_weights(Decoder(InputEmbedding(embedding), layers, _norm(config), head))


def _norm(config: Config) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


def _block(config: Config, rotary: Rotary) -> Block:
    M, H, bias = config.hidden_size, config.num_attention_heads, config.attention_bias
    project = FusedQKV(M, H, H, M // H, order="heads", steps=[rotary], bias=bias)
    attention = Attention(project, Linear(M, M, bias=bias), mask=masks.Causal())
    feed_forward = FeedForward(M, config.intermediate_size, activation(config.hidden_act))
    residuals = [PreNorm(_norm(config)) for _ in range(2)]
    kind = ParallelBlock if config.use_parallel_residual else Block
    return kind(attention, feed_forward, *residuals)


STORED_LAYER, MODEL_LAYER = "gpt_neox.layers.{}.", "layers.{}."
PARTS = {
    "input_layernorm": "attention_residual.norm",
    "attention.query_key_value": "attention.project.linear",
    "attention.dense": "attention.output",
    "post_attention_layernorm": "feed_forward_residual.norm",
    "mlp.dense_h_to_4h": "feed_forward.up",
    "mlp.dense_4h_to_h": "feed_forward.down",
}
NAMES = {
    "gpt_neox.embed_in.weight": "embed.embedding.weight",
    "gpt_neox.final_layer_norm.weight": "norm.weight",
    "gpt_neox.final_layer_norm.bias": "norm.bias",
    "embed_out.weight": "head.weight",
} | weights_and_biases(PARTS, STORED_LAYER, MODEL_LAYER)
"""Stored name -> parameter name; {} is the layer."""

FAMILY = Family(
    Config,
    build,
    NAMES,
    # a missing head is not tied to the embedding, unless config.json ties it
    complete_config=lambda config, _raw, _stored: config,
    check=lambda config: building_blocks.rotary_module(config.rope),
    prefixes=("gpt_neox.",),
    head="embed_out.weight",
    buffers=(r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    rename_stored=lambda name: "embed_out.weight" if name == "lm_head.weight" else name,
)
