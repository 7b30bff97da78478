"""Biases: numbers added to scores before the softmax."""

from regard.biases.alibi import ALiBi, alibi_slopes
from regard.biases.base import Bias, Sum
from regard.biases.custom import Dense, Fn
from regard.biases.t5 import T5Relative, t5_bucket

__all__ = ["ALiBi", "Bias", "Dense", "Fn", "Sum", "T5Relative", "alibi_slopes", "t5_bucket"]
