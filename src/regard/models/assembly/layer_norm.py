"""The network of a `LayerNormRecipe`: decoders with LayerNorms and feed-forward layers without a
gate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from regard import masks
from regard.configs.layer_norm import LayerNormConfig
from regard.models.assembly import building_blocks
from regard.models.assembly.building_blocks import activation, initialize_weights
from regard.models.checkpoint.family import Family, NameTable
from regard.models.decoder import Decoder
from regard.nn import (
    Attention,
    Block,
    FeedForward,
    FusedQKV,
    InputEmbedding,
    NormedResidual,
    ParallelBlock,
    PreNorm,
    SharedNormBlock,
)
from regard.nn.projections.heads import Projection
from regard.nn.weights import Linear
from regard.positions import LearnedPositions, Rotary

Options: TypeAlias = Callable[[Any, int], Mapping[str, Any]]
"""(config, number of the layer) -> further options of its `Attention`, or its `project`."""


def no_options(_config: LayerNormConfig, _layer: int) -> Mapping[str, Any]:
    """Return the options of attention as GPT-2 has it, but for its scale."""
    return {}


def family(
    config: type[LayerNormConfig], names: NameTable, options: Options = no_options, **more: Any
) -> Family:
    """Return the family of a config with a `LayerNormRecipe`; `more` replaces what is usual."""
    usual: dict[str, Any] = {
        "check": partial(_check, options=options),
        "prefixes": ("transformer.",),
        "head": "lm_head.weight",
    }
    return Family(config, partial(_decoder, options=options), names, **usual | more)


def _check(config: LayerNormConfig, options: Options) -> None:
    """Refuse a rotary scaling that the network of this family does not have."""
    if config.rope is not None:
        with torch.device("meta"):  # nothing is allocated
            _layers(config, options, 1)


def _decoder(config: LayerNormConfig, options: Options) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    M, recipe = config.model_dim, config.recipe
    layers = _layers(config, options, config.layers)
    embedding, head = building_blocks.embedding_and_head(
        config.vocab_size, M, tied=config.value("tie_word_embeddings"), bias=recipe.head_bias
    )
    rows = config.value(recipe.positions)
    learned = None if rows is None else LearnedPositions(rows, M, offset=recipe.unused)
    own_norm = norm(config) if recipe.embedding_norm else None
    embed = InputEmbedding(embedding, learned, norm=own_norm)
    return initialize_weights(Decoder(embed, layers, norm(config), head))


def norm(config: LayerNormConfig) -> nn.LayerNorm:
    """Build a norm of the model dim."""
    eps = config.value(config.recipe.eps)
    return nn.LayerNorm(config.model_dim, eps=eps, bias=config.recipe.norm_bias)


def _layers(config: LayerNormConfig, options: Options, count: int) -> list[Block]:
    """Build the first layers of a config."""
    M, recipe, value = config.model_dim, config.recipe, config.value
    rotary = None if config.rope is None else building_blocks.rotary_module(config.rope)
    residual = NormedResidual if value(recipe.normed_residual) else PreNorm
    kind = {0: Block, 1: SharedNormBlock, 2: ParallelBlock}[config.parallel_norms]
    layers: list[Block] = []
    for i, window in enumerate(config.windows()[:count]):
        more = dict(options(config, i))
        project: Projection = more.pop("project", None) or _projection(config, rotary)
        output = Linear(M, M, bias=value(recipe.output_bias))
        mask = masks.Causal() if window is None else masks.Causal() & masks.Window(window)
        f = activation(value(recipe.activation), recipe.activation)
        network = FeedForward(M, config.hidden, f, bias=value(recipe.ff_bias))
        norms = (residual(norm(config)) for _ in range(config.parallel_norms or 2))
        layers.append(kind(Attention(project, output, mask=mask, **more), network, *norms))
    return layers


def _projection(config: LayerNormConfig, rotary: Rotary | None) -> Projection:
    """Build the maps to queries, keys and values."""
    M, H, G, bias = (
        config.model_dim,
        config.heads,
        config.groups,
        config.value(config.recipe.qkv_bias),
    )
    if config.rows is None:
        return building_blocks.rotary_heads(M, H, G, M // H, rotary, bias=bias)
    steps = [] if rotary is None else [rotary]
    return FusedQKV(M, H, G, M // H, order=config.rows, steps=steps, bias=bias)
