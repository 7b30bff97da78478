"""Parts of models: projections, norms, attention, feed-forward and blocks; `variants` is the
catalogue of mechanisms.

A projection computes queries (`query`), what a cache stores (`remember`), keys and values from that
(`recall`), and the last step on the result of attention (`postprocess`). A projection with several
forms that are equal in exact arithmetic (MLA) chooses one by `select_form`.

A residual path (`PreNorm`, `PostNorm`, ...) is a part around a sublayer, so that one `Block` serves
every family. What a mechanism shows of itself stands in `explainable`; how it runs over several
ranks, in `across_ranks`.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from regard.nn.attention.attention import Attention
from regard.nn.attention.compressed import BlockPooling, CompressedAttention, EntryIndexer
from regard.nn.attention.cross import AdditiveAttention, CrossAttention
from regard.nn.attention.evicting import EvictingAttention
from regard.nn.attention.infini import InfiniAttention
from regard.nn.attention.nsa import NSA
from regard.nn.attention.remapped import (
    DistanceMap,
    DualChunk,
    LMInfinite,
    MultiAxisAttention,
    MultiAxisProjection,
    RemappedAttention,
    ReRoPE,
    SelfExtend,
)
from regard.nn.attention.selected import QuestAttention, SelectedAttention
from regard.nn.attention.windowed import Longformer, StreamingAttention
from regard.nn.blocks.blocks import (
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
    ScaledPreNorm,
    SharedNormBlock,
)
from regard.nn.blocks.embedding import CappedLogits, InputEmbedding, SinusoidalPositions
from regard.nn.blocks.experts import MoE, stack_experts
from regard.nn.blocks.feed_forward import ClippedSwiGLU, FeedForward, GatedFeedForward, SwiGLU
from regard.nn.blocks.norms import HeadNorm, OffsetRMSNorm, RMSNorm
from regard.nn.blocks.routers import ExpertGroups, Router, SigmoidRouter, SoftmaxRouter
from regard.nn.projections.dynamic_rotary import PrefixRecomputer, rotary_projection
from regard.nn.projections.factored import KeysAsValues, SharedKeyValue
from regard.nn.projections.fused import (
    ClippedQKV,
    EncoderStateProjection,
    FusedQKV,
    IdentityProjection,
    PerHeadProjection,
)
from regard.nn.projections.heads import HeadProjection, Projection, SeparateQKV
from regard.nn.projections.latent import LatentProjection
from regard.nn.projections.steps import (
    DifferentialProjection,
    FinishedProjection,
    GatedProjection,
    HeadGate,
    InverseRotary,
    L2Clip,
    OwnValueRemoval,
    PairDifference,
    QueryTemperature,
    UnitNorm,
    WeightlessRMSNorm,
)
from regard.nn.recurrence.projections import CausalConvolution, ConvolvedQKV, GroupedValueQKV
from regard.nn.recurrence.recurrent import Recurrent
from regard.nn.weights import Linear, set_fp32_product

if TYPE_CHECKING:
    from regard.nn import variants

__all__ = [
    "NSA",
    "AdditiveAttention",
    "Attention",
    "Block",
    "BlockCaches",
    "BlockPooling",
    "CappedLogits",
    "CausalConvolution",
    "ClippedQKV",
    "ClippedSwiGLU",
    "CompressedAttention",
    "ConvolvedQKV",
    "CrossAttention",
    "DecoderBlock",
    "DifferentialProjection",
    "DistanceMap",
    "DualChunk",
    "EncoderStateProjection",
    "EntryIndexer",
    "EvictingAttention",
    "ExpertGroups",
    "FeedForward",
    "FinishedProjection",
    "FusedQKV",
    "GatedFeedForward",
    "GatedProjection",
    "GroupedValueQKV",
    "HeadGate",
    "HeadNorm",
    "HeadProjection",
    "IdentityProjection",
    "InfiniAttention",
    "InputEmbedding",
    "InverseRotary",
    "KeysAsValues",
    "L2Clip",
    "LMInfinite",
    "LatentProjection",
    "Linear",
    "Longformer",
    "MoE",
    "MultiAxisAttention",
    "MultiAxisProjection",
    "NormedResidual",
    "OffsetRMSNorm",
    "OutputNorm",
    "OwnValueRemoval",
    "PairDifference",
    "ParallelBlock",
    "PerHeadProjection",
    "PostNorm",
    "PreNorm",
    "PrefixRecomputer",
    "Projection",
    "QueryTemperature",
    "QuestAttention",
    "RMSNorm",
    "ReRoPE",
    "Recurrent",
    "RemappedAttention",
    "Residual",
    "Router",
    "SandwichNorm",
    "ScaledPreNorm",
    "SelectedAttention",
    "SelfExtend",
    "SeparateQKV",
    "SharedKeyValue",
    "SharedNormBlock",
    "SigmoidRouter",
    "SinusoidalPositions",
    "SoftmaxRouter",
    "StreamingAttention",
    "SwiGLU",
    "UnitNorm",
    "WeightlessRMSNorm",
    "rotary_projection",
    "set_fp32_product",
    "stack_experts",
    "variants",
]


def _load_variants(name: str) -> ModuleType:
    if name == "variants":  # it imports every part of this package
        return importlib.import_module("regard.nn.variants")
    raise AttributeError(f"module 'regard.nn' has no attribute {name!r}")


__getattr__ = _load_variants
