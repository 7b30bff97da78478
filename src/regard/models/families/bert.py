"""BERT, RoBERTa, DistilBERT and ModernBERT. Source: Devlin et al. 2018 (arXiv 1810.04805); Liu et
al. 2019 (arXiv 1907.11692); Sanh et al. 2019 (arXiv 1910.01108); Warner et al. 2024 (arXiv
2412.13663).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, replace

from torch import nn

from regard.argument_checks import resolve_head_dim
from regard.configs.base import Raw
from regard.configs.bert import BertConfig, DistilBertConfig, ModernBertConfig, RobertaConfig
from regard.masks import Window
from regard.models.assembly import building_blocks
from regard.models.assembly.building_blocks import activation
from regard.models.checkpoint.family import (
    Family,
    NameTable,
    stacked_rows,
    weight_and_bias,
    weights_and_biases,
)
from regard.models.encoder import Encoder, HeadedEncoder
from regard.nn import Attention, Block, FeedForward, InputEmbedding, PostNorm, PreNorm
from regard.nn.blocks.feed_forward import GatedFeedForward
from regard.nn.variants.projections import output_projection, separate_qkv
from regard.nn.weights import Linear
from regard.positions import LearnedPositions, Rotary


@dataclass(frozen=True)
class EncoderSizes:
    """The sizes of an encoder like BERT."""

    dim: int
    hidden: int
    layers: int
    heads: int
    activation: str
    eps: float


def _norm(sizes: EncoderSizes) -> nn.LayerNorm:
    """Build a LayerNorm of the model dim."""
    return nn.LayerNorm(sizes.dim, eps=sizes.eps)


def _encoder(
    sizes: EncoderSizes, embed: InputEmbedding, *, pooler: bool, masked_words: bool
) -> HeadedEncoder:
    """Build an encoder with initial weights: normal (0.02), biases 0, norms 1."""
    M = sizes.dim
    pool = _chain(dense=Linear(M, M), activation=nn.Tanh()) if pooler else None
    head = _head(sizes, embed.embedding) if masked_words else None
    blocks = [_block(sizes) for _ in range(sizes.layers)]
    model = HeadedEncoder(Encoder(embed, blocks, nn.Identity()), pool, head)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
    return model


def _block(sizes: EncoderSizes) -> Block:
    M, H = sizes.dim, sizes.heads
    D = resolve_head_dim(M, H, None)
    attention = Attention(
        separate_qkv(M, H, H, D, bias=True), output_projection(M, H, D, bias=True)
    )
    feed_forward = FeedForward(M, sizes.hidden, activation(sizes.activation))
    return Block(attention, feed_forward, PostNorm(_norm(sizes)), PostNorm(_norm(sizes)))


def _head(sizes: EncoderSizes, embedding: nn.Embedding) -> nn.Sequential:
    M, f = sizes.dim, activation(sizes.activation)
    words = Linear(M, embedding.num_embeddings)
    words.weight = embedding.weight
    return _chain(dense=Linear(M, M), activation=f, norm=_norm(sizes), words=words)


def _chain(**steps: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(steps))


BERT_PARTS = {
    "attention.self.query": "attention.project.q.linear",
    "attention.self.key": "attention.project.k.linear",
    "attention.self.value": "attention.project.v.linear",
    "attention.output.dense": "attention.output",
    "attention.output.LayerNorm": "attention_residual.norm",
    "intermediate.dense": "feed_forward.up",
    "output.dense": "feed_forward.down",
    "output.LayerNorm": "feed_forward_residual.norm",
}
"""BERT's name of a part of a layer -> its name in the network."""


def _complete_bert(config: BertConfig, _: Raw, stored: Collection[str]) -> BertConfig:
    """Set `pooler` and `masked_words` by whether their tensors are stored."""
    return replace(
        config,
        pooler="bert.pooler.dense.weight" in stored,
        masked_words="cls.predictions.bias" in stored,
    )


def _rename_layer_norm(name: str) -> str:
    """Rename the parts of a LayerNorm, which the first releases spelled as TensorFlow does."""
    spellings = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
    return next((name.replace(old, new) for old, new in spellings.items() if old in name), name)


def _build_bert(config: BertConfig) -> HeadedEncoder:
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
        norm=_norm(sizes),
    )
    return _encoder(sizes, embed, pooler=config.pooler, masked_words=config.masked_words)


BERT_NAMES = {
    "bert.embeddings.word_embeddings.weight": "encoder.embed.embedding.weight",
    "bert.embeddings.position_embeddings.weight": "encoder.embed.positional.weight",
    "bert.embeddings.token_type_embeddings.weight": "encoder.embed.segments.weight",
    **weight_and_bias("bert.embeddings.LayerNorm", "encoder.embed.norm"),
    **weights_and_biases(BERT_PARTS, "bert.encoder.layer.{}.", "encoder.layers.{}."),
    **weight_and_bias("bert.pooler.dense", "pooler.dense"),
    **weight_and_bias("cls.predictions.transform.dense", "head.dense"),
    **weight_and_bias("cls.predictions.transform.LayerNorm", "head.norm"),
    "cls.predictions.bias": "head.words.bias",
    **weight_and_bias("cls.predictions.decoder", "head.words"),
}


def _complete_roberta(config: RobertaConfig, _: Raw, stored: Collection[str]) -> RobertaConfig:
    """Set `pooler` and `masked_words` by whether their tensors are stored."""
    return replace(
        config,
        pooler="roberta.pooler.dense.weight" in stored,
        masked_words="lm_head.bias" in stored,
    )


ROBERTA_NAMES = {
    "roberta.embeddings.word_embeddings.weight": "encoder.embed.embedding.weight",
    "roberta.embeddings.position_embeddings.weight": "encoder.embed.positional.weight",
    "roberta.embeddings.token_type_embeddings.weight": "encoder.embed.segments.weight",
    **weight_and_bias("roberta.embeddings.LayerNorm", "encoder.embed.norm"),
    **weights_and_biases(BERT_PARTS, "roberta.encoder.layer.{}.", "encoder.layers.{}."),
    **weight_and_bias("roberta.pooler.dense", "pooler.dense"),
    **weight_and_bias("lm_head.dense", "head.dense"),
    **weight_and_bias("lm_head.layer_norm", "head.norm"),
    "lm_head.bias": "head.words.bias",
    **weight_and_bias("lm_head.decoder", "head.words"),
}


def _complete_distilbert(
    config: DistilBertConfig, _: Raw, stored: Collection[str]
) -> DistilBertConfig:
    """Set `masked_words` by whether its tensors are stored."""
    return replace(config, masked_words="vocab_projector.bias" in stored)


def _build_distilbert(config: DistilBertConfig) -> HeadedEncoder:
    """Build the encoder of a config with its head, and initial weights."""
    M = config.dim
    sizes = EncoderSizes(
        M, config.hidden_dim, config.n_layers, config.n_heads, config.activation, config.eps
    )
    embed = InputEmbedding(
        nn.Embedding(config.vocab_size, M),
        LearnedPositions(config.max_position_embeddings, M),
        norm=_norm(sizes),
    )
    return _encoder(sizes, embed, pooler=False, masked_words=config.masked_words)


DISTILBERT_PARTS = {
    "attention.q_lin": "attention.project.q.linear",
    "attention.k_lin": "attention.project.k.linear",
    "attention.v_lin": "attention.project.v.linear",
    "attention.out_lin": "attention.output",
    "sa_layer_norm": "attention_residual.norm",
    "ffn.lin1": "feed_forward.up",
    "ffn.lin2": "feed_forward.down",
    "output_layer_norm": "feed_forward_residual.norm",
}
DISTILBERT_NAMES = {
    "distilbert.embeddings.word_embeddings.weight": "encoder.embed.embedding.weight",
    "distilbert.embeddings.position_embeddings.weight": "encoder.embed.positional.weight",
    **weight_and_bias("distilbert.embeddings.LayerNorm", "encoder.embed.norm"),
    **weights_and_biases(
        DISTILBERT_PARTS, "distilbert.transformer.layer.{}.", "encoder.layers.{}."
    ),
    **weight_and_bias("vocab_transform", "head.dense"),
    **weight_and_bias("vocab_layer_norm", "head.norm"),
    **weight_and_bias("vocab_projector", "head.words"),
}


def _complete_modernbert(
    config: ModernBertConfig, _: Raw, stored: Collection[str]
) -> ModernBertConfig:
    """Set `masked_words` by whether the head's tensors are stored."""
    return replace(config, masked_words="head.dense.weight" in stored)


def _build_modernbert(config: ModernBertConfig) -> HeadedEncoder:
    """Build an encoder with its head and initial weights: normal (std 0.02), norms 1."""
    M = config.hidden_size
    distances = config.distances()
    rotaries = {x: building_blocks.rotary_module(config.rope(x)) for x in set(distances)}
    blocks = [_modern_block(config, i, x, rotaries[x]) for i, x in enumerate(distances)]
    embed = InputEmbedding(nn.Embedding(config.vocab_size, M), norm=_modern_norm(config))
    head = _modern_head(config, embed.embedding) if config.masked_words else None
    model = HeadedEncoder(Encoder(embed, blocks, _modern_norm(config)), None, head)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    return model


def _modern_norm(config: ModernBertConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)


def _modern_block(
    config: ModernBertConfig, index: int, distance: int | None, rotary: Rotary
) -> Block:
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
    first = nn.Identity() if index == 0 else _modern_norm(config)
    return Block(attention, feed_forward, PreNorm(first), PreNorm(_modern_norm(config)))


def _modern_head(config: ModernBertConfig, embedding: nn.Embedding) -> nn.Sequential:
    M = config.hidden_size
    words = Linear(M, config.vocab_size, bias=config.decoder_bias)
    if config.tie_word_embeddings:
        words.weight = embedding.weight
    steps: dict[str, nn.Module] = {
        "dense": Linear(M, M, bias=config.classifier_bias),
        "activation": activation(config.classifier_activation, "classifier_activation"),
        "norm": _modern_norm(config),
        "words": words,
    }
    return nn.Sequential(OrderedDict(steps))


MODERN_LAYER, OURS = "model.layers.{}.", "encoder.layers.{}."
MODERN_NAMES: NameTable = {
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
        MODERN_LAYER,
        OURS,
    ),
    **{
        f"{MODERN_LAYER}{theirs}.{end}": stacked_rows(*(f"{OURS}{part}.{end}" for part in parts))
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
FAMILIES = {
    "bert": Family(
        BertConfig,
        _build_bert,
        BERT_NAMES,
        complete_config=_complete_bert,
        rename_stored=_rename_layer_norm,
        prefixes=("bert.",),
        buffers=(r"(bert\.)?embeddings\.position_ids", r"cls\.seq_relationship\.(weight|bias)"),
        architecture="encoder",
    ),
    "roberta": Family(
        RobertaConfig,
        _build_bert,
        ROBERTA_NAMES,
        complete_config=_complete_roberta,
        prefixes=("roberta.",),
        buffers=(r"(roberta\.)?embeddings\.position_ids",),
        architecture="encoder",
    ),
    "distilbert": Family(
        DistilBertConfig,
        _build_distilbert,
        DISTILBERT_NAMES,
        complete_config=_complete_distilbert,
        prefixes=("distilbert.",),
        buffers=(r"(distilbert\.)?embeddings\.position_ids",),
        architecture="encoder",
    ),
    "modernbert": Family(
        ModernBertConfig,
        _build_modernbert,
        MODERN_NAMES,
        complete_config=_complete_modernbert,
        prefixes=("model.",),
        architecture="encoder",
    ),
}
