"""Granite 3: Llama with factors on the embedding, the scores, what each sublayer adds, and the
logits.

Source: IBM 2024, "Granite 3.0 Language Models"; key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.llama_relatives import GraniteConfig
from regard.models.assembly import granite, llama_like
from regard.models.decoder import Decoder
from regard.nn import SwiGLU

Config = GraniteConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    M, hidden = config.hidden_size, config.intermediate_size
    return granite.decoder(config, lambda: SwiGLU(M, hidden, bias=config.mlp_bias))


FAMILY = llama_like.family(Config, build)
