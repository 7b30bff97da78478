"""GPT-2: pre-norm blocks with LayerNorm and GELU, learned positions, one fused matrix for queries,
keys and values, and a tied head.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; key names as in
Hugging Face checkpoints.
"""

from __future__ import annotations

from torch import nn

from regard import masks
from regard.argument_checks import resolve_head_dim
from regard.configs.gpt import GPT2Config
from regard.models.assembly.building_blocks import (
    activation,
    embedding_and_head,
    initialize_weights,
)
from regard.models.checkpoint.family import Family, NameTable, transposed
from regard.models.decoder import Decoder
from regard.nn import Attention, Block, FeedForward, FusedQKV, InputEmbedding, PreNorm
from regard.nn.linear import Linear
from regard.positions import LearnedPositions

Config = GPT2Config


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    M = config.n_embd
    embedding, head = embedding_and_head(config.vocab_size, M, tied=config.tie_word_embeddings)
    embed = InputEmbedding(embedding, LearnedPositions(config.n_positions, M))
    layers = [_block(config, i) for i in range(config.n_layer)]
    return initialize_weights(Decoder(embed, layers, _norm(config), head))


def _norm(config: Config) -> nn.LayerNorm:
    return nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)


def _block(config: Config, layer: int) -> Block:
    M, H = config.n_embd, config.n_head
    D = resolve_head_dim(M, H, None)
    scale = D**-0.5 if config.scale_attn_weights else 1.0
    if config.scale_attn_by_inverse_layer_idx:
        scale /= layer + 1
    project = FusedQKV(M, H, H, D, order="parts")
    attention = Attention(project, Linear(M, M), mask=masks.Causal(), scale=scale)
    feed_forward = FeedForward(M, config.hidden, activation(config.activation_function))
    return Block(attention, feed_forward, PreNorm(_norm(config)), PreNorm(_norm(config)))


STORED_LAYER, MODEL_LAYER = "transformer.h.{}.", "layers.{}."
NAMES: NameTable = {
    "transformer.wte.weight": "embed.embedding.weight",
    "transformer.wpe.weight": "embed.positional.weight",
    "transformer.ln_f.weight": "norm.weight",
    "transformer.ln_f.bias": "norm.bias",
    "lm_head.weight": "head.weight",
    STORED_LAYER + "ln_1.weight": MODEL_LAYER + "attention_residual.norm.weight",
    STORED_LAYER + "ln_1.bias": MODEL_LAYER + "attention_residual.norm.bias",
    STORED_LAYER + "attn.c_attn.weight": transposed(
        MODEL_LAYER + "attention.project.linear.weight"
    ),
    STORED_LAYER + "attn.c_attn.bias": MODEL_LAYER + "attention.project.linear.bias",
    STORED_LAYER + "attn.c_proj.weight": transposed(MODEL_LAYER + "attention.output.weight"),
    STORED_LAYER + "attn.c_proj.bias": MODEL_LAYER + "attention.output.bias",
    STORED_LAYER + "ln_2.weight": MODEL_LAYER + "feed_forward_residual.norm.weight",
    STORED_LAYER + "ln_2.bias": MODEL_LAYER + "feed_forward_residual.norm.bias",
    STORED_LAYER + "mlp.c_fc.weight": transposed(MODEL_LAYER + "feed_forward.up.weight"),
    STORED_LAYER + "mlp.c_fc.bias": MODEL_LAYER + "feed_forward.up.bias",
    STORED_LAYER + "mlp.c_proj.weight": transposed(MODEL_LAYER + "feed_forward.down.weight"),
    STORED_LAYER + "mlp.c_proj.bias": MODEL_LAYER + "feed_forward.down.bias",
}
"""Stored name -> parameter name; {} is the layer. Matrices are stored as [in, out]."""

FAMILY = Family(
    Config,
    build,
    NAMES,
    prefixes=("transformer.",),
    head="lm_head.weight",
    buffers=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),
)
