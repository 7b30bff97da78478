"""OLMo 2: norms after the attention and the feed-forward layer, one norm over all query heads, and
one over all key heads, before the rotation.

Source: OLMo 2, 2025 (arXiv 2501.00656); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.llama import Olmo2Config
from regard.models.assembly import llama_like, olmo
from regard.models.decoder import Decoder

Config = Olmo2Config


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    return olmo.output_norm_decoder(config)


FAMILY = llama_like.family(Config, build, olmo.NAMES)
