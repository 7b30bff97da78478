"""Qwen 3: Qwen 2 with a norm on each head of queries and keys, before they are rotated, in place of
the bias.

Source: Yang et al. 2025 (arXiv 2505.09388); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.llama import Qwen3Config
from regard.models.assembly import grouped
from regard.models.assembly.grouped import OURS, THEIRS
from regard.models.checkpoint.family import Family
from regard.models.decoder import Decoder
from regard.nn import Block
from regard.positions import Rotary

Config = Qwen3Config


def build(config: Config) -> Decoder:
    """The decoder of a config, with fresh weights."""

    def block(rotary: Rotary, window: int | None) -> Block:
        mixer = grouped.attention(
            config,
            rotary,
            window,
            q_steps=[grouped.norm(config, config.head_dim)],
            k_steps=[grouped.norm(config, config.head_dim)],
            bias=config.attention_bias,
            output_bias=config.attention_bias,
        )
        return grouped.block(config, mixer)

    return grouped.decoder(config, block)


HEAD_NORMS = {
    THEIRS + "self_attn.q_norm.weight": OURS + "attention.project.q.steps.0.weight",
    THEIRS + "self_attn.k_norm.weight": OURS + "attention.project.k.steps.0.weight",
}
FAMILY = Family(
    Config,
    build,
    grouped.NAMES | HEAD_NORMS,
    check=grouped.check,
    prefixes=grouped.PREFIXES,
    head=grouped.HEAD,
    buffers=grouped.BUFFERS,
)
