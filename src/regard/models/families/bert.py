"""BERT: an encoder of post-norm blocks with learned positions and segments, a pooler, and a head
for masked language modelling.

Source: Devlin et al. 2018 (arXiv 1810.04805); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import nn

from regard.configs.base import Raw
from regard.configs.bert import BertConfig
from regard.models.assembly import bert_like
from regard.models.assembly.bert_like import LAYER_PARTS, EncoderSizes
from regard.models.checkpoint.family import Family, weight_and_bias, weights_and_biases
from regard.models.encoder import HeadedEncoder
from regard.nn import InputEmbedding
from regard.positions import LearnedPositions

Config = BertConfig


def complete_config(config: Config, _: Raw, stored: Collection[str]) -> Config:
    """Set `pooler` and `masked_words` by whether their tensors are stored."""
    return replace(
        config,
        pooler="bert.pooler.dense.weight" in stored,
        masked_words="cls.predictions.bias" in stored,
    )


def rename_stored(name: str) -> str:
    """Rename the parts of a LayerNorm, which the first releases spelled as TensorFlow does."""
    spellings = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
    return next((name.replace(old, new) for old, new in spellings.items() if old in name), name)


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
        LearnedPositions(config.max_position_embeddings, M),
        segments=nn.Embedding(config.type_vocab_size, M),
        norm=bert_like.norm(sizes),
    )
    return bert_like.encoder(sizes, embed, pooler=config.pooler, masked_words=config.masked_words)


STORED_LAYER, MODEL_LAYER = "bert.encoder.layer.{}.", "encoder.layers.{}."
NAMES = {
    "bert.embeddings.word_embeddings.weight": "encoder.embed.embedding.weight",
    "bert.embeddings.position_embeddings.weight": "encoder.embed.positional.weight",
    "bert.embeddings.token_type_embeddings.weight": "encoder.embed.segments.weight",
    **weight_and_bias("bert.embeddings.LayerNorm", "encoder.embed.norm"),
    **weights_and_biases(LAYER_PARTS, STORED_LAYER, MODEL_LAYER),
    **weight_and_bias("bert.pooler.dense", "pooler.dense"),
    **weight_and_bias("cls.predictions.transform.dense", "head.dense"),
    **weight_and_bias("cls.predictions.transform.LayerNorm", "head.norm"),
    "cls.predictions.bias": "head.words.bias",
    **weight_and_bias("cls.predictions.decoder", "head.words"),
}
"""Stored name -> parameter name; {} is the layer."""

FAMILY = Family(
    Config,
    build,
    NAMES,
    complete_config=complete_config,
    rename_stored=rename_stored,
    prefixes=("bert.",),
    buffers=(r"(bert\.)?embeddings\.position_ids", r"cls\.seq_relationship\.(weight|bias)"),
    architecture="encoder",
)
