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
    NormedPath,
    OutputNorm,
    ParallelBlock,
    PostNorm,
    PreNorm,
    Residual,
    Sandwich,
)
from regard.nn.cross import AdditiveAttention, CrossAttention
from regard.nn.dynamic_rotary import Prefix, rotary_heads
from regard.nn.embedding import CappedLogits, Embed, Sinusoidal
from regard.nn.feed_forward import (
    ClippedSwiGLU,
    FeedForward,
    GatedFeedForward,
    Groups,
    MoE,
    Router,
    SigmoidRouter,
    SoftmaxRouter,
    SwiGLU,
)
from regard.nn.gated import Differential, Gated
from regard.nn.infini import InfiniAttention
from regard.nn.latent import Latent
from regard.nn.linear import Linear
from regard.nn.longformer import Longformer
from regard.nn.norms import HeadNorm, OffsetRMSNorm, RMSNorm
from regard.nn.projections import (
    Clipped,
    Fused,
    Heads,
    PerHead,
    Projection,
    Separate,
    States,
    Unprojected,
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
    "Clipped",
    "ClippedSwiGLU",
    "CrossAttention",
    "DecoderBlock",
    "Differential",
    "Embed",
    "FeedForward",
    "Fused",
    "Gated",
    "GatedFeedForward",
    "Groups",
    "HeadNorm",
    "Heads",
    "InfiniAttention",
    "Latent",
    "Linear",
    "Longformer",
    "MoE",
    "NormedPath",
    "OffsetRMSNorm",
    "OutputNorm",
    "ParallelBlock",
    "PerHead",
    "PostNorm",
    "PreNorm",
    "Prefix",
    "Projection",
    "RMSNorm",
    "Recurrent",
    "Residual",
    "Router",
    "Sandwich",
    "SelectedAttention",
    "Separate",
    "SigmoidRouter",
    "Sinusoidal",
    "SoftmaxRouter",
    "States",
    "StreamingAttention",
    "SwiGLU",
    "Unprojected",
    "rotary_heads",
    "variants",
]


def __getattr__(name: str) -> Any:
    if name == "variants":  # it imports all of the parts
        return importlib.import_module("regard.nn.variants")
    raise AttributeError(f"module 'regard.nn' has no attribute {name!r}")
