"""BLOOM, MPT and OPT: decoders with LayerNorms and feed-forward layers without a gate.

What only the first code of MPT has (learned positions, biases, prefixes, norms on heads and more)
raises, as in transformers; but `alibi_bias_max` is used, where transformers 5.23 takes 8.

Source: Le Scao et al. 2022 (arXiv 2211.05100); MosaicML 2023, "Introducing MPT-7B"; Zhang et al.
2022 (arXiv 2205.01068).
"""

from __future__ import annotations

from torch import nn

from regard import masks
from regard.argument_checks import resolve_head_dim
from regard.biases import ALiBi
from regard.biases.distance import alibi_slopes
from regard.configs.gpt_like import MPT_ATTENTION, BloomConfig, MptConfig, OPTConfig
from regard.models.assembly.building_blocks import (
    activation,
    embedding_and_head,
    initialize_weights,
)
from regard.models.checkpoint.family import Family, weight_and_bias, weights_and_biases
from regard.models.decoder import Decoder
from regard.nn import Attention, Block, FeedForward, FusedQKV, InputEmbedding, PreNorm
from regard.nn.blocks.blocks import NormedResidual
from regard.nn.projections.fused import ClippedQKV
from regard.nn.variants.projections import separate_qkv
from regard.nn.weights import Linear
from regard.positions import LearnedPositions


def _build_bloom(config: BloomConfig) -> Decoder:
    embedding, head = embedding_and_head(
        config.vocab_size, config.hidden_size, tied=config.tie_word_embeddings
    )
    embed = InputEmbedding(embedding, norm=_bloom_norm(config))
    layers = [_bloom_block(config) for _ in range(config.n_layer)]
    return initialize_weights(Decoder(embed, layers, _bloom_norm(config), head))


def _bloom_norm(config: BloomConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)


def _bloom_block(config: BloomConfig) -> Block:
    M, H = config.hidden_size, config.n_head
    project = FusedQKV(M, H, H, resolve_head_dim(M, H, None), order="heads")
    attention = Attention(project, Linear(M, M), mask=masks.Causal(), bias=ALiBi(H))
    feed_forward = FeedForward(M, 4 * M, nn.GELU("tanh"))
    residual = NormedResidual if config.apply_residual_connection_post_layernorm else PreNorm
    return Block(
        attention, feed_forward, residual(_bloom_norm(config)), residual(_bloom_norm(config))
    )


def _build_mpt(config: MptConfig) -> Decoder:
    V, M = config.vocab_size, config.d_model
    embedding, head = embedding_and_head(V, M, tied=config.tie_word_embeddings)
    layers = [_mpt_block(config) for _ in range(config.n_layers)]
    return initialize_weights(Decoder(InputEmbedding(embedding), layers, _mpt_norm(config), head))


def _mpt_norm(config: MptConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon, bias=False)


def _mpt_block(config: MptConfig) -> Block:
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
    return Block(attention, feed_forward, PreNorm(_mpt_norm(config)), PreNorm(_mpt_norm(config)))


def _build_opt(config: OPTConfig) -> Decoder:
    M = config.hidden_size
    embedding, head = embedding_and_head(config.vocab_size, M, tied=config.tie_word_embeddings)
    positions = LearnedPositions(config.max_position_embeddings, M, offset=2)
    layers = [_opt_block(config) for _ in range(config.num_hidden_layers)]
    embed = InputEmbedding(embedding, positions)
    return initialize_weights(Decoder(embed, layers, nn.LayerNorm(M), head))


def _opt_block(config: OPTConfig) -> Block:
    M, H = config.hidden_size, config.num_attention_heads
    D = resolve_head_dim(M, H, None)
    project = separate_qkv(M, H, H, D, bias=True)
    attention = Attention(project, Linear(M, M), mask=masks.Causal())
    feed_forward = FeedForward(M, config.ffn_dim, activation(config.activation_function))
    return Block(attention, feed_forward, PreNorm(nn.LayerNorm(M)), PreNorm(nn.LayerNorm(M)))


BLOOM_PARTS = {
    "input_layernorm": "attention_residual.norm",
    "self_attention.query_key_value": "attention.project.linear",
    "self_attention.dense": "attention.output",
    "post_attention_layernorm": "feed_forward_residual.norm",
    "mlp.dense_h_to_4h": "feed_forward.up",
    "mlp.dense_4h_to_h": "feed_forward.down",
}
BLOOM_NAMES = {
    "transformer.word_embeddings.weight": "embed.embedding.weight",
    **weight_and_bias("transformer.word_embeddings_layernorm", "embed.norm"),
    **weight_and_bias("transformer.ln_f", "norm"),
    "lm_head.weight": "head.weight",
    **weights_and_biases(BLOOM_PARTS, "transformer.h.{}.", "layers.{}."),
}
MPT_PARTS = {
    "norm_1": "attention_residual.norm",
    "attn.Wqkv": "attention.project.linear",
    "attn.out_proj": "attention.output",
    "norm_2": "feed_forward_residual.norm",
    "ffn.up_proj": "feed_forward.up",
    "ffn.down_proj": "feed_forward.down",
}
MPT_NAMES = {
    "transformer.wte.weight": "embed.embedding.weight",
    "transformer.norm_f.weight": "norm.weight",
    "lm_head.weight": "head.weight",
    **weights_and_biases(MPT_PARTS, "transformer.blocks.{}.", "layers.{}."),
}
OPT_PARTS = {
    "self_attn_layer_norm": "attention_residual.norm",
    "self_attn.q_proj": "attention.project.q.linear",
    "self_attn.k_proj": "attention.project.k.linear",
    "self_attn.v_proj": "attention.project.v.linear",
    "self_attn.out_proj": "attention.output",
    "final_layer_norm": "feed_forward_residual.norm",
    "fc1": "feed_forward.up",
    "fc2": "feed_forward.down",
}
OPT_NAMES = {
    "model.decoder.embed_tokens.weight": "embed.embedding.weight",
    "model.decoder.embed_positions.weight": "embed.positional.weight",
    **weight_and_bias("model.decoder.final_layer_norm", "norm"),
    "lm_head.weight": "head.weight",
    **weights_and_biases(OPT_PARTS, "model.decoder.layers.{}.", "layers.{}."),
}
FAMILIES = {
    "bloom": Family(
        BloomConfig,
        _build_bloom,
        BLOOM_NAMES,
        prefixes=("transformer.",),
        head="lm_head.weight",
    ),
    "mpt": Family(
        MptConfig,
        _build_mpt,
        MPT_NAMES,
        prefixes=("transformer.",),
        head="lm_head.weight",
    ),
    "opt": Family(
        OPTConfig,
        _build_opt,
        OPT_NAMES,
        prefixes=("model.",),
        head="lm_head.weight",
    ),
}
