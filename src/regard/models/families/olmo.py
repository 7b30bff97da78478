"""OLMo 1: Llama with LayerNorms that have no parameters, and in some models clipped queries, keys
and values.

Source: Groeneveld et al. 2024 (arXiv 2402.00838); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from torch import nn

from regard.configs.layer_norm_decoders import OlmoConfig
from regard.models.assembly import llama_like
from regard.models.decoder import Decoder
from regard.nn import Attention, Block, PreNorm, SeparateQKV, SwiGLU
from regard.nn.head_steps import Clip
from regard.positions import Rotary

Config = OlmoConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""

    def norm() -> nn.LayerNorm:
        return nn.LayerNorm(config.hidden_size, eps=config.eps, elementwise_affine=False)

    def block(rotary: Rotary | None, window: int | None) -> Block:
        feed_forward = SwiGLU(config.hidden_size, config.intermediate_size)
        mixer = _attention(config, rotary, window)
        return Block(mixer, feed_forward, PreNorm(norm()), PreNorm(norm()))

    return llama_like.decoder(config, block, final_norm=norm())


def _attention(config: Config, rotary: Rotary | None, window: int | None) -> Attention:
    bias = config.attention_bias
    if config.clip_qkv is None:
        return llama_like.attention(config, rotary, window, bias=bias, output_bias=bias)
    q, k, v = (Clip(config.clip_qkv) for _ in range(3))
    mixer = llama_like.attention(
        config, rotary, window, q_flat=q, k_flat=k, bias=bias, output_bias=bias
    )
    assert isinstance(mixer.project, SeparateQKV)
    mixer.project.v.flat = v
    return mixer


FAMILY = llama_like.family(
    Config,
    build,
    {k: v for k, v in llama_like.EMBEDDING_AND_HEAD.items() if k != "model.norm.weight"}
    | llama_like.ATTENTION
    | llama_like.FEED_FORWARD,
)
