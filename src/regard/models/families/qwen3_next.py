"""Qwen3-Next: three layers of Gated DeltaNet, then one of attention with an output gate, and a
mixture of experts in every layer.

Source: Qwen Team 2025, "Qwen3-Next"; Yang et al. 2024 (arXiv 2412.06464); Qiu et al. 2025 (arXiv
2505.06708); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.gated_delta_hybrids import Qwen3NextConfig
from regard.models.assembly import gated_delta
from regard.models.assembly.gated_delta import DECAY, GATE, MIXER, QKV, STORED_DELTA, STRENGTH
from regard.models.checkpoint.family import HeadRows, NameTable
from regard.models.decoder import Decoder
from regard.nn import MoE

Config = Qwen3NextConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""

    def feed_forward() -> MoE:
        return gated_delta.mixture(config, normalise=config.norm_topk_prob)

    return gated_delta.decoder(config, feed_forward)


KEYS = MIXER + "project.k"
NAMES: NameTable = {
    **gated_delta.PARTS,
    **gated_delta.EXPERTS,
    STORED_DELTA + "in_proj_qkvz.weight": HeadRows((*QKV, GATE), KEYS),
    STORED_DELTA + "in_proj_ba.weight": HeadRows((STRENGTH, DECAY), KEYS),
}
"""The rows of the maps are stored key head by key head."""

FAMILY = gated_delta.family(Config, build, NAMES)
