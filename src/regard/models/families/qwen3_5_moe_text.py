"""The language model of Qwen3.5 with a mixture of experts in every layer, and an expert for all
tokens behind a gate.

From a folder with image input (`model_type` "qwen3_5_moe"), only `text_config` and the tensors of
the language model are read.

Source: Qwen Team 2026, "Qwen3.5"; Yang et al. 2024 (arXiv 2412.06464); key names as in Hugging Face
checkpoints.
"""

from __future__ import annotations

from regard.configs.gated_delta_hybrids import Qwen35MoeConfig
from regard.models.assembly import gated_delta
from regard.models.checkpoint.family import NameTable
from regard.models.decoder import Decoder

Config = Qwen35MoeConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    return gated_delta.decoder(config, lambda: gated_delta.mixture(config, normalise=True))


NAMES: NameTable = {
    **gated_delta.PARTS,
    **gated_delta.SEPARATE_MAPS,
    **gated_delta.EXPERTS,
    **gated_delta.FUSED_EXPERTS,
}
FAMILY = gated_delta.family(Config, build, NAMES)
