"""GPT-J: attention and feed-forward in parallel behind one norm, rotary pairs of neighbours in a
part of each head, and a head with biases.

Source: Wang and Komatsuzaki 2021, "GPT-J-6B"; key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from torch import nn

from regard import masks
from regard.configs.gpt_relatives import GPTJConfig
from regard.models.assembly import building_blocks
from regard.models.assembly.building_blocks import activation, initialize_weights
from regard.models.checkpoint.family import Family, weight_and_bias, weights_and_biases
from regard.models.decoder import Decoder
from regard.nn import Attention, Block, FeedForward, InputEmbedding, PreNorm, SharedNormBlock
from regard.nn.linear import Linear
from regard.positions import Rotary

Config = GPTJConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    M, V = config.n_embd, config.vocab_size
    rotary = building_blocks.rotary_module(config.rope)
    layers = [_block(config, rotary) for _ in range(config.n_layer)]
    embed = InputEmbedding(nn.Embedding(V, M))
    return initialize_weights(Decoder(embed, layers, _norm(config), Linear(M, V)))


def _norm(config: Config) -> nn.LayerNorm:
    return nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)


def _block(config: Config, rotary: Rotary) -> Block:
    M, H = config.n_embd, config.n_head
    project = building_blocks.rotary_heads(M, H, H, M // H, rotary)
    attention = Attention(project, Linear(M, M, bias=False), mask=masks.Causal())
    feed_forward = FeedForward(M, config.hidden, activation(config.activation_function))
    return SharedNormBlock(attention, feed_forward, PreNorm(_norm(config)))


STORED_LAYER, MODEL_LAYER = "transformer.h.{}.", "layers.{}."
PARTS = {
    "ln_1": "attention_residual.norm",
    "mlp.fc_in": "feed_forward.up",
    "mlp.fc_out": "feed_forward.down",
}
NAMES = {
    "transformer.wte.weight": "embed.embedding.weight",
    **weight_and_bias("transformer.ln_f", "norm"),
    **weight_and_bias("lm_head", "head"),
    **weights_and_biases(PARTS, STORED_LAYER, MODEL_LAYER),
    **{
        f"{STORED_LAYER}attn.{part}_proj.weight": f"{MODEL_LAYER}attention.project.{part}"
        ".linear.weight"
        for part in "qkv"
    },
    STORED_LAYER + "attn.out_proj.weight": MODEL_LAYER + "attention.output.weight",
}
"""Stored name -> parameter name; {} is the layer."""

FAMILY = Family(
    Config,
    build,
    NAMES,
    # the head has its own matrix and biases, and is never tied to the embedding
    complete_config=lambda config, _raw, _stored: config,
    check=lambda config: building_blocks.rotary_module(config.rope),
    prefixes=("transformer.",),
    buffers=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias|embed_positions)",),
)
