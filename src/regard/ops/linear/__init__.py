"""Linear recurrences with a state of fixed size: linear attention, retention, gated linear
attention, and the delta rules; each is computed token by token or in chunks.
"""

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
