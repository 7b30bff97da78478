"""Gemma: Llama with norms of weight 1 + w, an embedding times sqrt(M), GeGLU, and heads of 256
whatever the model's size.

Source: Gemma Team 2024 (arXiv 2403.08295); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from regard.models.assembly import gemmas, grouped, rope
from regard.models.checkpoint.family import Family, Raw
from regard.models.decoder import Decoder
from regard.nn import Block, PreNorm


@dataclass(frozen=True)
class Config(gemmas.Config):
    """The keys of a Gemma config.json that shape the model.

    Raises:
        ArgumentError: as `regard.models.assembly.gemmas.Config`.
    """


def plain(raw: Raw) -> dict[str, Any]:
    """A file without head_dim means 256.

    Two keys name the activation, and files of both kinds are around: "gelu" in `hidden_act` of the
    first ones means the form with tanh, as their authors computed it.
    """
    return rope.plain({"head_dim": 256, **raw})


def build(config: Config) -> Decoder:
    """The decoder of a config, with fresh weights."""
    rotary = config.rotary()

    def block() -> Block:
        paths = [PreNorm(gemmas.norm(config)) for _ in range(2)]
        return Block(gemmas.attention(config, rotary), gemmas.feed_forward(config), *paths)

    return gemmas.decoder(config, [block() for _ in range(config.num_hidden_layers)])


FAMILY = Family(
    Config,
    build,
    grouped.NAMES,
    fixed={
        "hidden_act": ("gelu", "gelu_pytorch_tanh"),
        "hidden_activation": (None, "gelu_pytorch_tanh"),
        "use_bidirectional_attention": (None, False),
    },
    plain=plain,
    prefixes=grouped.PREFIXES,
    head=grouped.HEAD,
    buffers=grouped.BUFFERS,
)
