"""Llama 1 to 3: RMS norm, rotary in halves, grouped queries, SwiGLU.

Source: Touvron et al. 2023 (arXiv 2307.09288); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

from regard.models.assembly import grouped
from regard.models.checkpoint.family import Family
from regard.models.decoder import Decoder
from regard.nn import Block
from regard.positions import Rotary


@dataclass(frozen=True)
class Config(grouped.Config):
    """The keys of a Llama config.json that shape the model.

    Raises:
        ArgumentError: as `regard.models.assembly.grouped.Config`.
    """

    attention_bias: bool = False
    mlp_bias: bool = False


def build(config: Config) -> Decoder:
    """The decoder of a config, with fresh weights."""

    def block(rotary: Rotary, window: int | None) -> Block:
        bias = config.attention_bias
        mixer = grouped.attention(config, rotary, window, bias=bias, output_bias=bias)
        return grouped.block(config, mixer, bias=config.mlp_bias)

    return grouped.decoder(config, block)


FAMILY = Family(
    Config,
    build,
    grouped.NAMES,
    ignored=frozenset({"is_llama_config", "max_sequence_length"}),
    fixed={"hidden_act": ("silu",), "rope_interleaved": (False,)},
    plain=grouped.plain,
    prefixes=grouped.PREFIXES,
    head=grouped.HEAD,
    buffers=grouped.BUFFERS,
)
