"""Parts and checkpoint names of decoders with LayerNorms and rotary positions."""

from __future__ import annotations

from torch import nn

from regard.configs.layer_norm_decoders import LayerNormDecoderConfig
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.checkpoint.family import weight_and_bias, weights_and_biases

PRE_NORMS = weights_and_biases(
    {
        "input_layernorm": "attention_residual.norm",
        "post_attention_layernorm": "feed_forward_residual.norm",
    },
    STORED_LAYER,
    MODEL_LAYER,
) | weight_and_bias("model.norm", "norm")
"""The names of the norms of pre-norm blocks, and of the last norm."""


def norm(config: LayerNormDecoderConfig, *, bias: bool = True) -> nn.LayerNorm:
    """Build a LayerNorm of the model dim, with the config's eps."""
    return nn.LayerNorm(config.hidden_size, eps=config.eps, bias=bias)
