"""Mistral: Llama whose every layer looks through a sliding window, in its first version.

Source: Jiang et al. 2023 (arXiv 2310.06825); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.llama import MistralConfig
from regard.models.assembly import grouped
from regard.models.checkpoint.family import Family
from regard.models.decoder import Decoder

Config = MistralConfig


def build(config: Config) -> Decoder:
    """The decoder of a config, with fresh weights."""
    return grouped.decoder(
        config,
        lambda rotary, window: grouped.block(config, grouped.attention(config, rotary, window)),
    )


FAMILY = Family(
    Config,
    build,
    grouped.NAMES,
    check=grouped.check,
    prefixes=grouped.PREFIXES,
    head=grouped.HEAD,
    buffers=grouped.BUFFERS,
)
