"""GLM-4-0414: GLM-4-9B with a norm after each sublayer, too.

Source: Z.ai 2025, GLM-4-0414; key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.llama_relatives import Glm4Config
from regard.models.assembly import llama_like
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.checkpoint.family import NameTable
from regard.models.decoder import Decoder
from regard.nn import Block, SandwichNorm, SwiGLU
from regard.positions import Rotary

Config = Glm4Config


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""

    def block(rotary: Rotary | None, window: int | None) -> Block:
        mixer = llama_like.attention(config, rotary, window, bias=config.attention_bias)
        feed_forward = SwiGLU(config.hidden_size, config.intermediate_size)
        residuals = (
            SandwichNorm(llama_like.norm(config), llama_like.norm(config)) for _ in range(2)
        )
        return Block(mixer, feed_forward, *residuals)

    return llama_like.decoder(config, block)


NORMS: NameTable = {
    STORED_LAYER + "input_layernorm.weight": MODEL_LAYER + "attention_residual.norm.weight",
    STORED_LAYER + "post_self_attn_layernorm.weight": MODEL_LAYER
    + "attention_residual.after.weight",
    STORED_LAYER + "post_attention_layernorm.weight": MODEL_LAYER
    + "feed_forward_residual.norm.weight",
    STORED_LAYER + "post_mlp_layernorm.weight": MODEL_LAYER + "feed_forward_residual.after.weight",
}
FAMILY = llama_like.family(
    Config,
    build,
    {
        **llama_like.EMBEDDING_AND_HEAD,
        **NORMS,
        **llama_like.ATTENTION,
        **llama_like.FUSED_FEED_FORWARD,
    },
)
