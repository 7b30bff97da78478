"""ModernBERT: an encoder with rotary positions, gated feed-forward layers, no biases, and windows
in two of three layers, which have another rotary base. The first block has no norm before its
attention, because the embedding ends in one.

Source: Warner et al. 2024 (arXiv 2412.13663); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import replace

from torch import nn

from regard.configs.base import Raw
from regard.configs.modernbert import ModernBertConfig
from regard.masks import Window
from regard.models.assembly import building_blocks
from regard.models.assembly.building_blocks import activation
from regard.models.checkpoint.family import Family, NameTable, stacked_rows, weights_and_biases
from regard.models.encoder import Encoder, HeadedEncoder
from regard.nn import Attention, Block, InputEmbedding, PreNorm
from regard.nn.feed_forward import GatedFeedForward
from regard.nn.linear import Linear
from regard.nn.variants.projections import output_projection
from regard.positions import Rotary

Config = ModernBertConfig


def complete_config(config: Config, _: Raw, stored: Collection[str]) -> Config:
    """Set `masked_words` by whether the head's tensors are stored."""
    return replace(config, masked_words="head.dense.weight" in stored)


def build(config: Config) -> HeadedEncoder:
    """Build the encoder of a config with its head, and initial weights: normal (standard deviation
    0.02), biases 0, norms 1.
    """
    M = config.hidden_size
    distances = config.distances()
    rotaries = {x: building_blocks.rotary_module(config.rope(x)) for x in set(distances)}
    blocks = [_block(config, i, x, rotaries[x]) for i, x in enumerate(distances)]
    embed = InputEmbedding(nn.Embedding(config.vocab_size, M), norm=_norm(config))
    head = _head(config, embed.embedding) if config.masked_words else None
    model = HeadedEncoder(Encoder(embed, blocks, _norm(config)), None, head)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    return model


def _norm(config: Config) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)


def _block(config: Config, index: int, distance: int | None, rotary: Rotary) -> Block:
    M, H, bias = config.hidden_size, config.num_attention_heads, config.attention_bias
    attention = Attention(
        building_blocks.rotary_heads(M, H, H, M // H, rotary, bias=bias),
        output_projection(M, H, M // H, bias=bias),
        mask=None if distance is None else Window(distance + 1, ahead=distance),
    )
    feed_forward = GatedFeedForward(
        M,
        config.intermediate_size,
        activation(config.hidden_activation, "hidden_activation"),
        bias=config.mlp_bias,
    )
    first = nn.Identity() if index == 0 else _norm(config)
    return Block(attention, feed_forward, PreNorm(first), PreNorm(_norm(config)))


def _head(config: Config, embedding: nn.Embedding) -> nn.Sequential:
    M = config.hidden_size
    words = Linear(M, config.vocab_size, bias=config.decoder_bias)
    if config.tie_word_embeddings:
        words.weight = embedding.weight
    steps: dict[str, nn.Module] = {
        "dense": Linear(M, M, bias=config.classifier_bias),
        "activation": activation(config.classifier_activation, "classifier_activation"),
        "norm": _norm(config),
        "words": words,
    }
    return nn.Sequential(OrderedDict(steps))


LAYER, OURS = "model.layers.{}.", "encoder.layers.{}."
NAMES: NameTable = {
    "model.embeddings.tok_embeddings.weight": "encoder.embed.embedding.weight",
    **weights_and_biases(
        {"embeddings.norm": "embed.norm", "final_norm": "norm"}, "model.", "encoder."
    ),
    **weights_and_biases(
        {
            "attn_norm": "attention_residual.norm",
            "attn.Wo": "attention.output",
            "mlp_norm": "feed_forward_residual.norm",
            "mlp.Wo": "feed_forward.down",
        },
        LAYER,
        OURS,
    ),
    **{
        f"{LAYER}{theirs}.{end}": stacked_rows(*(f"{OURS}{part}.{end}" for part in parts))
        for theirs, parts in {
            "attn.Wqkv": [f"attention.project.{x}.linear" for x in "qkv"],
            "mlp.Wi": ["feed_forward.gate", "feed_forward.up"],
        }.items()
        for end in ("weight", "bias")
    },
    **weights_and_biases(
        {"head.dense": "head.dense", "head.norm": "head.norm", "decoder": "head.words"}, "", ""
    ),
}
"""Stored name -> parameter name; {} is the layer."""

FAMILY = Family(
    Config,
    build,
    NAMES,
    complete_config=complete_config,
    prefixes=("model.",),
    architecture="encoder",
)
