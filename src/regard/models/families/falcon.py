"""Falcon: attention and feed-forward in parallel, and one key and one value for all query heads or
for groups of them, in one fused matrix.

Source: Almazrouei et al. 2023 (arXiv 2311.16867); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from torch import nn

from regard import masks
from regard.configs.gpt_relatives import FalconConfig
from regard.models.assembly import building_blocks
from regard.models.assembly.building_blocks import (
    activation,
    embedding_and_head,
    initialize_weights,
)
from regard.models.checkpoint.family import (
    Family,
    TensorRule,
    as_stored,
    weight_and_bias,
    weights_and_biases,
)
from regard.models.decoder import Decoder
from regard.nn import (
    Attention,
    Block,
    FeedForward,
    FusedQKV,
    InputEmbedding,
    ParallelBlock,
    PreNorm,
    SharedNormBlock,
)
from regard.nn.linear import Linear
from regard.positions import Rotary

Config = FalconConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    M = config.hidden_size
    embedding, head = embedding_and_head(config.vocab_size, M, tied=config.tie_word_embeddings)
    rotary = building_blocks.rotary_module(config.rope)
    layers = [_block(config, rotary) for _ in range(config.num_hidden_layers)]
    return initialize_weights(Decoder(InputEmbedding(embedding), layers, _norm(config), head))


def _norm(config: Config) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)


def _block(config: Config, rotary: Rotary) -> Block:
    M, H, bias = config.hidden_size, config.num_attention_heads, config.bias
    project = FusedQKV(M, H, config.groups, M // H, order="groups", steps=[rotary], bias=bias)
    attention = Attention(project, Linear(M, M, bias=bias), mask=masks.Causal())
    feed_forward = FeedForward(M, config.hidden, activation(config.activation), bias=bias)
    first = PreNorm(_norm(config))
    if config.shares_norm:
        return SharedNormBlock(attention, feed_forward, first)
    return ParallelBlock(attention, feed_forward, first, PreNorm(_norm(config)))


def check(config: Config) -> None:
    """Refuse a rotary scaling that this family does not have."""
    _block(config, building_blocks.rotary_module(config.rope))


STORED_LAYER, MODEL_LAYER = "transformer.h.{}.", "layers.{}."
PARTS = {
    "self_attention.query_key_value": "attention.project.linear",
    "self_attention.dense": "attention.output",
    "mlp.dense_h_to_4h": "feed_forward.up",
    "mlp.dense_4h_to_h": "feed_forward.down",
}
NAMES: dict[str, str | TensorRule] = {
    "transformer.word_embeddings.weight": "embed.embedding.weight",
    **weight_and_bias("transformer.ln_f", "norm"),
    "lm_head.weight": "head.weight",
    **weights_and_biases(PARTS, STORED_LAYER, MODEL_LAYER),
}
FIRST, SECOND = (MODEL_LAYER + f"{part}_residual.norm." for part in ("attention", "feed_forward"))
for end in ("weight", "bias"):
    NAMES |= {
        f"{STORED_LAYER}input_layernorm.{end}": as_stored(FIRST + end, unless=SECOND + end),
        f"{STORED_LAYER}ln_attn.{end}": as_stored(FIRST + end, requires=SECOND + end),
        f"{STORED_LAYER}ln_mlp.{end}": SECOND + end,
    }
"""Stored name -> parameter name; {} is the layer. A norm that both sublayers share has its own
name.
"""

FAMILY = Family(
    Config,
    build,
    NAMES,
    check=check,
    prefixes=("transformer.",),
    head="lm_head.weight",
    buffers=(r"(transformer\.)?h\.\d+\.self_attention\.rotary_emb\.inv_freq",),
)
