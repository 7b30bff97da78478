"""Mechanisms that keep a state in place of tokens: (q, k, v, ..., state) -> (out, state), in three
forms that agree.
"""

from __future__ import annotations

from regard.ops.linear import (
    FEATURE_MAPS,
    delta_rule,
    gated_delta_rule,
    gated_linear,
    linear_attention,
    retention,
)

__all__ = [
    "FEATURE_MAPS",
    "delta_rule",
    "gated_delta_rule",
    "gated_linear",
    "linear_attention",
    "retention",
]
