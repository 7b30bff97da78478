"""OLMo 2: norms behind attention and feed-forward, and one over all heads of queries and of keys
before they are rotated.

Source: OLMo 2, 2025 (arXiv 2501.00656); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.llama import Olmo2Config
from regard.models.assembly import grouped
from regard.models.assembly.grouped import OURS, THEIRS
from regard.models.checkpoint.family import Family
from regard.models.decoder import Decoder
from regard.nn import Block, OutputNorm, SwiGLU
from regard.positions import Rotary

Config = Olmo2Config


def build(config: Config) -> Decoder:
    """The decoder of a config, with fresh weights."""

    def block(rotary: Rotary, window: int | None) -> Block:
        mixer = grouped.attention(
            config,
            rotary,
            window,
            q_flat=grouped.norm(config, config.num_attention_heads * config.head_dim),
            k_flat=grouped.norm(config, config.num_key_value_heads * config.head_dim),
            bias=config.attention_bias,
            output_bias=config.attention_bias,
        )
        feed_forward = SwiGLU(config.hidden_size, config.intermediate_size)
        paths = (OutputNorm(grouped.norm(config)) for _ in range(2))
        return Block(mixer, feed_forward, *paths)

    return grouped.decoder(config, block)


NORMS = {
    THEIRS + "self_attn.q_norm.weight": OURS + "attention.project.q.flat.weight",
    THEIRS + "self_attn.k_norm.weight": OURS + "attention.project.k.flat.weight",
    THEIRS + "post_attention_layernorm.weight": OURS + "attention_residual.norm.weight",
    THEIRS + "post_feedforward_layernorm.weight": OURS + "feed_forward_residual.norm.weight",
}
FAMILY = Family(
    Config,
    build,
    grouped.OUTSIDE | grouped.ATTENTION | grouped.FEED_FORWARD | NORMS,
    check=grouped.check,
    prefixes=grouped.PREFIXES,
    head=grouped.HEAD,
    buffers=grouped.BUFFERS,
)
