"""The language model of Qwen3.5 with dense feed-forward layers: the layers of Qwen3-Next, whose
maps are stored one after the other.

From a folder with image input (`model_type` "qwen3_5"), only `text_config` and the tensors of the
language model are read.

Source: Qwen Team 2026, "Qwen3.5"; Yang et al. 2024 (arXiv 2412.06464); key names as in Hugging Face
checkpoints.
"""

from __future__ import annotations

from regard.configs.gated_delta_hybrids import Qwen35Config
from regard.models.assembly import gated_delta, llama_like
from regard.models.checkpoint.family import NameTable
from regard.models.decoder import Decoder
from regard.nn import SwiGLU

Config = Qwen35Config


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    return gated_delta.decoder(config, lambda: SwiGLU(config.hidden_size, config.intermediate_size))


NAMES: NameTable = {
    **gated_delta.PARTS,
    **gated_delta.SEPARATE_MAPS,
    **llama_like.FEED_FORWARD,
}
FAMILY = gated_delta.family(Config, build, NAMES)
