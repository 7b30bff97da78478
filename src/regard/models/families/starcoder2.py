"""StarCoder2: LayerNorms, biases everywhere, and a feed-forward layer without a gate.

Source: Lozhkov et al. 2024 (arXiv 2402.19173); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.layer_norm_decoders import Starcoder2Config
from regard.models.assembly import layer_norm_decoder, llama_like
from regard.models.assembly.building_blocks import activation
from regard.models.checkpoint.family import weights_and_biases
from regard.models.decoder import Decoder
from regard.nn import Block, FeedForward, PreNorm
from regard.positions import Rotary

Config = Starcoder2Config


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    bias = config.use_bias

    def block(rotary: Rotary | None, window: int | None) -> Block:
        mixer = llama_like.attention(config, rotary, window, bias=bias, output_bias=bias)
        feed_forward = FeedForward(
            config.hidden_size,
            config.intermediate_size,
            activation(config.hidden_act),
            bias=bias,
        )
        residuals = (PreNorm(layer_norm_decoder.norm(config)) for _ in range(2))
        return Block(mixer, feed_forward, *residuals)

    return llama_like.decoder(config, block, final_norm=layer_norm_decoder.norm(config))


FEED_FORWARD = weights_and_biases(
    {"mlp.c_fc": "feed_forward.up", "mlp.c_proj": "feed_forward.down"},
    llama_like.STORED_LAYER,
    llama_like.MODEL_LAYER,
)
FAMILY = llama_like.family(
    Config,
    build,
    llama_like.EMBEDDING_AND_HEAD
    | llama_like.ATTENTION
    | FEED_FORWARD
    | layer_norm_decoder.PRE_NORMS,
)
