"""Biases: numbers that are added to the attention scores before the softmax."""

from regard.biases.base import BIASES, Bias, Sum
from regard.biases.distance import FIRE, ALiBi, Kerple, T5Relative, alibi_slopes, t5_bucket
from regard.biases.tables import DenseBias, FnBias, ForgetBias, RelativeLogits, deberta_bucket
from regard.registry import import_all

__all__ = [
    "BIASES",
    "FIRE",
    "ALiBi",
    "Bias",
    "DenseBias",
    "FnBias",
    "ForgetBias",
    "Kerple",
    "RelativeLogits",
    "Sum",
    "T5Relative",
    "alibi_slopes",
    "deberta_bucket",
    "t5_bucket",
]

# Biases in other files of this folder become `regard.biases.<Name>` without an entry here.
import_all(__name__, __path__)
globals().update(
    (kind.__name__, kind) for _, kind in BIASES if kind.__module__.startswith(f"{__name__}.")
)
