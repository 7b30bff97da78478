"""RoBERTa, XLM-RoBERTa and CamemBERT: BERT whose table of positions has unused rows in front, and
whose head is stored under other names.

Source: Liu et al. 2019 (arXiv 1907.11692); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import nn

from regard.configs.base import Raw
from regard.configs.bert import RobertaConfig
from regard.models.assembly import bert_like
from regard.models.assembly.bert_like import LAYER_PARTS, EncoderSizes
from regard.models.checkpoint.family import Family, weight_and_bias, weights_and_biases
from regard.models.encoder import HeadedEncoder
from regard.nn import InputEmbedding
from regard.positions import LearnedPositions

Config = RobertaConfig


def complete_config(config: Config, _: Raw, stored: Collection[str]) -> Config:
    """Set `pooler` and `masked_words` by whether their tensors are stored."""
    return replace(
        config,
        pooler="roberta.pooler.dense.weight" in stored,
        masked_words="lm_head.bias" in stored,
    )


def build(config: Config) -> HeadedEncoder:
    """Build the encoder of a config with its pooler and head, and initial weights."""
    M = config.hidden_size
    sizes = EncoderSizes(
        M,
        config.intermediate_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.hidden_act,
        config.layer_norm_eps,
    )
    embed = InputEmbedding(
        nn.Embedding(config.vocab_size, M),
        LearnedPositions(config.positions, M, offset=config.offset),
        segments=nn.Embedding(config.type_vocab_size, M),
        norm=bert_like.norm(sizes),
    )
    return bert_like.encoder(sizes, embed, pooler=config.pooler, masked_words=config.masked_words)


NAMES = {
    "roberta.embeddings.word_embeddings.weight": "encoder.embed.embedding.weight",
    "roberta.embeddings.position_embeddings.weight": "encoder.embed.positional.weight",
    "roberta.embeddings.token_type_embeddings.weight": "encoder.embed.segments.weight",
    **weight_and_bias("roberta.embeddings.LayerNorm", "encoder.embed.norm"),
    **weights_and_biases(LAYER_PARTS, "roberta.encoder.layer.{}.", "encoder.layers.{}."),
    **weight_and_bias("roberta.pooler.dense", "pooler.dense"),
    **weight_and_bias("lm_head.dense", "head.dense"),
    **weight_and_bias("lm_head.layer_norm", "head.norm"),
    "lm_head.bias": "head.words.bias",
    **weight_and_bias("lm_head.decoder", "head.words"),
}
"""Stored name -> parameter name; {} is the layer."""

FAMILY = Family(
    Config,
    build,
    NAMES,
    complete_config=complete_config,
    prefixes=("roberta.",),
    buffers=(r"(roberta\.)?embeddings\.position_ids",),
    architecture="encoder",
)
