"""OLMo 2: norms after the attention and the feed-forward layer, one norm over all query heads, and
one over all key heads, before the rotation.

Source: OLMo 2, 2025 (arXiv 2501.00656); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.llama import Olmo2Config
from regard.models.assembly import llama_like
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.decoder import Decoder
from regard.nn import Block, OutputNorm, SwiGLU
from regard.positions import Rotary

Config = Olmo2Config


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""

    def block(rotary: Rotary, window: int | None) -> Block:
        mixer = llama_like.attention(
            config,
            rotary,
            window,
            q_flat=llama_like.norm(config, config.num_attention_heads * config.head_dim),
            k_flat=llama_like.norm(config, config.num_key_value_heads * config.head_dim),
            bias=config.attention_bias,
            output_bias=config.attention_bias,
        )
        feed_forward = SwiGLU(config.hidden_size, config.intermediate_size)
        residuals = (OutputNorm(llama_like.norm(config)) for _ in range(2))
        return Block(mixer, feed_forward, *residuals)

    return llama_like.decoder(config, block)


NORMS = {
    STORED_LAYER + "self_attn.q_norm.weight": MODEL_LAYER + "attention.project.q.flat.weight",
    STORED_LAYER + "self_attn.k_norm.weight": MODEL_LAYER + "attention.project.k.flat.weight",
    STORED_LAYER + "post_attention_layernorm.weight": MODEL_LAYER
    + "attention_residual.norm.weight",
    STORED_LAYER + "post_feedforward_layernorm.weight": MODEL_LAYER
    + "feed_forward_residual.norm.weight",
}
FAMILY = llama_like.family(
    Config,
    build,
    llama_like.EMBEDDING_AND_HEAD | llama_like.ATTENTION | llama_like.FEED_FORWARD | NORMS,
)
