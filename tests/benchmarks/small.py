"""Sizes at which every case runs in milliseconds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks import ProblemSizes
from benchmarks.gpu_cases import GPU
from benchmarks.memory_cases import MEMORY, MemorySizes
from benchmarks.model_cases import MODELS
from benchmarks.parallel_cases import PARALLEL
from benchmarks.problems import AttentionSizes, LatentSizes, ModelSizes
from benchmarks.problems.sentences import SentenceSizes
from benchmarks.program_cases import CheckpointSizes, PageSizes, StartSizes
from benchmarks.training_cases import TrainingSizes

CPU = torch.device("cpu")
HEADS: dict[str, Any] = {"B": 2, "H": 4, "G": 2, "D": 8}


def small_gpu_sizes(sizes: ProblemSizes) -> ProblemSizes:
    """Sizes of a case for a GPU that a CPU can check."""
    if isinstance(sizes, LatentSizes):
        return LatentSizes(10, H=2, rank=8, rope=2, nope=4, value=4)
    if isinstance(sizes, ModelSizes):
        return ModelSizes(20, layers=2, dim=32, inner=48, H=4, G=2, vocabulary=97)
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
    "model-decode": ModelSizes(20, layers=2, dim=32, inner=48, H=4, G=2, vocabulary=97),
    "model-decode-int8": ModelSizes(
        20, layers=2, dim=64, inner=96, H=4, G=2, vocabulary=97, bits=8
    ),
    "model-decode-int4": ModelSizes(
        20, layers=2, dim=64, inner=96, H=4, G=2, vocabulary=97, bits=4
    ),
    "sentences": SentenceSizes(5, layers=1, dim=16, inner=24, H=4, vocabulary=32),
    "model-training": TrainingSizes(9, 2, layers=2, dim=32, inner=48, H=4, G=2, vocabulary=97),
    **{
        case.name: MemorySizes(
            ModelSizes(20, layers=1, dim=64, inner=96, H=4, G=2, vocabulary=97, bits=bits), 5, 2
        )
        for case, bits in zip(MEMORY, (None, 8, 4), strict=True)
    },
    **{case.name: case.sizes["small"] for case in MODELS},
    **{case.name: case.sizes["small"].resized(length=64) for case in PARALLEL},
    **{case.name: small_gpu_sizes(case.sizes["small"]) for case in GPU},
}
