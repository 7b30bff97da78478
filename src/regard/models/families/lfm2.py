"""LFM2: layers of gated short convolutions between layers of attention. Source: Liquid AI 2025
(arXiv 2511.23404).
"""

from __future__ import annotations

from regard.configs.base import FULL
from regard.configs.lfm2 import Lfm2Config, Lfm2MoeConfig
from regard.models.assembly import llama_like
from regard.models.assembly.gated_delta import filters
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.checkpoint.family import NameTable, only, weights_and_biases
from regard.nn import Block
from regard.nn.recurrence.recurrent import GatedConvolution
from regard.positions import Rotary


def _layer(config: Lfm2Config, layer: int, rotary: Rotary | None, window: int | None) -> Block:
    if config.kinds()[layer] == FULL:
        return llama_like.recipe_layer(config, layer, rotary, window)
    mixer = GatedConvolution(config.hidden_size, config.conv_L_cache, bias=config.conv_bias)
    return llama_like.block(config, mixer, llama_like.feed_forward(config, layer))


STORED, MIXER = STORED_LAYER + "conv.", MODEL_LAYER + "attention."
CONVOLUTION: NameTable = {
    STORED + "conv.weight": filters(MIXER + "convolution.weight"),
    STORED + "conv.bias": MIXER + "convolution.bias",
    **only(
        weights_and_biases({"in_proj": "input", "out_proj": "output"}, STORED, MIXER),
        requires=MIXER + "input.weight",
    ),
}


def _names(config: type[Lfm2Config]) -> NameTable:
    table = llama_like.recipe_names(config.recipe)
    attention = {k: v for k, v in table.items() if ".self_attn." in k}
    return {**table, **only(attention, unless=MIXER + "input.weight"), **CONVOLUTION}


FAMILIES = {
    kind.model_types[0]: llama_like.family(kind, _layer, _names(kind))
    for kind in (Lfm2Config, Lfm2MoeConfig)
}
