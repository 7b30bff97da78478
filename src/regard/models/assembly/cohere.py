"""Parts and checkpoint names of Command R and A: parallel sublayers that share a LayerNorm without
biases, and a factor on the logits.
"""

from __future__ import annotations

from regard.configs.layer_norm_decoders import CohereConfig
from regard.models.assembly import layer_norm_decoder, llama_like
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.decoder import Decoder
from regard.nn import Block, PreNorm, SharedNormBlock, SwiGLU
from regard.positions import Rotary

NAMES = (
    llama_like.EMBEDDING_AND_HEAD
    | llama_like.ATTENTION
    | llama_like.FEED_FORWARD
    | {STORED_LAYER + "input_layernorm.weight": MODEL_LAYER + "attention_residual.norm.weight"}
)
"""Stored name -> parameter name; {} is the layer."""


def decoder(config: CohereConfig) -> Decoder:
    """Build the decoder of a config, with initial weights."""

    def block(rotary: Rotary | None, window: int | None) -> Block:
        bias = config.attention_bias
        mixer = llama_like.attention(config, rotary, window, bias=bias, output_bias=bias)
        feed_forward = SwiGLU(config.hidden_size, config.intermediate_size)
        norm = layer_norm_decoder.norm(config, bias=False)
        return SharedNormBlock(mixer, feed_forward, PreNorm(norm))

    return llama_like.decoder(
        config,
        block,
        final_norm=layer_norm_decoder.norm(config, bias=False),
        logit_scale=config.logit_scale,
    )
