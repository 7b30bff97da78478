"""Granite 3: Llama with factors on the embedding, the scores, what each sublayer adds, and the
logits.

Source: IBM 2024, "Granite 3.0 Language Models"; key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.llama_relatives import GraniteConfig
from regard.models.assembly import granite, llama_like
from regard.models.decoder import Decoder
from regard.nn import Block, SwiGLU
from regard.positions import Rotary

Config = GraniteConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    M, hidden = config.hidden_size, config.intermediate_size

    def layer(rotary: Rotary | None, window: int | None) -> Block:
        mixer = granite.attention(config, rotary, window)
        return granite.block(config, mixer, SwiGLU(M, hidden, bias=config.mlp_bias))

    return granite.decoder(config, layer)


FAMILY = llama_like.family(Config, build)
