"""T5: an encoder-decoder of pre-norm blocks with one relative position bias for each stack."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

from torch import nn

from regard.biases import T5Relative
from regard.biases.distance import check_buckets
from regard.configs.base import Raw
from regard.configs.t5 import T5Config
from regard.masks import Causal
from regard.models.assembly.building_blocks import activation
from regard.models.checkpoint.family import Family, TensorRule, as_stored
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.nn import (
    Attention,
    Block,
    CrossAttention,
    DecoderBlock,
    FeedForward,
    InputEmbedding,
    PreNorm,
    RMSNorm,
)
from regard.nn.blocks.embedding import ScaledLogits
from regard.nn.blocks.feed_forward import GatedFeedForward
from regard.nn.projections.heads import SeparateQKV
from regard.nn.variants.projections import output_projection, separate_qkv


def stack_bias(config: T5Config, *, bidirectional: bool) -> T5Relative:
    """Build the position bias of a stack, whose layers share its table, normal with std M^-0.5."""
    table = nn.Embedding(config.relative_attention_num_buckets, config.num_heads).weight
    nn.init.normal_(table, std=config.d_model**-0.5)
    distance = config.relative_attention_max_distance
    return T5Relative(table, bidirectional=bidirectional, max_distance=distance)


def initialize_t5(model: EncoderDecoder, head_dim: int) -> None:
    """Draw initial weights in place as T5's code does: std 1/sqrt(fan-in), query maps 1/sqrt(fan-in
    * D), which replaces the scale of scores, embedding and head 1.
    """
    for name, part in model.named_modules():
        if isinstance(part, nn.Linear):
            size = part.in_features * (head_dim if name.endswith("project.q.linear") else 1)
            nn.init.normal_(part.weight, std=size**-0.5)
    for part in (model.head, model.embed.embedding):
        nn.init.normal_(part.get_parameter("weight"))


def complete_config(config: T5Config, _: Raw, stored: Collection[str]) -> T5Config:
    """Untie a head that is stored and not scaled (version 1.1): transformers 5 writes
    tie_word_embeddings for every T5.
    """
    own = "lm_head.weight" in stored and not config.scale_decoder_outputs
    return replace(config, tie_word_embeddings=False) if own else config


def build(config: T5Config) -> EncoderDecoder:
    """Build the encoder-decoder of a config, with the initial weights of the released code; blocks
    are pre-norm, and cross-attention has no bias (arXiv 1910.10683, section 2.1).
    """
    M, V, H, D = config.d_model, config.vocab_size, config.num_heads, config.d_kv
    norm = partial(RMSNorm, M, eps=config.layer_norm_epsilon)

    def parts() -> tuple[SeparateQKV, nn.Linear]:  # the head dim need not be M / H
        return separate_qkv(M, H, H, D), output_projection(M, H, D)

    both, ahead = (stack_bias(config, bidirectional=x) for x in (True, False))
    encoder_blocks = [
        Block(
            Attention(*parts(), scale=1.0, bias=both),
            _feed_forward(config),
            *(PreNorm(norm()) for _ in range(2)),
        )
        for _ in range(config.num_layers)
    ]
    decoder_blocks = [
        DecoderBlock(
            Attention(*parts(), mask=Causal(), scale=1.0, bias=ahead),
            CrossAttention(*parts(), scale=1.0),
            _feed_forward(config),
            *(PreNorm(norm()) for _ in range(3)),
        )
        for _ in range(config.decoder_layers)
    ]
    scale = M**-0.5 if config.scale_decoder_outputs else 1.0
    embed, head = InputEmbedding(nn.Embedding(V, M)), ScaledLogits(M, V, scale=scale)
    model = EncoderDecoder(
        Encoder(embed, encoder_blocks, norm()), embed, decoder_blocks, norm(), head
    )
    initialize_t5(model, D)
    if config.tie_word_embeddings:
        head.weight = embed.embedding.weight
    return model


def _feed_forward(config: T5Config) -> nn.Module:
    gated, name = config.activation
    sizes, f = (config.d_model, config.d_ff), activation(name)
    return GatedFeedForward(*sizes, f) if gated else FeedForward(*sizes, f, bias=False)


def _stack(theirs: str, ours: str, attentions: dict[str, str]) -> dict[str, str | TensorRule]:
    """Return the name table of one stack; {} is the layer."""
    names: dict[str, str | TensorRule] = {}
    for i, (name, where) in enumerate(attentions.items()):
        for x in "qkv":
            names[f"{theirs}{i}.{name}.{x}.weight"] = f"{ours}{where}.project.{x}.linear.weight"
        names[f"{theirs}{i}.{name}.o.weight"] = f"{ours}{where}.output.weight"
        names[f"{theirs}{i}.layer_norm.weight"] = f"{ours}{where}_residual.norm.weight"
    wide, feed = f"{theirs}{len(attentions)}.", ours + "feed_forward."
    names[wide + "layer_norm.weight"] = ours + "feed_forward_residual.norm.weight"
    up, gate = feed + "up.weight", feed + "gate.weight"
    inner: dict[str, str | TensorRule]
    inner = {
        "wi_0": gate,
        "wi_1": as_stored(up, requires=gate),
        "wi": up,
        "wo": feed + "down.weight",
    }
    names |= {f"{wide}DenseReluDense.{x}.weight": where for x, where in inner.items()}
    table = theirs + "0.SelfAttention.relative_attention_bias.weight"
    return names | {table: ours + "attention.bias_tensors.{}"}


ENCODER_ATTENTIONS = {"SelfAttention": "attention"}
NAMES = {
    "shared.weight": "encoder.embed.embedding.weight",
    "encoder.embed_tokens.weight": "encoder.embed.embedding.weight",
    "decoder.embed_tokens.weight": "embed.embedding.weight",
    **_stack("encoder.block.{}.layer.", "encoder.layers.{}.", ENCODER_ATTENTIONS),
    "encoder.final_layer_norm.weight": "encoder.norm.weight",
    **_stack(
        "decoder.block.{}.layer.", "layers.{}.", ENCODER_ATTENTIONS | {"EncDecAttention": "cross"}
    ),
    "decoder.final_layer_norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}
"""Stored name -> parameter name."""


def check(config: T5Config) -> None:
    """Check that the buckets of relative positions are possible for the distance."""
    buckets = config.relative_attention_num_buckets
    for both in (True, False):
        check_buckets(
            buckets, bidirectional=both, max_distance=config.relative_attention_max_distance
        )


FAMILIES = {
    "t5": Family(
        T5Config,
        build,
        NAMES,
        complete_config=complete_config,
        check=check,
        buffers=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
        architecture="encoder-decoder",
    ),
}
