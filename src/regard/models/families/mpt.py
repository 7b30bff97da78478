"""MPT: a decoder with ALiBi, no biases in linear maps and norms, and one fused matrix for queries,
keys and values.

The first code of the family also had learned positions, biases, prefixes without causal mask, norms
on heads, multi-query attention and a factor on logits. They raise here, as transformers does not
support them. `alibi_bias_max` is used, as in the first code; transformers 5.23 ignores it and uses
8.

Source: MosaicML 2023, "Introducing MPT-7B"; key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from torch import nn

from regard import masks
from regard.argument_checks import resolve_head_dim
from regard.biases import ALiBi
from regard.biases.alibi import alibi_slopes
from regard.configs.gpt import MPT_ATTENTION, MptConfig
from regard.models.assembly.building_blocks import embedding_and_head, initialize_weights
from regard.models.checkpoint.family import Family
from regard.models.decoder import Decoder
from regard.nn import Attention, Block, FeedForward, FusedQKV, InputEmbedding, PreNorm
from regard.nn.fused_projections import ClippedQKV
from regard.nn.linear import Linear

Config = MptConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    V, M = config.vocab_size, config.d_model
    embedding, head = embedding_and_head(V, M, tied=config.tie_word_embeddings)
    layers = [_block(config) for _ in range(config.n_layers)]
    return initialize_weights(Decoder(InputEmbedding(embedding), layers, _norm(config), head))


def _norm(config: Config) -> nn.LayerNorm:
    return nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon, bias=False)


def _block(config: Config) -> Block:
    M, H = config.d_model, config.n_heads
    D, own = resolve_head_dim(M, H, None), MPT_ATTENTION | dict(config.attn_config)
    project = FusedQKV(M, H, H, D, bias=False)
    if own["clip_qkv"] is not None:
        project = ClippedQKV(M, H, H, D, limit=own["clip_qkv"], bias=False)
    # the smallest slope of ALiBi is 2^-8; MPT's is 2^-alibi_bias_max
    slopes = [slope ** (own["alibi_bias_max"] / 8) for slope in alibi_slopes(H)]
    attention = Attention(
        project,
        Linear(M, M, bias=False),
        mask=masks.Causal(),
        bias=ALiBi(slopes=slopes),
        scale=own["softmax_scale"],
    )
    feed_forward = FeedForward(M, 4 * M, nn.GELU(), bias=False)
    return Block(attention, feed_forward, PreNorm(_norm(config)), PreNorm(_norm(config)))


STORED_LAYER, MODEL_LAYER = "transformer.blocks.{}.", "layers.{}."
NAMES = {
    "transformer.wte.weight": "embed.embedding.weight",
    "transformer.norm_f.weight": "norm.weight",
    "lm_head.weight": "head.weight",
    STORED_LAYER + "norm_1.weight": MODEL_LAYER + "attention_residual.norm.weight",
    STORED_LAYER + "attn.Wqkv.weight": MODEL_LAYER + "attention.project.linear.weight",
    STORED_LAYER + "attn.out_proj.weight": MODEL_LAYER + "attention.output.weight",
    STORED_LAYER + "norm_2.weight": MODEL_LAYER + "feed_forward_residual.norm.weight",
    STORED_LAYER + "ffn.up_proj.weight": MODEL_LAYER + "feed_forward.up.weight",
    STORED_LAYER + "ffn.down_proj.weight": MODEL_LAYER + "feed_forward.down.weight",
}
"""Stored name -> parameter name; {} is the layer."""

FAMILY = Family(
    Config,
    build,
    NAMES,
    prefixes=("transformer.",),
    head="lm_head.weight",
)
