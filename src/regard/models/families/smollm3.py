"""SmolLM3: Llama without positions in every fourth layer (NoPE).

Source: Hugging Face 2025, "SmolLM3: smol, multilingual, long-context reasoner"; NoPE: Yang et al.
2025 (arXiv 2501.18795); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.llama_relatives import SmolLM3Config
from regard.models.assembly import llama_like
from regard.models.decoder import Decoder

Config = SmolLM3Config


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    bias = config.attention_bias
    return llama_like.pre_norm_decoder(
        config, bias=bias, output_bias=bias, feed_forward_bias=config.mlp_bias
    )


FAMILY = llama_like.family(Config, build)
