"""Qwen 3: Qwen 2 with a norm on each head of queries and keys, before they are rotated, in place of
the bias.

Source: Yang et al. 2025 (arXiv 2505.09388); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.llama import Qwen3Config
from regard.models.assembly import llama_like
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.decoder import Decoder
from regard.nn import Block
from regard.positions import Rotary

Config = Qwen3Config


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""

    def block(rotary: Rotary, window: int | None) -> Block:
        mixer = llama_like.attention(
            config,
            rotary,
            window,
            q_steps=[llama_like.norm(config, config.head_dim)],
            k_steps=[llama_like.norm(config, config.head_dim)],
            bias=config.attention_bias,
            output_bias=config.attention_bias,
        )
        return llama_like.block(config, mixer)

    return llama_like.decoder(config, block)


HEAD_NORMS = {
    STORED_LAYER + "self_attn.q_norm.weight": MODEL_LAYER + "attention.project.q.steps.0.weight",
    STORED_LAYER + "self_attn.k_norm.weight": MODEL_LAYER + "attention.project.k.steps.0.weight",
}
FAMILY = llama_like.family(Config, build, llama_like.NAMES | HEAD_NORMS)
