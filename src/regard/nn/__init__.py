"""Parts of models: projections, norms, attention, feed-forward and blocks; `variants` is the
catalogue of mechanisms.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
from regard.nn.cross import AdditiveAttention, CrossAttention
from regard.nn.dynamic_rotary import PrefixRecomputer, rotary_projection
from regard.nn.embedding import CappedLogits, InputEmbedding, SinusoidalPositions
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
from regard.nn.gated import DifferentialProjection, GatedProjection
from regard.nn.infini import InfiniAttention
from regard.nn.latent import LatentProjection
from regard.nn.linear import Linear
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
from regard.nn.recurrent import Recurrent
from regard.nn.selected import NSA, SelectedAttention
from regard.nn.streaming import StreamingAttention

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
    "variants",
]


def __getattr__(name: str) -> Any:
    if name == "variants":  # it imports all of the parts
        return importlib.import_module("regard.nn.variants")
    raise AttributeError(f"module 'regard.nn' has no attribute {name!r}")
