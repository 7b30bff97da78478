"""The three kinds of benchmark problem: a softmax attention call, a decoding step of latent
attention, and a decoding step of a whole model.
"""

from benchmarks.problems.attention import (
    AttentionProblem,
    AttentionSizes,
    LatentProblem,
    LatentSizes,
    prepared_call,
)
from benchmarks.problems.model import ModelProblem, ModelSizes

__all__ = [
    "AttentionProblem",
    "AttentionSizes",
    "LatentProblem",
    "LatentSizes",
    "ModelProblem",
    "ModelSizes",
    "prepared_call",
]
