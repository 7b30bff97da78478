"""BERT: an encoder of post-norm blocks with learned positions and segments, a pooler, and a head
for masked language modelling.

Source: Devlin et al. 2018 (arXiv 1810.04805); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import replace

from torch import nn

from regard.argument_checks import resolve_head_dim
from regard.configs.base import Raw
from regard.configs.bert import BertConfig
from regard.models.assembly.building_blocks import activation
from regard.models.checkpoint.family import Family, weight_and_bias
from regard.models.encoder import Encoder, HeadedEncoder
from regard.nn import Attention, Block, FeedForward, InputEmbedding, PostNorm
from regard.nn.linear import Linear
from regard.nn.variants.projections import output_projection, separate_qkv
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
    """Build the encoder of a config with its pooler and head, and initial weights.

    Weights are normal with standard deviation 0.02, biases 0, norms 1.
    """
    M = config.hidden_size
    embedding = nn.Embedding(config.vocab_size, M)
    embed = InputEmbedding(
        embedding,
        LearnedPositions(config.max_position_embeddings, M),
        segments=nn.Embedding(config.type_vocab_size, M),
        norm=_norm(config),
    )
    layers = [_block(config) for _ in range(config.num_hidden_layers)]
    pooler = _chain(dense=Linear(M, M), activation=nn.Tanh()) if config.pooler else None
    head = _head(config, embedding) if config.masked_words else None
    model = HeadedEncoder(Encoder(embed, layers, nn.Identity()), pooler, head)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
    return model


def _norm(config: Config) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


def _block(config: Config) -> Block:
    M, H = config.hidden_size, config.num_attention_heads
    D = resolve_head_dim(M, H, None)
    attention = Attention(
        separate_qkv(M, H, H, D, bias=True), output_projection(M, H, D, bias=True)
    )
    feed_forward = FeedForward(M, config.intermediate_size, activation(config.hidden_act))
    return Block(attention, feed_forward, PostNorm(_norm(config)), PostNorm(_norm(config)))


def _head(config: Config, embedding: nn.Embedding) -> nn.Sequential:
    M, f = config.hidden_size, activation(config.hidden_act)
    words = Linear(M, config.vocab_size)
    words.weight = embedding.weight
    return _chain(dense=Linear(M, M), activation=f, norm=_norm(config), words=words)


def _chain(**steps: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(steps))


STORED_LAYER, MODEL_LAYER = "bert.encoder.layer.{}.", "encoder.layers.{}."
NAMES = {
    "bert.embeddings.word_embeddings.weight": "encoder.embed.embedding.weight",
    "bert.embeddings.position_embeddings.weight": "encoder.embed.positional.weight",
    "bert.embeddings.token_type_embeddings.weight": "encoder.embed.segments.weight",
    **weight_and_bias("bert.embeddings.LayerNorm", "encoder.embed.norm"),
    **weight_and_bias(
        STORED_LAYER + "attention.self.query", MODEL_LAYER + "attention.project.q.linear"
    ),
    **weight_and_bias(
        STORED_LAYER + "attention.self.key", MODEL_LAYER + "attention.project.k.linear"
    ),
    **weight_and_bias(
        STORED_LAYER + "attention.self.value", MODEL_LAYER + "attention.project.v.linear"
    ),
    **weight_and_bias(STORED_LAYER + "attention.output.dense", MODEL_LAYER + "attention.output"),
    **weight_and_bias(
        STORED_LAYER + "attention.output.LayerNorm", MODEL_LAYER + "attention_residual.norm"
    ),
    **weight_and_bias(STORED_LAYER + "intermediate.dense", MODEL_LAYER + "feed_forward.up"),
    **weight_and_bias(STORED_LAYER + "output.dense", MODEL_LAYER + "feed_forward.down"),
    **weight_and_bias(
        STORED_LAYER + "output.LayerNorm", MODEL_LAYER + "feed_forward_residual.norm"
    ),
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
