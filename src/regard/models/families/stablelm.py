"""StableLM: LayerNorms and rotary positions on a part of each head; in some models, parallel
sublayers that share a norm.

Source: Bellagente et al. 2024 (arXiv 2402.17834); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.layer_norm_decoders import StableLmConfig
from regard.models.assembly import layer_norm_decoder, llama_like
from regard.models.decoder import Decoder
from regard.nn import Block, PreNorm, SharedNormBlock, SwiGLU
from regard.positions import Rotary

Config = StableLmConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""

    def block(rotary: Rotary | None, window: int | None) -> Block:
        mixer = llama_like.attention(config, rotary, window, bias=config.use_qkv_bias)
        feed_forward = SwiGLU(config.hidden_size, config.intermediate_size)
        first = PreNorm(layer_norm_decoder.norm(config))
        if config.use_parallel_residual:
            return SharedNormBlock(mixer, feed_forward, first)
        return Block(mixer, feed_forward, first, PreNorm(layer_norm_decoder.norm(config)))

    return llama_like.decoder(config, block, final_norm=layer_norm_decoder.norm(config))


FAMILY = llama_like.family(
    Config,
    build,
    llama_like.EMBEDDING_AND_HEAD
    | llama_like.ATTENTION
    | llama_like.FEED_FORWARD
    | layer_norm_decoder.PRE_NORMS,
)
