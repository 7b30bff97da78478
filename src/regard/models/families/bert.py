"""BERT, RoBERTa, DistilBERT and ModernBERT. Source: Devlin et al. 2018 (arXiv 1810.04805); Liu et
al. 2019 (arXiv 1907.11692); Sanh et al. 2019 (arXiv 1910.01108); Warner et al. 2024 (arXiv
2412.13663).
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from regard.configs.bert import BertConfig, DistilBertConfig, ModernBertConfig, RobertaConfig
from regard.masks import Window
from regard.models.assembly import building_blocks
from regard.models.assembly.building_blocks import activation, flags_of_stored
from regard.models.assembly.stacks import LayerSizes, encoder_blocks, initialize_normal
from regard.models.checkpoint.family import (
    Family,
    NameTable,
    stacked_rows,
    weight_and_bias,
    weights_and_biases,
)
from regard.models.encoder import Encoder, HeadedEncoder
from regard.nn import Attention, Block, InputEmbedding, PreNorm
from regard.nn.blocks.feed_forward import GatedFeedForward
from regard.nn.variants.projections import output_projection
from regard.nn.weights import Linear
from regard.positions import LearnedPositions, Rotary


def _build(config: BertConfig | DistilBertConfig) -> HeadedEncoder:
    """Build the encoder of a config with its pooler and head, and initial weights: normal (standard
    deviation 0.02), biases 0, norms 1.
    """
    M, recipe = config.model_dim, config.recipe
    name, eps = config.value(recipe.activation), config.value(recipe.eps)
    sizes = LayerSizes(M, config.heads, config.hidden, name, eps)
    segments = config.type_vocab_size
    embed = InputEmbedding(
        nn.Embedding(config.vocab_size, M),
        LearnedPositions(config.positions, M, offset=config.offset),
        segments=nn.Embedding(segments, M) if segments else None,
        norm=sizes.norm(),
    )
    pool = _chain(dense=Linear(M, M), activation=nn.Tanh()) if config.pooler else None
    head = None
    if config.masked_words:
        head = _head(embed.embedding, activation(name), sizes.norm())
    encoder = Encoder(embed, encoder_blocks(sizes, config.layers), nn.Identity())
    model = HeadedEncoder(encoder, pool, head)
    initialize_normal(model)
    return model


def _head(
    embedding: nn.Embedding,
    f: nn.Module,
    norm: nn.Module,
    *,
    bias: bool = True,
    words_bias: bool = True,
    tied: bool = True,
) -> nn.Sequential:
    """Build a head for masked words, whose last matrix may be that of the embedding."""
    V, M = embedding.weight.shape
    words = Linear(M, V, bias=words_bias)
    if tied:
        words.weight = embedding.weight
    return _chain(dense=Linear(M, M, bias=bias), activation=f, norm=norm, words=words)


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


def _rename_layer_norm(name: str) -> str:
    """Rename the parts of a LayerNorm, which the first releases spelled as TensorFlow does."""
    spellings = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
    return next((name.replace(old, new) for old, new in spellings.items() if old in name), name)


def _names(model: str, head: str, dense: str, norm: str) -> NameTable:
    """Return the name table of a model, with the names of its head and of two parts of that."""
    return {
        f"{model}.embeddings.word_embeddings.weight": "encoder.embed.embedding.weight",
        f"{model}.embeddings.position_embeddings.weight": "encoder.embed.positional.weight",
        f"{model}.embeddings.token_type_embeddings.weight": "encoder.embed.segments.weight",
        **weight_and_bias(f"{model}.embeddings.LayerNorm", "encoder.embed.norm"),
        **weights_and_biases(BERT_PARTS, f"{model}.encoder.layer.{{}}.", "encoder.layers.{}."),
        **weight_and_bias(f"{model}.pooler.dense", "pooler.dense"),
        **weight_and_bias(f"{head}.{dense}", "head.dense"),
        **weight_and_bias(f"{head}.{norm}", "head.norm"),
        f"{head}.bias": "head.words.bias",
        **weight_and_bias(f"{head}.decoder", "head.words"),
    }


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


def _build_modernbert(config: ModernBertConfig) -> HeadedEncoder:
    """Build an encoder with its head and initial weights: normal (std 0.02), norms 1."""
    M = config.hidden_size
    distances = config.distances()
    rotaries = {x: building_blocks.rotary_module(config.rope(x)) for x in set(distances)}
    blocks = [_modern_block(config, i, x, rotaries[x]) for i, x in enumerate(distances)]
    embed = InputEmbedding(nn.Embedding(config.vocab_size, M), norm=_modern_norm(config))
    head = None
    if config.masked_words:
        head = _head(
            embed.embedding,
            activation(config.classifier_activation, "classifier_activation"),
            _modern_norm(config),
            bias=config.classifier_bias,
            words_bias=config.decoder_bias,
            tied=config.tie_word_embeddings,
        )
    model = HeadedEncoder(Encoder(embed, blocks, _modern_norm(config)), None, head)
    initialize_normal(model)
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
        _build,
        _names("bert", "cls.predictions", "transform.dense", "transform.LayerNorm"),
        complete_config=flags_of_stored(
            pooler="bert.pooler.dense.weight", masked_words="cls.predictions.bias"
        ),
        rename_stored=_rename_layer_norm,
        prefixes=("bert.",),
        buffers=(r"(bert\.)?embeddings\.position_ids", r"cls\.seq_relationship\.(weight|bias)"),
        architecture="encoder",
    ),
    "roberta": Family(
        RobertaConfig,
        _build,
        _names("roberta", "lm_head", "dense", "layer_norm"),
        complete_config=flags_of_stored(
            pooler="roberta.pooler.dense.weight", masked_words="lm_head.bias"
        ),
        prefixes=("roberta.",),
        buffers=(r"(roberta\.)?embeddings\.position_ids",),
        architecture="encoder",
    ),
    "distilbert": Family(
        DistilBertConfig,
        _build,
        DISTILBERT_NAMES,
        complete_config=flags_of_stored(masked_words="vocab_projector.bias"),
        prefixes=("distilbert.",),
        buffers=(r"(distilbert\.)?embeddings\.position_ids",),
        architecture="encoder",
    ),
    "modernbert": Family(
        ModernBertConfig,
        _build_modernbert,
        MODERN_NAMES,
        complete_config=flags_of_stored(masked_words="head.dense.weight"),
        prefixes=("model.",),
        architecture="encoder",
    ),
}
