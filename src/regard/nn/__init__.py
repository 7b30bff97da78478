"""Parts of models: projections, norms, attention, feed-forward and blocks; `variants` is the
catalogue of mechanisms.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from regard.deprecation import renamed
from regard.nn.attention import Attention
from regard.nn.blocks import (
    Block,
    BlockCaches,
    DecoderBlock,
    NormedResidual,
    OutputNorm,
    ParallelBlock,
    PostNorm,
    PreNorm,
    Residual,
    SandwichNorm,
)
from regard.nn.cross_attention import AdditiveAttention, CrossAttention
from regard.nn.dynamic_rotary import PrefixRecomputer, rotary_projection
from regard.nn.embedding import CappedLogits, InputEmbedding, SinusoidalPositions
from regard.nn.evicting_attention import EvictingAttention
from regard.nn.feed_forward import (
    ClippedSwiGLU,
    ExpertGroups,
    FeedForward,
    GatedFeedForward,
    MoE,
    Router,
    SigmoidRouter,
    SoftmaxRouter,
    SwiGLU,
)
from regard.nn.gated_projections import DifferentialProjection, GatedProjection
from regard.nn.infini_attention import InfiniAttention
from regard.nn.latent_projection import LatentProjection
from regard.nn.linear import Linear, set_fp32_product
from regard.nn.linear_recurrence import Recurrent
from regard.nn.longformer import Longformer
from regard.nn.norms import HeadNorm, OffsetRMSNorm, RMSNorm
from regard.nn.projections import (
    ClippedQKV,
    EncoderStateProjection,
    FusedQKV,
    HeadProjection,
    IdentityProjection,
    PerHeadProjection,
    Projection,
    SeparateQKV,
)
from regard.nn.selected_attention import NSA, SelectedAttention
from regard.nn.streaming_attention import StreamingAttention

if TYPE_CHECKING:
    from regard.nn import variants

__all__ = [
    "NSA",
    "AdditiveAttention",
    "Attention",
    "Block",
    "BlockCaches",
    "CappedLogits",
    "ClippedQKV",
    "ClippedSwiGLU",
    "CrossAttention",
    "DecoderBlock",
    "DifferentialProjection",
    "EncoderStateProjection",
    "EvictingAttention",
    "ExpertGroups",
    "FeedForward",
    "FusedQKV",
    "GatedFeedForward",
    "GatedProjection",
    "HeadNorm",
    "HeadProjection",
    "IdentityProjection",
    "InfiniAttention",
    "InputEmbedding",
    "LatentProjection",
    "Linear",
    "Longformer",
    "MoE",
    "NormedResidual",
    "OffsetRMSNorm",
    "OutputNorm",
    "ParallelBlock",
    "PerHeadProjection",
    "PostNorm",
    "PreNorm",
    "PrefixRecomputer",
    "Projection",
    "RMSNorm",
    "Recurrent",
    "Residual",
    "Router",
    "SandwichNorm",
    "SelectedAttention",
    "SeparateQKV",
    "SigmoidRouter",
    "SinusoidalPositions",
    "SoftmaxRouter",
    "StreamingAttention",
    "SwiGLU",
    "rotary_projection",
    "set_fp32_product",
    "variants",
]


def _load_variants(name: str) -> ModuleType:
    if name == "variants":  # it imports every part of this package
        return importlib.import_module("regard.nn.variants")
    raise AttributeError(f"module 'regard.nn' has no attribute {name!r}")


__getattr__ = renamed(
    __name__,
    {
        "Clipped": "ClippedQKV",
        "Differential": "DifferentialProjection",
        "Embed": "InputEmbedding",
        "Fused": "FusedQKV",
        "Gated": "GatedProjection",
        "Groups": "ExpertGroups",
        "Heads": "HeadProjection",
        "Latent": "LatentProjection",
        "NormedPath": "NormedResidual",
        "PerHead": "PerHeadProjection",
        "Prefix": "PrefixRecomputer",
        "Sandwich": "SandwichNorm",
        "Separate": "SeparateQKV",
        "Sinusoidal": "SinusoidalPositions",
        "States": "EncoderStateProjection",
        "Unprojected": "IdentityProjection",
        "rotary_heads": "rotary_projection",
    },
    otherwise=_load_variants,
)
