"""DistilBERT: BERT without segments and without a pooler.

Source: Sanh et al. 2019 (arXiv 1910.01108); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import nn

from regard.configs.base import Raw
from regard.configs.bert import DistilBertConfig
from regard.models.assembly import bert_like
from regard.models.assembly.bert_like import EncoderSizes
from regard.models.checkpoint.family import Family, weight_and_bias, weights_and_biases
from regard.models.encoder import HeadedEncoder
from regard.nn import InputEmbedding
from regard.positions import LearnedPositions

Config = DistilBertConfig


def complete_config(config: Config, _: Raw, stored: Collection[str]) -> Config:
    """Set `masked_words` by whether its tensors are stored."""
    return replace(config, masked_words="vocab_projector.bias" in stored)


def build(config: Config) -> HeadedEncoder:
    """Build the encoder of a config with its head, and initial weights."""
    M = config.dim
    sizes = EncoderSizes(
        M, config.hidden_dim, config.n_layers, config.n_heads, config.activation, config.eps
    )
    embed = InputEmbedding(
        nn.Embedding(config.vocab_size, M),
        LearnedPositions(config.max_position_embeddings, M),
        norm=bert_like.norm(sizes),
    )
    return bert_like.encoder(sizes, embed, pooler=False, masked_words=config.masked_words)


PARTS = {
    "attention.q_lin": "attention.project.q.linear",
    "attention.k_lin": "attention.project.k.linear",
    "attention.v_lin": "attention.project.v.linear",
    "attention.out_lin": "attention.output",
    "sa_layer_norm": "attention_residual.norm",
    "ffn.lin1": "feed_forward.up",
    "ffn.lin2": "feed_forward.down",
    "output_layer_norm": "feed_forward_residual.norm",
}
NAMES = {
    "distilbert.embeddings.word_embeddings.weight": "encoder.embed.embedding.weight",
    "distilbert.embeddings.position_embeddings.weight": "encoder.embed.positional.weight",
    **weight_and_bias("distilbert.embeddings.LayerNorm", "encoder.embed.norm"),
    **weights_and_biases(PARTS, "distilbert.transformer.layer.{}.", "encoder.layers.{}."),
    **weight_and_bias("vocab_transform", "head.dense"),
    **weight_and_bias("vocab_layer_norm", "head.norm"),
    **weight_and_bias("vocab_projector", "head.words"),
}
"""Stored name -> parameter name; {} is the layer."""

FAMILY = Family(
    Config,
    build,
    NAMES,
    complete_config=complete_config,
    prefixes=("distilbert.",),
    buffers=(r"(distilbert\.)?embeddings\.position_ids",),
    architecture="encoder",
)
