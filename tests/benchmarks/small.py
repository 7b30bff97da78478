"""Sizes at which every case runs in milliseconds, and a run of a made-up case."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks import Case, Ceilings, Peer, ProblemSizes, TimingBudget, measure
from benchmarks.attention import AttentionSizes, LatentSizes
from benchmarks.cases import GPU, MODELS
from benchmarks.model import ModelSizes
from benchmarks.parallel import PARALLEL
from benchmarks.programs import MEMORY, CheckpointSizes, MemorySizes, PageSizes, StartSizes
from benchmarks.result import CaseResult
from benchmarks.sentences import SentenceSizes
from benchmarks.training import TrainingSizes

CPU = torch.device("cpu")
HEADS: dict[str, Any] = {"B": 2, "H": 4, "G": 2, "D": 8}
MODEL = ModelSizes(20, layers=2, dim=32, inner=48, H=4, G=2, vocabulary=97)
FEW_BITS = replace(MODEL, dim=64, inner=96)


def small_gpu_sizes(sizes: ProblemSizes) -> ProblemSizes:
    """Sizes of a case for a GPU that a CPU can check."""
    if isinstance(sizes, LatentSizes):
        return LatentSizes(10, H=2, rank=8, rope=2, nope=4, value=4)
    if isinstance(sizes, ModelSizes):
        return MODEL
    assert isinstance(sizes, AttentionSizes)
    window = None if sizes.window is None else 5
    heads = {"B": min(sizes.B, 2), "H": 2, "G": 1, "D": 32 if sizes.bits else 8}
    return replace(sizes, **heads, S=64 if sizes.bits else 16, window=window)


SMALL: dict[str, ProblemSizes] = {
    "decode": AttentionSizes(**HEADS, S=40, T=1),
    "decode-int8": AttentionSizes(**HEADS, S=40, T=1, bits=8),
    "mla-decode": LatentSizes(S=21, B=2, H=4, rank=16, rope=4, nope=8, value=6),
    "causal-prefill": AttentionSizes(**HEADS, S=19),
    "window-prefill": AttentionSizes(**HEADS, S=19, window=5),
    "window-training": AttentionSizes(**HEADS, S=19, window=5, train=True),
    "training-step": AttentionSizes(**HEADS, S=19, train=True),
    "alibi": AttentionSizes(**HEADS, S=19, alibi=True),
    "left-padded": AttentionSizes(B=4, H=4, G=2, D=8, S=24, padded=True),
    "overhead": AttentionSizes(**HEADS, S=19),
    "kernels": AttentionSizes(**HEADS, S=19),
    "kernels-training": AttentionSizes(**HEADS, S=19, train=True),
    "startup": StartSizes(),
    "read-checkpoint": CheckpointSizes(layers=1, dim=16, inner=24, keys=8, vocabulary=31),
    "draw-page": PageSizes(layers=1, heads=2, tokens=12),
    "model-decode": MODEL,
    "model-decode-int8": replace(FEW_BITS, bits=8),
    "model-decode-int4": replace(FEW_BITS, bits=4),
    "sentences": SentenceSizes(5, layers=1, dim=16, inner=24, H=4, vocabulary=32),
    "model-training": TrainingSizes(9, 2, layers=2, dim=32, inner=48, H=4, G=2, vocabulary=97),
    **{
        case.name: MemorySizes(replace(FEW_BITS, layers=1, bits=bits), 5, 2)
        for case, bits in zip(MEMORY, (None, 8, 4), strict=True)
    },
    **{case.name: case.sizes["small"] for case in MODELS},
    **{case.name: case.sizes["small"].resized(length=64) for case in PARALLEL},
    **{case.name: small_gpu_sizes(case.sizes["small"]) for case in GPU},
}


def run_peers(
    *peers: Peer[Any],
    sizes: ProblemSizes = SMALL["causal-prefill"],
    dtype: torch.dtype = torch.float32,
    ceilings: Ceilings | None = None,
    budget: dict[str, Any] | None = None,
    **options: Any,
) -> CaseResult:
    """The result of a case with these peers."""
    case = Case("test", "A test.", {}, (), peers)
    timing = TimingBudget(**{"rounds": 3, "sample": 0.0, **(budget or {})})
    ceilings = ceilings or Ceilings(1e9, {torch.float32: 1e9})
    return measure(case, sizes, dtype, CPU, budget=timing, ceilings=ceilings, **options)
