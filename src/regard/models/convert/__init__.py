"""Conversion of checkpoints: another number of key/value heads, latent attention, another rotary
layout, a longer context, another dtype.
"""

from regard.models.convert.attention_maps import Checkpoint, ConversionStep
from regard.models.convert.folder import ConversionOptions, convert, to_dtype
from regard.models.convert.grouped_heads import to_groups
from regard.models.convert.latent_attention import to_latent
from regard.models.convert.report import (
    ConversionReport,
    FinetuneResult,
    ModelComparison,
    compare_models,
)
from regard.models.convert.rotary_positions import extend_context, to_layout

__all__ = [
    "Checkpoint",
    "ConversionOptions",
    "ConversionReport",
    "ConversionStep",
    "FinetuneResult",
    "ModelComparison",
    "compare_models",
    "convert",
    "extend_context",
    "to_dtype",
    "to_groups",
    "to_latent",
    "to_layout",
]
