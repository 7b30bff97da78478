"""Phi 1, 1.5 and 2: parallel sublayers that share a LayerNorm, rotary positions on a part of each
head, and a head with biases.

Source: Li et al. 2023 (arXiv 2309.05463); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from torch import nn

from regard.configs.layer_norm_decoders import PhiConfig
from regard.models.assembly import layer_norm_decoder, llama_like
from regard.models.assembly.building_blocks import activation
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.checkpoint.family import weight_and_bias, weights_and_biases
from regard.models.decoder import Decoder
from regard.nn import Block, FeedForward, PreNorm, SharedNormBlock
from regard.nn.linear import Linear
from regard.positions import Rotary

Config = PhiConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    M, hidden = config.hidden_size, config.intermediate_size

    def block(rotary: Rotary | None, window: int | None) -> Block:
        mixer = llama_like.attention(config, rotary, window, bias=True, output_bias=True)
        feed_forward = FeedForward(M, hidden, activation(config.hidden_act))
        return SharedNormBlock(mixer, feed_forward, PreNorm(layer_norm_decoder.norm(config)))

    decoder = llama_like.decoder(config, block, final_norm=layer_norm_decoder.norm(config))
    head = Linear(M, config.vocab_size)
    nn.init.normal_(head.weight, std=0.02)
    nn.init.zeros_(head.bias)
    decoder.head = head
    return decoder


PARTS = {
    "input_layernorm": "attention_residual.norm",
    "self_attn.q_proj": "attention.project.q.linear",
    "self_attn.k_proj": "attention.project.k.linear",
    "self_attn.v_proj": "attention.project.v.linear",
    "self_attn.dense": "attention.output",
    "mlp.fc1": "feed_forward.up",
    "mlp.fc2": "feed_forward.down",
}
NAMES = (
    {"model.embed_tokens.weight": "embed.embedding.weight"}
    | weight_and_bias("model.final_layernorm", "norm")
    | weight_and_bias("lm_head", "head")
    | weights_and_biases(PARTS, STORED_LAYER, MODEL_LAYER)
)
FAMILY = llama_like.family(Config, build, NAMES)
