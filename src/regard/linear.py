"""Linear recurrences: attention mechanisms with a state of fixed size instead of a cache of tokens.

Each function maps (q, k, v, ..., state) to (output, state), in three forms that give the same
result: token by token, in chunks, and in parallel.
"""

from __future__ import annotations

from regard.ops.linear.delta_rule import delta_rule, gated_delta_rule
from regard.ops.linear.linear_attention import (
    FEATURE_MAPS,
    gated_linear,
    linear_attention,
    retention,
)
from regard.ops.linear.short_convolution import short_convolution

__all__ = [
    "FEATURE_MAPS",
    "delta_rule",
    "gated_delta_rule",
    "gated_linear",
    "linear_attention",
    "retention",
    "short_convolution",
]
