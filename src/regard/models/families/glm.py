"""GLM-4-9B: Llama that rotates a part of each head, in pairs of neighbours, with gate and up
projection in one stored matrix.

Source: GLM Team 2024 (arXiv 2406.12793); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.llama_relatives import GlmConfig
from regard.models.assembly import llama_like
from regard.models.decoder import Decoder

Config = GlmConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    return llama_like.pre_norm_decoder(config, bias=config.attention_bias)


FAMILY = llama_like.family(
    Config,
    build,
    {
        **llama_like.EMBEDDING_AND_HEAD,
        **llama_like.PRE_NORMS,
        **llama_like.ATTENTION,
        **llama_like.FUSED_FEED_FORWARD,
    },
)
