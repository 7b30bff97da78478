"""ERNIE 4.5, the dense models: Llama that rotates pairs of neighbours.

Source: Baidu 2025, "ERNIE 4.5 Technical Report"; key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.llama_relatives import Ernie45Config
from regard.models.assembly import llama_like
from regard.models.decoder import Decoder

Config = Ernie45Config


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    bias = config.use_bias
    return llama_like.pre_norm_decoder(config, bias=bias, output_bias=bias, feed_forward_bias=bias)


FAMILY = llama_like.family(Config, build)
