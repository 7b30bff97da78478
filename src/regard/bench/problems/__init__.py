"""The three kinds of problem: one softmax attention call, one latent decoding step, one step of a
whole model.
"""

from regard.bench.problems.attention import AttentionProblem, AttentionSizes, way
from regard.bench.problems.latent import LatentProblem, LatentSizes
from regard.bench.problems.model import ModelProblem, ModelSizes

__all__ = [
    "AttentionProblem",
    "AttentionSizes",
    "LatentProblem",
    "LatentSizes",
    "ModelProblem",
    "ModelSizes",
    "way",
]
