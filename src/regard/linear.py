"""Linear attention: mechanisms that keep a state of fixed size in place of all keys and values.

Each function maps (q, k, v, ..., state) to (out, state), in three forms that give equal results:
recurrent, chunked and parallel.
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
